"""A pipeline that computes nothing: it counts slots, as the ranks follow a plan."""

import torch
from torch import nn

from ddp_course.models.pipeline import Pipeline, owners_of


class Clocked(Pipeline):
    """A Pipeline whose messages are clocks, so that the slots of a real run are counted
    and not measured: a busy machine changes none of them.

    A rank's clock advances by `lengths[kind, stage]` with each action. A message has
    its sender's clock, and an action begins no earlier than the message arrived. L.
    Lamport, "Time, Clocks, and the Ordering of Events in a Distributed System", 1978.
    slots: (kind, stage, micro-batch, begin, length) of each action.
    """

    def __init__(self, owners, rank, lengths):
        parts = {s: nn.Linear(1, 1) for s, owner in owners.items() if owner == rank}
        super().__init__(parts, owners)
        self.lengths, self.clock, self.slots = lengths, 0.0, []

    def compute(self, kind, stage, i, arrived):
        begin = max(self.clock, 0.0 if arrived is None else arrived.item())
        self.slots.append((kind, stage, i, begin, self.lengths[kind, stage]))
        self.clock = begin + self.lengths[kind, stage]
        return torch.tensor([self.clock])


def count_slots(plan, rank, units, slowness=()):
    """Follow a plan on the ranks of the process group; return this rank's slots.

    units: how long each kind of action takes on a whole rank, {kind: slots}. slowness:
    {stage: a factor} for stages that take longer than others.
    """
    owners, slowness = owners_of(plan), dict(slowness)
    lengths = {
        (kind, stage): unit * len(plan) / len(owners) * slowness.get(stage, 1)
        for kind, unit in units.items()
        for stage in owners
    }
    micro_batches = 1 + max(i for *_, i in plan[rank])
    pipe = Clocked(owners, rank, lengths)
    nothing = [torch.zeros(1)] * micro_batches
    pipe.run(plan[rank], nothing, nothing)
    return pipe.slots
