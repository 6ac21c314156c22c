"""Real ranks from a notebook cell or a test: `launch(fn, *args, nproc=2)`.

It does what torchrun does, without torchrun's three seconds:

* ranks are processes, started by `torch.multiprocessing.start_processes` (the engine
  beneath `mp.spawn`) from a fork server that has imported torch already and nothing
  else, so it does not matter what the calling process did before;
* they find each other through a TCPStore that the caller hosts on a loopback socket;
* each has the environment that torchrun would have given it, so code that runs here
  runs under torchrun.

Functions, classes and closures that were defined in a notebook cell travel by
cloudpickle; modules are imported by the ranks anew, as they are on disk. No rank
outlives the call, nor the process that made it.
"""

import faulthandler
import io
import json
import linecache
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import re
import shutil
import signal
import sys
import sysconfig
import tempfile
import textwrap
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path

import cloudpickle

PACKAGE = Path(__file__).parents[1]  # ddp_course/
PRELOADED = [
    "ddp_course.ranks.fork_server",
    "torch",
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "torch._dynamo",
    "numpy",
    "cloudpickle",
]
# seconds after which output is shown as it comes, and not only at the end of the run
LIVE_AFTER = 3.0
LARGEST_FILE = 64 * 2**20  # bytes, in launch_untrusted
# seconds that the other ranks get, once one has failed, to say what they have to say
GRACE = 0.3
# What a rank says when another one has gone wrong: that it does not come, and then,
# that it has left.
TIMEOUTS = ["Timed out waiting", "Application timeout"]
HANG_UPS = ["Connection closed by peer", "Connection reset by peer", "Broken pipe"]
SYMPTOMS = TIMEOUTS + HANG_UPS


class RankError(RuntimeError):
    """A rank raised, died or left early. `rank` is its number; the text holds that
    rank's own traceback first.

    message: that rank's error alone, "ValueError: ...", or how it died.
    """

    def __init__(self, text, rank=None, message=""):
        super().__init__(text)
        self.rank, self.message = rank, message

    def _render_traceback_(self):
        """IPython's hook: a notebook shows the ranks' story and none of launch()'s
        insides.
        """
        return f"{type(self).__name__}: {self}".splitlines()


class RankTimeout(RankError, TimeoutError):
    """The ranks did not finish in time. The text says where each of them stood."""


class RanksInterrupted(KeyboardInterrupt):
    """Ctrl-C, or the notebook's stop button. The text says where each rank stood."""

    _render_traceback_ = RankError._render_traceback_


def launch(fn, *args, nproc=2, timeout=60, env=None, **kwargs):
    """Run `fn(*args, **kwargs)` on `nproc` ranks; return what each of them returned, a
    list in rank order.

    fn: any callable, also one that was defined in a notebook cell. It finds its rank
        where torchrun would put it, in the environment (RANK, LOCAL_RANK, WORLD_SIZE,
        MASTER_ADDR ...), and so does `init_process_group`.
    timeout: seconds after which every rank is stopped.
    env: more environment variables for the ranks, such as {"TORCH_DISTRIBUTED_DEBUG":
    "DETAIL"}.

    What the ranks print is printed by this process: whole lines, marked with their
    rank, in rank order; as it comes where the run takes longer than three seconds.

    Raises RankError (the traceback of the rank that failed first), RankTimeout (where
    each rank stood), and TypeError or ValueError for what cannot be launched.
    """
    if not callable(fn):
        raise TypeError(
            f"launch takes a function and then its arguments, launch(train, 3), but got {fn!r}"
        )
    if isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1:
        raise ValueError(f"nproc is a number of ranks, 1 or more, but is {nproc!r}")
    if not timeout > 0:
        raise ValueError(f"timeout is a number of seconds above 0, but is {timeout!r}")
    payload = _pickle(fn, args, kwargs)
    with _Run(nproc, timeout) as run:
        run.start(payload, env or {})
        run.wait()
    return run.results()


def launch_untrusted(fn, *args, nproc=1, timeout=60):
    """launch() for what nobody has read yet: nothing that the ranks leave is ever run
    or unpickled here.

    fn returns tensors, numbers, texts, None, and lists, tuples and dicts of these.
    Raises RankError for all else, too. No file that a rank writes, and nothing that it
    prints, may be larger than LARGEST_FILE.
    """
    with _Run(nproc, timeout, plain=True) as run:
        run.start(_pickle(fn, args, {}), {})
        run.wait()
    return run.results()


def start_server(*more):
    """Start the fork server ahead of the first launch, so that not even the first one
    waits for `import torch`.

    more: names of modules that the ranks are to begin with, besides torch: those that
    take seconds to import.
    Returns at once, the server imports in the background. Does nothing where it runs
    already, nor in a rank, which has no use for a server of its own.
    """
    if start_method() == "forkserver" and multiprocessing.parent_process() is None:
        multiprocessing.get_context("forkserver").set_forkserver_preload(
            [*PRELOADED, *more]
        )
        prepare_environment()
        with _main_module_hidden(), _spawned_apart():
            multiprocessing.forkserver.ensure_running()


def prepare_environment():
    """Tell the processes that we start two things, by variables that their users know.

    glibc returns the memory of every large tensor to the kernel, which hands it out
    again page by page: on a CPU, evaluation takes half as long again. They are to keep
    it for their next tensor, see mallopt(3). And Accelerate and Trainer import
    DeepSpeed wherever it is installed, which looks for a GPU, and warns in each process
    where there is none: on such a machine it is told so.
    """
    os.environ.setdefault("MALLOC_MMAP_MAX_", "0")
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(4 * 10**9))
    gpus = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
    if sys.platform == "linux" and not any(map(os.path.exists, gpus)):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def start_method():
    """How ranks are started: 'forkserver'; 'spawn', which takes seconds, on Windows or
    by DDP_COURSE_START_METHOD.
    """
    best = (
        "forkserver"
        if "forkserver" in multiprocessing.get_all_start_methods()
        else "spawn"
    )
    return os.environ.get("DDP_COURSE_START_METHOD") or best


def rank_environment(rank, world_size, port):
    """What torchrun sets for one rank of a job on one machine, and gloo told to stay on
    the loopback interface.
    """
    from ddp_course.ranks.environment import loopback_interface

    environment = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
        "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": world_size, "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RUN_ID": "launch", "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
    }  # fmt: skip
    if world_size > 1:
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", 1)
    if loopback_interface():
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get(
            "GLOO_SOCKET_IFNAME", loopback_interface()
        )
    return {name: str(value) for name, value in environment.items()}


# ---- in the process that calls launch ----


def _pickle(fn, args, kwargs):
    try:
        return cloudpickle.dumps((fn, args, kwargs))
    except Exception as error:
        name = getattr(fn, "__name__", repr(fn))
        advice = "Make such things inside the function: each rank needs its own."
        raise TypeError(
            f"{name} and its arguments cannot be sent to the ranks: {error}. {advice}"
        ) from None


class _Run:
    """One launch: its processes, the private folder that they write to, and how each
    rank ended.
    """

    def __init__(self, nproc, timeout, plain=False):
        self.nproc, self.timeout, self.plain = nproc, timeout, plain
        self.processes, self.endings, self.store = [], [], None

    def __enter__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="ddp-course-"))
        self.output = _Output(self.folder, self.nproc)
        return self

    def start(self, payload, env):
        start_server()  # it imports torch while we do
        from torch.multiprocessing import start_processes

        from ddp_course.ranks.environment import host_store

        method = start_method()
        if method == "spawn":
            print(
                "Ranks start with 'spawn' here: each imports torch, for some seconds.",
                file=sys.stderr,
            )
        with _interrupt_held_back(), _main_module_hidden():
            self.store = host_store()
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
            others = multiprocessing.active_children()
            try:
                context = start_processes(
                    _rank_main, arguments, self.nproc, join=False, start_method=method
                )
                self.processes = context.processes
            except (
                BaseException
            ):  # too many processes, say: those that did start are ours to stop
                self.processes = [
                    child
                    for child in multiprocessing.active_children()
                    if child not in others
                ]
                raise

    def wait(self):
        """Return when all ranks have ended, a moment after the first one failed, or
        when the time is up.
        """
        begin = time.monotonic()
        deadline = begin + self.timeout
        running = {process.sentinel: process for process in self.processes}
        while running and (now := time.monotonic()) < deadline:
            live = now >= begin + LIVE_AFTER
            patience = 0.2 if live else begin + LIVE_AFTER - now
            patience = min(patience, deadline - now)
            for sentinel in multiprocessing.connection.wait(
                list(running), timeout=patience
            ):
                process = running.pop(sentinel)
                process.join()
                if process.exitcode != 0:
                    deadline = min(deadline, time.monotonic() + GRACE)
            if live:
                self.output.show()

    def __exit__(self, kind, error, _traceback):
        """Stop every rank, learn how it ended, show the rest of the output, free the
        port, leave no file.
        """
        with _interrupt_held_back():
            try:
                self.store = None
                running = [
                    rank
                    for rank, process in enumerate(self.processes)
                    if process.is_alive()
                ]
                self._ask_where_they_stand(running)
                for process in self.processes:
                    _kill(process)
                for rank, process in enumerate(self.processes):
                    self.endings.append(
                        _Ending(self.folder, rank, process.exitcode, rank in running)
                    )
                self.output.show(
                    rest=True,
                    but_not=[ending.rank for ending in self.endings if ending.died],
                )
            finally:
                shutil.rmtree(self.folder, ignore_errors=True)
        if kind is KeyboardInterrupt:
            raise RanksInterrupted(
                "the ranks were stopped\n" + _places(self.endings)
            ) from None

    def _ask_where_they_stand(self, ranks):
        """Have each of these ranks write its stack to the folder; wait for that half a
        second at most.
        """
        if not hasattr(signal, "SIGUSR2"):
            # no such signal on Windows: there the ranks do it by the clock, see
            # _rank_main
            return
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR2)
        stacks = [self.folder / f"{rank}.stack" for rank in ranks]
        patience = time.monotonic() + 0.5
        while time.monotonic() < patience and not all(
            b"_rank_main" in _read(stack) for stack in stacks
        ):
            time.sleep(0.01)

    def results(self):
        """What the ranks returned, in rank order; or the error that says why they did
        not.
        """
        failed = [ending for ending in self.endings if ending.failed]
        if failed:
            first = min(
                failed,
                key=lambda ending: (ending.is_hang_up, ending.is_timeout, ending.time),
            )
            first = next(
                ending
                for ending in failed
                if ending is first or ending.fails_like(first)
            )
            lines = [f"rank {first.rank} of {self.nproc} {first.story}\n"]
            for other in self.endings:
                if other is not first:
                    place = (
                        "failed likewise" if other.fails_like(first) else other.place
                    )
                    lines.append(f"meanwhile rank {other.rank} {place}")
            raise RankError(
                "\n".join(lines).strip(), first.rank, first.message or first.summary
            )
        if any(ending.running for ending in self.endings):
            limit = f"the {'rank' if self.nproc == 1 else f'{self.nproc} ranks'} did not finish within {self.timeout:g} s"
            raise RankTimeout(f"{limit}\n{_places(self.endings)}")
        return [
            ending.plain_value() if self.plain else cloudpickle.loads(ending.result)
            for ending in self.endings
        ]


class _Ending:
    """How one rank ended, read from its exit code and from what it left in the
    folder.
    """

    def __init__(self, folder, rank, exitcode, running):
        self.rank, self.exitcode, self.running = rank, exitcode, running
        self.result = _read(folder / f"{rank}.result")
        # a rank that we stop may yet report that it has lost another: that is our doing
        self.failure = None if running else _read_failure(folder / f"{rank}.failure")
        self.died = (
            not self.running
            and not self.failure
            and (self.exitcode != 0 or not self.result)
        )
        self.failed = self.died or bool(self.failure)
        self.time = (
            self.failure["time"] if self.failure else 0.0
        )  # who cannot say when was the first
        self.message = self.failure["message"] if self.failure else ""
        self.is_timeout = any(words in self.message for words in TIMEOUTS)
        self.is_hang_up = any(words in self.message for words in HANG_UPS)
        self.last_words = (
            _read(folder / f"{rank}.stderr")
            .decode(errors="replace")
            .strip()
            .splitlines()[-8:]
        )
        self.stack = _main_thread(
            _read(folder / f"{rank}.stack").decode(errors="replace")
        )

    def plain_value(self):
        """What the rank returned, without running any code that may come with it."""
        import torch

        try:
            return torch.load(io.BytesIO(self.result), weights_only=True)
        except Exception:
            message = "what the rank returned is no plain value"
            raise RankError(
                f"rank {self.rank}: {message}", self.rank, message
            ) from None

    @property
    def summary(self):
        if self.failure:
            return textwrap.shorten(self.message, width=160, placeholder=" ...")
        if self.exitcode < 0:
            return f"was killed by {signal.Signals(-self.exitcode).name}"
        return f"left with exit code {self.exitcode} before it had returned"

    def fails_like(self, other):
        """Whether both raised the same error, whatever ranks and numbers it names."""
        return bool(self.message) and re.sub(r"\d+", "", self.message) == re.sub(
            r"\d+", "", other.message
        )

    @property
    def story(self):
        if self.failure:
            frames = [frame for frame in self.failure["frames"] if frame[0] != __file__]
            return f"raised\n\n{_format_frames(frames)}\n{self.message}"
        if not self.last_words:
            return self.summary
        return f"{self.summary}; its last words:\n\n" + "\n".join(
            f"    {line}" for line in self.last_words
        )

    @property
    def place(self):
        if self.failed:
            return f"failed: {self.summary}"
        if not self.running:
            return "had returned"
        if not self.stack:
            return "was still starting"
        return "stood in " + _format_frame(
            next(filter(_is_learners, self.stack), self.stack[0])
        )


class _Output:
    """What the ranks print: kept in files by them, shown by this process, in rank
    order, each line with its rank.
    """

    def __init__(self, folder, nproc):
        self.files = {}
        for stream in ("stdout", "stderr"):
            for rank in range(nproc):
                path = folder / f"{rank}.{stream}"
                path.touch()
                self.files[stream, rank] = path.open("rb")

    def show(self, rest=False, but_not=()):
        """Print the whole lines that have come since the last call; with `rest`, an
        unfinished last line too.

        but_not: ranks whose stderr is told elsewhere.
        """
        for (stream, rank), file in self.files.items():
            new = file.read()
            whole = len(new) if rest else new.rfind(b"\n") + 1
            file.seek(whole - len(new), os.SEEK_CUR)
            if stream == "stderr" and rank in but_not:
                continue
            for line in new[:whole].decode(errors="replace").splitlines():
                print(f"[rank{rank}]: {line}", file=getattr(sys, stream))
            if rest:
                file.close()


def _places(endings):
    return "\n".join(f"  rank {ending.rank} {ending.place}" for ending in endings)


def _read(path):
    """The bytes of a file that a rank may or may not have written."""
    return path.read_bytes() if path.exists() else b""


def _read_failure(path):
    """What a rank says of the error that it raised, a dict; None where it says nothing,
    or what no rank of ours writes.
    """
    try:
        failure = json.loads(_read(path))
        frames = [
            (str(file), int(line), str(name)) for file, line, name in failure["frames"]
        ]
        return {
            "time": float(failure["time"]),
            "message": str(failure["message"]),
            "frames": frames,
        }
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _kill(process):
    """End a rank and all that it has started: a rank leads a process group of its
    own.
    """
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _main_thread(dump):
    """The main thread's frames (file, line, function), innermost first, out of
    faulthandler's dump of all threads.
    """
    for thread in dump.split("\n\n"):
        if "_rank_main" in thread:
            frames = re.findall(r'File "(.*)", line (\d+) in (.*)', thread)
            return [(file, int(line), name) for file, line, name in frames]
    return []


def _is_learners(frame):
    """Whether a frame (file, line, function) is the learner's code or a lesson's, and
    not a library's or ours.
    """
    file = frame[0]
    ours = (
        __file__,
        *(str(PACKAGE / room) for room in ("notebook", "school", "checks")),
    )
    libraries = ("<frozen", "<string>", sysconfig.get_path("stdlib"))
    return not (file.startswith(ours + libraries) or "-packages" in file)


def _format_frame(frame):
    file, line, name = frame
    text = linecache.getline(file, line).strip()
    return f"{_short_name(file)}, line {line}, in {name}" + (
        f": {text}" if text else ""
    )


def _format_frames(frames):
    """A traceback, outermost frame first: the learner's own frames, and the innermost
    one, whosever it is.
    """
    kept = [
        frame
        for index, frame in enumerate(frames)
        if _is_learners(frame) or index == len(frames) - 1
    ]
    return "\n".join(f"  {_format_frame(frame)}" for frame in kept)


def _short_name(file):
    """A file as a person would name it: the cell, or a path from where Python finds
    it.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell and (name := shell.compile.format_code_name(file)):
        return f"cell {name[1]}"
    if not os.path.exists(file):
        return "cell"
    above = [*map(os.path.abspath, sys.path), str(PACKAGE.parent)]
    parents = [parent for parent in above if file.startswith(parent + os.sep)]
    return (
        os.path.relpath(file, max(parents, key=len))
        if parents
        else os.path.basename(file)
    )


@contextmanager
def _interrupt_held_back():
    """Let no Ctrl-C in between two steps that belong together; raise it after the
    second.
    """
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


_one_start_at_a_time = threading.Lock()


@contextmanager
def _main_module_hidden():
    """Keep multiprocessing from running the caller's script again in every rank:
    cloudpickle brings what they need.
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
def _spawned_apart():
    """Have the fork server and multiprocessing's resource tracker run in process groups
    of their own.

    The tracker ignores SIGTERM. A Jupyter kernel that shuts down sends SIGTERM to all
    its children in its own group and waits until they have gone, which this one never
    does; 2.5 s later the kernel itself is killed, and leaves its temporary folders
    behind. Why the server: see ddp_course/ranks/fork_server.py.
    """
    spawn = multiprocessing.util.spawnv_passfds

    def spawn_apart(path, arguments, descriptors):
        return spawn(
            path,
            [*arguments[:-1], f"import os; os.setpgid(0, 0); {arguments[-1]}"],
            descriptors,
        )

    multiprocessing.util.spawnv_passfds = spawn_apart
    try:
        yield
    finally:
        multiprocessing.util.spawnv_passfds = spawn


# ---- in each rank ----


def _rank_main(rank, payload, folder, environments, timeout, plain=False):
    """Become rank `rank`: take on its output, environment and threads, call the
    function, write down what came of it.
    """
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    threading.Thread(target=_end_with_the_caller, args=(folder,), daemon=True).start()
    if plain:
        _limit_files()
    _write_output_to(folder, rank)
    os.environ.clear()
    os.environ.update(environments[rank])

    stack = open(f"{folder}/{rank}.stack", "w")
    if hasattr(signal, "SIGUSR2"):
        faulthandler.register(signal.SIGUSR2, stack)
    else:
        faulthandler.dump_traceback_later(max(timeout - 0.3, 0.1), file=stack)
    try:
        import torch
        import torch.distributed

        # the fork server has read these two before we set them
        torch.distributed.set_debug_level_from_env()
        torch.set_num_threads(
            int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads()))
        )
        if "numpy" in sys.modules:
            sys.modules[
                "numpy"
            ].random.seed()  # or all that the fork server ever forks would draw the same
        fn, args, kwargs = cloudpickle.loads(payload)
        result = fn(*args, **kwargs)
        try:
            packed = io.BytesIO()
            torch.save(result, packed) if plain else cloudpickle.dump(result, packed)
        except Exception as error:
            raise TypeError(
                f"what the rank returned cannot be sent back: {error}"
            ) from None
        Path(folder, f"{rank}.result").write_bytes(packed.getvalue())
    except BaseException as error:
        if isinstance(error, SystemExit):
            message = f"SystemExit: the rank left with sys.exit({error.code!r})"
        else:
            message = "".join(traceback.format_exception_only(error)).strip()
        frames = [
            (at.filename, at.lineno, at.name)
            for at in traceback.extract_tb(error.__traceback__)
        ]
        failure = {"time": time.time(), "message": message, "frames": frames}
        Path(folder, f"{rank}.failure").write_text(json.dumps(failure))
        sys.exit(1)


def _limit_files():
    """No file of this rank, nor what it prints, grows beyond LARGEST_FILE: writing more
    raises OSError.
    """
    if sys.platform != "win32":
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))


def _write_output_to(folder, rank):
    """Send all that this process prints, from Python or from C++, to the rank's
    files.
    """
    for number, stream in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{folder}/{rank}.{stream}", os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
        options = {
            "buffering": 1,
            "encoding": "utf-8",
            "errors": "replace",
            "closefd": False,
        }
        setattr(sys, stream, open(number, "w", **options))


def _end_with_the_caller(folder):
    """Wait, in a thread, for the death of the process that called launch; then leave no
    trace of the run.
    """
    multiprocessing.parent_process().join()
    shutil.rmtree(folder, ignore_errors=True)
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
