"""Machines made of Linux namespaces: each has its own network, host name, /etc/hosts and
processes, and shares the disk with the others, as the machines of a cluster do.

A bridge joins their networks, and `tc` limits what each of them sends. All of this is in
one user namespace, so it needs no root: see user_namespaces(7). If there is a delay, it
comes from netem, see tc-netem(8), or, on kernels without it, from switch.py.

Nothing outlives the process that made it. Process 1 of the outermost namespace reads from
a pipe that only the maker can write to; when the pipe closes, process 1 ends, and then
the kernel ends all other processes in there and removes the network.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from ddp_course import UsageError

TOOLS = ["unshare", "nsenter", "ip", "tc"]
OUTER = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--uts", "--ipc"]
OUTER += ["--pid", "--mount-proc", "--kill-child", "--fork"]
INNER = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid"]
INNER += ["--mount-proc", "--kill-child", "--fork"]
UNTIL_THE_PIPE_CLOSES = "echo up; exec cat"

# IPv6 would need seconds to give out its addresses; there may be none
WITHOUT_IPV6 = """
off=/proc/sys/net/ipv6/conf/all/disable_ipv6
test ! -e $off || echo 1 > $off
"""
# in a new machine
START = """
hostname {name}
hosts=$(mktemp) && echo "{hosts}" > "$hosts" && mount --bind "$hosts" /etc/hosts && rm "$hosts"
ip link set lo up
"""


def environment():
    """This process's environment, in which the administrator's tools are found, too:
    PATH lacks their folders where it is an ordinary user's.
    """
    folders = [os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]
    return os.environ | {"PATH": os.pathsep.join(folders)}


def why_not():
    """Why there can be no such machines here, in a few words; None if there can."""
    if sys.platform != "linux":
        return "network namespaces are a feature of Linux"
    env = environment()
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=env["PATH"])]
    if missing:
        fix = "install util-linux and iproute2"
        return f"{', '.join(missing)} not found on this machine: {fix}"
    tried = subprocess.run([*OUTER, "true"], capture_output=True, text=True, env=env)
    if tried.returncode:
        said = (tried.stderr.strip().splitlines() or ["unshare failed"])[-1]
        fix = "the administrator can allow user namespaces"
        if Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns").exists():
            fix = "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0 allows it"
        return f"{said}: {fix}"
    return None


class Namespaces:
    """The network, and one set of namespaces per machine.

    count: how many machines. bandwidth: the bits per second that each can send, or
    None. delay: the seconds that each packet travels, or None.
    """

    def __init__(self, count, bandwidth=None, delay=None):
        self.count, self.bandwidth, self.delay = count, bandwidth, delay
        self.machines = [None] * count  # of each, process 1, or None while it is off
        self.openers = [None] * count  # the commands that hold the machines
        self.outer = self.outer_opener = self.switch = None

    def open(self):
        """Make the network and switch all machines on."""
        self.outer_opener = _holding(OUTER, f"{WITHOUT_IPV6}ip link set lo up")
        self.outer = _innermost(self.outer_opener)
        if self.delay and not self._has_netem():
            self.switch = self._start_switch()
        else:
            self._in_outer("ip link add name bridge type bridge forward_delay 0")
            self._in_outer("ip link set bridge up")
        for machine in range(self.count):
            self.power_on(machine)

    def close(self):
        """End all processes in the machines, and remove the network."""
        held = [*filter(None, (self.switch, *self.openers, self.outer_opener))]
        for process in held:
            process.stdin.close()
        deadline = time.monotonic() + 5
        for process in held:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:  # --kill-child then ends the rest
                process.kill()
                process.wait()
            process.stdout.close()

    def power_on(self, machine):
        """Start a machine that is off, with its network."""
        if self.machines[machine] is not None:
            raise UsageError(f"node{machine} is on")
        start = START.format(name=f"node{machine}", hosts=hosts(self.count))
        start = WITHOUT_IPV6 + start
        opener = _holding([*_enter(self.outer), *INNER], start)
        self.machines[machine], self.openers[machine] = _innermost(opener), opener
        self._connect(machine)
        self._in(machine, f"ip address add {address(machine)}/24 dev eth0")
        self._in(machine, "ip link set eth0 up")
        if self.bandwidth:
            self.limit(machine, self.bandwidth)

    def power_off(self, machine):
        """End all processes of a machine, as a power cut does: nobody says goodbye."""
        process, opener = self.process(machine), self.openers[machine]
        self._in_outer(f"ip link delete veth{machine}")
        os.kill(process, signal.SIGKILL)
        opener.communicate()
        self.machines[machine] = self.openers[machine] = None

    def limit(self, machine, bandwidth):
        """Let a machine send at most this much: tc's token bucket filter, tc-tbf(8)."""
        burst = max(16_000, bandwidth / 8 * 0.001)  # what goes at once, in bytes
        rule = f"tc qdisc replace dev eth0 root tbf rate {bandwidth:.0f}bit"
        rule += f" burst {burst:.0f} latency 200ms"
        self._in(machine, rule)

    def cable(self, machine, plugged):
        """Pull a machine's cable, or plug it in again."""
        self.process(machine)  # raises UsageError if it is off
        self._in_outer(f"ip link set veth{machine} {'up' if plugged else 'down'}")

    def sent(self, machine):
        """The bytes that a machine's eth0 has sent."""
        (eth0,) = json.loads(self._in(machine, "ip -s -j link show eth0"))
        return eth0["stats64"]["tx"]["bytes"]

    def process(self, machine):
        """The number of a machine's process 1. Raises UsageError if it is off."""
        if self.machines[machine] is None:
            raise UsageError(f"node{machine} is off")
        return self.machines[machine]

    def enter(self, machine):
        """The beginning of a command line that runs in a machine, a list of texts."""
        return _enter(self.process(machine))

    # ---- the network ----

    def _in_outer(self, line):
        return _do([*_enter(self.outer), *line.split()])

    def _in(self, machine, line):
        return _do([*self.enter(machine), *line.split()])

    def _has_netem(self):
        """Whether this kernel can delay packets itself."""
        with suppress(UsageError):
            self._in_outer("tc qdisc add dev lo root netem delay 1us")
            return True
        return False

    def _connect(self, machine):
        """Give a machine its eth0, and connect it to the others."""
        veth, number = f"veth{machine}", _number(self.machines[machine])
        # after a power cut, the others still know the machine by its hardware address
        own = f"address 02:00:00:00:00:{machine:02x}"
        ends = f"name {veth} type veth peer name eth0 {own} netns {number}"
        self._in_outer(f"ip link add {ends}")
        master = "" if self.switch else "master bridge "
        self._in_outer(f"ip link set {veth} {master}up")
        if self.delay and not self.switch:
            delay = f"netem delay {self.delay * 1e6:.0f}us"
            self._in_outer(f"tc qdisc add dev {veth} root {delay}")

    def _start_switch(self):
        enter = ["nsenter", "--target", str(self.outer), "--user", "--net"]
        command = [*enter, "--preserve-credentials", sys.executable, "-m"]
        command += ["ddp_course.ranks.machines.switch", str(self.delay)]
        return _started(command)


def address(machine):
    """The address of a machine, an IPv4 address as text."""
    return f"10.77.0.{machine + 1}"


def hosts(count):
    """The text of /etc/hosts in each of `count` machines."""
    names = [(address(number), f"node{number}") for number in range(count)]
    # torch asks, for its messages, for the names of these addresses as IPv6 writes them
    mapped = [(f"::ffff:{place}", f"{name}.ipv4") for place, name in names]
    lines = [("127.0.0.1", "localhost"), *names, *mapped]
    return "\n".join(map(" ".join, lines))


# ---- processes ----


def _holding(command, script):
    """Run a script in new namespaces; returns when it has ended. They exist, and the
    process does, until the pipe to it is closed.
    """
    script = f"set -e\n{script}\n{UNTIL_THE_PIPE_CLOSES}"
    return _started([*command, "sh", "-c", script])


def _started(command):
    """Start a command that prints "up" when it is ready, and ends with its input."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment(),
    )  # fmt: skip
    if process.stdout.readline() != b"up\n":
        _, said = process.communicate()
        raise UsageError(f"no machine could be started: {said.decode().strip()}")
    return process


def _innermost(process):
    """The process 1 that unshare has started, by its number out here."""
    return psutil.Process(process.pid).children(recursive=True)[-1].pid


def _number(process):
    """The number that a process has in the outermost of our namespaces."""
    status = Path(f"/proc/{process}/status").read_text()
    numbers = next(line for line in status.splitlines() if line.startswith("NSpid"))
    return numbers.split()[2]


def _enter(process):
    """The beginning of a command that runs in the namespaces of a process."""
    spaces = ["--user", "--net", "--mount", "--uts", "--ipc", "--pid"]
    enter = ["nsenter", "--target", str(process), "--preserve-credentials", *spaces]
    return [*enter, f"--wdns={os.getcwd()}"]


def _do(command):
    env = environment()
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        said = done.stderr.strip()
        raise UsageError(f"{' '.join(command[len(_enter(0)) :])}: {said}")
    return done.stdout


# ---- a rank of launch() enters a machine ----

CLONE_NEWNS, MS_BIND = 0x20000, 4096  # from <sched.h> and <sys/mount.h>


def move_into(process):
    """Move this process, which has one thread, into the network and the name of the
    machine of which `process` is process 1.

    It keeps its process number and its parent. setns(2) says what is needed for that.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def check(failed):
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    hosts = Path("/proc", str(process), "root", "etc", "hosts").read_bytes()
    for kind in ("user", "net", "uts"):
        with open(f"/proc/{process}/ns/{kind}") as namespace:
            check(libc.setns(namespace.fileno(), 0))
    check(libc.unshare(CLONE_NEWNS))
    with tempfile.NamedTemporaryFile() as file:
        file.write(hosts)
        file.flush()
        check(libc.mount(file.name.encode(), b"/etc/hosts", None, MS_BIND, None))
