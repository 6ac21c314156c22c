"""Which rank did not come: what a rank says that has waited for another in vain.

Under torchrun nobody watches but torchrun, which blames the rank whose process ends
first: that is one of those that have waited. So they compare notes, in the store in
which they met, and one of them names those that are missing.
"""

import re
import time
import traceback
from contextlib import suppress
from datetime import timedelta

import psutil
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_course import UsageError
from ddp_course.ranks import environment
from ddp_course.ranks.endings import SYMPTOMS, TIMEOUTS, is_stopped
from ddp_course.ranks.frames import format_frame, is_learners

PATIENCE = 3.0  # seconds in which all ranks that waited for the same have noticed it
_steps = []  # how many steps the optimizers of this process have done: one number


def count_steps():
    """Count the optimizer's steps from now on, so that a line can name one."""

    def count(*_):
        _steps[0] += 1

    if not _steps:
        register_optimizer_step_post_hook(count)
    _steps[:] = [0]


def line_about(error):
    """What has gone wrong, if this rank has waited in vain; call it on every rank that
    an error has reached.

    Returns a line on one of these ranks, "" on the others, and None where the error has
    another cause, or nobody can tell.
    """
    said = str(error)
    if found := re.search(r"wait timeout after (\d+)ms, keys: \S*/(\d+)$", said):
        return f"rank {found[2]} did not come to the group within {seconds(found[1])}"
    if not any(words in said for words in SYMPTOMS):
        return None
    try:
        return compare_notes(error, any(words in said for words in TIMEOUTS))
    except (dist.DistError, UsageError):  # the store is gone, too
        return None


def compare_notes(error, in_vain):
    """The same for an error of a collective. in_vain: this rank has waited its time,
    and did not just lose its connection to another one that had.
    """
    rank, _, ranks, _ = environment.torchrun_environment()
    store = environment.meeting_place(timeout=PATIENCE)
    store.set(f"note {rank}", f"{int(in_vain)} {place_of(error)}")
    deadline, here = time.monotonic() + PATIENCE, []
    while len(here) < ranks and time.monotonic() < deadline:
        time.sleep(0.05)
        here = [other for other in range(ranks) if store.check([f"note {other}"])]
    notes = {other: store.get(f"note {other}").decode() for other in here}
    waited = [other for other, note in notes.items() if note.startswith("1")]
    if rank != min(waited or here):
        # torchrun ends all ranks as soon as one has left: that one first
        while not store.check(["told"]) and time.monotonic() < deadline + PATIENCE:
            time.sleep(0.05)
        return ""
    store.set("told", "")
    missing = [other for other in range(ranks) if other not in notes]
    places = {other: note[2:] for other, note in notes.items()}
    step, place = f"step {_steps[0] + 1}", f"rank {rank} has waited in {places[rank]}"
    if not waited:
        return f"rank {missing[0]} has left before {step}: {place}" if missing else None
    told = re.search(r"(\d+)\s?ms", str(error))  # gloo does not always tell
    limit = seconds(told[1]) if told else "its timeout"
    if missing:
        who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {missing}"
        if any(map(is_stopped, filter(None, map(process_of, missing)))):
            who += ", which is stopped (SIGSTOP),"
        return f"{who} did not come to {step} within {limit}: {place}"
    if len(set(places.values())) == 1:
        return f"a rank came to {step} later than within {limit}: {place}"
    each = "; ".join(f"rank {other} in {line}" for other, line in places.items())
    return f"the ranks wait for each other, in different places: {each}"


def place_of(error):
    """The line in a program in which an error came up."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [(frame.filename, frame.lineno, frame.name) for frame in frames]
    own = [frame for frame in frames if is_learners(frame)]
    return format_frame((own or frames)[-1])


def process_of(rank):
    """The number of a rank's process; None where it is not on this machine."""
    torchrun = psutil.Process().parent()
    for process in torchrun.children() if torchrun else ():
        with suppress(psutil.Error):
            if process.environ().get("RANK") == str(rank):
                return process.pid
    return None


def seconds(milliseconds):
    return f"{timedelta(milliseconds=int(milliseconds)).total_seconds():g} s"
