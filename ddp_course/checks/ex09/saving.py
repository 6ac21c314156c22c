"""Question 4: writing a file atomically, by one rank for all."""

import os
import resource
import signal
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_course.checks.claims import hold, on_every_rank
from ddp_course.checks.ex09.saving_claims import (
    NOWHERE,
    PATIENCE,
    new_file_is_there,
    nothing_is_lost_or_left,
    only_rank_0_writes,
    raises_in_time,
    safe_at_all_times,
    saves_again,
    state_is_kept,
    survives,
)
from ddp_course.checks.ex09.saving_watch import a_state, reading, same, watching
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import RankError

# ---- what the ranks observe ----


def save_on_ranks(save_whole, path, seed):
    """Let all ranks save over an older file, rank 0 later than the others; return what
    each did, and what it found afterwards.
    """
    path = Path(path)
    with process_group(timeout=4) as (rank, _):
        if rank == 0:
            torch.save(a_state(seed + 1), path)
        dist.barrier()
        if rank == 0:
            time.sleep(0.3)
        state = a_state(seed)
        with watching(path, save_whole) as events:
            save_whole(path, state)
        found = reading(path)
        size = path.stat().st_size if path.exists() else 0
        dist.barrier()
        left = sorted(os.listdir(path.parent))
        return {"events": events, "found": found, "size": size, "left": left, "kept": same(state, seed)}


def save_and_die(save_whole, path, seed, offset):
    """Save; the system kills the process as soon as `offset` bytes are in a file."""
    with process_group(timeout=4):
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (offset, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        save_whole(Path(path), a_state(seed))


def save_and_fail(save_whole, path, seed, most, ended_folder):
    """Save where rank 0 fails; return how the call ended on this rank, and when. most:
    bytes that rank 0 may write to a file. ended_folder: where each rank notes its end.

    Rank 0 stays until the others have ended, or for PATIENCE: the end of its process
    must not be what tells them.
    """
    with process_group(timeout=8) as (rank, n):
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        dist.barrier()
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        try:
            save_whole(Path(path), a_state(seed))
            ended = "it returned"
        except Exception as error:
            ended = f"it raised {type(error).__name__}"
        now = time.monotonic()
        Path(ended_folder, str(rank)).touch()
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            while len(os.listdir(ended_folder)) < n and time.monotonic() < now + PATIENCE:
                time.sleep(0.02)
        return {"ended": ended, "at": now}


def save_again(save_whole, path, seed):
    """Save, after others have been killed, and then under a name that is new; return
    what is then in both files.
    """
    path = Path(path)
    first = path.with_name(f"another-{path.name}")
    with process_group(timeout=4):
        save_whole(path, a_state(seed))
        save_whole(first, a_state(seed + 1))
    return reading(path), reading(first)


@question(
    "Write to another name in the same folder, and rename: that is atomic, and the old file stays until then. Data that "
    "a program has written may still be in memory: flush Python's buffer, and then the system's. And think of a full "
    "disk: for what do the other ranks wait then?",
    "On rank 0: file.flush(), os.fsync(file.fileno()), and after closing it os.replace(temporary, path), all in a try. "
    "If it fails, remove the temporary file and keep the error's text. Then a collective in which rank 0 tells the "
    "others how it went. It is also what they wait for.",
    "problem = [None]; on rank 0, in a try: with open(temporary, 'wb') as file: torch.save(state, file); file.flush(); "
    "os.fsync(file.fileno()), and then os.replace(temporary, path). except Exception as error: "
    "temporary.unlink(missing_ok=True); problem = [str(error)]. On all ranks: dist.broadcast_object_list(problem), and "
    "raise OSError(problem[0]) if it is not None.",
)
def check_save_whole(answer, draw):
    """If it is killed at any byte, the old file must be unchanged; only rank 0 may
    write, flush and rename; all ranks must wait, and all must raise an error if rank 0
    cannot write.
    """
    seed = 3 * draw.randrange(10**6)
    with answer.folder() as folder:
        path = folder / draw.choice(["state.pt", "last.ckpt", "step-7.pt"])
        n = draw.choice([2, 3])
        of_ranks = answer.on_ranks(save_on_ranks, str(path), seed, nproc=n)
        checked, size = f"what happens in save_whole('{path.name}', state), on {n} ranks", of_ranks[0]["size"]
        on_every_rank(partial(only_rank_0_writes, checked), of_ranks)
        hold(new_file_is_there(seed, 0, of_ranks), f"0 of {n}")  # first: without it, nothing can be waited for
        on_every_rank(partial(new_file_is_there, seed), of_ranks)
        hold(safe_at_all_times(checked, path, of_ranks[0]), f"0 of {n}")
        on_every_rank(state_is_kept, of_ranks)
        for part in (0.0, draw.uniform(0.1, 0.9), 0.999):
            offset = int(part * size)
            killed_at = f"a process that is killed after {offset:,} of {size:,} bytes"
            ended = killed(answer, path, seed + 7, offset)
            hold(survives(killed_at, ended, answer.apart(reading, str(path)), seed))
        [(found, first)] = answer.on_ranks(save_again, str(path), seed + 4)
        hold(saves_again(found, first, seed))
        fail(answer, path, seed + 9, n, size)


def killed(answer, path, seed, offset):
    """Save until the process is killed after so many bytes; return "FileExistsError" if it
    comes before.
    """
    try:
        answer.on_ranks(save_and_die, str(path), seed, offset)
    except RankError as error:
        if "FileExistsError" in error.message:
            return "FileExistsError"
        if "SIGXFSZ" not in str(error):
            raise
    return None


def fail(answer, path, seed, n, size):
    """Save in three ways in which rank 0 cannot. size: of the file at `path`, in bytes."""
    expected = answer.apart(reading, str(path))
    nowhere, taken = path.parent / NOWHERE / path.name, path.parent / "taken"
    answer.apart(os.makedirs, str(taken / "full"))
    before = answer.files(path.parent)
    for trouble, place, most, left in [
        ("a disk that is full in the middle of the file", path, size * 3 // 5, "half a file"),
        ("a folder that does not exist", nowhere, 2 * size, "something"),
        ("a folder at `path`, so that the rename fails", taken, 2 * size, "the temporary file"),
    ]:
        checked = f"{trouble}, on {n} ranks"
        with answer.folder() as ended:
            args = (str(place), seed, most, str(ended))
            of_ranks = answer.on_ranks(save_and_fail, *args, nproc=n, timeout=12)
        more = [name for name in answer.files(path.parent) if name not in before]
        on_every_rank(partial(raises_in_time, checked, more), of_ranks)
        hold(nothing_is_lost_or_left(checked, left, answer.apart(reading, str(path)), expected, more))
