"""Gradient accumulation: large batches from small ones, in mixed precision.

torchrun --nproc_per_node 2 ddp_course/lesson06.py --accumulate 4 --batch-size 16
torchrun --nproc_per_node 2 ddp_course/lesson06.py --precision bf16 --epochs 1
python ddp_course/lesson06.py --precision fp16 --train-samples 64 --epochs 1
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
from ddp_course.data.images import load_images
from ddp_course.lesson04 import evaluate, load, save
from ddp_course.models.convnets import ConvNet
from ddp_course.ranks.environment import backend_for, choose_device, process_group

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
IGNORED = -100  # marks labels that do not count, as in torch's nll_loss


def summed_loss(output, labels):
    return F.nll_loss(output, labels, ignore_index=IGNORED, reduction="sum")


def grouped(batches, size):
    """Yield a list of `size` batches for each update; the last list may be shorter."""
    batches = iter(batches)
    while micro_batches := list(itertools.islice(batches, size)):
        yield micro_batches


def count_items(micro_batches, device):
    """Count the labels that are not IGNORED, on all ranks: a tensor, at least 1."""
    counted = [int((labels != IGNORED).sum()) for _, labels in micro_batches]
    items = torch.tensor(sum(counted), device=device)
    dist.all_reduce(items)
    return items.clamp(min=1)


def accumulate(model, micro_batches, device, scaler, precision):
    """Leave in .grad the gradient of the mean loss over the items of all ranks.

    model: wrapped in DDP. micro_batches: those of one update on this rank; all ranks
    have the same number. Returns this rank's part of the mean loss; the parts of all
    ranks add up to it.
    """
    items = count_items(micro_batches, device)
    mixed = precision != torch.float32
    mean = 0.0
    for number, (images, labels) in enumerate(micro_batches, 1):
        last = number == len(micro_batches)
        with nullcontext() if last else model.no_sync():  # around the forward, too
            with torch.autocast(device.type, precision, enabled=mixed):
                output = model(images.to(device))
                total = summed_loss(output, labels.to(device))
            loss = total / items
            # DDP will divide the gradients by the number of ranks
            scaler.scale(loss * dist.get_world_size()).backward()
        mean = mean + loss.detach()
    return mean


def update(model, micro_batches, optimizer, scheduler, scaler, device, args):
    """Do one update; return this rank's part of the mean loss."""
    optimizer.zero_grad()
    precision = PRECISIONS[args.precision]
    loss = accumulate(model, micro_batches, device, scaler, precision)
    scaler.unscale_(optimizer)  # or the norm would be that of the scaled gradients
    nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
    scale = scaler.get_scale()
    scaler.step(optimizer)  # skips the step if a gradient has overflowed
    scaler.update()  # and then this makes the scale smaller
    if scaler.get_scale() >= scale:
        scheduler.step()
    return loss


def train_one_epoch(model, loader, optimizer, scheduler, scaler, device, args):
    """Do one update per args.accumulate batches; return the mean loss of each."""
    model.train()
    losses = [
        update(model, micro_batches, optimizer, scheduler, scaler, device, args)
        for micro_batches in grouped(loader, args.accumulate)
    ]
    losses = torch.stack(losses)
    runs.check_finite(losses)
    dist.all_reduce(losses)
    return losses.tolist()


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__, per="micro-batch")
    flag, count, precisions = parser.add_argument, runs.count, list(PRECISIONS)
    flag("--accumulate", type=count, default=4, help="micro-batches per update (4)")
    flag("--precision", choices=precisions, default="fp32", help="of autocast (fp32)")
    flag("--max-norm", type=runs.number, default=1.0, help="clip longer gradients (1)")
    return parser.parse_args(argv)


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device, deterministic=args.deterministic)
    with process_group(backend_for(device), args.timeout) as (rank, world_size):
        return train(args, rank, world_size, device)


def train(args, rank, world_size, device):
    log = runs.open_folder(args.out)
    train_set, test_set = load_images(args.data, args.train_samples, device)
    runs.check_batch_size(args.batch_size, len(train_set), world_size)
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler)

    torch.manual_seed(args.seed)
    model = ConvNet(dropout=not args.no_dropout).to(device)
    gpu = [device] if device.type == "cuda" else None
    model = DistributedDataParallel(model, device_ids=gpu, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # rounded up: the short group at the end of an epoch makes an update, too
    updates = args.epochs * -(-len(train_loader) // args.accumulate)
    schedule = torch.optim.lr_scheduler.LambdaLR
    scheduler = schedule(optimizer, lambda update: 1 - update / updates)
    is_fp16 = args.precision == "fp16"
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, enabled=is_fp16)
    torch.manual_seed(args.seed + rank)  # each rank draws its own dropout

    losses, seconds = [], 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # a different shuffle per epoch, the same on all ranks
        begin = time.perf_counter()
        losses += train_one_epoch(
            model, train_loader, optimizer, scheduler, scaler, device, args
        )
        seconds += time.perf_counter() - begin
        correct, seen = evaluate(model, test_set, device)
        accuracy = correct / seen
        log.info(f"epoch {epoch + 1}: loss {losses[-1]:.3f}, accuracy {accuracy:.1%}")

    save(model, args.out / "model.pt")
    load(model, args.out / "model.pt", device)  # what is reported is what was saved
    network = model.module
    return runs.finish(
        args, device, network, train_set, losses, seconds, accuracy, seen
    )


if __name__ == "__main__":
    runs.start(main)
