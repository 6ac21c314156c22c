"""The program of lesson 4 in Accelerate: prepare, backward, gather_for_metrics.

torchrun --nproc_per_node 2 ddp_course/lesson07.py --epochs 1
torchrun --nproc_per_node 3 ddp_course/lesson07.py --data digits --accumulate 2
accelerate launch --multi_gpu --num_processes 2 ddp_course/lesson07.py --epochs 1
python ddp_course/lesson07.py --epochs 1 --learning-rate 2e-3
"""

import os
import time
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ddp_course import UsageError, runs
from ddp_course.data.images import load_images
from ddp_course.models.convnets import ConvNet
from ddp_course.ranks.environment import (
    choose_device,
    stay_on_this_machine,
    torchrun_environment,
)


def train_one_epoch(model, loader, optimizer, accelerator):
    """Lesson 1's loop, with the accelerator's backward; return the mean losses."""
    model.train()
    losses = []
    for images, labels in loader:  # already on the right device
        with accelerator.accumulate(model):
            loss = F.nll_loss(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()  # both wait for the last micro-batch of an update
            optimizer.zero_grad()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    runs.check_finite(losses)
    return accelerator.reduce(losses, "mean").tolist()


@torch.no_grad()
def evaluate(model, loader, accelerator):
    """Count, over all processes, the samples that are right, and all samples."""
    model.eval()
    correct = seen = 0
    for images, labels in loader:
        pair = model(images).argmax(dim=1), labels
        predictions, labels = accelerator.gather_for_metrics(pair)  # without padding
        correct += (predictions == labels).sum().item()
        seen += len(labels)
    return correct, seen


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__, per="micro-batch")
    flag, count = parser.add_argument, runs.count
    flag("--learning-rate", type=runs.number, default=1e-3, help="of AdamW (1e-3)")
    flag("--accumulate", type=count, default=1, help="micro-batches per update (1)")
    return parser.parse_args(argv)


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device, deterministic=args.deterministic)
    stay_on_this_machine()
    # Accelerate warns where nobody has set it
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    shuffle = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed)
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=args.timeout))
    views = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(
        # without cpu=True, every process on a CPU silently trains alone
        cpu=device.type == "cpu",
        gradient_accumulation_steps=args.accumulate,
        dataloader_config=shuffle,
        kwargs_handlers=[timeout, views],
    )
    if accelerator.num_processes != torchrun_environment().world_size:
        raise UsageError("each process would train alone: Accelerate sees no others")
    try:
        accelerator.wait_for_everyone()  # none leaves while another is still connecting
        return train(args, accelerator)
    finally:
        accelerator.end_training()


def train(args, accelerator):
    log = runs.open_folder(args.out)
    device, world_size = accelerator.device, accelerator.num_processes
    train_set, test_set = load_images(args.data, args.train_samples, device)
    runs.check_batch_size(args.batch_size, len(train_set), world_size)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=250)

    torch.manual_seed(args.seed)
    model = ConvNet(dropout=not args.no_dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )
    rank = accelerator.process_index
    torch.manual_seed(args.seed + rank)  # each rank draws its own dropout

    losses, seconds = [], 0.0
    for epoch in range(args.epochs):
        train_loader.set_epoch(epoch)  # it would also count epochs by itself
        begin = time.perf_counter()
        losses += train_one_epoch(model, train_loader, optimizer, accelerator)
        seconds += time.perf_counter() - begin
        correct, seen = evaluate(model, test_loader, accelerator)
        accuracy = correct / seen
        log.info(f"epoch {epoch + 1}: loss {losses[-1]:.3f}, accuracy {accuracy:.1%}")

    if rank == 0:
        runs.empty_folder(args.out / "state")
    accelerator.wait_for_everyone()
    accelerator.save_state(args.out / "state")  # parameters, optimizer, random states
    accelerator.wait_for_everyone()  # save_state does not wait for rank 0's files
    accelerator.load_state(args.out / "state")
    network = accelerator.unwrap_model(model)
    return runs.finish(
        args, device, network, train_set, losses, seconds, accuracy, seen
    )


if __name__ == "__main__":
    runs.start(main)
