"""The small parts that every distributed program has: who am I, on which device, in
which group.

Each is shown in full in the lesson that teaches it: environment and process group in
lesson 02, the device in lesson 04.
"""

import itertools
import os
import socket
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_course import UsageError


class Place(NamedTuple):
    """Where a process stands in the job."""

    rank: int  # among all processes, 0 to world_size - 1
    local_rank: int  # among those on this machine, 0 to local_world_size - 1
    world_size: int
    local_world_size: int


def torchrun_environment():
    """Read from the environment what torchrun (or `launch`) tells each process: its
    Place.

    A process that nobody launched is the only one: rank 0 of 1. Raises UsageError where
    only a part is set.
    """
    names = [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ]
    missing = [name for name in names if name not in os.environ]
    if missing == names:
        return Place(0, 0, 1, 1)
    if missing:
        present = [name for name in names if name in os.environ]
        cure = "start with torchrun, which sets all, or unset them"
        raise UsageError(
            f"{', '.join(present)} set, but {', '.join(missing)} not: {cure}"
        )
    try:
        return Place(*(int(os.environ[name]) for name in names[:4]))
    except ValueError as error:
        raise UsageError(
            f"{', '.join(names[:4])} must be whole numbers: {error}"
        ) from None


def choose_device(wish="auto"):
    """The device of this process: its own GPU where there is one for each local rank,
    else the CPU.

    wish: 'auto', 'cpu', 'cuda' or 'mps'. One process alone on a Mac gets its 'mps',
    which has no collectives.
    Raises UsageError for a device that is not there, or for fewer GPUs than local
    ranks.
    """
    _, local_rank, world_size, local_world_size = torchrun_environment()
    gpus = torch.cuda.device_count()
    mps = torch.backends.mps.is_available()
    if wish == "auto":
        wish = (
            "cuda"
            if gpus >= local_world_size
            else "mps"
            if mps and world_size == 1
            else "cpu"
        )
    if wish == "cuda":
        if gpus < local_world_size:
            cure = "nccl needs one for each: start fewer ranks, or use --device cpu"
            raise UsageError(f"{local_world_size} local ranks, but {gpus} GPUs; {cure}")
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    if wish == "mps" and not (mps and world_size == 1):
        raise UsageError(
            "mps is for one process on a Mac: it has no collectives; use --device cpu"
        )
    return torch.device(wish)


def backend_for(device):
    """The backend whose collectives work on tensors of this device: 'nccl' on GPUs,
    'gloo' elsewhere.
    """
    return "nccl" if device.type == "cuda" else "gloo"


def loopback_interface():
    """The name of the loopback interface: 'lo' on Linux, 'lo0' on a Mac, None on
    Windows.
    """
    return next(
        (name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None
    )


def stay_on_this_machine():
    """Where all ranks are on one machine, have gloo talk through its loopback interface
    only.
    """
    if _on_one_machine() and loopback_interface():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())


def _on_one_machine():
    """Whether all ranks are: at an address that only this machine can reach, they must
    be.
    """
    place = torchrun_environment()
    alone = place.world_size == place.local_world_size
    return alone or os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost")


_groups = itertools.count()  # that this process has asked to join


def rendezvous():
    """Where this process meets the others, as arguments for `init_process_group`.

    Under torchrun that stands in the environment, and there is nothing to add. A
    process that is alone gets a store of its own, and needs neither address nor port.
    """
    stay_on_this_machine()
    rank, _, world_size, _ = torchrun_environment()
    if "RANK" not in os.environ:
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    attempt, group = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)), next(_groups)
    served = (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )  # by torchrun, and not by rank 0
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not _on_one_machine():
        return {}
    if not served and group == 0 and address in ("127.0.0.1", "localhost"):
        # rank 0 is to serve it, and would listen on all interfaces
        store = (
            host_store(port)
            if rank == 0
            else dist.TCPStore(address, port, is_master=False)
        )
        return {"store": store, "rank": rank, "world_size": world_size}
    if attempt == group == 0 or not served:
        return {}
    # torchrun keeps its store when it restarts the ranks, or when they leave a group
    # and join another: the addresses of before are still in it, under the names at
    # which the new ones look for each other. On one machine all ranks know a prefix
    # that is new.
    store = dist.TCPStore(address, port, is_master=False)
    store = dist.PrefixStore(f"attempt {attempt}, group {group}", store)
    return {"store": store, "rank": rank, "world_size": world_size}


def host_store(port=0):
    """A TCPStore on a loopback port (`.port`), 0 for a free one, served by this
    process, for any number of ranks to join.

    A TCPStore that opens its own socket listens on every interface, whatever host name
    it is given; one that is given a listening socket keeps to that. Raises UsageError
    where the port is taken.
    """
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        problem = f"cannot listen on 127.0.0.1:{port}: {os.strerror(error.errno)}"
        raise UsageError(
            f"{problem}; another run has it, perhaps: choose another master port"
        ) from None
    address = listener.getsockname()
    return dist.TCPStore(
        *address,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


@contextmanager
def process_group(backend="gloo", timeout=300):
    """Join the job's process group for the length of a `with` block; gives (rank,
    world_size).

    timeout: seconds that a collective waits for the others. torch's own default is 30
    minutes, 10 for nccl.
    """
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **rendezvous())
    try:
        if backend == "gloo":
            # or one rank could leave again while another is still connecting to it
            dist.barrier()
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()
