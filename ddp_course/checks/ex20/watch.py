"""Logs what a rank brings to each communication, and which ranks take part."""

import torch
import torch.distributed as dist

from ddp_course.checks.checked_watch import CheckedWatch

# c10d's collectives that have their result as the first argument, and what is sent as the second
RESULT_FIRST = ("allgather", "alltoall", "gather", "scatter", "reduce_scatter")


class BroughtWatch(CheckedWatch):
    """A CheckedWatch whose entries say what this rank brings, in bytes, and the `ranks`."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before, opname = len(self.log), getattr(function, "_opname", "")
        returned = super().__torch_dispatch__(function, types, args, kwargs)
        for entry in self.log[before:]:
            place = int(function.namespace == "c10d" and opname.strip("_").startswith(RESULT_FIRST))
            received = entry["name"].startswith(("recv", "barrier", "monitored"))
            entry["brought"] = 0 if received else size_of(args[place])
            entry["ranks"] = ranks_of([*args, *(kwargs or {}).values()])
        return returned


def size_of(tensors):
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(map(size_of, tensors)) if isinstance(tensors, list | tuple) else 0


def ranks_of(arguments):
    """The ranks of the process group among a communication's arguments: it, or its name."""
    names = dist.distributed_c10d._world.pg_names.values()
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            try:
                argument = dist.ProcessGroup.unbox(argument).group_name
            except (RuntimeError, TypeError):
                continue  # a reduction, such as SUM
        if isinstance(argument, str) and argument in names:
            return dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(argument))
    return []


def sent(log):
    """[(name, bytes that this rank brings)] of a log's messages; barriers are none."""
    messages = (entry for entry in log if not entry["name"].startswith(("barrier", "monitored", "recv")))
    return [(entry["name"], entry["brought"]) for entry in messages]


def outside(log, ranks):
    """The names of communications in which others than these ranks take part."""
    return [entry["name"] for entry in log if not set(entry["ranks"]) <= set(ranks)]


def group_of(groups):
    """This rank's group among these lists of ranks: (the group, this rank's place in it,
    the number of the list).
    """
    made = [dist.new_group(ranks) for ranks in groups]
    rank = dist.get_rank()
    [number] = [number for number, ranks in enumerate(groups) if rank in ranks]
    return made[number], groups[number].index(rank), number
