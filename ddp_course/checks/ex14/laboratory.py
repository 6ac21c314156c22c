"""Three machines of the laboratory with traps in their networks, and ranks that meet on
them, for question 2.
"""

import json
import os
import sys
import time
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_course.ranks.machines.machines import PIPES, PRETENDED, Machines
from ddp_course.ranks.machines.namespaces import why_not

PORTS = [29_700, 29_701, 29_702, 29_703]
SPEEDS = {"lo": 0, "docker0": 40_000, "ib0": 100_000}  # Mbit/s; eth0 has 10,000
LISTEN = "import socket, time; s = socket.create_server(('', {})); time.sleep(600)"
# Each machine gets a bridge with the same address, as Docker makes it, and a fast
# interface in a network of its own; its own name leads to loopback, as on Debian.
TRAPS = """
ip link add docker0 type bridge
ip address add 172.17.0.1/16 dev docker0
ip link set docker0 up
ip link add ib0 type veth peer name ib0-end
ip address add 192.168.{machine}.1/24 dev ib0
ip link set ib0 up
ip link set ib0-end up
sed 's/^[0-9.]* node{machine}$/127.0.1.1 node{machine}/' /etc/hosts > {copy}
cat {copy} > /etc/hosts
rm {copy}
"""
# one machine's card has another name
RENAME = "ip link set eth0 down; ip link set eth0 name ens5; ip link set ens5 up"


def obstacle():
    """Why there can be no machines here, in a few words; None if there can."""
    if os.environ.get("DDP_COURSE_MACHINES") == PRETENDED:
        return f"DDP_COURSE_MACHINES={PRETENDED}"
    return why_not()


@contextmanager
def machines():
    """Three machines, the table of these hosts, and the ports to choose from."""
    with Machines(3, quiet=True) as found:
        for machine in range(3):
            copy = f"/tmp/ddp-course-hosts-{os.getpid()}-{machine}"
            script = TRAPS.format(machine=machine, copy=copy)
            do(found, machine, script + RENAME * (machine == 2))
        found.start(0, ["python", "-c", LISTEN.format(PORTS[0])])
        do(found, 0, f"ip rule add sport {PORTS[1]} ipproto tcp blackhole")
        wait_for_listener(found, 0, PORTS[0])
        yield found, [table_of(found, machine) for machine in range(3)], PORTS


def do(found, machine, script):
    """Run a shell script in a machine; return what it printed. Raises RuntimeError."""
    code, text = found.run(machine, ["sh", "-ec", script])
    if code:
        raise RuntimeError(f"node{machine}: {text}")
    return text


def wait_for_listener(found, machine, port, patience=20):
    deadline = time.monotonic() + patience
    while f":{port:04X} 00000000:0000 0A" not in do(found, machine, "cat /proc/net/tcp"):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody listens at port {port} of node{machine}")
        time.sleep(0.05)


def table_of(found, machine):
    """A machine's interfaces and names, as it says itself, and its ports."""
    text = do(found, machine, "ip -j -4 address")
    interfaces = [
        {
            "name": card["ifname"],
            "address": f"{own['local']}/{own['prefixlen']}",
            "up": "UP" in card["flags"],
            "speed": SPEEDS.get(card["ifname"], 10_000),
        }
        for card in json.loads(text)
        for own in card.get("addr_info", [])
    ]
    lines = [line.split() for line in do(found, machine, "cat /etc/hosts").splitlines()]
    resolves = {line[1]: line[0] for line in lines if len(line) == 2 and ":" not in line[0]}
    return {
        "name": f"node{machine}",
        "interfaces": interfaces,
        "resolves": {name: resolves[name] for name in resolves if name != "localhost"},
        "taken": PORTS[:1] if machine == 0 else [],
        "blocked": PORTS[1:2] if machine == 0 else [],
    }


def meet(machines, address, port, names, host):
    """Let one process per machine meet at an address, and add up 1, 2 and 3.

    names: each machine's interface. host: the machine with this address. Raises
    RuntimeError if they cannot.
    """
    # not by launch(): while an answer is graded, ranks are spawned, which enter no machine
    here = ["python", "-m", __name__, address, str(port), str(host)]
    meeting = [machines.start(machine, [*here, str(machine), name], **PIPES) for machine, name in enumerate(names)]
    said = [process.communicate(timeout=100)[0] for process in meeting]
    if not all("6.0" in text.splitlines() for text in said):
        raise RuntimeError("the ranks on three machines printed\n" + "\n".join(said))


def add_up(address, port, host, rank, name):
    """Be a rank of three; print the sum. All are texts, as in a command line."""
    port, host, rank, patience = int(port), int(host), int(rank), timedelta(seconds=30)
    os.environ["GLOO_SOCKET_IFNAME"] = name
    serves = {"is_master": rank == host, "wait_for_workers": False}
    store = dist.TCPStore(address, port, timeout=patience, **serves)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=patience)
    total = torch.tensor(rank + 1.0)
    dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    print(total.item())


if __name__ == "__main__":
    add_up(*sys.argv[1:])
