"""Gradient accumulation: large batches from small ones, in mixed precision.

torchrun --nproc_per_node 2 ddp_course/lesson06.py --accumulate 4 --batch-size 16
torchrun --nproc_per_node 2 ddp_course/lesson06.py --precision bf16 --epochs 1
python ddp_course/lesson06.py --precision fp16 --train-samples 128 --epochs 1
"""

import itertools
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_course import runs
from ddp_course.lesson04 import evaluate, load, save
from ddp_course.ranks.environment import backend_for, choose_device, process_group
from ddp_course.scenery.images import load_images
from ddp_course.scenery.models import ConvNet

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
IGNORED = (
    -100
)  # the label of an item that does not count, as nll_loss and cross_entropy have it


def windows(batches, size):
    """Yield lists of `size` batches, those of one update; the last list of an epoch may
    be shorter.
    """
    batches = iter(batches)
    while window := list(itertools.islice(batches, size)):
        yield window


def count_items(window, device):
    """How many labels count in this window, on all ranks together: a tensor, at least
    1.
    """
    items = torch.tensor(
        sum(int((labels != IGNORED).sum()) for _, labels in window), device=device
    )
    dist.all_reduce(items)
    return items.clamp(min=1)


def accumulate(model, window, device, scaler, precision):
    """Put into .grad the gradient of the mean loss of all items of this window on all
    ranks.

    model: wrapped in DDP. window: this rank's micro-batches, equally many on each rank.
    Returns this rank's part of that mean; the parts of all ranks add up to it.
    """
    items = count_items(window, device)
    mean = 0.0
    for number, (images, labels) in enumerate(window, 1):
        with (
            nullcontext() if number == len(window) else model.no_sync()
        ):  # around the forward, too
            with torch.autocast(
                device.type, precision, enabled=precision != torch.float32
            ):
                output = model(images.to(device))
                total = F.nll_loss(
                    output, labels.to(device), ignore_index=IGNORED, reduction="sum"
                )
            loss = total / items
            scaler.scale(loss * dist.get_world_size()).backward()  # DDP divides by that
        mean = mean + loss.detach()
    return mean


def update(model, window, optimizer, scheduler, scaler, device, args):
    """Take one optimizer step for this window; return this rank's part of its mean
    loss.
    """
    optimizer.zero_grad()
    loss = accumulate(model, window, device, scaler, PRECISIONS[args.precision])
    scaler.unscale_(optimizer)  # or the norm would be that of the scaled gradients
    nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
    scaler.step(optimizer)  # left out where a gradient has overflowed
    scaler.update()
    scheduler.step()
    return loss


def train_one_epoch(model, loader, optimizer, scheduler, scaler, device, args):
    """Take one optimizer step for each window of args.accumulate batches; return the
    mean loss of each.
    """
    model.train()
    losses = [
        update(model, window, optimizer, scheduler, scaler, device, args)
        for window in windows(loader, args.accumulate)
    ]
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    return losses.tolist()


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__)
    parser.add_argument(
        "--accumulate", type=runs.count, default=4, help="micro-batches an update (4)"
    )
    parser.add_argument("--precision", choices=list(PRECISIONS), default="fp32")
    parser.add_argument(
        "--max-norm",
        type=float,
        default=1.0,
        help="of the gradient; longer ones are clipped",
    )
    return parser.parse_args(argv)


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device)
    with process_group(backend_for(device)) as (rank, world_size):
        return train(args, rank, world_size, device)


def train(args, rank, world_size, device):
    log = runs.open_folder(args.out)
    train_set, test_set = load_images(args.data, args.train_samples, device)
    runs.check_batch_size(args.batch_size, len(train_set), world_size)
    sampler = DistributedSampler(
        train_set, world_size, rank, shuffle=True, seed=args.seed
    )
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler)

    torch.manual_seed(args.seed)
    model = ConvNet(dropout=not args.no_dropout).to(device)
    model = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        # .grad lies in the bucket: one copy less, and less memory
        gradient_as_bucket_view=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    updates = args.epochs * -(
        -len(train_loader) // args.accumulate
    )  # rounded up: a short window is one, too
    scheduler = torch.optim.lr_scheduler.LinearLR(
        optimizer, 1.0, 0.0, total_iters=updates
    )
    scaler = torch.amp.GradScaler(
        device.type, init_scale=1024, enabled=args.precision == "fp16"
    )
    torch.manual_seed(
        args.seed + rank
    )  # the same model everywhere, but each rank its own dropout

    losses, seconds = [], 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # another shuffle in each epoch, the same on all ranks
        begin = time.perf_counter()
        losses += train_one_epoch(
            model, train_loader, optimizer, scheduler, scaler, device, args
        )
        seconds += time.perf_counter() - begin
        correct, seen = evaluate(model, test_set, device)
        log.info(
            f"epoch {epoch + 1}: loss {losses[-1]:.3f}, test accuracy {correct / seen:.1%}"
        )

    save(model, args.out / "model.pt")
    load(model, args.out / "model.pt", device)
    return runs.finish(
        args, device, model.module, train_set, losses, seconds, correct / seen, seen
    )


if __name__ == "__main__":
    runs.start(main)
