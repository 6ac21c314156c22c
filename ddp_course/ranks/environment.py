"""What every distributed program needs: its rank, its device and its process group.

Lesson 2 shows the environment and the process group, lesson 4 the device.
"""

import atexit
import itertools
import os
import socket
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_course import UsageError
from ddp_course.ranks import gpus, pretend_network
from ddp_course.ranks.store import host_store, loopback_interface

LOOPBACK = ("127.0.0.1", "localhost")


class Place(NamedTuple):
    """The place of a process in the job."""

    rank: int  # among all processes, 0 to world_size - 1
    local_rank: int  # among those on this machine, 0 to local_world_size - 1
    world_size: int
    local_world_size: int


def torchrun_environment():
    """This process's Place, from the environment that torchrun or `launch` has set.

    A process that was started without a launcher is rank 0 of 1. Raises UsageError if
    only some variables are set, or if they contradict each other.
    """
    if "LOCAL_SIZE" in os.environ:  # DeepSpeed's launcher's name for it
        os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["LOCAL_SIZE"])
    places = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
    names = [*places, "MASTER_ADDR", "MASTER_PORT"]
    missing = [name for name in names if name not in os.environ]
    if missing == names:
        return Place(0, 0, 1, 1)
    if missing:
        present = ", ".join(name for name in names if name in os.environ)
        fix = "start with torchrun, which sets all of them, or unset them"
        raise UsageError(f"{present} set, but {', '.join(missing)} not: {fix}")
    place = Place(*map(whole_number, places))
    port_of("MASTER_PORT", os.environ["MASTER_PORT"])
    for name, index, size in (
        ("RANK", place.rank, place.world_size),
        ("LOCAL_RANK", place.local_rank, place.local_world_size),
        ("LOCAL_WORLD_SIZE", place.local_world_size - 1, place.world_size),
    ):
        if not 0 <= index < size:
            values = ", ".join(f"{name} {os.environ[name]}" for name in places)
            raise UsageError(f"{name} is impossible, the environment says: {values}")
    return place


def whole_number(name, default=None):
    """An environment variable as an int. Raises UsageError if it is not one."""
    value = os.environ.get(name, default)
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"{name} must be a whole number, but is {value!r}") from None


def port_of(name, text):
    """A text as a port of TCP. Raises UsageError, with the name of where it comes from."""
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise UsageError(f"{name} must be a port, 1 to 65535, but is {text[:40]!r}")
    return int(text)


def choose_device(name="auto", collectives=True, deterministic=False):
    """This process's device: its own GPU if each rank on this host has one, or the CPU.

    name: 'auto', 'cpu', 'cuda' or 'mps'. 'mps' is a Mac's GPU. It has no collectives,
    so only a program without a process group gets it: collectives=False. If 'auto'
    leaves GPUs unused, rank 0 prints why. deterministic: see repeat_bits. Raises
    UsageError for a device that does not exist, and for fewer GPUs than ranks.
    """
    if deterministic:
        repeat_bits()
    number, ranks = on_this_host()
    there = gpus.count()
    few = f"{ranks} rank{'s' * (ranks != 1)} on this host, but {there} GPU"
    few += "s" * (there != 1)
    mps = torch.backends.mps.is_available() and not collectives
    if name == "auto":
        name = "cuda" if there >= ranks else "mps" if mps else "cpu"
        if name == "cpu" and there and torchrun_environment().rank == 0:
            print(f"device: cpu ({few}: nccl needs one per rank)")
    if name == "cuda":
        if there < ranks:
            fix = "nccl needs one per rank: start fewer ranks, or use --device cpu"
            raise UsageError(f"{few}; {fix}")
        torch.cuda.set_device(number)
        return torch.device("cuda", number)
    if name == "mps" and not mps:
        fix = "it has no collectives; use --device cpu"
        raise UsageError(f"mps is for lesson 1 on a Mac: {fix}")
    return torch.device(name)


def repeat_bits():
    """Make torch use algorithms on GPUs that give the same bits in each run.

    It holds for the rest of this process; call it before the first use of a GPU. Other
    algorithms add in the order in which threads happen to end. An operation that has no
    such algorithm raises a RuntimeError. On CPUs, bits repeat without this.

    The switches:
    https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def backend_for(device):
    """The backend for tensors on this device: 'nccl' on GPUs, 'gloo' elsewhere.

    Or 'pretend', if `launch(..., network=...)` was called with a pretend network.
    """
    if device.type == "cuda":
        return "nccl"
    if pretend_network.network_of_environment() is None:
        return "gloo"
    pretend_network.register()
    return "pretend"


# Kept until the next one is left, or the process ends: a DDP model often lives on for a
# moment after its group. With torch 2.11, a model that is the last to know its group
# holds Python's lock while it waits for gloo's threads, which may need that lock.
_last_group = []
atexit.register(_last_group.clear)


@contextmanager
def process_group(backend=None, timeout=300):
    """Join the job's process group for a `with` block; gives (rank, world_size).

    backend: by default, that for CPUs. timeout: seconds that a collective waits for the
    other ranks. torch's own default is 30 minutes, and 10 for nccl.
    """
    backend = backend or backend_for(torch.device("cpu"))
    limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, timeout=limit, **rendezvous(timeout))
    try:
        if backend != "nccl":
            # otherwise one rank could leave while another is still connecting to it
            dist.barrier()
        yield dist.get_rank(), dist.get_world_size()
    finally:
        _last_group[:] = [dist.group.WORLD]
        dist.destroy_process_group()


# ---- how the ranks find each other ----

_groups = itertools.count()  # the number of groups that this process has joined


_met_in = []  # the store that this process serves, as rank 0


def rendezvous(timeout=300):
    """Where this process meets the other ranks: arguments for `init_process_group`.

    Under torchrun, the environment has everything and there is nothing to add. A single
    process gets its own store, which needs no address and no port. timeout: seconds to
    wait for the store.
    """
    stay_on_this_machine()
    check_network()
    rank, _, world_size, _ = torchrun_environment()
    if "RANK" not in os.environ:
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    attempt = whole_number("TORCHELASTIC_RESTART_COUNT", 0)
    group = next(_groups)
    address, port = (
        os.environ["MASTER_ADDR"],
        port_of("MASTER_PORT", os.environ["MASTER_PORT"]),
    )
    served_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not on_one_machine():
        return {}
    if not served_by_torchrun and group == 0 and address in LOOPBACK:
        # rank 0 must serve the store, and would otherwise listen on all interfaces
        if rank == 0:
            store = host_store(port)
            _met_in[:] = [store]
        else:
            store = connect_to(address, port, timeout)
        return {"store": store, "rank": rank, "world_size": world_size}
    if attempt == group == 0 or not served_by_torchrun:
        return {}
    # torchrun keeps its store when it restarts the ranks, or when they leave a group
    # and join another. The store still has the old addresses, under the names that the
    # new ranks use to find each other. On one machine, all ranks can agree on a new
    # prefix.
    store = connect_to(address, port, timeout)
    store = dist.PrefixStore(f"attempt {attempt}, group {group}", store)
    return {"store": store, "rank": rank, "world_size": world_size}


def connect_to(address, port, timeout):
    """The TCPStore that another process serves; timeout: seconds to wait for it.

    Raises UsageError where nobody answers: TCPStore says it with a C++ stack.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((address, port), timeout=timeout).close()
            break
        except OSError:
            if time.monotonic() > deadline:
                where = f"nothing answers at {address}:{port}"
                absent = f"rank 0 did not come to the group within {timeout:g} s"
                raise UsageError(f"{absent}: {where}") from None
            time.sleep(0.1)
    limit = timedelta(seconds=timeout)
    return dist.TCPStore(address, port, is_master=False, timeout=limit)


def meeting_place(timeout):
    """The store of the job in this attempt, for what the ranks say to each other when
    their group is gone. Raises DistError where it is gone, too.
    """
    attempt = whole_number("TORCHELASTIC_RESTART_COUNT", 0)
    address, port = (
        os.environ["MASTER_ADDR"],
        port_of("MASTER_PORT", os.environ["MASTER_PORT"]),
    )
    store = _met_in[0] if _met_in else connect_to(address, port, timeout)
    return dist.PrefixStore(f"after attempt {attempt}", store)


def on_one_machine():
    """Whether all ranks are on this machine: with a loopback address, they must be."""
    place = torchrun_environment()
    alone = place.world_size == place.local_world_size
    return alone or os.environ["MASTER_ADDR"] in LOOPBACK


def on_this_host():
    """This rank's number among the job's ranks on this host, and how many they are.

    These are the local rank and the local world size, except where several launchers
    run on one host and meet on loopback: then their ranks share the host's GPUs.
    """
    rank, local_rank, world_size, local_world_size = torchrun_environment()
    return (rank, world_size) if on_one_machine() else (local_rank, local_world_size)


def stay_on_this_machine():
    """Make gloo use only the loopback interface if all ranks are on one machine."""
    if on_one_machine() and loopback_interface():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())


def check_network():
    """Raise UsageError if the environment names an interface or host that does not
    exist.
    """
    known = [name for _, name in socket.if_nameindex()]
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if interfaces and not set(interfaces.split(",")) & set(known):
        choice = f"this machine has {', '.join(known)}"
        raise UsageError(f"GLOO_SOCKET_IFNAME={interfaces} is no interface: {choice}")
    address = os.environ.get("MASTER_ADDR", "localhost")
    try:
        socket.getaddrinfo(address, None)
    except OSError as error:
        problem = f"MASTER_ADDR={address} cannot be found: {error.strerror}"
        raise UsageError(f"{problem}; it is the name or address of machine 0") from None
