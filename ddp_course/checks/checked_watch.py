"""A Watch that an answer cannot evade: gloo counts, too."""

import pickle

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from ddp_course.ranks.watch import Watch

UNSEEN = "sent something that torch's dispatcher was not told of"
# torch's flight recorder, which notes each collective of each of gloo's groups in C++
recorder = getattr(_distributed_c10d, "_dump_fr_trace", None)
MESSAGES = ("send", "recv", "recv_any_source")


class CheckedWatch(Watch):
    """A Watch that raises a RuntimeError if gloo has counted more than is in the log.

    Dispatch modes can be switched off, and a backend can be called directly: neither
    reaches the log.
    """

    def __enter__(self):
        self.before, self.more_pieces, self.in_barriers = counted(), 0, 0
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "_opname", "")
        if name == "reduce_scatter_":  # gloo reduces a list of tensors one by one
            self.more_pieces += len(args[1][0]) - 1
        if name == "monitored_barrier_":  # the first rank has a message from and to each other one
            group = dist.ProcessGroup.unbox(args[1])
            self.in_barriers += 2 * (group.size() - 1 if group.rank() == 0 else 1)
        return super().__torch_dispatch__(function, types, args, kwargs)

    def __exit__(self, kind, error, trace):
        super().__exit__(kind, error, trace)
        if kind is not None or not dist.is_initialized():
            return
        for before, now, most in zip(self.before, counted(), self.at_most()):
            if now - before > most:
                raise RuntimeError(f"the answer {UNSEEN}: it sees {most} operations at most, and gloo {now - before}")

    def at_most(self):
        """Of how many collectives, and of how many operations, of gloo the log consists."""
        names = [entry["name"] for entry in self.log]
        messages, barriers = sum(map(names.count, MESSAGES)), names.count("monitored_barrier")
        collectives = len(names) - messages - barriers + self.more_pieces
        return collectives, collectives + messages + self.in_barriers


def counted():
    """How many collectives gloo has begun in this process so far, and how many operations,
    messages included: each in all groups, those of the answer's own, too.
    """
    if not dist.is_initialized():
        return 0, 0
    collectives = 0
    if recorder:
        entries = pickle.loads(recorder(True, False, False)).get("entries", [])
        collectives = max((entry["record_id"] + 1 for entry in entries), default=0)
    backends = [group._get_backend(torch.device("cpu")) for group in dist.distributed_c10d._world.pg_map]
    sequences = [getattr(backend, "_get_sequence_number_for_group", lambda: 0) for backend in backends]
    return collectives, sum(sequence() for sequence in sequences)
