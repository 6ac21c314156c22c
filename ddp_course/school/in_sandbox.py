"""The process that launches ranks in the sandbox: sandbox.py starts it there, sends it
jobs through a pipe, and reads what came of them from another.

It runs none of an answer's code, and neither does the fork server. After each job, all
other processes in the sandbox are killed: an answer leaves nothing behind but files.
"""

import io
import json
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import resource
import signal
import struct
import sys
import time
from contextlib import redirect_stderr, redirect_stdout, suppress

import cloudpickle

from ddp_course.ranks.in_each_rank import close_to_others
from ddp_course.ranks.launch import (
    RankError,
    RankTimeout,
    launch_untrusted,
    start_server,
)
from ddp_course.school.sandbox import MOST_TEXT, READY


def main(memory, *preloads):
    for kind, limit in ((resource.RLIMIT_DATA, int(memory)), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (limit, limit))
    close_to_others()
    jobs, replies = pipes()
    start_server(*preloads)
    import torch.multiprocessing  # noqa: F401  (while the server imports it, too)

    first = set(processes())
    replies.write(READY)
    replies.flush()
    while header := jobs.read(8):
        [size] = struct.unpack(">Q", header)
        fn, args, nproc, timeout = cloudpickle.loads(jobs.read(size))
        parts = reply(fn, args, nproc, timeout)
        end_all_but(first | own_processes())
        for part in parts:
            replies.write(part)
        replies.flush()


def processes():
    """The numbers of all processes in the sandbox."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def own_processes():
    """The numbers of multiprocessing's two, which are started anew if they have died."""
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    tracker = multiprocessing.resource_tracker._resource_tracker._pid
    return {os.getpid(), server, tracker}


def end_all_but(kept, patience=5.0):
    """Kill all other processes, also those that have left their session; where they
    start others more quickly than that, end the sandbox, and all of them with it.
    """
    deadline = time.monotonic() + patience
    while strangers := set(processes()) - kept:
        for process in strangers:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.002)


def pipes():
    """The two pipes. No process that this one starts inherits them."""
    pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    return pipes


def reply(fn, args, nproc, timeout):
    """The parts of a reply: their sizes, a JSON text, and what the ranks returned."""
    import torch

    output, values, error = io.StringIO(), io.BytesIO(), None
    try:
        with redirect_stdout(output), redirect_stderr(output):
            results = launch_untrusted(fn, *args, nproc=nproc, timeout=timeout)
        torch.save(results, values)
    except RankError as failed:
        kind = "RankTimeout" if isinstance(failed, RankTimeout) else "RankError"
        texts = [text[:MOST_TEXT] for text in (str(failed), failed.message)]
        error = [kind, texts[0], failed.rank, texts[1]]
    header = {"printed": output.getvalue()[-MOST_TEXT:], "error": error}
    header = json.dumps(header).encode()
    return [struct.pack(">QQ", len(header), values.tell()), header, values.getvalue()]


if __name__ == "__main__":
    main(*sys.argv[1:])
