"""When a job ends before its program does: what its ranks are told, and whether those
that start next go on with the run.
"""

import os
import signal
import threading
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ddp_course.ranks.environment import whole_number


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
    """Whether any rank was told, the same on all ranks: signals do not arrive at once.

    The answer is there when a GPU has done all that was queued, so do not ask often: it
    then waits for new work.
    """
    flag = torch.tensor(float(bool(told)), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)
