"""A program under torchrun that always ends: `with Job("clinic/killed.py") as job`.

For programs that hang, and for the tools that look at them from outside. `python -m
ddp_course.ranks.machines.job` is torchrun with a store on loopback only, and with torchrun's
table of failures at the end.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import psutil

from ddp_course.ranks.machines.agent import end_with_the_caller, torchrun
from ddp_course.ranks.machines.machines import Ended
from ddp_course.ranks.store import loopback_interface
from ddp_course.ranks.variables import JOB


class Job:
    """torchrun and its ranks, which run until they end or the `with` block does.

    program: a Path, or a text with a path and flags, in a shell's spelling. nproc: how
    many ranks. flags: of torchrun, such a text.
    env: more environment variables. What they print is in `text`, without the names of
    this machine's folders.
    """

    def __init__(self, program, nproc=2, flags="", env=None):
        torchrun = [sys.executable, "-m", "ddp_course.ranks.machines.job"]
        torchrun += ["--nproc-per-node", str(nproc), *shlex.split(flags)]
        self.command = torchrun
        self.command += (
            shlex.split(program) if isinstance(program, str) else [str(program)]
        )
        self.mark, self.nproc = uuid4().hex, nproc
        self.env = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self.env |= os.environ | (env or {}) | {JOB: self.mark}
        if loopback_interface():
            self.env.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())

    def __enter__(self):
        self.output = tempfile.TemporaryFile()  # without a name: nothing stays behind
        pipes = {"stdin": subprocess.DEVNULL, "stdout": self.output}
        pipes |= {"stderr": subprocess.STDOUT, "start_new_session": True}
        self.agent = subprocess.Popen(self.command, env=self.env, **pipes)
        return self

    def __exit__(self, *_):
        """Kill what is left of the job, also processes that its ranks have started."""
        while left := self.processes():
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()  # a stopped process, too
            self.agent.wait()
            time.sleep(0.02)
        self.output.close()

    @property
    def text(self):
        """What torchrun and the ranks have printed so far."""
        file = self.output.fileno()
        printed = os.pread(file, os.fstat(file).st_size, 0)
        return without_folders(printed.decode(errors="replace"))

    def wait(self, limit=60):
        """Wait until torchrun has ended, and return how it Ended; its code is None if it
        has not ended within `limit` seconds.
        """
        with suppress(subprocess.TimeoutExpired):
            self.agent.wait(limit)
        return Ended(self.agent.poll(), self.text)

    def wait_for(self, words, limit=60):
        """Wait until the job has printed these words. Raises TimeoutError."""
        deadline = time.monotonic() + limit
        while words not in self.text:
            if time.monotonic() > deadline or self.agent.poll() is not None:
                raise TimeoutError(f"the job has not printed {words!r}:\n{self.text}")
            time.sleep(0.05)

    def processes(self):
        """All living processes of the job, those that a rank has started included."""
        return [
            process
            for process in psutil.process_iter()
            if environment(process).get(JOB) == self.mark
        ]

    def ranks(self, limit=60):
        """The ranks' processes, in rank order, as soon as all are there."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            with suppress(psutil.NoSuchProcess):
                children = psutil.Process(self.agent.pid).children()
                ranks = {environment(child).get("RANK"): child for child in children}
                with suppress(KeyError):
                    return [ranks[str(rank)] for rank in range(self.nproc)]
            time.sleep(0.05)
        raise TimeoutError(f"the ranks have not started:\n{self.text}")

    def py_spy(self, rank, *flags):
        """What `py-spy dump` says of a rank: the stacks of its threads, or why it may not
        look.
        """
        here = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        command = [shutil.which("py-spy", path=here) or "py-spy", "dump", *flags]
        command += ["--pid", str(self.ranks()[rank].pid)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except FileNotFoundError:
            return "py-spy is not installed: pip install py-spy"
        said = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout or done.stderr)  # colours
        return re.sub(r"(?m)^Python v.*\n", "", without_folders(said))


def environment(process):
    """A process's environment variables; none if it has ended, or is not ours."""
    with suppress(psutil.Error, OSError):
        if process.status() != psutil.STATUS_ZOMBIE:
            return process.environ()
    return {}


def without_folders(text):
    """A text without the folders of this machine: torch/serialization.py."""
    folders = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}
    folders |= {os.getcwd(), tempfile.gettempdir(), *sys.path}
    folders |= {str(Path(__file__).parents[2])}
    for folder in sorted(filter(None, folders), key=len, reverse=True):
        if len(folder) > 1:
            text = text.replace(folder + os.sep, "")
    return text


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    threading.Thread(target=end_with_the_caller, daemon=True).start()
    try:
        torchrun(["--rdzv_endpoint", "127.0.0.1", *sys.argv[1:]])
    except ChildFailedError as error:
        sys.exit(str(error))
    except SignalException as signalled:
        sys.exit(128 + signalled.sigval.value)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
