"""The process that the ranks are forked from: it has imported torch and little else.

Ranks therefore start quickly, and do not depend on what the calling process did before.
"""

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import sys
import tempfile
import threading
from contextlib import contextmanager

from ddp_course.ranks.gpus import driver_is_here
from ddp_course.ranks.variables import PRELOAD, START_METHOD

PRELOADED = [
    "ddp_course.ranks.in_fork_server",
    "torch",
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "torch._dynamo",
    "numpy",
    "cloudpickle",
    "ddp_course.ranks.preload",
]


def start_server(*more):
    """Start the fork server ahead of the first launch, which then need not wait for it.

    more: names of modules that the server imports besides torch, those that take
    seconds; on a machine with a GPU, only those that do not ask for it, see preload.py.
    Returns at once; the server imports in the background. Does nothing if the server
    runs already, nor in a rank, which needs no server of its own.
    """
    if start_method() == "forkserver" and multiprocessing.parent_process() is None:
        multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
        prepare_environment()
        with main_module_hidden(), _spawned_apart(more), _sockets_with_short_names():
            multiprocessing.forkserver.ensure_running()


def start_method():
    """How ranks are started: by 'forkserver', or by 'spawn', which takes seconds, on
    Windows or if DDP_COURSE_START_METHOD says so.
    """
    best = (
        "forkserver"
        if "forkserver" in multiprocessing.get_all_start_methods()
        else "spawn"
    )
    return os.environ.get(START_METHOD) or best


def prepare_environment():
    """Set environment variables for the processes that we start.

    glibc returns the memory of every large tensor to the kernel, which hands it out
    again page by page: on a CPU, evaluation then takes half as long again. Two
    variables make glibc keep the memory for the next tensor, see mallopt(3). OpenMP's
    threads wait for each other by spinning, which keeps the cores from whatever else
    runs: with two busy programs on two cores, training was several times slower, once 40
    times. A variable makes them sleep. Accelerate
    and Trainer import DeepSpeed if it is installed, and DeepSpeed warns in each process
    if it finds no GPU: on a machine without one, a variable says so beforehand.
    """
    os.environ.setdefault("MALLOC_MMAP_MAX_", "0")
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(4 * 10**9))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if sys.platform == "linux" and not driver_is_here():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


LONGEST_FOLDER = 65  # characters: a socket has 103 on macOS, 107 on Linux, see unix(7)


@contextmanager
def _sockets_with_short_names():
    """Let multiprocessing put its sockets into /tmp where TMPDIR has a long name, as
    clusters give to each job: in there, the server's socket could not be opened.
    """
    before = tempfile.tempdir
    if len(tempfile.gettempdir()) > LONGEST_FOLDER:
        tempfile.tempdir = "/tmp"
    try:
        multiprocessing.util.get_temp_dir()  # multiprocessing keeps what it finds first
        yield
    finally:
        tempfile.tempdir = before


_one_start_at_a_time = threading.Lock()


@contextmanager
def main_module_hidden():
    """Keep multiprocessing from running the caller's script again in every rank.

    Cloudpickle sends the parts of it that the ranks need.
    """
    with _one_start_at_a_time:
        main = sys.modules["__main__"].__dict__
        hidden = {
            name: main.pop(name) for name in ("__file__", "__spec__") if name in main
        }
        main["__spec__"] = None
        try:
            yield
        finally:
            main.update(hidden)


@contextmanager
def _spawned_apart(names):
    """Run the fork server and multiprocessing's resource tracker in their own process
    groups, and tell the server the names of the modules that it preloads.

    The tracker ignores SIGTERM. A Jupyter kernel that shuts down sends SIGTERM to all
    its children in its own group and waits until they have gone, which this one never
    does; 2.5 s later the kernel itself is killed, and leaves its temporary folders
    behind. Why the server: see in_fork_server.py.
    """
    spawn, preloaded = multiprocessing.util.spawnv_passfds, " ".join(names)

    def spawn_apart(path, arguments, descriptors):
        first = f"import os; os.setpgid(0, 0); os.environ[{PRELOAD!r}] = {preloaded!r}"
        arguments = [*arguments[:-1], f"{first}; {arguments[-1]}"]
        return spawn(path, arguments, descriptors)

    multiprocessing.util.spawnv_passfds = spawn_apart
    try:
        yield
    finally:
        multiprocessing.util.spawnv_passfds = spawn
