"""The program of lesson 4 in Accelerate: prepare, backward, gather_for_metrics.

torchrun --nproc_per_node 2 ddp_course/lesson07.py --epochs 1
torchrun --nproc_per_node 3 ddp_course/lesson07.py --data digits --accumulate 2
python ddp_course/lesson07.py --epochs 1 --learning-rate 2e-3
"""

import os
import time

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ddp_course import runs
from ddp_course.ranks.environment import (
    choose_device,
    stay_on_this_machine,
    torchrun_environment,
)
from ddp_course.scenery.images import load_images
from ddp_course.scenery.models import ConvNet


def train_one_epoch(model, loader, optimizer, accelerator):
    """Lesson 01's loop, with the accelerator's backward. Return the mean loss of each
    batch.
    """
    model.train()
    losses = []
    for images, labels in loader:  # on the right device already
        with accelerator.accumulate(model):
            loss = F.nll_loss(model(images), labels)
            accelerator.backward(loss)
            # does nothing, and zero_grad neither, until the window is full
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return accelerator.reduce(torch.stack(losses), "mean").tolist()


@torch.no_grad()
def evaluate(model, loader, accelerator):
    """Count, over all processes, how many samples the model gets right, and how many
    there are.
    """
    model.eval()
    correct = seen = 0
    for images, labels in loader:
        predictions = model(images).argmax(dim=1)
        predictions, labels = accelerator.gather_for_metrics(
            (predictions, labels)
        )  # without the padding
        correct += (predictions == labels).sum().item()
        seen += len(labels)
    return correct, seen


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--accumulate", type=runs.count, default=1, help="micro-batches an update (1)"
    )
    return parser.parse_args(argv)


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device)
    stay_on_this_machine()
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(torch.get_num_threads())
    )  # or Accelerate warns of it
    accelerator = Accelerator(
        cpu=device.type
        # without this, each process on a CPU trains alone, and does not say so
        == "cpu",
        gradient_accumulation_steps=args.accumulate,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=True, data_seed=args.seed
        ),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    assert accelerator.num_processes == torchrun_environment().world_size
    try:
        return train(args, accelerator)
    finally:
        accelerator.end_training()


def train(args, accelerator):
    log = runs.open_folder(args.out)
    train_set, test_set = load_images(args.data, args.train_samples, accelerator.device)
    runs.check_batch_size(args.batch_size, len(train_set), accelerator.num_processes)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=250)

    torch.manual_seed(args.seed)
    model = ConvNet(dropout=not args.no_dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )
    torch.manual_seed(
        args.seed + accelerator.process_index
    )  # each rank its own dropout

    losses, seconds = [], 0.0
    for epoch in range(args.epochs):
        train_loader.set_epoch(
            epoch
        )  # another shuffle in each epoch, the same on all ranks
        begin = time.perf_counter()
        losses += train_one_epoch(model, train_loader, optimizer, accelerator)
        seconds += time.perf_counter() - begin
        correct, seen = evaluate(model, test_loader, accelerator)
        log.info(
            f"epoch {epoch + 1}: loss {losses[-1]:.3f}, test accuracy {correct / seen:.1%}"
        )

    accelerator.save_state(
        args.out / "state"
    )  # parameters, optimizer, samplers, random states
    # save_state does not: another rank may come before the file is there
    accelerator.wait_for_everyone()
    accelerator.load_state(args.out / "state")
    network = accelerator.unwrap_model(model)
    return runs.finish(
        args,
        accelerator.device,
        network,
        train_set,
        losses,
        seconds,
        correct / seen,
        seen,
    )


if __name__ == "__main__":
    runs.start(main)
