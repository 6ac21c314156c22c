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
        self.before, self.in_pieces = counted(), 0
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        # gloo reduces a list of tensors one by one
        self.in_pieces += getattr(function, "_opname", "") == "reduce_scatter_"
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
        names, others = [entry["name"] for entry in self.log], dist.get_world_size() - 1
        messages = sum(map(names.count, MESSAGES))
        barriers = names.count("monitored_barrier")  # rank 0 has a message from and to each rank
        collectives = len(names) - messages - barriers + others * self.in_pieces
        return collectives, collectives + messages + 2 * others * barriers


def counted():
    """How many collectives gloo has begun in this process so far, in all groups; and how
    many operations in the first group, messages included.
    """
    if not dist.is_initialized():
        return 0, 0
    collectives = 0
    if recorder:
        entries = pickle.loads(recorder(True, False, False)).get("entries", [])
        collectives = max((entry["record_id"] + 1 for entry in entries), default=0)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    sequence = getattr(backend, "_get_sequence_number_for_group", lambda: 0)
    return collectives, sequence()
