"""DistributedDataParallel: the program that you will copy, whole.

torchrun ddp_course/lesson04.py
torchrun --nproc_per_node 2 ddp_course/lesson04.py --epochs 1
torchrun --nproc_per_node 3 ddp_course/lesson04.py --data digits --learning-rate 2e-3
python ddp_course/lesson04.py --epochs 1 --bucket-cap-mb 1
"""

import io
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from ddp_course import lesson01, runs
from ddp_course.ranks.environment import backend_for, choose_device, rendezvous
from ddp_course.scenery.images import load_images
from ddp_course.scenery.models import ConvNet


def train_one_epoch(model, loader, optimizer, device):
    """Lesson 01's loop as it is, since backward() averages. Return the mean loss of
    each step.
    """
    losses = torch.tensor(
        lesson01.train_one_epoch(model, loader, optimizer, device), device=device
    )
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return losses.tolist()


def evaluate(model, test_set, device):
    """Count, over all ranks, how many samples the model gets right, and how many there
    are.

    Not by DistributedSampler: it repeats samples until all ranks have equally many. Not
    through the DDP wrapper: its forward may communicate, and a rank may have a batch
    less here.
    """
    mine = range(dist.get_rank(), len(test_set), dist.get_world_size())
    loader = DataLoader(Subset(test_set, mine), batch_size=250)
    counts = torch.tensor(
        lesson01.evaluate(model.module, loader, device), device=device
    )
    dist.all_reduce(counts)
    correct, seen = counts.tolist()
    return correct, seen


def save(model, path):
    """Rank 0 writes the parameters, whole or not at all; nobody goes on before the file
    is there.
    """
    if dist.get_rank() == 0:
        file = io.BytesIO()
        torch.save(
            model.module.state_dict(), file
        )  # .module: names without the prefix `module.`
        runs.write_atomically(path, file.getvalue())
    dist.barrier()


def load(model, path, device):
    """Every rank reads the file, onto its own device."""
    model.module.load_state_dict(
        torch.load(path, map_location=device, weights_only=True)
    )


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--bucket-cap-mb", type=float, default=None
    )  # 25 MiB, the first one 1
    return parser.parse_args(argv)


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device)
    gpu = (
        device if device.type == "cuda" else None
    )  # nccl wants to know before the first collective
    dist.init_process_group(backend_for(device), device_id=gpu, **rendezvous())
    try:
        return train(args, dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


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
        bucket_cap_mb=args.bucket_cap_mb,
        # .grad lies in the bucket: one copy less, and less memory
        gradient_as_bucket_view=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    torch.manual_seed(
        args.seed + rank
    )  # the same model everywhere, but each rank its own dropout

    losses, seconds = [], 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # another shuffle in each epoch, the same on all ranks
        begin = time.perf_counter()
        losses += train_one_epoch(model, train_loader, optimizer, device)
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
