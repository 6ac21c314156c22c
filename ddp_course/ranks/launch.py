"""Real ranks from a notebook cell or a test: `launch(fn, *args, nproc=2)`.

It does what torchrun does, without torchrun's three seconds:

* ranks are processes, started by `torch.multiprocessing.start_processes` (the engine
  beneath `mp.spawn`) from a fork server that has imported torch: fork_server.py;
* they find each other through a TCPStore that the caller hosts on a loopback socket;
* each has the environment that torchrun would have given it, so code that runs here
  runs under torchrun.

Functions, classes and closures that were defined in a notebook cell travel by
cloudpickle; modules are imported by the ranks anew, as they are on disk. No rank
outlives the call, nor the process that made it. What a rank does is in in_each_rank.py,
and how its end is reported is in endings.py.
"""

import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from numbers import Real
from pathlib import Path

import cloudpickle

from ddp_course.ranks import endings, links, nan_note
from ddp_course.ranks.endings import (
    HANG_UPS,
    SYMPTOMS,
    TIMEOUTS,
    CannotLaunch,
    Ending,
    RankError,
    RanksInterrupted,
    RankTimeout,
)
from ddp_course.ranks.fork_server import (
    main_module_hidden,
    prepare_environment,
    start_method,
    start_server,
)
from ddp_course.ranks.gpus import HIDDEN
from ddp_course.ranks.in_each_rank import rank_main
from ddp_course.ranks.output import Output
from ddp_course.ranks.store import host_store, loopback_interface
from ddp_course.ranks.variables import NETWORK

__all__ = [
    "HANG_UPS",
    "SYMPTOMS",
    "TIMEOUTS",
    "CannotLaunch",
    "RankError",
    "RankTimeout",
    "RanksInterrupted",
    "launch",
    "launch_untrusted",
    "prepare_environment",
    "rank_environment",
    "start_method",
    "start_server",
]

# seconds after which output is shown immediately, and not only at the end of the run
LIVE_AFTER = 3.0
# seconds that the other ranks get, after one has failed, to report their own errors
GRACE = 0.3
LONGEST = 4  # times the timeout of launch_untrusted: its end on a machine that is busy
# Starting a process asks after all children of this one, those of other threads, too. An
# exit code can be read only once: if two threads ask at the same moment, one of them
# gets 255 (multiprocessing.process._cleanup, popen_forkserver.Popen.poll).
_ASKING = threading.RLock()


def launch(
    fn, *args, nproc=2, timeout=60, env=None, network=None, machines=None, **kwargs
):
    """Run `fn(*args, **kwargs)` on `nproc` ranks; return what each of them returned.

    fn: any callable, also one that was defined in a notebook cell. Its rank is in the
        environment, as under torchrun (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR ...),
        where `init_process_group` finds it, too.
    timeout: seconds after which every rank is stopped.
    env: more environment variables for the ranks, such as {"TORCH_DISTRIBUTED_DEBUG":
        "DETAIL"}.
    network: (latency, bandwidth) of a pretend network between the ranks, in seconds and
        bytes per second; or a Network with two links: see links.py.
    machines: Machines, see machines/machines.py; `nproc` ranks run in each of them.

    The results come as a list in rank order; that of a rank which ends with sys.exit(0)
    is None. What the ranks print is printed by this
    process: whole lines, marked with their rank, in rank order. If the run takes longer
    than three seconds, it is printed immediately.

    Raises RankError (the traceback of the rank that failed first), RankTimeout (where
    each rank was), and CannotLaunch, a TypeError and ValueError, for what cannot be
    launched.
    """
    _check(fn, nproc, timeout, {} if env is None else env, network)
    env = dict(env or {})
    if network is not None:
        env[NETWORK] = links.as_text(network)
    payload = _pickle(fn, args, kwargs)
    with _Run(nproc, timeout, machines=machines) as run:
        run.start(payload, env)
        run.wait()
    return endings.results(run.endings, timeout)


def launch_untrusted(fn, *args, nproc=1, timeout=60):
    """launch() for untrusted code: nothing that the ranks leave is ever run or
    unpickled here.

    The time does not count in which other programs have the CPU, up to LONGEST times the
    timeout in all: how a rank ends shall not depend on what else this machine does. Its
    ranks see no GPU, so that an answer is judged alike on all machines. fn returns
    tensors, numbers, texts, None, and lists, tuples and dicts of these.
    Raises RankError for any other value, too. No file that a rank writes, and nothing
    that it prints, may be larger than in_each_rank.LARGEST_FILE.
    """
    with _Run(nproc, timeout, plain=True) as run:
        run.start(_pickle(fn, args, {}), HIDDEN)
        run.wait()
    return endings.results(run.endings, timeout, plain=True)


def rank_environment(rank, world_size, port):
    """What torchrun sets for one rank of a job on one machine, and gloo told to stay on
    the loopback interface.
    """
    environment = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
        "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": world_size, "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
    }  # fmt: skip
    if world_size > 1:
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", 1)
    if loopback_interface():
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get(
            "GLOO_SOCKET_IFNAME", loopback_interface()
        )
    return {name: str(value) for name, value in environment.items()}


# ---- before anything is started ----


def _check(fn, nproc, timeout, env, network):
    """Raise CannotLaunch if an argument of launch() has the wrong type or value."""
    if not callable(fn):
        raise CannotLaunch(
            f"launch takes a function and then its arguments, launch(train, 3), but got {fn!r}"
        )
    if isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1:
        raise CannotLaunch(f"nproc is a number of ranks, 1 or more, but is {nproc!r}")
    if not isinstance(timeout, Real) or not timeout > 0:
        raise CannotLaunch(
            f"timeout is a number of seconds above 0, but is {timeout!r}"
        )
    if not isinstance(env, dict):
        raise CannotLaunch(
            f'env is a dict of texts, {{"NAME": "value"}}, but is {env!r}'
        )
    for name, value in env.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise CannotLaunch(
                f'env holds texts, {{"NAME": "value"}}, but {name!r} is {value!r}'
            )
    if network is not None:
        _check_network(network)


def _check_network(network):
    """Raise CannotLaunch unless it is a pretend network."""
    try:
        links.from_text(links.as_text(network))
    except (TypeError, ValueError):
        raise CannotLaunch(
            "network is (seconds of latency, bytes per second), such as (1e-3, 1e9), "
            f"or links.Network, but is {network!r}"
        ) from None


def _pickle(fn, args, kwargs):
    try:
        return cloudpickle.dumps((fn, args, kwargs))
    except Exception as error:
        name = getattr(fn, "__name__", repr(fn))
        advice = "Make such things inside the function: each rank needs its own."
        raise CannotLaunch(
            f"{name} and its arguments cannot be sent to the ranks: {error}. {advice}"
        ) from None


def _check_files(nproc):
    """Raise CannotLaunch if this number of ranks needs more open files than are
    allowed.

    This process has 5 per rank: its output (2), its process (2), its connection to the
    store. A rank and the fork server, which have the same limit, need fewer.
    """
    folder = next(filter(os.path.isdir, ("/proc/self/fd", "/dev/fd")), None)
    if folder is None:  # Windows has no such limit
        return
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir(folder)) + 5 * nproc + 20
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise CannotLaunch(
            f"{nproc} ranks need about {needed} open files here, and {limit} are allowed: "
            f"start fewer ranks, or Jupyter from a shell after `ulimit -n {2 * needed}`"
        )


# ---- one launch ----


class _Run:
    """One launch: its processes, the private folder that they write to, and how each
    rank ended.
    """

    def __init__(self, nproc, timeout, plain=False, machines=None):
        self.nproc = nproc * machines.count if machines else nproc
        self.machines, self.timeout, self.plain = machines, timeout, plain
        self.processes, self.endings, self.store = [], [], None

    def __enter__(self):
        _check_files(self.nproc)
        self.folder = Path(tempfile.mkdtemp(prefix="ddp-course-"))
        self.output = Output(self.folder, self.nproc)
        return self

    def start(self, payload, env):
        start_server()  # it imports torch while this process does
        from torch.multiprocessing import start_processes

        method = start_method()
        if method == "spawn":
            print(
                "Ranks start with 'spawn' here: each imports torch, for some seconds.",
                file=sys.stderr,
            )
        with _interrupt_held_back(), main_module_hidden():
            self.store = host_store()
            if self.machines:
                own = self.machines.environments(self.nproc, self.store.port)
            else:
                own = [
                    rank_environment(rank, self.nproc, self.store.port)
                    for rank in range(self.nproc)
                ]
            environments = [os.environ | variables | env for variables in own]
            arguments = (
                payload,
                str(self.folder),
                environments,
                self.timeout,
                self.plain,
            )
            with _ASKING:
                others = multiprocessing.active_children()
                try:
                    context = start_processes(
                        rank_main,
                        arguments,
                        self.nproc,
                        join=False,
                        start_method=method,
                    )
                    self.processes = context.processes
                except BaseException:
                    # too many processes, for example: stop those that did start
                    self.processes = [
                        child
                        for child in multiprocessing.active_children()
                        if child not in others
                    ]
                    raise

    def wait(self):
        """Return when all ranks have ended, a moment after the first one has failed, or
        at the timeout.
        """
        begin = time.monotonic()
        deadline, failed = begin + self.timeout, False
        running = {process.sentinel: process for process in self.processes}
        while running:
            now = time.monotonic()
            if self.plain and now >= deadline and not failed:
                lost = max(map(waited_for_a_cpu, running.values()))
                lost = min(lost, (LONGEST - 1) * self.timeout)
                deadline = max(deadline, begin + self.timeout + lost)
            if now >= deadline:
                break
            live = now >= begin + LIVE_AFTER
            patience = 0.2 if live else begin + LIVE_AFTER - now
            patience = min(patience, deadline - now)
            for sentinel in multiprocessing.connection.wait(
                list(running), timeout=patience
            ):
                process = running.pop(sentinel)
                with _ASKING:
                    process.join()
                if process.exitcode != 0:
                    deadline, failed = min(deadline, time.monotonic() + GRACE), True
            if live:
                self.output.show()

    def __exit__(self, kind, error, _traceback):
        """Stop every rank, read how it ended, show the rest of the output, free the
        port, remove the files.
        """
        with _interrupt_held_back():
            try:
                self.store = None
                with _ASKING:
                    running = [
                        rank
                        for rank, process in enumerate(self.processes)
                        if process.is_alive()
                    ]
                pids = [process.pid for process in self.processes]
                stopped = [rank for rank in running if endings.is_stopped(pids[rank])]
                self._ask_where_they_stand(running)
                for process in self.processes:
                    _kill(process)
                for rank, process in enumerate(self.processes):
                    state = rank in running, rank in stopped
                    ending = Ending(self.folder, rank, process.exitcode, *state)
                    self.endings.append(ending)
                died = [ending.rank for ending in self.endings if ending.died]
                self.output.show(rest=True, but_not=died)
                if told := nan_note.note(self.folder, len(self.processes)):
                    print(told)
            finally:
                shutil.rmtree(self.folder, ignore_errors=True)
        if kind is KeyboardInterrupt:
            raise RanksInterrupted(
                "the ranks were stopped\n" + endings.places(self.endings)
            ) from None

    def _ask_where_they_stand(self, ranks):
        """Let each of these ranks write its stack to the folder; wait half a second at
        most.
        """
        if not hasattr(signal, "SIGUSR2"):
            # Windows has no such signal: there the ranks write it at a fixed time, see
            # rank_main
            return
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR2)
                os.kill(self.processes[rank].pid, signal.SIGCONT)  # one that is stopped
        stacks = [self.folder / f"{rank}.stack" for rank in ranks]
        patience = time.monotonic() + 0.5
        while time.monotonic() < patience and not all(
            b"in rank_main" in endings.read(stack) for stack in stacks
        ):
            time.sleep(0.01)


def waited_for_a_cpu(process):
    """For how many seconds a thread of this process has been ready, and had no CPU.

    As Linux counts it, see its documentation of schedstat; 0.0 on other systems.
    """
    longest = 0
    for file in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):
            longest = max(longest, int(file.read_text().split()[1]))
    return longest / 1e9


def _kill(process):
    """End a rank and all processes that it has started: a rank leads its own process
    group.
    """
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    with _ASKING:
        process.kill()
        process.join()


@contextmanager
def _interrupt_held_back():
    """Delay Ctrl-C between two steps that belong together; raise it after the second."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt
