"""Checkpoints that survive a kill at any moment, and runs that resume bit for bit.

torchrun --nproc_per_node 2 ddp_course/lesson09.py --epochs 1 --save-every 5
torchrun --nproc_per_node 2 ddp_course/lesson09.py --epochs 2 --resume
torchrun --max-restarts 3 --nproc_per_node 2 ddp_course/lesson09.py --epochs 1
python ddp_course/lesson09.py --epochs 1
"""

import hashlib
import io
import itertools
import json
import logging
import os
import signal
import threading
import time
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_course import UsageError, lesson06, runs
from ddp_course.checkpoints.whole import (
    check_numbers,
    checkpoints,
    finished,
    load_checkpoint,
    load_state,
    newest,
    remove,
    remove_all,
    remove_older,
    warn,
)
from ddp_course.data.images import load_images
from ddp_course.files import Unusable, check_alike
from ddp_course.lesson04 import evaluate, load, save
from ddp_course.lesson06 import grouped, update
from ddp_course.models.convnets import ConvNet
from ddp_course.ranks.environment import (
    backend_for,
    choose_device,
    process_group,
    whole_number,
)

# ---- what a checkpoint holds ----


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that leaves out this rank's first `start` samples."""

    start = 0

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.start, None)


def seed_workers(generator, seed, epoch, rank):
    """Seed a DataLoader's generator, from which the loader seeds its workers.

    Each rank and each epoch gets its own seed, and a resumed epoch gets the same again.
    """
    digest = hashlib.sha256(f"{seed} {epoch} {rank}".encode()).digest()
    generator.manual_seed(int.from_bytes(digest[:8], "little"))


def random_states(device):
    """The states of this rank's random number generators, {device: tensor}."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states, device):
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def settings_of(args, train_set, world_size):
    """What a run must have in common with the run that it resumes.

    The number of epochs is not among them: a run may be resumed for more epochs.
    """
    names = "seed batch_size accumulate precision max_norm no_dropout".split()
    chosen = {name.replace("_", "-"): vars(args)[name] for name in names}
    data = {"data": train_set.name, "train-samples": len(train_set)}
    return chosen | data | {"ranks": world_size}


def snapshot(parts, losses, seconds, settings, device):
    """The state of a run between two updates: (shared, own), for save_checkpoint.

    parts: {name: object with a state_dict}. losses: of each update, on this rank. The
    epoch and the position in it follow from the number of updates.
    """
    shared = {name: part.state_dict() for name, part in parts.items()}
    shared |= {"updates": len(losses), "seconds": seconds, "settings": settings}
    own = {"losses": torch.stack(losses), "random": random_states(device)}
    return shared, own


def restore(parts, device, shared, own):
    """Load a snapshot into the parts of a run; raise an error if it does not fit."""
    check_alike(shared["updates"], 0, "the number of updates")
    check_alike(list(own["losses"].shape[:1]), [0], "the losses")
    check_alike(own["losses"].is_contiguous(), True, "the memory of the losses")
    if len(own["losses"]) != shared["updates"]:
        counts = f"{len(own['losses'])} losses of {shared['updates']} updates"
        raise Unusable(f"it has {counts}")
    check_alike(shared["seconds"], 0.0, "seconds")
    for name, part in parts.items():
        load_state(part, shared[name])
    check_numbers(parts["model"], parts["optimizer"])
    set_random_states(own["random"], device)


# ---- how a checkpoint is written ----


def save_checkpoint(folder, shared, own, keep):
    """Write a checkpoint, a folder: what all ranks share, once, and each rank's own.

    The manifest, with the checksum of each file, comes last: a folder without it is no
    checkpoint. The newest `keep` checkpoints stay. All ranks call this together.
    """
    rank = dist.get_rank()
    if rank == 0:
        remove(folder)
        runs.empty_folder(folder)
    dist.barrier()
    if not folder.is_dir():
        problem = f"{folder} is not on this machine"
        raise UsageError(f"{problem}: --out must be on a disk that all machines share")
    checksums = {f"rank{rank}.pt": write(folder / f"rank{rank}.pt", own)}
    if rank == 0:
        checksums["shared.pt"] = write(folder / "shared.pt", shared)
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, checksums)  # now the files of all ranks are there
    if rank == 0:
        manifest = {name: value for part in of_ranks for name, value in part.items()}
        text = json.dumps(manifest, indent=2) + "\n"
        runs.write_atomically(folder / "manifest.json", text)
        remove_older(folder, keep)


def write(path, state):
    """Write tensors and plain values, whole or not at all; return their SHA-256."""
    file = io.BytesIO()
    torch.save(state, file)
    runs.write_atomically(path, file.getvalue())
    return hashlib.sha256(file.getvalue()).hexdigest()


# ---- how often a checkpoint is written ----

DAY = 86400  # seconds


def best_interval(saving, between_failures):
    """The seconds between two checkpoints at which the least time is lost.

    saving: seconds that a checkpoint takes. between_failures: mean seconds between two
    failures. J. W. Young, "A first order approximation to the optimum checkpoint
    interval", 1974.
    """
    return (2 * saving * between_failures) ** 0.5


def updates_between(saving, update, device):
    """How many updates best_interval() is for a job that fails once a day.

    saving, update: the seconds that they took on this rank. All ranks call it together
    and return the same.
    """
    taken = torch.tensor([saving, update], device=device)
    dist.all_reduce(taken, dist.ReduceOp.AVG)
    saving, update = taken.tolist()
    return max(1, round(best_interval(saving, DAY) / update))


# ---- how a checkpoint is read ----


def resume(folder, settings, restore):
    """Restore the newest checkpoint that all ranks can use; return its (shared, own).

    restore(shared, own) takes the content over, or raises an error if it does not fit;
    then the next older checkpoint is tried. Returns None if there is no checkpoint.
    Raises UsageError if none of them can be used, or if other settings made it.
    """
    checkpoint = newest(folder)
    while checkpoint:
        problem = None
        try:
            shared, own = load_checkpoint(checkpoint, settings)
            restore(shared, own)
        except UsageError as error:
            problem = error
        except Exception as error:  # load_state_dict has errors of many kinds
            problem = Unusable.because(error)
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)  # all ranks agree
        problem = next(filter(None, problems), None)
        if problem is None:
            logging.getLogger("ddp_course").info(f"resuming from {checkpoint.name}")
            return shared, own
        if isinstance(problem, UsageError):
            raise problem
        if dist.get_rank() == 0:
            warn(checkpoint, problem)
        checkpoint = newest(folder, older_than=checkpoint)
    unfinished = [path.name for path in checkpoints(folder)]
    if dist.get_rank() == 0 and unfinished and not finished(folder):
        warn(folder / unfinished[-1], "it has no manifest: starting anew")
    if finished(folder):
        fix = "see train.log; without --resume, the run starts anew"
        raise UsageError(f"no checkpoint in {folder} can be used: {fix}")


def goes_on(out):
    """Whether torchrun has started this process to go on with the run in its folder.

    torchrun counts the restarts on each machine for itself, and counts none when a
    machine joins. So it is enough if one rank was restarted, or if the run belongs to
    this job. All ranks return the same.
    """
    restarted = whole_number("TORCHELASTIC_RESTART_COUNT", 0) > 0
    note = out / "job"
    owner = note.read_bytes().decode(errors="replace") if note.is_file() else "none"
    signs = [None] * dist.get_world_size()
    dist.all_gather_object(signs, restarted or owner == job() != "none")
    return any(signs)


def job():
    """The id of torchrun's job, from --rdzv-id or --standalone; without, it is none."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "none")


# ---- when a scheduler wants the machines back ----


@contextmanager
def told_to_leave():
    """A list that has an entry as soon as this process receives USR1.

    Schedulers can send this signal some time before they end a job: SLURM does with
    --signal. Python receives signals in its main thread only.
    """
    told = []
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or not hasattr(signal, "SIGUSR1"):  # Windows has none
        yield told
        return
    before = signal.signal(signal.SIGUSR1, lambda *_: told.append(True))
    try:
        yield told
    finally:
        signal.signal(signal.SIGUSR1, before or signal.SIG_DFL)


def any_rank(told, device):
    """Whether any rank was told, the same on all ranks: signals do not arrive at once."""
    flag = torch.tensor(float(bool(told)), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


# ---- the program ----


def arrange_buckets(model, inputs):
    """Make DDP arrange its buckets now, by a backward pass whose result is dropped.

    DDP rearranges them once, after its first backward pass. From three ranks on, sums
    are then added in another order, so a resumed run would differ in the last bits.
    """
    model(inputs).sum().backward()
    model.zero_grad()


def count_or_auto(text):
    return text if text == "auto" else runs.count(text)


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__, per="micro-batch")
    flag, count, precisions = parser.add_argument, runs.count, list(lesson06.PRECISIONS)
    flag("--accumulate", type=count, default=1, help="micro-batches per update (1)")
    flag("--precision", choices=precisions, default="fp32", help="of autocast (fp32)")
    flag("--max-norm", type=runs.number, default=1.0, help="clip longer gradients (1)")
    save_help = "updates per checkpoint, or auto: as often as pays (10; on a GPU, auto)"
    flag("--save-every", type=count_or_auto, help=save_help)
    flag("--keep", type=count, default=2, help="how many checkpoints stay (2)")
    flag("--resume", action="store_true", help="from the newest good checkpoint")
    return parser.parse_args(argv)


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device, deterministic=args.deterministic)
    with process_group(backend_for(device), args.timeout) as (rank, world_size):
        with told_to_leave() as told:
            return train(args, rank, world_size, device, told)


def train(args, rank, world_size, device, told=()):
    log = runs.open_folder(args.out)
    train_set, test_set = load_images(args.data, args.train_samples, device)
    runs.check_batch_size(args.batch_size, len(train_set), world_size)
    sampler = ResumableSampler(train_set, world_size, rank, seed=args.seed)
    generator = torch.Generator()  # or each epoch would draw from dropout's
    train_loader = DataLoader(
        train_set, args.batch_size, sampler=sampler, generator=generator
    )

    torch.manual_seed(args.seed)
    model = ConvNet(dropout=not args.no_dropout).to(device)
    gpu = [device] if device.type == "cuda" else None
    model = DistributedDataParallel(model, device_ids=gpu, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # rounded up: the short group at the end of an epoch makes an update, too
    per_epoch = -(-len(train_loader) // args.accumulate)
    updates = args.epochs * per_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR
    scheduler = schedule(optimizer, lambda update: 1 - update / updates)
    is_fp16 = args.precision == "fp16"
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, enabled=is_fp16)
    arrange_buckets(model, torch.zeros(1, 1, 28, 28, device=device))
    torch.manual_seed(args.seed + rank)  # each rank draws its own dropout

    parts = {"model": model.module, "optimizer": optimizer}
    parts |= {"scheduler": scheduler, "scaler": scaler}
    settings = settings_of(args, train_set, world_size)
    folder, losses, seconds = args.out / "checkpoints", [], 0.0
    found = None
    if args.resume or goes_on(args.out):
        found = resume(folder, settings, partial(restore, parts, device))
    elif rank == 0:
        remove_all(folder)  # of an earlier run
    if rank == 0:
        runs.write_atomically(args.out / "job", job())
    if found:
        if (done := found[0]["updates"]) > updates:
            problem = f"the checkpoints are {done} updates into their run"
            raise UsageError(f"{problem}; --epochs {args.epochs} has only {updates}")
        losses, seconds = list(found[1]["losses"].to(device)), found[0]["seconds"]
        # --epochs may be more than it was: take the rate of the new schedule
        scheduler.last_epoch -= 1
        scheduler.step()
        log.info(f"the learning rate is {scheduler.get_last_lr()[0]:.1e}")

    save_every = args.save_every or ("auto" if device.type == "cuda" else 10)
    every = 10 if save_every == "auto" else save_every
    # a run that was stopped at the end of an epoch evaluates that epoch again
    for epoch in range(max(0, len(losses) - 1) // per_epoch, args.epochs):
        done = len(losses) - epoch * per_epoch  # in this epoch, before it was resumed
        sampler.set_epoch(epoch)
        sampler.start = done * args.accumulate * args.batch_size
        seed_workers(generator, args.seed, epoch, rank)
        model.train()
        begin = time.perf_counter()
        for micro_batches in grouped(train_loader, args.accumulate):
            losses.append(
                update(model, micro_batches, optimizer, scheduler, scaler, device, args)
            )
            leaves = any_rank(told, device) and len(losses) < updates
            if leaves or len(losses) % every == 0 or len(losses) == updates:
                runs.check_finite(torch.stack(losses[epoch * per_epoch :]))
                seconds += time.perf_counter() - begin
                begin = time.perf_counter()
                path = folder / f"step-{len(losses):08}"
                state = snapshot(parts, losses, seconds, settings, device)
                save_checkpoint(path, *state, args.keep)
                if leaves:
                    log.info(f"told to leave: {path.name} is written, see --resume")
                    return None
                if save_every == "auto":
                    saving = time.perf_counter() - begin
                    every = updates_between(saving, seconds / len(losses), device)
                begin = time.perf_counter()
        seconds += time.perf_counter() - begin
        runs.check_finite(torch.stack(losses[epoch * per_epoch :]))
        correct, seen = evaluate(model, test_set, device)
        accuracy, loss = correct / seen, losses[-1].clone()
        dist.all_reduce(loss)  # each rank has its part of the mean
        log.info(f"epoch {epoch + 1}: loss {loss:.3f}, accuracy {accuracy:.1%}")

    save(model, args.out / "model.pt")
    load(model, args.out / "model.pt", device)  # what is reported is what was saved
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    network = model.module
    return runs.finish(
        args, device, network, train_set, losses.tolist(), seconds, accuracy, seen
    )


if __name__ == "__main__":
    runs.start(main)
