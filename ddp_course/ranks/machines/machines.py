"""Several machines in one laptop: `with Machines(2, bandwidth="100mbit") as machines`.

On Linux, each machine has its own network, address, host name and processes:
namespaces.py. Elsewhere, and where the system forbids this, the machines are groups of
ranks on the loopback interface, with the pretend network between all ranks; then they
cannot be unplugged, and have no names.

The machines share this host's GPUs, which nccl does not allow, and what they are for is
the network: their ranks compute on the CPU.
"""

import itertools
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from ddp_course import UsageError
from ddp_course.ranks import gpus
from ddp_course.ranks.fork_server import start_method
from ddp_course.ranks.launch import launch, rank_environment
from ddp_course.ranks.machines.namespaces import (
    Namespaces,
    environment,
    why_not,
)
from ddp_course.ranks.variables import MACHINE, MACHINES, NETWORK, START_METHOD

PRETENDED = "pretended"  # the value of MACHINES that forbids namespaces
BITS = {
    "bit": 1,
    "kbit": 1e3,
    "mbit": 1e6,
    "gbit": 1e9,
}  # per second, as tc writes them
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1}


PIPES = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
PIPES |= {"stderr": subprocess.STDOUT, "errors": "replace"}


class Ended(NamedTuple):
    """How a command in a machine ended."""

    code: int  # its exit code
    text: str  # what it printed, stdout and stderr


class Followed:
    """A command that runs in a machine. `text` is what it has printed so far."""

    def __init__(self, name, process):
        self.name, self.process, self.text = name, process, ""
        self.news, self.ended = threading.Condition(), False
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            print(f"{self.name} | {line}", end="", flush=True)
            with self.news:
                self.text += line
                self.news.notify_all()
        with self.news:
            self.ended = True
            self.news.notify_all()

    def wait_for(self, pattern, timeout=60):
        """Wait until it has printed a match for the pattern, and return the match. Raises
        TimeoutError if it has not in `timeout` seconds, or has ended without.
        """
        found = lambda: re.search(pattern, self.text)
        with self.news:
            self.news.wait_for(lambda: found() or self.ended, timeout)
        match = found()
        if match is None:
            limit = "before it ended" if self.ended else f"within {timeout:g} s"
            problem = f"{self.name} did not print {pattern!r} {limit}"
            raise TimeoutError(f"{problem}. It printed\n{self.text}")
        return match

    def wait(self, timeout=600):
        """Wait until it has ended, and return how."""
        self.process.wait(timeout)
        self.reader.join(timeout)
        return Ended(self.process.returncode, self.text)

    def end(self):
        """Kill it, and all that it has started in its session."""
        end_session(self.process)


class Machines:
    """Machines node0, node1 ... that exist inside a `with` block.

    count: how many. bandwidth: what each can send per second, such as "100mbit" or
    "1gbit", in bits as tc(8) writes them; None is as fast as this machine can.
    delay: how long each packet travels, such as "1ms". quiet: do not say what kind of
    machines these are. Raises UsageError for other values.
    """

    def __init__(self, count=2, bandwidth=None, delay=None, quiet=False):
        if (
            isinstance(count, bool)
            or not isinstance(count, int)
            or not 1 <= count <= 200
        ):
            raise UsageError(f"a number of machines is from 1 to 200, not {count!r}")
        self.bits = bandwidth and quantity(bandwidth, BITS, "100mbit")
        self.delay = delay and quantity(delay, SECONDS, "1ms")
        self.count, self.quiet = count, quiet
        self.ports = itertools.count(29500)  # in node0's own network all are free
        self.running = []  # (machine, process) of what start() has started

    def __enter__(self):
        forbidden = os.environ.get(MACHINES) == PRETENDED
        self.obstacle = f"{MACHINES}={PRETENDED}" if forbidden else why_not()
        self.namespaces = None
        if self.obstacle is None:
            self.namespaces = Namespaces(self.count, self.bits, self.delay)
            try:
                self.namespaces.open()
            except BaseException:
                self.namespaces.close()
                raise
        if not self.quiet:
            print(self)
        return self

    def __exit__(self, *_):
        for _, process in self.running:
            end_session(process)
        if self.namespaces:
            self.namespaces.close()

    def __str__(self):
        network = f"{self.bits / 1e6:g} Mbit/s" if self.bits else "as fast as it goes"
        network += f", {self.delay * 1e3:g} ms" if self.delay else ""
        network += ", without the GPUs of this host" if gpus.count() else ""
        machines = "1 machine" if self.count == 1 else f"{self.count} machines"
        if self.obstacle is None:
            return f"{machines} in network namespaces, {network}"
        pretended = f"{machines}, pretended on loopback, {network}"
        return f"{pretended} ({self.obstacle})"

    # ---- what runs in them ----

    def launch(self, fn, *args, nproc=2, **options):
        """launch() on these machines, with `nproc` ranks in each. Raises UsageError if
        ranks are spawned: a process with threads cannot enter a machine.
        """
        if self.namespaces and start_method() == "spawn":
            fix = f"without {START_METHOD}=spawn, or with "
            fix += f"{MACHINES}={PRETENDED}, they can"
            raise UsageError(f"spawned ranks cannot enter a machine: {fix}")
        return launch(fn, *args, nproc=nproc, machines=self, **options)

    def start(self, machine, command, env=None, **options):
        """Start a command, a list of texts, in a machine; return its Popen.

        env: more environment variables. options: of Popen. It ends with the machine.
        """
        env = self._environment() | (env or {})
        if self.namespaces:
            command = [*self.namespaces.enter(machine), *command]
        process = subprocess.Popen(command, env=env, start_new_session=True, **options)
        self.running.append((machine, process))
        return process

    def run(self, machine, line, env=None, timeout=60):
        """Run a command, a text or a list of texts, in a machine; return how it Ended."""
        command = shlex.split(line) if isinstance(line, str) else line
        process = self.start(machine, command, env, **PIPES)
        try:
            text, _ = process.communicate(timeout=timeout)
        finally:
            end_session(process)
        return Ended(process.returncode, text)

    def follow(self, machine, line, env=None):
        """Start a command, a text or a list of texts, in a machine, and show what it
        prints, each line marked with the machine. Returns a Followed.
        """
        command = shlex.split(line) if isinstance(line, str) else line
        process = self.start(machine, command, env, **PIPES)
        return Followed(f"node{machine}", process)

    def torchrun(self, line, nproc=2, env=None, timeout=600):
        """Run a program with torchrun, `nproc` ranks in each machine, show the commands and
        what they print, and return how torchrun Ended in each machine.

        line: the program and its flags, a text or a list of texts.
        """
        port = next(self.ports) if self.namespaces else free_port()
        program = shlex.split(line) if isinstance(line, str) else line
        agents = []
        try:
            for machine in range(self.count):
                command = [*self.agent(machine, nproc, port), *program]
                print(f"node{machine} $ {shlex.join(command)}", flush=True)
                agents.append(self.follow(machine, command, env))
            return [agent.wait(timeout) for agent in agents]
        finally:
            for agent in agents:
                agent.end()

    def agent(self, machine, nproc, port):
        """The beginning of torchrun's command line in a machine, a list of texts."""
        flags = f"--nnodes {self.count} --nproc-per-node {nproc}"
        if self.namespaces:
            flags += f" --node-rank {machine} --master-addr node0 --master-port {port}"
            return ["torchrun", *flags.split()]
        flags += f" --rdzv-conf rank={machine} --rdzv-endpoint 127.0.0.1:{port}"
        return ["python", "-m", "ddp_course.ranks.machines.agent", *flags.split()]

    def environments(self, world_size, port):
        """The environment variables of each rank of launch(), as many in each machine.

        port: of the store on loopback, which is used where there are no namespaces.
        """
        nproc = world_size // self.count
        if self.namespaces:
            master = {"MASTER_ADDR": "node0", "MASTER_PORT": next(self.ports)}
            # rank 0 serves the store, as a process of node0
            master |= {
                "TORCHELASTIC_USE_AGENT_STORE": False,
                "GLOO_SOCKET_IFNAME": "eth0",
            }
        else:
            master = self._network()
        environments = []
        for rank in range(world_size):
            machine, local_rank = divmod(rank, nproc)
            own = {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": nproc, **master}
            own |= {"GROUP_RANK": machine, "GROUP_WORLD_SIZE": self.count}
            own |= gpus.HIDDEN
            if self.namespaces:
                own[MACHINE] = self.namespaces.process(machine)
            texts = {name: str(value) for name, value in own.items()}
            environments.append(rank_environment(rank, world_size, port) | texts)
        return environments

    def _environment(self):
        """The environment of commands in a machine."""
        env = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"} | environment()
        env |= gpus.HIDDEN
        # torchrun and python are those of this program
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
        if self.namespaces:
            env.pop("GLOO_SOCKET_IFNAME", None)  # of this machine
            return env
        return env | self._network()

    def _network(self):
        """The pretend network, as an environment variable."""
        if self.bits is None and self.delay is None:
            return {}
        return {NETWORK: f"{self.delay or 0} {self.bits / 8 if self.bits else 1e12}"}

    # ---- what may happen to them ----

    def power_off(self, machine):
        """End all processes of a machine, as a power cut does: nobody says goodbye."""
        self.real("power_off").power_off(machine)

    def power_on(self, machine):
        """Start a machine that is off."""
        self.real("power_on").power_on(machine)

    def unplug(self, machine):
        """Pull the machine's network cable."""
        self.real("unplug").cable(machine, False)

    def plug_in(self, machine):
        """Plug the machine's network cable in again."""
        self.real("plug_in").cable(machine, True)

    def limit(self, machine, bandwidth):
        """Change what a machine can send per second, "10mbit", while it runs."""
        self.real("limit").limit(machine, quantity(bandwidth, BITS, "100mbit"))

    def sent(self, machine):
        """The bytes that a machine has sent so far, as its network device counts them."""
        return self.real("sent").sent(machine)

    def real(self, what="this"):
        """The namespaces. Raises UsageError where the machines are only pretended."""
        if self.namespaces is None:
            raise UsageError(f"{what} needs machines of their own: {self.obstacle}")
        return self.namespaces


def quantity(text, units, example):
    """A number with a unit, as a float. Raises UsageError for another text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", str(text).lower())
    if not found or found[2] not in units or not float(found[1]) > 0:
        choice = ", ".join(units)
        raise UsageError(
            f"{text!r} is no such quantity: write it as {example} ({choice})"
        )
    return float(found[1]) * units[found[2]]


def free_port():
    """A port on loopback that nobody has at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def end_session(process):
    """End a process that leads its own session, all others in the session, and those that
    they have started: torchrun gives each rank a session of its own.
    """
    started = []
    with suppress(psutil.Error):
        started = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for each in started:
        with suppress(psutil.Error):
            each.kill()
    process.wait()
