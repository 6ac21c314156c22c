"""Groups of ranks: made from lists, and logged with each communication in them."""

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d  # a check may note what an answer calls of dist

from ddp_course.checks.checked_watch import CheckedWatch


def group_of(groups):
    """This rank's group among these lists of ranks: (the group, this rank's place in it,
    the number of the list).
    """
    made = [dist.new_group(ranks) for ranks in groups]
    rank = dist.get_rank()
    [number] = [number for number, ranks in enumerate(groups) if rank in ranks]
    return made[number], groups[number].index(rank), number


class GroupWatch(CheckedWatch):
    """A CheckedWatch whose log says of each communication which ranks take part."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = len(self.log)
        returned = super().__torch_dispatch__(function, types, args, kwargs)
        for entry in self.log[before:]:
            entry["ranks"] = ranks_of([*args, *(kwargs or {}).values()])
        return returned


def ranks_of(arguments):
    """The ranks of the process group among a communication's arguments: it, or its name."""
    names = c10d._world.pg_names.values()
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            try:
                argument = dist.ProcessGroup.unbox(argument).group_name
            except (RuntimeError, TypeError):
                continue  # a reduction, such as SUM
        if isinstance(argument, str) and argument in names:
            return c10d.get_process_group_ranks(c10d._resolve_process_group(argument))
    return []


def outside(log, ranks):
    """The names of communications in which others than these ranks take part."""
    return [entry["name"] for entry in log if not set(entry["ranks"]) <= set(ranks)]
