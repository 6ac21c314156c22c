"""Groups of ranks on which the questions of exercise 17 try an answer."""

import torch
import torch.distributed as dist

from ddp_course.checks.checked_watch import CheckedWatch

GATHERS = ("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced")


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


def whole_world(n):
    return [list(range(n))]


def in_words(groups):
    if len(groups) == 1:
        return f"a group of {len(groups[0])} ranks"
    return "groups " + " and ".join(map(str, groups))


def given(log, size):
    """The bytes that a rank gives to the communication in a Watch's log, in groups of
    this size.
    """
    return sum(entry["whole"] // (size if entry["name"] in GATHERS else 1) for entry in log if is_message(entry))


def is_message(entry):
    return not entry["name"].startswith(("barrier", "monitored", "recv"))


def names_in(log):
    return [entry["name"] for entry in log if is_message(entry)]
