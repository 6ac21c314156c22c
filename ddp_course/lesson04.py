"""DistributedDataParallel, the whole program: set-up, sampler, seeds, wrapper, exact evaluation, log, saving.

torchrun ddp_course/lesson04.py
torchrun --nproc_per_node 2 ddp_course/lesson04.py
torchrun --nproc_per_node 3 ddp_course/lesson04.py --data digits --batch-size 32
torchrun --nproc_per_node 2 ddp_course/lesson04.py --learning-rate 2e-3 --bucket-cap-mb 1 --epochs 1
python ddp_course/lesson04.py --epochs 1
python -m ddp_course.lesson04 --epochs 1
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from ddp_course import data, lesson01, runs
from ddp_course.distributed import backend_for, choose_device, stay_on_this_machine, torchrun_environment
from ddp_course.models import ConvNet


def set_up(device):
    """Join the process group of all ranks; return this rank's number and how many there are."""
    rank, _, world_size, _ = torchrun_environment()
    stay_on_this_machine()
    if "RANK" in os.environ:  # torchrun says where to meet
        gpu = device if device.type == "cuda" else None  # tells nccl which GPU is ours before the first collective
        dist.init_process_group(backend_for(device), timeout=timedelta(minutes=10), device_id=gpu)
    else:  # started alone: a group of one, which needs no address
        dist.init_process_group(backend_for(device), store=dist.HashStore(), rank=0, world_size=1)
    return rank, world_size


def train_one_epoch(model, loader, optimizer, device):
    """Lesson 01's loop as it is: backward() averages the gradients. Return the loss of each step, over all ranks."""
    losses = torch.tensor(lesson01.train_one_epoch(model, loader, optimizer, device), device=device)
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return losses.tolist()


def evaluate(model, test_set, device):
    """Count, over all ranks, how many samples the model gets right, and how many there are: each is seen once.

    Not by DistributedSampler: it repeats samples until all ranks have equally many.
    Not through the DDP wrapper: its forward may communicate, and here a rank may have one batch more than another.
    """
    mine = Subset(test_set, range(dist.get_rank(), len(test_set), dist.get_world_size()))
    counts = torch.tensor(lesson01.evaluate(model.module, DataLoader(mine, batch_size=1000), device), device=device)
    dist.all_reduce(counts)
    correct, seen = counts.tolist()
    return correct, seen


def save(model, path):
    """Rank 0 writes the parameters, under another name first; nobody goes on before the file is there."""
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), path.with_suffix(".part"))  # .module: names without the prefix `module.`
        os.replace(path.with_suffix(".part"), path)
    dist.barrier()


def load(model, path, device):
    """Every rank reads the file, onto its own device."""
    model.module.load_state_dict(torch.load(path, map_location=device, weights_only=True))


def arguments(argv=None):
    parser = runs.parser(__file__, __doc__)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--bucket-cap-mb", type=float, default=25.0)
    return parser.parse_args(argv)


def main(argv=None):
    args = arguments(argv)
    device = choose_device(args.device)
    rank, world_size = set_up(device)
    try:
        return train(args, rank, world_size, device)
    finally:
        dist.destroy_process_group()


def train(args, rank, world_size, device):
    log = runs.open_folder(args.out)
    train_set, test_set = data.load(args.data, args.train_samples, device)
    runs.check_batch_size(args.batch_size, len(train_set), world_size)
    sampler = DistributedSampler(train_set, world_size, rank, shuffle=True, seed=args.seed)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler)

    torch.manual_seed(args.seed)
    model = ConvNet(dropout=not args.no_dropout).to(device)
    model = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        bucket_cap_mb=args.bucket_cap_mb,
        gradient_as_bucket_view=True,  # .grad lies in the bucket: one copy less, and less memory
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    torch.manual_seed(args.seed + rank)  # the same model everywhere, but each rank its own dropout

    losses, seconds = [], 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # another shuffle in each epoch, the same on all ranks
        begin = time.perf_counter()
        losses += train_one_epoch(model, train_loader, optimizer, device)
        seconds += time.perf_counter() - begin
        correct, seen = evaluate(model, test_set, device)
        log.info("epoch %d: loss of the last step %.3f, test accuracy %.1f %%", epoch + 1, losses[-1], 100 * correct / seen)

    save(model, args.out / "model.pt")
    load(model, args.out / "model.pt", device)
    return runs.finish(args, device, model.module, train_set, losses, seconds, correct / seen, seen)


if __name__ == "__main__":
    runs.start(main)
