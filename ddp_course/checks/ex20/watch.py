"""Logs what a rank brings to each communication, and which ranks take part."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d  # not what noticing_ranks notes

from ddp_course.checks.groups import GroupWatch, ranks_of

# c10d's collectives that have their result as the first argument, and what is sent as the second
RESULT_FIRST = ("allgather", "alltoall", "gather", "scatter", "reduce_scatter")


class BroughtWatch(GroupWatch):
    """A GroupWatch whose log says what this rank brings, in bytes."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before, opname = len(self.log), getattr(function, "_opname", "")
        returned = super().__torch_dispatch__(function, types, args, kwargs)
        for entry in self.log[before:]:
            place = int(function.namespace == "c10d" and opname.strip("_").startswith(RESULT_FIRST))
            received = entry["name"].startswith(("recv", "barrier", "monitored")) or receives(opname, args)
            entry["brought"] = 0 if received else size_of(args[place])
        return returned


def receives(opname, args):
    """Whether this rank only receives in this broadcast: its source is another rank."""
    if not opname.strip("_").startswith("broadcast"):
        return False
    source = next(value for value in args if type(value) is int)  # as a rank of the group
    return c10d.get_rank() != ranks_of(args)[source]


def size_of(tensors):
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(map(size_of, tensors)) if isinstance(tensors, list | tuple) else 0


def sent(log, barriers=False):
    """[(name, bytes that this rank brings)] of a log's messages, with barriers or without."""
    none = ("recv",) if barriers else ("recv", "barrier", "monitored")
    messages = (entry for entry in log if not entry["name"].startswith(none))
    return [(entry["name"], entry["brought"]) for entry in messages]


OF_WORLD = "dist.get_rank() is the rank in the world. The rank in the group is dist.get_rank(group)"


@contextmanager
def noticing_ranks(place):
    """Whether the code asks for its rank in the world where its place in the group is
    another, and never translates it: yields a list of what it asks for. An error gets a
    note then.
    """
    asked, before = [], {name: getattr(dist, name) for name in ("get_rank", *TRANSLATE)}
    for name, function in before.items():
        setattr(dist, name, noting(asked, name, function))
    try:
        yield asked
    except Exception as error:
        if takes_world(asked) and c10d.get_rank() != place:
            error.add_note(OF_WORLD)
        raise
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


TRANSLATE = ("get_process_group_ranks", "get_group_rank", "get_global_rank")


def noting(asked, name, function):
    def call(*args, **kwargs):
        group = [*args, *kwargs.values()]
        asked.append("world" if name == "get_rank" and group in ([], [None]) else name)
        return function(*args, **kwargs)

    return call


def takes_world(asked):
    return "world" in asked and not set(TRANSLATE) & set(asked)
