"""Question 5: find the bugs in an optimizer whose master weights are shards."""

from functools import partial

import torch
from torch import nn

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import on_every_rank
from ddp_course.checks.ex12.counted import bytes_sent, least_in_use, messages
from ddp_course.checks.ex12.master_cases import described, gradients_of, may_keep, start_of
from ddp_course.checks.ex12.master_claims import claims
from ddp_course.checks.ex12.optimizer import bytes_of_moved
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.watch import memory_timeline


def observe_shards(kind, cases):
    """Of each case, some steps: the weights after them, and the bytes kept and sent."""
    with process_group(timeout=5) as (rank, n):
        return [observe_case(kind, case, rank, n) for case in cases]


def observe_case(kind, case, rank, n):
    parameters = [nn.Parameter(part) for part in in_shapes(case, start_of(case))]
    steps = [in_shapes(case, gradient) for gradient in gradients_of(case)[rank]]
    given = [parameter.untyped_storage() for parameter in parameters]
    with trying(described(case)), memory_timeline() as timeline, CheckedWatch() as watched:
        optimizer = kind(parameters, case["lr"])
        at_begin = bytes_sent(messages(watched.log, n))
        for gradients in steps:
            for parameter, gradient in zip(parameters, gradients):
                parameter.grad = gradient
            optimizer.step()
            for parameter in parameters:
                parameter.grad = None
            if any(parameter.dtype != torch.bfloat16 for parameter in parameters):
                break  # the next gradients do not fit, and the verdict tells why
        moved = bytes_of_moved(parameters, given)
        kept = least_in_use(timeline, may_keep(case) + moved) - moved
    return {
        "weights": torch.cat([parameter.detach().flatten() for parameter in parameters]),
        "kept": kept,
        "sent": bytes_sent(messages(watched.log, n)) - at_begin,
    }


def in_shapes(case, vector):
    """A vector as tensors of the case's shapes, each with memory of its own."""
    parts = vector.split([torch.Size(shape).numel() for shape in case["shapes"]])
    return [part.clone().view(shape) for part, shape in zip(parts, case["shapes"])]


@question(
    "Look at three numbers on 3 ranks: the last weight before and after a step; the bytes of optimizer.master."
    "untyped_storage(); and a weight near 1 whose update is 0.001, before and after ten steps.",
    "Three places. Integer division rounds down, and what is left over belongs to no shard. A slice of a tensor is a view, "
    "and a view keeps the whole tensor in memory. And bf16 has steps of 0.0078 above 1: a master weight that is read from "
    "the weights in bf16 loses each smaller update.",
    "joined: pad the vector with nn.functional.pad(vector, (0, -len(vector) % self.n)). In __init__: self.master = "
    "whole[self.own].clone(). In step: without self.master.copy_(weights[self.own]).",
)
def check_master_shards(answer, draw):
    """The weights of all ranks are those of one process, no rank keeps more than its shard,
    and each number is sent once.
    """
    for n in (3, 2):  # on 3, what is kept tells a view from a third vector
        cases = [a_case(draw, n, left) for left in (*range(1, n), *[0] * (n == 3))]
        of_ranks = answer.on_ranks(observe_shards, cases, nproc=n)
        for place, case in enumerate(cases):
            on_every_rank(partial(claims, case), [seen[place] for seen in of_ranks])


def a_case(draw, n, left):
    """left: what is left over of the numbers on n ranks."""
    shapes = [(draw.randrange(30, 40), draw.randrange(30, 40)), (draw.randrange(5, 40),), (20, draw.randrange(30, 40))]
    numbers = sum(torch.Size(shape).numel() for shape in shapes)
    shapes.append((30 + (left - numbers - 30) % n,))
    return {"n": n, "shapes": shapes, "lr": draw.uniform(0.001, 0.002), "seed": draw.randrange(10**6)}
