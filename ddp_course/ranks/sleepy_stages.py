"""Stages of a pipeline that only sleep, to see schedules."""

import time

import torch
import torch.distributed as dist
from torch import nn


class Nap(torch.autograd.Function):
    """Sleeps 30 ms forward and 60 ms backward, logs when, and passes on its clock.

    The clock is the schedule without the disturbances of a busy machine: a forward
    takes 1 and a backward 2, and neither begins before its input has arrived.
    """

    log, clock = [], 0

    @staticmethod
    def sleep(kind, units, arrived):
        number = sum(entry[0] == kind for entry in Nap.log)
        begin = time.perf_counter()
        time.sleep(0.030 * units)
        Nap.log.append((kind, number, begin, time.perf_counter() - begin))
        Nap.clock = max(Nap.clock, arrived.max().item()) + units
        return torch.full_like(arrived, Nap.clock)

    @staticmethod
    def forward(ctx, x):
        return Nap.sleep("forward", 1, x)

    @staticmethod
    def backward(ctx, gradient):
        return Nap.sleep("backward", 2, gradient)


class Sleeper(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return Nap.apply(x * self.weight)


def sleepy_step(kind, micro_batches):
    """One step of a pipeline with a Sleeper on each rank of the process group.

    kind: a schedule of torch.distributed.pipelining, such as "Schedule1F1B". Returns
    this rank's log, [(kind, micro-batch, begin, seconds)], and its clock at the end.
    """
    from torch.distributed import pipelining

    rank, world_size = dist.get_rank(), dist.get_world_size()
    stage = pipelining.PipelineStage(Sleeper(), rank, world_size, torch.device("cpu"))
    plan = getattr(pipelining, kind)
    schedule = plan(stage, micro_batches, loss_fn=lambda y, _: y.sum())
    x = torch.zeros(micro_batches, 4)  # all micro-batches are there at time 0
    for _ in range(2):  # the first step exchanges shapes
        dist.barrier()
        Nap.log, Nap.clock = [], 0
        target = x if rank == world_size - 1 else None
        schedule.step(*[x] * (rank == 0), target=target)
    return Nap.log, Nap.clock


def since_the_beginning(logs):
    """The logs of all ranks, with times in seconds since the step began."""
    start = min(begin for log in logs for _, _, begin, _ in log)
    return [
        [(*what, begin - start, long) for *what, begin, long in log] for log in logs
    ]
