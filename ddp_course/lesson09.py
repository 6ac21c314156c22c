"""Checkpoints that survive anything, and a run that resumes from them bit for bit.

torchrun --nproc_per_node 2 ddp_course/lesson09.py --epochs 1 --save-every 5
torchrun --nproc_per_node 2 ddp_course/lesson09.py --epochs 1 --resume
torchrun --max-restarts 3 --nproc_per_node 2 ddp_course/lesson09.py --epochs 1
python ddp_course/lesson09.py --epochs 1
"""

import hashlib
import io
import itertools
import json
import os
import shutil
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_course import UsageError, lesson06, runs
from ddp_course.lesson04 import evaluate, load, save
from ddp_course.lesson06 import grouped, update
from ddp_course.ranks.environment import backend_for, choose_device, process_group
from ddp_course.scenery.images import load_images
from ddp_course.scenery.models import ConvNet

# ---- what a checkpoint holds ----


class ResumableSampler(DistributedSampler):
    """A DistributedSampler whose next epoch may begin in the middle, `start` samples of
    this rank's further on.
    """

    start = 0

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.start, None)


def random_states(device):
    """The states of the generators that this rank draws from, {"cpu": tensor, "cuda":
    tensor}.
    """
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states, device):
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def settings_of(args, train_set, world_size):
    """What a run must share with the one that it goes on from."""
    names = [
        "seed",
        "epochs",
        "batch_size",
        "accumulate",
        "precision",
        "max_norm",
        "no_dropout",
    ]
    chosen = {name.replace("_", "-"): vars(args)[name] for name in names}
    return chosen | {
        "data": train_set.name,
        "train-samples": len(train_set),
        "ranks": world_size,
    }


# ---- how it is written ----


def save_checkpoint(folder, shared, own, keep):
    """Write a checkpoint, a folder: what all ranks share, once, and each rank's own.
    Keep the newest `keep` of them.

    The manifest, with the checksum of every file, comes last: without it, a folder is
    no checkpoint.
    """
    rank = dist.get_rank()
    if rank == 0:
        runs.empty_folder(folder)  # of what a run has left that was killed here
    dist.barrier()
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is not on this machine: --out must lie on a disk that all machines share"
        )
    checksums = {f"rank{rank}.pt": write(folder / f"rank{rank}.pt", own)}
    if rank == 0:
        checksums["shared.pt"] = write(folder / "shared.pt", shared)
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(
        of_ranks, checksums
    )  # from here on, the files of all ranks are there
    if rank == 0:
        manifest = {
            name: checksum for of_rank in of_ranks for name, checksum in of_rank.items()
        }
        runs.write_atomically(
            folder / "manifest.json", json.dumps(manifest, indent=2) + "\n"
        )
        everything = checkpoints(folder.parent)
        finished = [other for other in everything if (other / "manifest.json").exists()]
        for other in set(everything) - set(finished[-keep:]):
            shutil.rmtree(other, ignore_errors=True)


def write(path, state):
    """Write tensors and plain values, whole or not at all; return the file's
    SHA-256.
    """
    file = io.BytesIO()
    torch.save(state, file)
    runs.write_atomically(path, file.getvalue())
    return hashlib.sha256(file.getvalue()).hexdigest()


# ---- how it is found and read ----


def checkpoints(folder):
    """The folders of checkpoints, whole or not, in the order of their steps."""
    return sorted(folder.glob("step-*"))


def is_whole(checkpoint):
    """Whether it has a manifest, and all files that this names, as they were
    written.
    """
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        if not isinstance(manifest, dict) or "shared.pt" not in manifest:
            return False
        return all(
            sha256(checkpoint / name) == expected for name, expected in manifest.items()
        )
    except (OSError, ValueError):
        return False


def sha256(path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def newest(folder):
    """The newest whole checkpoint in a folder, or None. Rank 0 looks, so that no two
    ranks take different ones.
    """
    found = [None]
    if dist.get_rank() == 0:
        found = [next(filter(is_whole, reversed(checkpoints(folder))), None)]
    dist.broadcast_object_list(found)
    return found[0]


def load_checkpoint(checkpoint, settings):
    """Its (shared, own) for this rank, on the CPU: load_state_dict takes each tensor to
    its place.

    Raises UsageError where it was made by a run with other settings.
    """
    shared = torch.load(checkpoint / "shared.pt", map_location="cpu", weights_only=True)
    check_settings(shared["settings"], settings, checkpoint)
    own = torch.load(
        checkpoint / f"rank{dist.get_rank()}.pt", map_location="cpu", weights_only=True
    )
    return shared, own


def check_settings(made_with, settings, checkpoint):
    """Raise UsageError where a checkpoint was made with other settings than today's:
    with the first that differs.
    """
    for name in made_with | settings:
        then, now = made_with.get(name), settings.get(name)
        if then != now:
            cure = (
                "go on with that, or begin anew, without --resume or with another --out"
            )
            raise UsageError(
                f"{checkpoint} was made with {name} {then}, not {now}: {cure}"
            )


# ---- the program ----


def arrange_buckets(model, inputs):
    """A backward that counts for nothing. DDP arranges its buckets anew after its first
    one, and where ranks are three or more, sums in another order from then on: a
    resumed run would differ in the last bits."""
    model(inputs).sum().backward()
    model.zero_grad()


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__)
    parser.add_argument(
        "--accumulate", type=runs.count, default=1, help="micro-batches an update (1)"
    )
    parser.add_argument(
        "--precision", choices=list(lesson06.PRECISIONS), default="fp32"
    )
    parser.add_argument(
        "--max-norm",
        type=float,
        default=1.0,
        help="of the gradient; longer ones are clipped",
    )
    parser.add_argument(
        "--save-every",
        type=runs.count,
        default=10,
        help="updates between checkpoints (10)",
    )
    parser.add_argument(
        "--keep", type=runs.count, default=2, help="how many checkpoints stay (2)"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest whole checkpoint, if any",
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
    sampler = ResumableSampler(
        train_set, world_size, rank, shuffle=True, seed=args.seed
    )
    # beginning an epoch draws a number: from a generator of its own, or a resumed epoch
    # would draw one more
    train_loader = DataLoader(
        train_set, args.batch_size, sampler=sampler, generator=torch.Generator()
    )

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
    arrange_buckets(model, torch.zeros(1, 1, 28, 28, device=device))
    torch.manual_seed(
        args.seed + rank
    )  # the same model everywhere, but each rank its own dropout

    parts = {
        "model": model.module,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scaler": scaler,
    }
    settings, folder = (
        settings_of(args, train_set, world_size),
        args.out / "checkpoints",
    )
    position, losses = {"epoch": 0, "updates": 0, "seconds": 0.0}, []
    restarted = (
        int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    )  # by torchrun, after a failure
    checkpoint = newest(folder) if args.resume or restarted else None
    if checkpoint:
        shared, own = load_checkpoint(checkpoint, settings)
        for name, part in parts.items():
            part.load_state_dict(shared[name])
        position, losses = shared["position"], list(own["losses"].to(device))
        set_random_states(own["random"], device)
        log.info(f"going on from {checkpoint.name}")
    elif rank == 0:
        runs.empty_folder(folder)  # of an earlier run's checkpoints

    while position["epoch"] < args.epochs:
        sampler.set_epoch(position["epoch"])
        sampler.start = position["updates"] * args.accumulate * args.batch_size
        model.train()
        begin = time.perf_counter()
        for window in grouped(train_loader, args.accumulate):
            losses.append(
                update(model, window, optimizer, scheduler, scaler, device, args)
            )
            position["updates"] += 1
            if len(losses) % args.save_every == 0:
                position["seconds"] += time.perf_counter() - begin
                shared = {name: part.state_dict() for name, part in parts.items()}
                shared |= {"position": position, "settings": settings}
                own = {"random": random_states(device), "losses": torch.stack(losses)}
                save_checkpoint(
                    folder / f"step-{len(losses):08}", shared, own, args.keep
                )
                begin = time.perf_counter()
        position["seconds"] += time.perf_counter() - begin
        correct, seen = evaluate(model, test_set, device)
        log.info(
            f"epoch {position['epoch'] + 1}: loss {losses[-1]:.3f}, test accuracy {correct / seen:.1%}"
        )
        position |= {"epoch": position["epoch"] + 1, "updates": 0}

    save(model, args.out / "model.pt")
    load(model, args.out / "model.pt", device)
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    seconds = position["seconds"]
    return runs.finish(
        args,
        device,
        model.module,
        train_set,
        losses.tolist(),
        seconds,
        correct / seen,
        seen,
    )


if __name__ == "__main__":
    runs.start(main)
