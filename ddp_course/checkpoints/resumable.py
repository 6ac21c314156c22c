"""How a checkpoint is written, whole or not at all, how often, and how a run resumes
from it on all ranks.
"""

import hashlib
import io
import json
import logging

import torch
import torch.distributed as dist

from ddp_course import UsageError
from ddp_course.checkpoints.whole import (
    checkpoints,
    finished,
    load_checkpoint,
    newest,
    remove,
    remove_older,
    warn,
)
from ddp_course.files import Unusable, empty_folder, write_atomically

# ---- how a checkpoint is written ----


def save_checkpoint(folder, shared, own, keep):
    """Write a checkpoint, a folder: what all ranks share, once, and each rank's own.

    The manifest, with the checksum of each file, comes last: a folder without it is no
    checkpoint. The newest `keep` checkpoints stay. All ranks call this together.
    """
    rank = dist.get_rank()
    if rank == 0:
        remove(folder)
        empty_folder(folder)
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
        write_atomically(folder / "manifest.json", text)
        remove_older(folder, keep)


def write(path, state):
    """Write tensors and plain values, whole or not at all; return their SHA-256."""
    file = io.BytesIO()
    torch.save(state, file)
    write_atomically(path, file.getvalue())
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


def arrange_buckets(model, inputs):
    """Make DDP arrange its buckets now, by a backward pass whose result is dropped.

    DDP rearranges them once, after its first backward pass. From three ranks on, sums
    are then added in another order, so a resumed run would differ in the last bits.
    """
    model(inputs).sum().backward()
    model.zero_grad()
