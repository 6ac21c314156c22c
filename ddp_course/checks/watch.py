"""Seeing what an answer sends: every operation of torch.distributed, whichever function asked for it."""

import time
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """Log each communication of this rank while the `with` block runs: `log`, a list of dicts.

    name: 'send', 'recv', 'allreduce', 'broadcast', ...; bytes: of its tensors; peer: the other rank of a send or recv;
    waits: whether the caller waits for it to end (async_op=False); at: the time, in seconds.
    """

    def __init__(self):
        super().__init__()
        self.log = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            name = function._opname.strip("_")
            entry = {"name": name, "bytes": _bytes(args[0]), "peer": None, "at": time.perf_counter()}
            if name in ("send", "recv"):
                entry["peer"] = args[2]
            entry["waits"] = any(argument is False for argument in args[1:])  # asyncOp, else left out
            self.log.append(entry)
        return function(*args, **(kwargs or {}))


def _bytes(tensors):
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(tensor) for tensor in tensors) if isinstance(tensors, list | tuple) else 0


class NotedWork:
    """What all_reduce(async_op=True) has returned, and whether anybody has waited for it."""

    def __init__(self, work):
        self.work, self.waited = work, False

    def wait(self, *arguments):
        self.waited = True
        return self.work.wait(*arguments)

    def get_future(self):
        self.waited = True
        return self.work.get_future()

    def __getattr__(self, name):
        return getattr(self.work, name)


@contextmanager
def noting_works():
    """A list of the NotedWorks of each `dist.all_reduce` that is begun within."""
    original, noted = dist.all_reduce, []

    def all_reduce(*arguments, **options):
        work = original(*arguments, **options)
        if work is not None:
            noted.append(NotedWork(work))
        return work and noted[-1]

    dist.all_reduce = all_reduce
    try:
        yield noted
    finally:
        dist.all_reduce = original
