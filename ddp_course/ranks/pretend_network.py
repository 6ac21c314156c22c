"""A pretend network: gloo's collectives, which take as long as slower links would.

The ranks of a laptop share its memory, and what they send needs the same cores that
compute. Here a thread of its own moves the data, and then sleeps until a link of the
given latency and bandwidth would have been done. So communication costs time and hardly
any computing, as it does between GPUs. `launch(..., network=(1e-3, 1e9))` has the ranks
use it, by an environment variable that `process_group` reads. A Network has two links,
a fast one inside a machine and a slow one between machines: see links.py.
"""

import os
import queue
import threading
import time
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

from ddp_course import UsageError
from ddp_course.ranks import links
from ddp_course.ranks.variables import NETWORK

# ---- which link is between two ranks ----


def network_of_environment():
    """The Network that `launch` was asked for, or None."""
    text = os.environ.get(NETWORK)
    if not text:
        return None
    try:
        return links.from_text(text)
    except ValueError:
        what = f"must be {links.FORM}, but is {text[:40]!r}"
        raise UsageError(f"{NETWORK} {what}") from None


def machines_of(ranks, own, network):
    """The number of the machine of each of these ranks. own: that of this process."""
    local = network.ranks_per_machine or int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if not local:  # nothing says that there are several machines
        return [0 for _ in ranks]
    here = os.environ.get("GROUP_RANK", own // local)
    if network.ranks_per_machine is None and own // local != int(here):
        said = f"rank {own} is on machine {here}, which has {local}"
        raise UsageError(f"{NETWORK} needs equally many ranks per machine, but {said}")
    return [rank // local for rank in ranks]


class End:
    """A rank's end of a link: it sends one transfer at a time, and receives one.

    Each rank has its own, like a network card. `carried` has (name, begin, end) of each
    transfer, in seconds of time.perf_counter.
    """

    def __init__(self, link):
        self.link, self.carried, self.lock = link, [], threading.Lock()
        self.free = {"out": 0.0, "in": 0.0}  # when each way is free again

    def carry(self, name, seconds, *ways):
        """Occupy one way or both for these seconds; return when that will be over."""
        with self.lock:
            begin = max(time.perf_counter(), *(self.free[way] for way in ways))
            self.free |= dict.fromkeys(ways, begin + seconds)
            self.carried.append((name, begin, begin + seconds))
        return begin + seconds


@cache
def ends_of(network):
    """This process's End of each link. All its groups share them."""
    return {"inside": End(network.inside), "between": End(network.between)}


# ---- the process group ----


def register():
    """Make the backend "pretend" known to torch, for tensors on CPUs."""
    if not hasattr(dist.Backend, "PRETEND"):
        how = {"extended_api": True, "devices": ["cpu"]}
        dist.Backend.register_backend("pretend", connect, **how)


def connect(options, _):
    """What `init_process_group("pretend")` calls in each rank, and `new_group`."""
    place = options.group_rank, options.group_size
    gloo = ProcessGroupGloo(options.store, *place, options.timeout)
    # the group of all ranks comes without a list of them
    ranks = options.global_ranks_in_group or range(options.group_size)
    network = network_of_environment()
    machines = machines_of(ranks, ranks[options.group_rank], network)
    return PretendNetwork(gloo, options.group_rank, machines, ends_of(network))


class Transfer(dist._Work):
    """What a collective returns: its data are available when the pretend link is done."""

    def __init__(self):
        super().__init__()
        self.future, self.peer = torch.futures.Future(), None

    def wait(self, timeout=None):
        self.future.wait()
        return True

    def is_completed(self):
        return self.future.done()

    def get_future(self):
        return self.future

    def _source_rank(self):
        return self.peer  # of a message from any rank


BOTH = ("out", "in")


class PretendNetwork(dist.ProcessGroup):
    """A process group whose collectives take turns, at what they cost on two links.

    A collective of ranks on several machines goes over the slow link, a message over
    the link to its other rank. machines: that of each rank of the group. `spans` has
    the (begin, end) of each collective, in seconds of time.perf_counter, and
    `ends[...].carried` what each link has carried, messages too.
    """

    def __init__(self, gloo, rank, machines, ends):
        super().__init__(rank, len(machines))
        self.gloo, self.spans = gloo, []
        self.machines, self.ends = machines, ends
        self.slowest = ends["inside" if len(set(machines)) == 1 else "between"]
        self.waiting = queue.Queue()
        threading.Thread(target=self._transfer, daemon=True).start()

    def getBackendName(self):
        return "pretend"

    # What torch asks of a group, and a ProcessGroup leaves to its backends:

    def _get_backend(self, device):
        return self.gloo

    def _set_group_name(self, name):
        self.own_name = name

    @property
    def group_name(self):
        return self.own_name

    def end_to(self, peer):
        """This rank's end of the link to another rank of the group."""
        same = self.machines[peer] == self.machines[self.rank()]
        return self.ends["inside" if same else "between"]

    def _transfer(self):
        while True:
            name, start, result, costs, transfer = self.waiting.get()
            try:
                begin = time.perf_counter()
                start().wait()  # until all ranks have arrived; the rest is quick
                sleep_while_carried(name, costs)
                self.spans.append((begin, time.perf_counter()))
                # its callbacks run in this thread, and may wait for further transfers
                done = threading.Thread(
                    target=transfer.future.set_result, args=(result,)
                )
                done.start()
            except Exception as error:
                transfer.future.set_exception(error)

    def pass_on(self, name, arguments, costs):
        """Run gloo's collective of this name in its turn, at these costs: (the end of a
        link, seconds, its ways) each.
        """
        transfer = Transfer()
        known = name if hasattr(self.gloo, name) else BEFORE[name]
        start = lambda: getattr(self.gloo, known)(*arguments)
        told = SHORT.get(BEFORE.get(name, name), name)
        self.waiting.put((told, start, arguments[0], costs, transfer))
        return transfer

    def barrier(self, opts):
        return self.pass_on("barrier", [opts], [])

    def broadcast(self, tensors, opts):
        seconds = self.slowest.link.message(bytes_of(tensors))
        costs = [(self.slowest, seconds, BOTH)]
        return self.pass_on("broadcast", [tensors, opts], costs)

    # Messages take no turns: two ranks that both send first would wait for each other.

    def send(self, tensors, peer, tag):
        work = self.gloo.send(tensors, peer, tag)
        return self.in_a_thread("send", work, tensors, "out", lambda: peer)

    def recv(self, tensors, peer, tag):
        work = self.gloo.recv(tensors, peer, tag)
        return self.in_a_thread("recv", work, tensors, "in", lambda: peer)

    def recv_anysource(self, tensors, tag):
        work = self.gloo.recv_anysource(tensors, tag)
        return self.in_a_thread("recv", work, tensors, "in", work._source_rank)

    def in_a_thread(self, name, work, tensors, way, find_peer):
        """Wait for gloo's message, then for the link to the other rank."""
        transfer = Transfer()

        def wait():
            try:
                work.wait()
                transfer.peer = find_peer()
                end = self.end_to(transfer.peer)
                seconds = end.link.message(bytes_of(tensors))
                sleep_while_carried(name, [(end, seconds, [way])])
                transfer.future.set_result(tensors)
            except Exception as error:
                transfer.future.set_exception(error)

        threading.Thread(target=wait, daemon=True).start()
        return transfer

    def alltoall(self, outputs, inputs, opts):
        sizes = [[each.nbytes for each in tensors] for tensors in (inputs, outputs)]
        costs = self.costs_of_pieces(*sizes)
        return self.pass_on("alltoall", [outputs, inputs, opts], costs)

    def costs_of_pieces(self, sent, received):
        """Of an all-to-all, whose pieces go straight to their rank, one at a time.

        sent, received: the bytes to and from each rank. R. Thakur et al., "Optimization
        of Collective Communication Operations in MPICH", 2005: pairwise exchange.
        """
        costs = []
        for way, sizes in (("out", sent), ("in", received)):
            for peer, size in enumerate(sizes):
                if size and peer != self.rank():
                    end = self.end_to(peer)
                    costs.append((end, end.link.message(size), [way]))
        return costs


def sleep_while_carried(name, costs):
    """Let each end of a link carry what it has to, and return when all is done."""
    over = [end.carry(name, seconds, *ways) for end, seconds, ways in costs]
    if over:
        time.sleep(max(0.0, max(over) - time.perf_counter()))


def all_to_all_in_one(name):
    """A method of PretendNetwork: gloo's all-to-all of this name, of rows of tensors."""

    def method(self, output, input, output_splits, input_splits, opts):
        sent = bytes_by_rank(input, input_splits, self.size())
        received = bytes_by_rank(output, output_splits, self.size())
        arguments = [output, input, output_splits, input_splits, opts]
        return self.pass_on(name, arguments, self.costs_of_pieces(sent, received))

    return method


def ring_collective(name, rounds):
    """A method of PretendNetwork: gloo's of this name, at the cost of a ring."""

    def method(self, *arguments):
        size = max(bytes_of(tensors) for tensors in arguments[:-1])
        seconds = self.slowest.link.ring(size, self.size(), rounds)
        return self.pass_on(name, arguments, [(self.slowest, seconds, BOTH)])

    return method


# torch's newer names, and the older ones, which gloo alone has for a while (torch 2.13)
BEFORE = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
# what `carried` has, with each version
SHORT = {
    "_allgather_base": "allgather",
    "_reduce_scatter_base": "reduce_scatter",
    "alltoall_base": "alltoall",
}
# the rounds of a ring that they take
RINGS = {"allreduce": 2, "allgather": 1, "_allgather_base": 1, "all_gather_single": 1}
RINGS |= {"reduce_scatter": 1, "_reduce_scatter_base": 1, "reduce_scatter_single": 1}
for name, rounds in RINGS.items():
    setattr(PretendNetwork, name, ring_collective(name, rounds))
for name in ("alltoall_base", "all_to_all_single"):
    setattr(PretendNetwork, name, all_to_all_in_one(name))


def bytes_of(tensors):
    """The bytes of tensors in lists, which may be lists of lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(map(bytes_of, tensors))


def bytes_by_rank(tensor, rows, ranks):
    """The bytes of a tensor's rows for each rank. rows: none where all are equal."""
    if not rows:
        return [tensor.nbytes // ranks] * ranks
    return [tensor[:1].nbytes * number for number in rows]
