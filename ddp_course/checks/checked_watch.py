"""A Watch that an answer cannot evade: gloo counts, too."""

import math
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
        self.before = counted()
        return super().__enter__()

    def __exit__(self, kind, error, trace):
        super().__exit__(kind, error, trace)
        if kind is not None or not dist.is_initialized():
            return
        names = [entry["name"] for entry in self.log]
        for before, now, most in zip(self.before, counted(), at_most(names)):
            if now - before > most:
                raise RuntimeError(f"the answer {UNSEEN}: it sees {most} operations at most, and gloo {now - before}")


def at_most(names):
    """Of how many collectives, and of how many operations, of gloo a log consists."""
    if "monitored_barrier" in names:  # gloo's is made of messages
        return math.inf, math.inf
    ranks = dist.get_world_size()  # gloo reduces a list of tensors one by one
    each = [ranks if name == "reduce_scatter" else name not in MESSAGES for name in names]
    return sum(each), sum(max(1, number) for number in each)


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
