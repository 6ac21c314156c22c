"""Logs what a rank brings to communication, and its calls of new_group."""

from contextlib import contextmanager

import torch.distributed as dist

from ddp_course.checks.checked_watch import CheckedWatch

GATHERS = ("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced")
FROM_ONE = {"broadcast_": 1, "scatter_": 2}  # the place of the group; that of the source follows


class TiedWatch(CheckedWatch):
    """A CheckedWatch that knows of which operations this rank only receives the result."""

    def __init__(self, members):
        super().__init__()
        self.members, self.received = members, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        place = FROM_ONE.get(getattr(function, "_opname", "")) if function.namespace == "c10d" else None
        if place and dist.ProcessGroup.unbox(args[place]).rank() != args[place + 1]:
            self.received.add(len(self.log))
        return super().__torch_dispatch__(function, types, args, kwargs)

    def brought(self):
        """[(name, bytes)] of all operations so far to which this rank has brought something; a
        barrier counts, with no bytes.
        """
        found = []
        for number, entry in enumerate(self.log):
            name, size = entry["name"], entry["whole"]
            if number not in self.received and not name.startswith("recv"):
                own = size // self.members if name in GATHERS else 0 if "barrier" in name else size
                found.append((name, own))
        return found


@contextmanager
def noting_groups():
    """A list that grows with each call of `dist.new_group` for which all ranks are needed."""
    original, calls = dist.new_group, []

    def new_group(*arguments, **options):
        if not options.get("use_local_synchronization"):
            calls.append(1)
        return original(*arguments, **options)

    dist.new_group = new_group
    try:
        yield calls
    finally:
        dist.new_group = original
