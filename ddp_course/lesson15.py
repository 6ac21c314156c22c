"""Training that watches itself: it names the rank, the step and what went wrong there.

torchrun --nproc_per_node 2 ddp_course/lesson15.py
torchrun --nproc_per_node 2 ddp_course/lesson15.py --epochs 1 --check-every 5
torchrun --nproc_per_node 3 ddp_course/lesson15.py --epochs 1 --watch desync nan
python ddp_course/lesson15.py --epochs 1 --watch
"""

import time

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_course import runs
from ddp_course.data.images import load_images
from ddp_course.detectors.desync import DesyncDetector
from ddp_course.detectors.flight_record import flight_recorded
from ddp_course.detectors.nan import NanGuard
from ddp_course.detectors.straggler import StragglerDetector
from ddp_course.lesson04 import evaluate, load, save, train_one_epoch
from ddp_course.models.convnets import ConvNet
from ddp_course.ranks.environment import (
    backend_for,
    choose_device,
    process_group,
)

TOOLS = ["nan", "desync", "straggler"]


def watch(model, optimizer, report, args):
    """Attach the tools to training with this optimizer. The loop stays as it is.

    report: is called with a line about a straggler. Returns the desync detector, which
    has a `check()` for the end, or None.
    """
    if "nan" in args.watch:
        NanGuard(model, optimizer, args.timeout)
    if "straggler" in args.watch:
        StragglerDetector(model, optimizer, report, timeout=args.timeout)
    if "desync" in args.watch:
        return DesyncDetector(model, optimizer, args.check_every, args.timeout)


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__)
    flag = parser.add_argument
    attached = "which tools to attach (all; without a name: none)"
    flag("--watch", nargs="*", choices=TOOLS, default=TOOLS, help=attached)
    compared = "steps per comparison of the ranks (10)"
    flag("--check-every", type=runs.count, default=10, help=compared)
    return parser.parse_args(argv)


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device, deterministic=args.deterministic)
    with process_group(backend_for(device), args.timeout) as (rank, world_size):
        with flight_recorded(args.out / "flight"):
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
    torch.manual_seed(args.seed + rank)  # each rank draws its own dropout
    desync = watch(model, optimizer, log.info, args)

    losses, seconds = [], 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # a different shuffle per epoch, the same on all ranks
        begin = time.perf_counter()
        losses += train_one_epoch(model, train_loader, optimizer, device)
        seconds += time.perf_counter() - begin
        correct, seen = evaluate(model, test_set, device)
        accuracy = correct / seen
        log.info(f"epoch {epoch + 1}: loss {losses[-1]:.3f}, accuracy {accuracy:.1%}")

    if desync:
        desync.check()  # the steps since the last comparison
    save(model, args.out / "model.pt")
    load(model, args.out / "model.pt", device)  # what is reported is what was saved
    network = model.module
    return runs.finish(
        args, device, network, train_set, losses, seconds, accuracy, seen
    )


if __name__ == "__main__":
    runs.start(main)
