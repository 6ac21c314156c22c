"""Strangers' answers, shut in: their ranks run under bubblewrap, the judge outside.

https://github.com/containers/bubblewrap makes the namespaces. Inside, there is a
read-only file system with Python, its packages and the course, but without solutions,
submissions and homes; processes of its own; a network with nothing but loopback; and
/tmp and /dev/shm in memory, the only places that can be written to. No file or folder
is shared with the judge. There in_sandbox.py launches the ranks. What they observed
comes out through one pipe, as plain values.
"""

import atexit
import importlib.util
import io
import json
import os
import re
import select
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import cloudpickle
import psutil

from ddp_course.folders import PACKAGE
from ddp_course.judge import system_calls
from ddp_course.ranks.endings import RankError, RankTimeout
from ddp_course.ranks.gpus import HIDDEN
from ddp_course.ranks.launch import LONGEST
from ddp_course.ranks.variables import SANDBOX, SHUT_IN

PROCESSES, THREADS = 100, 2000  # at most
MOST_FILES = 20_000  # in /tmp, and in /dev/shm
MOST_WATCHES = 5_000  # of epoll; a rank needs some ten
SIZE = 512 * 2**20  # bytes of /tmp and of /dev/shm, each, and of files without names
SPARE = 10**9  # bytes that the machine keeps for itself
LARGEST_REPLY = 512 * 2**20
LARGEST_HEADER = 4 * 2**20  # the part of a reply in words
MOST_TEXT = 100_000  # characters of output and errors that come out
START, REPLY = 180, 30  # seconds: to import torch there; for a reply after its timeout
SYSTEM = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"]
SYSTEM += ["/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/etc/hosts"]
SYSTEM += ["/sys/devices/system"]  # the CPUs
INSTALL = "sudo apt-get install bubblewrap (dnf, pacman and zypper have it, too)"


@cache
def why_not():
    """Why no answer can be shut in here, one line; None if one can."""
    if sys.platform != "linux":
        return "bubblewrap needs Linux (on Windows: WSL 2)"
    if not shutil.which("bwrap"):
        return f"bubblewrap is not installed: {INSTALL}"
    line = [*namespaces(), *mounts(), "true"]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    words = (done.stderr.strip().splitlines() or ["bwrap: failed"])[-1]
    return (
        f"bubblewrap cannot make namespaces here ({words}); on Ubuntu: "
        "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    )


def namespaces():
    return [
        "bwrap", "--unshare-user", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL",
        "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts",
        "--unshare-cgroup-try", "--hostname", "localhost", "--new-session", "--as-pid-1",
        "--die-with-parent", *no_namespaces_within(),
    ]  # fmt: skip


@cache
def no_namespaces_within():
    """bwrap's option, since 0.8, that keeps an answer from making namespaces of its own:
    there it could mount a file system in memory without a limit.
    """
    words = subprocess.run(["bwrap", "--help"], capture_output=True, text=True).stdout
    return ["--disable-userns"] if "--disable-userns" in words else []


def mounts():
    """bwrap's options for the file system."""
    options = [option for path in SYSTEM for option in ("--ro-bind-try", path, path)]
    options += ["--proc", "/proc", "--dev", "/dev"]
    # who is root outside owns the kernel's settings inside, too
    for path in sorted(Path("/proc").iterdir()):
        if not path.name.isdecimal() and not path.is_symlink():
            options += ["--ro-bind-try", str(path), str(path)]
    for path in ("/dev/shm", "/tmp"):
        options += ["--size", str(SIZE), "--tmpfs", path]
    options += ["--dir", "/tmp/home"]
    folders = [*python_folders(), PACKAGE]
    for path in folders:
        options += ["--ro-bind", str(path.resolve()), str(path)]
    hidden = sorted(hidden_in([*map(Path, SYSTEM), *folders]))
    for path in hidden:
        options += ["--tmpfs", str(path)]
    # they are file systems in memory, too, which no limit would count
    for path in [*hidden, "/dev", "/"]:
        options += ["--remount-ro", str(path)]
    return [*options, "--chdir", "/"]


def hidden_in(shown):
    """The folders that no answer should see, by each path under which one of the shown
    folders would show them: what judges, solutions, submissions.
    """
    secret = [PACKAGE / "checks", PACKAGE / "cli" / "course"]
    names = ("solutions", "exercises", "work", "tests", "runs", ".git")
    secret += [PACKAGE.parent / name for name in names]
    secret += map(Path, (settings() or {}).get("hidden", []))
    python = Path(os.__file__).parent  # in /usr, perhaps
    needed = [*python_folders(), PACKAGE, python, *map(Path, SYSTEM)]
    needed = [path.resolve() for path in needed]
    hidden = set()
    for folder in (path.resolve() for path in secret if path.is_dir()):
        if not any(path.is_relative_to(folder) for path in needed):
            for path in shown:
                if folder.is_relative_to(path.resolve()):
                    hidden.add(path / folder.relative_to(path.resolve()))
    return hidden


@contextmanager
def a_filter_of_calls():
    """bwrap's options for system_calls.py, and the files that it needs for them."""
    program = system_calls.a_filter()
    if program is None:
        yield [], []
        return
    with tempfile.TemporaryFile() as file:
        file.write(program)
        file.seek(0)
        yield ["--seccomp", str(file.fileno())], [file.fileno()]


def python_folders():
    """The folders with Python and its packages, outer ones first."""
    given = [sys.prefix, sys.exec_prefix, sys.base_prefix, packages()]
    paths = {path for text in given for path in (Path(text), Path(text).resolve())}
    outside = [path for path in paths if not path.is_relative_to("/usr")]
    return sorted(outside, key=lambda path: len(path.parts))


def packages():
    """The folder in which torch is installed."""
    return Path(importlib.util.find_spec("torch").origin).parents[1]


def environment():
    """All environment variables inside: no token of the instructor's is among them."""
    kept = (
        "LANG",
        "OMP_NUM_THREADS",
        "OMP_WAIT_POLICY",
        "MALLOC_MMAP_MAX_",
        "MALLOC_TRIM_THRESHOLD_",
    )
    own = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": f"{PACKAGE.parent}:{packages()}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONSAFEPATH": "1",  # no module of an answer takes the place of ours
        "HOME": "/tmp/home",
        "USER": "learner",
        "TMPDIR": "/tmp",
        "HF_HUB_OFFLINE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # no warnings about names without a DNS
        SHUT_IN: "1",
        **HIDDEN,
    }
    return {name: os.environ[name] for name in kept if name in os.environ} | own


def settings():
    """What the grader asks for: {"preloads": modules, "memory": bytes, "hidden": folders
    that no answer may see}; None if answers are not shut in.
    """
    return json.loads(os.environ[SANDBOX]) if SANDBOX in os.environ else None


class Sandbox:
    """One sandbox, in which one question's ranks are launched, one call after another.

    memory: bytes for all its processes together.
    """

    def __init__(self, preloads, memory):
        self.memory, self.broken = memory, ""
        program = [sys.executable, "-m", "ddp_course.judge.in_sandbox"]
        with a_filter_of_calls() as (options, files):
            self.process = subprocess.Popen(
                [*namespaces(), *options, *mounts(), *program, str(memory), *preloads],
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=files,
            )
        os.set_blocking(self.process.stdin.fileno(), False)
        atexit.register(self.process.kill)
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            if self._read(8, time.monotonic() + START) != READY:
                raise EOFError
        except (EOFError, TimeoutError):
            raise RuntimeError(f"the sandbox did not start\n{self._end()}") from None

    def launch(self, fn, *args, nproc, timeout):
        """As launch_untrusted; returns also what the ranks printed."""
        job = cloudpickle.dumps((fn, args, nproc, timeout))
        try:
            deadline = time.monotonic() + LONGEST * timeout + REPLY
            self._write(struct.pack(">Q", len(job)) + job, deadline)
            return self._results(*self._reply(deadline), nproc)
        except (OSError, EOFError, ValueError, TypeError, KeyError, RecursionError):
            # nothing of ours can have failed here: it is the answer's doing
            told = re.search("(?m)^limit: (.*)", self._end())
            message = self.broken or (told[1] if told else ENDED)
            raise RankError(message, None, message) from None

    def _end(self):
        """End it; return its last words."""
        self.process.kill()
        return self.process.stderr.read(MOST_TEXT).decode(errors="replace")

    def _write(self, content, deadline):
        """Send bytes through the pipe, which may be full."""
        rest, pipe = memoryview(content), self.process.stdin.fileno()
        while rest:
            patience = max(0, deadline - time.monotonic())
            if not select.select([], [pipe], [], patience)[1]:
                raise TimeoutError("nobody reads")
            rest = rest[os.write(pipe, rest[: 2**16]) :]

    def _reply(self, deadline):
        """The two parts of a reply: a JSON text, and the values, as bytes."""
        sizes = struct.unpack(">QQ", self._read(16, deadline))
        if sum(sizes) > LARGEST_REPLY or sizes[0] > LARGEST_HEADER:
            raise ValueError("too large")
        return [self._read(size, deadline) for size in sizes]

    def _results(self, header, values, nproc):
        """What the ranks returned, and what they printed; or raise what went wrong."""
        import torch

        from ddp_course.judge.values import plain

        header = json.loads(header)
        printed = str(header["printed"])[:MOST_TEXT]
        if header["error"]:
            kind, text, rank, message = header["error"]
            text, message = str(text)[:MOST_TEXT], str(message)[:MOST_TEXT]
            error = RankTimeout if kind == "RankTimeout" else RankError
            raise Printed(printed, error(text, rank, message))
        try:
            results = plain(torch.load(io.BytesIO(values), weights_only=True))
        except Exception:
            raise ValueError("no plain values") from None
        if not isinstance(results, list) or len(results) != nproc:
            raise ValueError("not one value per rank")
        return results, printed

    def _read(self, size, deadline):
        """So many bytes from the pipe."""
        found, pipe = bytearray(), self.process.stdout.fileno()
        while len(found) < size:
            patience = max(0, deadline - time.monotonic())
            if not select.select([pipe], [], [], patience)[0]:
                raise TimeoutError("no reply")
            part = os.read(pipe, min(size - len(found), 2**20))
            if not part:
                raise EOFError
            found += part
        return bytes(found)

    def _watch(self):
        """End the sandbox as soon as it takes too much of the machine."""
        try:
            while self.process.poll() is None and not self.broken:
                time.sleep(0.2)
                with suppress(psutil.Error):
                    self.broken = self._too_much()
        finally:
            self.process.kill()

    def _too_much(self):
        """What the sandbox takes too much of, a line; "" if nothing."""
        inside = psutil.Process(self.process.pid).children(recursive=True)
        if len(inside) > PROCESSES:
            return f"your code started more than {PROCESSES} processes"
        if sum(map(threads, inside)) > THREADS:
            return f"your code started more than {THREADS} threads"
        opened = Opened(inside)
        if opened.watches > MOST_WATCHES:
            return f"your code watched more than {MOST_WATCHES} files with epoll"
        if sum(map(resident, inside)) + opened.in_sockets > self.memory:
            if sum(map(proportional, inside)) + opened.in_sockets > self.memory:
                return f"your code used more than {self.memory / 1e9:g} GB of memory"
        if opened.without_names > SIZE:
            return f"your code wrote more than {SIZE // 2**20} MB of files"
        if psutil.virtual_memory().available < SPARE:  # in a way that nobody counts
            return FULL
        return ""


READY = b"sandbox!"
ENDED = "your code ended the process that starts its ranks"
FULL = "while your code ran, the memory of this machine was used up"


class Printed(Exception):
    """An error of the ranks, with what they printed before."""

    def __init__(self, printed, error):
        self.printed, self.error = printed, error


def threads(process):
    with suppress(psutil.Error):
        return process.num_threads()
    return 0


def told_of(process):
    """The folder in which /proc tells of a process: that of its first thread, or of
    another one if the first has ended, and with it all that /proc tells of the whole.
    """
    whole = Path(f"/proc/{process.pid}")
    with suppress(OSError):
        if not (whole / "statm").read_text().startswith("0 "):
            return whole
        for thread in (whole / "task").iterdir():
            with suppress(OSError):
                if not (thread / "statm").read_text().startswith("0 "):
                    return thread
    return whole


def resident(process):
    """A process's memory in bytes, with the tables of its pages."""
    return memory_of(process, "status", "VmRSS")


def proportional(process):
    """The same; of what several processes share, its part."""
    return memory_of(process, "smaps_rollup", "Pss") or resident(process)


def memory_of(process, file, name):
    """Bytes. Where little of much memory is touched, the tables are the larger part."""
    folder, sizes = told_of(process), []
    for where, what in ((file, name), ("status", "VmPTE")):
        with suppress(OSError):
            text = (folder / where).read_text()
            found = re.search(rf"(?m)^{what}:\s*(\d+) kB", text)
            sizes.append(int(found[1]) * 1024 if found else 0)
    return sum(sizes) if len(sizes) == 2 else 0


class Opened:
    """What some processes hold open, and what that takes.

    without_names: bytes of files that no folder has, removed ones and those of
    memfd_create, which are in memory. in_sockets: bytes that their sockets may hold, which
    belong to no process. watches: how many files they watch with epoll, which the system
    limits for all processes of a user together.
    """

    def __init__(self, processes):
        sizes, sockets, self.watches = {}, set(), 0
        for process in processes:
            folder = told_of(process)
            with suppress(OSError):
                for entry in os.scandir(folder / "fd"):
                    with suppress(OSError):
                        file = entry.stat()
                        if stat.S_ISREG(file.st_mode) and file.st_nlink == 0:
                            sizes[file.st_dev, file.st_ino] = file.st_blocks * 512
                        elif stat.S_ISSOCK(file.st_mode):
                            sockets.add(file.st_ino)
                        elif os.readlink(entry.path).endswith("[eventpoll]"):
                            self.watches += watches_in(folder / "fdinfo" / entry.name)
        self.without_names = sum(sizes.values())
        self.in_sockets = len(sockets) * largest_buffers()


def watches_in(information):
    """How many files an epoll instance watches; of very many, only that there are many."""
    with open(information, "rb") as file:
        return file.read(200 * MOST_WATCHES).count(b"tfd:")


@cache
def largest_buffers():
    """Bytes that a socket may hold, received and to be sent: system_calls.py grants no
    more than the defaults.
    """
    defaults = Path("/proc/sys/net/core")
    names = ("rmem_default", "wmem_default")
    return sum(int((defaults / name).read_text()) for name in names)


_current = None  # the sandbox of this process


def launch_inside(fn, *args, nproc, timeout):
    """launch_untrusted in the sandbox that the settings ask for, which is started where
    none runs.

    Returns what the ranks returned, and what they printed. Raises Printed, RankError.
    """
    global _current
    if _current is None or _current.process.poll() is not None:
        asked = settings()
        _current = Sandbox(asked["preloads"], asked["memory"])
    return _current.launch(fn, *args, nproc=nproc, timeout=timeout)
