"""What runs in each rank: it sets up the rank, calls the function, and writes the
result to a file.
"""

import ctypes
import difflib
import faulthandler
import io
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

import cloudpickle

from ddp_course.ranks import nan_note
from ddp_course.ranks.machines.namespaces import move_into
from ddp_course.ranks.output import write_output_to
from ddp_course.ranks.variables import MACHINE, SHUT_IN

LARGEST_FILE = 64 * 2**20  # bytes, in launch_untrusted
MOST_OPEN = 256  # files, in a sandbox


def rank_main(rank, payload, folder, environments, timeout, plain=False):
    """Be rank `rank` from the first line to the last.

    payload: the function and its arguments, pickled. folder: where this rank's files
    are: its result or failure, its stack, and what it prints. environments: the
    variables of each rank. plain: see launch_untrusted.
    """
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    if MACHINE in environments[rank]:  # before there is a second thread
        move_into(environments[rank][MACHINE])
    threading.Thread(target=_end_with_the_caller, args=(folder,), daemon=True).start()
    if plain:
        _limit_files()
    write_output_to(folder, rank)
    stack = open(f"{folder}/{rank}.stack", "w")
    if hasattr(signal, "SIGUSR2"):
        faulthandler.register(signal.SIGUSR2, stack)
    else:
        faulthandler.dump_traceback_later(max(timeout - 0.3, 0.1), file=stack)
    try:
        # DataLoader's workers start in the default way, not like this rank
        multiprocessing.set_start_method(None, force=True)
        os.environ.clear()
        os.environ.update(environments[rank])
        _apply_environment()
        if not plain:
            nan_note.note_first_nan(f"{folder}/{rank}.nan")
        fn, args, kwargs = cloudpickle.loads(payload)
        packed = _pack(_called(fn, args, kwargs, plain), plain)
        Path(folder, f"{rank}.result").write_bytes(packed)
    except BaseException as error:
        Path(folder, f"{rank}.failure").write_text(json.dumps(_failure(error)))
        sys.exit(1)


def _called(fn, args, kwargs, plain):
    """What the function returns: None if it ends with sys.exit(0), as a program does. An
    answer that leaves so has not returned.
    """
    try:
        return fn(*args, **kwargs)
    except SystemExit as left:
        if plain or left.code not in (0, None):
            raise
        return None


def _apply_environment():
    """Make torch follow variables that were set after the fork server had read them."""
    import torch
    import torch.distributed

    torch.distributed.set_debug_level_from_env()
    torch.set_num_threads(
        int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads()))
    )
    if "numpy" in sys.modules:
        # otherwise all ranks from this fork server would draw the same random numbers
        sys.modules["numpy"].random.seed()


def _pack(result, plain):
    """What the function returned, as bytes."""
    import torch

    packed = io.BytesIO()
    try:
        torch.save(result, packed) if plain else cloudpickle.dump(result, packed)
    except Exception as error:
        raise TypeError(
            f"what the rank returned cannot be sent back: {error}"
        ) from None
    return packed.getvalue()


def _failure(error):
    """A rank's report of the error that it raised: when, what and where."""
    if isinstance(error, SystemExit):
        message = f"SystemExit: the rank left with sys.exit({error.code!r})"
    else:
        message = "".join(traceback.format_exception_only(error)).strip()
        message += _did_you_mean(error) * ("Did you mean" not in message)
    frames = [
        (frame.filename, frame.lineno, frame.name)
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    return {"time": time.time(), "message": message, "frames": frames}


def _did_you_mean(error):
    """What Python adds to the error of a mistyped name, where it ends a program."""
    mistyped, names = getattr(error, "name", None), []
    with suppress(Exception):  # an object may refuse to list its names
        if isinstance(error, AttributeError):
            names = dir(error.obj)
        elif isinstance(error, NameError):
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            names = [*frame.f_locals, *frame.f_globals, *frame.f_builtins]
    similar = mistyped and difflib.get_close_matches(mistyped, names, 1, cutoff=0.8)
    return f". Did you mean: {similar[0]!r}?" if similar else ""


def close_to_others():
    """Keep processes of the same user from reading and writing this one's memory and
    files through /proc, see PR_SET_DUMPABLE in prctl(2); a program started later is open
    again.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)


def _limit_files():
    """No file of this rank, nor what it prints, grows beyond LARGEST_FILE: writing more
    raises OSError. In a sandbox, it opens MOST_OPEN at once: what the kernel keeps for
    open files counts for all processes of a user, those of other sandboxes, too.
    """
    if sys.platform != "win32":
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
        if SHUT_IN in os.environ:
            resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_OPEN, MOST_OPEN))
            os.chdir("/tmp")


def _end_with_the_caller(folder):
    """Wait, in a thread, for the end of the process that called launch; then remove all
    traces of the run.
    """
    multiprocessing.parent_process().join()
    shutil.rmtree(folder, ignore_errors=True)
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
