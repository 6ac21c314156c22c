"""What a rank sends, and what it holds in memory, as torch itself sees it."""

import time
import weakref
from collections import Counter
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# the functional collectives, which DTensor and compiled programs call, by c10d's names
FUNCTIONAL = {
    "all_reduce": "allreduce",
    "all_gather_into_tensor": "allgather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "alltoall",
    "broadcast": "broadcast",
}


class Watch(TorchDispatchMode):
    """Log each communication of this rank while the `with` block runs, whichever
    function asked for it: `log`, of dicts.

    name: 'send', 'recv', 'allreduce', 'broadcast', ...; bytes: of its first tensors, or
    of the result of a functional collective; whole: of all that the ranks share in it;
    peer: the other rank of a send or recv; waits: whether the caller waits for it to end
    (async_op=False); at: the time, in seconds.
    """

    def __init__(self):
        super().__init__()
        self.log = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if _is_sharded(types):
            return NotImplemented
        at = time.perf_counter()
        name = _name_of(function)
        if name and function.namespace == "c10d":
            self._note(name, at, _bytes(args[0]), args)
        returned = function(*args, **(kwargs or {}))
        if name and function.namespace == "_c10d_functional":
            self._note(name, at, _bytes(returned), [*args, returned])
        return returned

    def _note(self, name, at, size, shared):
        self.log.append({
            "name": name,
            "bytes": size,
            "whole": max(map(_bytes, shared)),
            "peer": shared[2] if name in ("send", "recv") else None,
            "at": at,
            "waits": any(each is False for each in shared[1:]),  # asyncOp, else left out
        })  # fmt: skip


def _name_of(operation):
    """What c10d calls a communication; None for any other operation."""
    if operation.namespace == "c10d":
        return operation._opname.strip("_").removesuffix("_base")
    if operation.namespace == "_c10d_functional":
        name = operation._opname.strip("_").removesuffix("_out")
        return FUNCTIONAL.get(name.removesuffix("_coalesced"))
    return None


def _is_sharded(types):
    """Whether an operation is one of FSDP's DTensors: refused, it comes back as one of
    the shards within.
    """
    return any(kind.__name__ == "DTensor" for kind in types)


def _bytes(tensors):
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(map(_bytes, tensors)) if isinstance(tensors, list | tuple) else 0


def count_collectives(step):
    """Run `step()`; return how many collectives of which kind it called, {name:
    number}, those of DDP's C++ and DTensor's functional ones included.
    """
    with Watch() as watch:
        step()
    return dict(Counter(entry["name"] for entry in watch.log))


def count_bytes(step):
    """Run `step()`; return how many bytes the ranks shared in its collectives, {kind:
    bytes}.

    In a ring of n ranks each sends (n - 1) / n of that, and twice as much for an
    allreduce: see lesson 2.
    """
    shared = {}
    with Watch() as watch:
        step()
    for entry in watch.log:
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
    """The storages of the tensors in some values; not of FSDP's placeholders, nor of
    those on 'meta', which have no bytes.
    """
    kinds = (torch.Tensor, torch.nn.Parameter)
    tensors = [
        value
        for value in tree_leaves(values)
        if type(value) in kinds and value.device.type != "meta"
    ]
    return [tensor.untyped_storage() for tensor in tensors]


# ---- what a training step keeps, uses and sends ----


class Observed(NamedTuple):
    """A training step as one rank sees it, in bytes or bytes per parameter."""

    kept: dict  # bytes between two steps: see held()
    in_use: list  # after each operation of the step
    blocks: list  # (place in in_use, number of the block that begins to compute there)
    shared: dict  # in collectives of more than a kilobyte, {kind: bytes}


def observe(build, step, per=1):
    """Build a model, train three steps, and return what was Observed of the last two.

    build(): the model and its optimizer. step(model, optimizer): one training step.
    per: the number of parameters, for bytes per parameter.
    """
    with memory_timeline() as timeline:
        model, optimizer, *_ = build()
        step(model, optimizer)
        begin = len(timeline)
        with _blocks_marked(model, timeline) as blocks:
            step(model, optimizer)
    in_use = [used / per for used in timeline[begin:]]
    blocks = [(place - begin, number) for place, number in blocks]
    kept = {part: size / per for part, size in held(model, optimizer).items()}
    shared = count_bytes(lambda: step(model, optimizer))
    shared = {kind: size / per for kind, size in shared.items() if size > 1000}
    return Observed(kept, in_use, blocks, shared)


@contextmanager
def _blocks_marked(model, timeline):
    """A list of where a block begins, forward or backward: (place, its number)."""
    marks, hooks = [], []
    for number, block in enumerate(getattr(_unwrapped(model), "blocks", [])):

        def mark(*_, number=number):
            marks.append((len(timeline), number))

        hooks.append(block.register_forward_pre_hook(mark))
        hooks.append(block.register_full_backward_pre_hook(mark))
    yield marks
    for hook in hooks:
        hook.remove()


def _unwrapped(model):
    return getattr(model, "module", model)


def held(model, optimizer):
    """What this rank keeps between two steps: weights, gradients, optimizer, in bytes.

    A gradient that is a view counts with its whole storage, once. Master weights count
    as the optimizer's.
    """
    parameters, state = list(model.parameters()), []
    gradients = [value.grad for value in parameters if value.grad is not None]
    for each in getattr(optimizer, "optimizers", [optimizer]):  # several, as one
        for inner in ("optim", "optimizer"):  # the local part of a sharded one
            each = getattr(each, inner, each)
        state += [value for values in each.state.values() for value in values.values()]
        state += getattr(each, "master_weights", [])
    kept = {"weights": parameters, "gradients": gradients, "optimizer": state}
    return {part: bytes_of(tensors) for part, tensors in kept.items()}


def bytes_of(tensors):
    """The bytes of the tensors' storages on this rank, each once; of DTensors, the
    shards.
    """
    local = [
        tensor.to_local() if hasattr(tensor, "to_local") else tensor
        for tensor in tensors
    ]
    storages = {storage.data_ptr(): storage.nbytes() for storage in _storages(local)}
    return sum(storages.values())


def sent_in_a_ring(shared, ranks):
    """The bytes that one rank sends in a ring for these collectives, {kind: bytes}: see
    lesson 2.
    """
    twice = shared.get("allreduce", 0)  # a reduce-scatter and an all-gather
    return (sum(shared.values()) + twice) * (ranks - 1) / ranks
