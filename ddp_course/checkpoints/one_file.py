"""A checkpoint of one file, from which any number of ranks can resume."""

import os

import torch.distributed as dist

from ddp_course import UsageError
from ddp_course.checkpoints.resumable import write
from ddp_course.checkpoints.whole import check_numbers, check_settings, load_state
from ddp_course.files import Unusable, check_alike, tensors_of

PROGRESS = {"losses": [0.0], "seconds": 0.0, "began": 0.0}  # what it is like


def save_checkpoint(path, parts, progress):
    """Rank 0 writes what all ranks share, to one file; the others wait for it.

    progress: plain values and tensors besides the states of the parts.
    """
    if dist.get_rank() == 0:
        states = {name: part.state_dict() for name, part in parts.items()}
        write(path, {"states": states, "progress": progress})
    dist.barrier()


def resume(path, parts, settings):
    """Load the parts on all ranks; return the progress, or None without a checkpoint.

    Rank 0 reads for all ranks, so no rank can find what another does not. Raises
    UsageError for a damaged file, and if a run with other settings made it.
    """
    found = [None, None]  # the content, and what is wrong with it
    if dist.get_rank() == 0 and os.path.lexists(path):
        try:
            found = [tensors_of(path), ""]
        except Unusable as problem:
            found = [None, str(problem)]
    dist.broadcast_object_list(found)
    checkpoint, problem = found
    if problem is None:
        return None
    try:
        if problem:
            raise Unusable(problem)
        progress, states = checkpoint["progress"], checkpoint["states"]
        check_settings(progress["settings"], settings, path)
        check_alike(progress, PROGRESS | {"settings": settings}, "the progress")
        if progress["seconds"] < 0:
            raise Unusable("its seconds are below 0")
        for name, part in parts.items():
            load_state(part, states[name])
        check_numbers(parts["model"], parts["optimizer"])
    except UsageError:
        raise
    except Exception as error:  # load_state_dict has errors of many kinds
        reason = Unusable.because(error)
        fix = "start anew, without --resume or with another --out"
        raise UsageError(f"{path} cannot be used because {reason}: {fix}") from None
    return progress
