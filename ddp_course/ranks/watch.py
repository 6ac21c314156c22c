"""What a rank sends, and what it holds in memory, as torch itself sees it."""

import time
import weakref
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def count_collectives(step):
    """Run `step()`; return how many collectives of which kind it called, {name:
    number}, those of DDP's C++ included.
    """
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as mode:
        step()
    return {
        str(kind).removeprefix("c10d.").rstrip("_"): number
        for kind, number in mode.get_comm_counts().items()
    }


class Watch(TorchDispatchMode):
    """Log each communication of this rank while the `with` block runs, whichever
    function asked for it: `log`, of dicts.

    name: 'send', 'recv', 'allreduce', 'broadcast', ...; bytes: of its first tensors;
    whole: of all that the ranks share in it; peer: the other rank of a send or recv;
    waits: whether the caller waits for it to end (async_op=False); at: the time, in
    seconds.
    """

    def __init__(self):
        super().__init__()
        self.log = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if _is_sharded(types):
            return NotImplemented
        if function.namespace == "c10d":
            name = function._opname.strip("_").removesuffix("_base")
            entry = {
                "name": name,
                "bytes": _bytes(args[0]),
                "whole": max(map(_bytes, args)),
            }
            entry |= {
                "peer": args[2] if name in ("send", "recv") else None,
                "at": time.perf_counter(),
            }
            entry["waits"] = any(
                argument is False for argument in args[1:]
            )  # asyncOp, else left out
            self.log.append(entry)
        return function(*args, **(kwargs or {}))


def _is_sharded(types):
    """Whether an operation is one of FSDP's DTensors: refused, it comes back as one of
    the shards within.
    """
    return any(kind.__name__ == "DTensor" for kind in types)


def _bytes(tensors):
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(map(_bytes, tensors)) if isinstance(tensors, list | tuple) else 0


def count_bytes(step):
    """Run `step()`; return how many bytes the ranks shared in its collectives, {kind:
    bytes}.

    In a ring of n ranks each sends (n - 1) / n of that, and twice as much for an
    allreduce: see lesson 2.
    """
    shared = {}
    with Watch() as watched:
        step()
    for entry in watched.log:
        shared[entry["name"]] = shared.get(entry["name"], 0) + entry["whole"]
    return shared


@contextmanager
def memory_timeline():
    """A list that gets, for each operation within the block, the bytes then in use by
    tensors that were made in it.

    All storages count, once each: DDP's buckets and FSDP's gathered weights, too, but
    not what a backend keeps for itself.
    """
    before, made = weakref.WeakValueDictionary(), weakref.WeakValueDictionary()
    timeline = []

    class Storages(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            if _is_sharded(types):
                return NotImplemented
            for storage in _storages((args, kwargs)):
                if storage._cdata not in made:
                    before[storage._cdata] = storage
            returned = operation(*args, **(kwargs or {}))
            for storage in _storages(returned):
                if storage._cdata not in before:
                    made[storage._cdata] = storage
            timeline.append(sum(storage.nbytes() for storage in list(made.values())))
            return returned

    with Storages():
        yield timeline


def _storages(values):
    """Of the tensors in some values; not of FSDP's stand-ins, nor of those on 'meta',
    which have a shape and no bytes.
    """
    kinds = (torch.Tensor, torch.nn.Parameter)
    tensors = [
        value
        for value in tree_leaves(values)
        if type(value) in kinds and value.device.type != "meta"
    ]
    return [tensor.untyped_storage() for tensor in tensors]
