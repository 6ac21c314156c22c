"""The process that launches ranks in the sandbox: sandbox.py starts it there, sends it
jobs through a pipe, and reads what came of them from another.
"""

import io
import json
import os
import resource
import struct
import sys
from contextlib import redirect_stderr, redirect_stdout

import cloudpickle

from ddp_course.ranks.launch import (
    RankError,
    RankTimeout,
    launch_untrusted,
    start_server,
)
from ddp_course.school.sandbox import READY

MOST_TEXT = 100_000  # characters of output and errors that come out


def main(memory, *preloads):
    for kind, limit in ((resource.RLIMIT_DATA, int(memory)), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (limit, limit))
    jobs, replies = pipes()
    start_server(*preloads)
    import torch.multiprocessing  # noqa: F401  (while the server imports it, too)

    replies.write(READY)
    replies.flush()
    while header := jobs.read(8):
        [size] = struct.unpack(">Q", header)
        fn, args, nproc, timeout = cloudpickle.loads(jobs.read(size))
        for part in reply(fn, args, nproc, timeout):
            replies.write(part)
        replies.flush()


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
