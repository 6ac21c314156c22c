"""A pretend network: gloo's collectives, which take as long as a slower link would.

The ranks of a laptop share its memory, and what they send needs the same cores that
compute. Here a thread of its own moves the data, and then sleeps until a link of the
given latency and bandwidth would have been done. So communication costs time and hardly
any computing, as it does between GPUs. `launch(..., network=Network(1e-3, 1e9))` has the
ranks use it, by an environment variable that `process_group` reads.
"""

import math
import os
import queue
import threading
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

from ddp_course import UsageError
from ddp_course.ranks.variables import NETWORK


class Network(NamedTuple):
    """A link between two ranks: a message of b bytes takes latency + b / bandwidth."""

    latency: float  # seconds per message
    bandwidth: float  # bytes per second

    def message(self, size):
        """The seconds that a message of this many bytes takes."""
        return self.latency + size / self.bandwidth

    def ring(self, size, ranks, rounds=1):
        """The seconds of a ring collective on a tensor of this many bytes.

        In a round, each piece of size / ranks bytes is sent on ranks - 1 times. An
        all-reduce is two rounds, a reduce-scatter or an all-gather is one.
        """
        return rounds * (ranks - 1) * self.message(size / ranks)


def network_of_environment():
    """The Network that `launch` was asked for, or None."""
    numbers = os.environ.get(NETWORK)
    if not numbers:
        return None
    try:
        latency, bandwidth = map(float, numbers.split())
        if 0 <= latency < math.inf and bandwidth > 0:
            return Network(latency, bandwidth)
    except ValueError:
        pass
    what = "two numbers, seconds and bytes per second"
    raise UsageError(f"{NETWORK} must be {what}, but is {numbers[:40]!r}")


def register():
    """Make the backend "pretend" known to torch, for tensors on CPUs."""
    if not hasattr(dist.Backend, "PRETEND"):
        dist.Backend.register_backend("pretend", connect, devices=["cpu"])


def connect(store, rank, world_size, timeout):
    """What `init_process_group("pretend")` calls in each rank."""
    gloo = ProcessGroupGloo(store, rank, world_size, timeout)
    return PretendNetwork(gloo, rank, world_size, network_of_environment())


class Transfer(dist._Work):
    """What a collective returns: its data are available when the pretend link is done."""

    def __init__(self):
        super().__init__()
        self.future = torch.futures.Future()

    def wait(self, timeout=None):
        self.future.wait()
        return True

    def is_completed(self):
        return self.future.done()

    def get_future(self):
        return self.future


class PretendNetwork(dist.ProcessGroup):
    """A process group with one transfer at a time.

    `spans` has the (begin, end) of each all-reduce, in seconds of time.perf_counter.
    """

    def __init__(self, gloo, rank, world_size, network):
        super().__init__(rank, world_size)
        self.gloo, self.network, self.spans = gloo, network, []
        self.waiting = queue.Queue()
        threading.Thread(target=self._transfer, daemon=True).start()

    def getBackendName(self):
        return "pretend"

    def _transfer(self):
        while True:
            start, result, seconds, transfer = self.waiting.get()
            try:
                begin = time.perf_counter()
                start().wait()  # until all ranks have arrived; the rest is quick
                time.sleep(seconds)
                self.spans.append((begin, time.perf_counter()))
                # its callbacks run in this thread, and may wait for further transfers
                done = threading.Thread(
                    target=transfer.future.set_result, args=(result,)
                )
                done.start()
            except Exception as error:
                transfer.future.set_exception(error)

    def pass_on(self, name, arguments, seconds):
        """Run gloo's collective of this name in its turn, in `seconds` seconds."""
        transfer = Transfer()
        start = lambda: getattr(self.gloo, name)(*arguments)
        self.waiting.put((start, arguments[0], seconds, transfer))
        return transfer

    def barrier(self, opts):
        return self.pass_on("barrier", [opts], 0.0)

    def broadcast(self, tensors, opts):
        seconds = self.network.message(bytes_of(tensors))
        return self.pass_on("broadcast", [tensors, opts], seconds)


def ring_collective(name, rounds):
    """A method of PretendNetwork: gloo's of this name, at the cost of a ring."""

    def method(self, *arguments):
        size = max(bytes_of(tensors) for tensors in arguments[:-1])
        seconds = self.network.ring(size, self.size(), rounds)
        return self.pass_on(name, arguments, seconds)

    return method


# by the names that torch 2.11 to 2.15 call them, and the rounds of a ring that they take
RINGS = {"allreduce": 2, "allgather": 1, "_allgather_base": 1, "all_gather_single": 1}
RINGS |= {"reduce_scatter": 1, "_reduce_scatter_base": 1, "reduce_scatter_single": 1}
for name, rounds in RINGS.items():
    setattr(PretendNetwork, name, ring_collective(name, rounds))


def bytes_of(tensors):
    """The bytes of tensors in lists, which may be lists of lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(map(bytes_of, tensors))
