"""The process that launches ranks in the sandbox: sandbox.py starts it there, sends it
jobs through a pipe, and reads what came of them from another.

It runs none of an answer's code, and neither does the fork server. It is process 1 of
the sandbox, which no process in it can stop or kill; where it ends, all of them do. It
ends where the fork server was killed: what an answer would start in its place could run
in the next call. After each job, all other processes are killed: an answer leaves
nothing behind but files.
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
import threading
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout, suppress

import cloudpickle

from ddp_course.judge.sandbox import MOST_FILES, MOST_TEXT, READY
from ddp_course.ranks.in_each_rank import close_to_others
from ddp_course.ranks.launch import (
    RankError,
    RankTimeout,
    launch_untrusted,
    start_server,
)


def main(memory, *preloads):
    for kind, limit in ((resource.RLIMIT_DATA, int(memory)), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (limit, limit))
    close_to_others()
    jobs, replies, words = pipes()
    try:
        start_server(*preloads)
        import torch.multiprocessing  # noqa: F401  (while the server imports it, too)

        threading.Thread(target=watch, args=(words,), daemon=True).start()
        work(jobs, replies)
    except BaseException:
        traceback.print_exc(file=words)
        raise


def work(jobs, replies):
    """Do the jobs that come through a pipe, and send a reply for each."""
    own = own_processes()
    replies.write(READY)
    replies.flush()
    while header := jobs.read(8):
        [size] = struct.unpack(">Q", header)
        fn, args, nproc, timeout = cloudpickle.loads(jobs.read(size))
        parts = reply(fn, args, nproc, timeout)
        end_all_but(own)
        if own_processes() != own or not own <= set(processes()):
            os._exit(1)
        for part in parts:
            replies.write(part)
        replies.flush()


def processes():
    """The numbers of all processes in the sandbox, but for those that have ended."""
    numbers = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [number for number in numbers if runs(number)]


def runs(process):
    """Whether a process has a thread that has not ended. The first one may have, and then
    /proc tells of the process as if all had.
    """
    try:
        names = os.listdir(f"/proc/{process}/task")
    except OSError:
        return False
    return any(state_of(f"{process}/task/{name}") not in "ZX" for name in names)


def state_of(process):
    """The letter of proc(5) for a process's or a thread's state; X for one that is gone."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def own_processes():
    """The numbers of this process, and of multiprocessing's two."""
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    tracker = multiprocessing.resource_tracker._resource_tracker._pid
    return {os.getpid(), server, tracker}


def end_all_but(kept, patience=5.0):
    """Kill all other processes, also those that have left their session; where that does
    not succeed, end the sandbox, and all of them with it.

    All are stopped first: a process that starts another, and ends, could be missed in a
    list of them that takes its time.
    """
    deadline = time.monotonic() + patience
    while True:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGSTOP)  # all but this one
        strangers = set(processes()) - kept
        if not strangers:
            break
        for process in strangers:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.002)
    for process in kept - {os.getpid()}:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


def watch(words):
    """Forget processes that have lost their parent and ended, which is process 1's duty;
    and end the sandbox where there are more files than its file systems should have: they
    limit bytes, but no names.
    """
    while True:
        own = own_processes()
        for name in os.listdir("/proc"):
            if name.isdecimal() and int(name) not in own and state_of(name) == "Z":
                with suppress(ChildProcessError):
                    os.waitpid(int(name), os.WNOHANG)
        for folder in ("/tmp", "/dev/shm"):
            there = os.statvfs(folder)
            if there.f_files - there.f_ffree > MOST_FILES:
                print(f"limit: your code made more than {MOST_FILES} files", file=words)
                words.flush()
                os._exit(1)
        time.sleep(0.2)


def pipes():
    """The two pipes, and the file for what goes wrong here. No process that this one
    starts inherits them.
    """
    streams = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    words = os.fdopen(os.dup(2), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    return *streams, words


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
