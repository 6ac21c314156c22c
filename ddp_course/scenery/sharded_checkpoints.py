"""Checkpoints of which each rank writes and reads its shards: torch's DCP.

A checkpoint is a folder, `epoch-0003`. It gets this name when all ranks have written, so
one that was interrupted is never read. Any number of ranks can resume from it, with DDP
or `fully_shard`, no matter which of them wrote it.
"""

import shutil

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from ddp_course import UsageError

SAVED = ("ddp", "fsdp")  # the ways of sharding whose optimizer torch can save and load


def full_parameters(model):
    """The whole parameters by name, on all ranks, which call this together."""
    options = StateDictOptions(full_state_dict=True)
    return get_model_state_dict(model, options=options)


def begin(args, model, optimizer):
    """Return the epoch to begin with: 0, or where the newest checkpoint has ended.

    args: with out, resume, sharding, shape and epochs. Raises UsageError where the run
    cannot be resumed.
    """
    first = 0
    if args.resume:
        first = resume(args, model, optimizer)
    elif dist.get_rank() == 0:
        shutil.rmtree(args.out / "checkpoints", ignore_errors=True)
    if first >= args.epochs:
        problem = f"the checkpoint in {args.out} is of epoch {first}"
        raise UsageError(f"{problem}: --epochs {args.epochs} leaves nothing to do")
    return first


def resume(args, model, optimizer):
    """Read the newest checkpoint into a model and its optimizer; return its epoch."""
    if args.sharding not in SAVED:
        raise UsageError(f"--resume needs --sharding {' or '.join(SAVED)}")
    there = found_in(args.out / "checkpoints")
    if not there:
        raise UsageError(f"no checkpoint in {args.out}: start without --resume")
    weights, averages = get_state_dict(model, optimizer)
    state = {"weights": weights, "averages": averages, "epoch": 0, "shape": ""}
    try:
        dcp.load(state, checkpoint_id=there[-1])  # into the tensors that are there
    except CheckpointException as error:
        raise UsageError(f"{there[-1]} cannot be used: {cause_of(error)}") from None
    if state["shape"] != args.shape:
        raise UsageError(f"{there[-1]} is of --shape {state['shape']}")
    weights, averages = state["weights"], state["averages"]
    set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=averages
    )
    return state["epoch"]


def cause_of(error):
    """What went wrong on the first rank that failed, in a line."""
    [(cause, _), *_] = error.failures.values()
    first_line = str(cause).strip().partition("\n")[0]
    return f"{type(cause).__name__} {first_line}".strip()


def found_in(folder):
    """The finished checkpoints, oldest first."""
    return sorted(folder.glob("epoch-*"))


def save(args, model, optimizer, epoch):
    """Write a checkpoint after this many epochs, in place of the older ones."""
    if args.sharding not in SAVED:
        return
    weights, averages = get_state_dict(model, optimizer)
    state = {"weights": weights, "averages": averages}
    state |= {"epoch": epoch, "shape": args.shape}
    folder = args.out / "checkpoints"
    try:
        dcp.save(state, checkpoint_id=folder / "unfinished")
    except CheckpointException as error:
        raise UsageError(f"cannot write to {folder}: {cause_of(error)}") from None
    if dist.get_rank() == 0:  # all ranks have written
        older = found_in(folder)
        (folder / "unfinished").rename(folder / f"epoch-{epoch:04}")
        for checkpoint in older:
            shutil.rmtree(checkpoint)
    dist.barrier()
