"""A GPT as the layers of a pipeline, and stages that only sleep, to see schedules."""

import time
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_course.scenery.models import Block


class Embedding(nn.Module):
    """A GPT's first layer: int64 (batch, tokens) to float (batch, tokens, width)."""

    def __init__(self, vocabulary, context, width):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.tokens(tokens) + self.positions(places)


class Head(nn.Sequential):
    """The last layer of a GPT, not tied to the embedding, which is on another rank."""

    def __init__(self, vocabulary, width):
        super().__init__(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))


def layers_of_gpt(vocabulary, context, layers, heads, width):
    """A GPT's layers, in order, as (class, its arguments ...): nothing is built yet."""
    first, last = (Embedding, vocabulary, context, width), (Head, vocabulary, width)
    return [first, *[(Block, width, heads, 0.0)] * layers, last]


def token_loss(logits, targets):
    """Mean cross entropy of float (batch, tokens, vocabulary), int64 (batch, tokens)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def bubble(stages, micro_batches):
    """The share of a step in which a stage waits, where all stages take equally long.

    Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", 2019.
    """
    return (stages - 1) / (micro_batches + stages - 1)


def schedule(kind, stages, micro_batches, unit=1):
    """A step of a pipeline whose stages take equally long: for each stage its
    [(kind, micro-batch, begin, length)], a forward `unit` long and a backward twice that.

    kind: "GPipe", all forwards first, or "1F1B", one forward, one backward. D.
    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM", 2021, section 2.2. A stage begins when it is free and its input
    has arrived.
    """
    orders = []
    for stage in range(stages):
        ahead = micro_batches if kind == "GPipe" else min(stages - stage, micro_batches)
        order = [("forward", number) for number in range(ahead)]
        for number in range(micro_batches):
            order.append(("backward", number))
            if ahead + number < micro_batches:
                order.append(("forward", ahead + number))
        orders.append(order)
    spans, ends = [[] for _ in orders], {}  # ends: {(kind, micro-batch, stage): when}
    while any(orders):
        for stage, order in enumerate(orders):
            if order and (begin := arrival(*order[0], stage, stages, ends)) is not None:
                what, number = order.pop(0)
                if spans[stage]:
                    *_, last, length = spans[stage][-1]
                    begin = max(begin, last + length)
                length = unit if what == "forward" else 2 * unit
                spans[stage].append((what, number, begin, length))
                ends[what, number, stage] = begin + length
    return spans


def arrival(what, number, stage, stages, ends):
    """When a stage has its input; None while the stage before it is not done."""
    source = stage - 1 if what == "forward" else stage + 1
    return ends.get((what, number, source)) if 0 <= source < stages else 0


# ---- stages that sleep ----


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


def kept_at_most(log):
    """The most micro-batches that had gone forward through a stage and not yet back."""
    return max(accumulate(1 if kind == "forward" else -1 for kind, *_ in log))
