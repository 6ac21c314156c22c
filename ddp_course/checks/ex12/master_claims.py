"""What question 5 claims of the weights of a rank, and of what it keeps and sends."""

import math
from functools import partial

import torch

from ddp_course.checks.claims import Between, Claim, agree
from ddp_course.checks.ex12.counted import ROOM
from ddp_course.checks.ex12.master_cases import (
    STEPS,
    cause,
    combinations,
    described,
    master_after,
    may_keep,
    numbers_of,
    rounded,
    shard_of,
    start_of,
)

HALF_A_STEP = 2.67  # digits, where numbers below 2 are rounded to bf16
MORE_THAN_A_STEP, NEAR = 2.3, 1.4
DIGITS_LOST = (
    "some digits are lost on the way: gradients are added up in fp32, and velocity and master weights are in fp32"
)
LEFT_OVER = (
    "these numbers belong to no shard, so nobody updates them: the number of parameters, divided by that of ranks, has a "
    "remainder. Round up, and pad"
)
UNCHANGED = "no parameter has changed: step() writes the new numbers into the given tensors"
VIEW = (
    "a rank keeps a whole vector in fp32, and not only its shard. A slice is a view, and a view keeps the whole tensor that "
    "it was taken from: copy the shard. Or is something else of that size stored in self?"
)
TRAFFIC = (
    "reduce_scatter the gradients in fp32, so that each rank gets the sum of its shard, and all_gather the weights in bf16: "
    "nothing else needs to travel"
)


def claims(case, rank, of_ranks):
    seen, call, n = of_ranks[rank], described(case), case["n"]
    got, kind = seen["weights"], "bf16 parameters, as many as were given"
    yield Claim(call, [str(got.dtype), len(got)], ["torch.bfloat16", numbers_of(case)], "step() changes the numbers of the "
                "parameters, and nothing else of them", told=kind, shown=f"{len(got):,}, {got.dtype}")  # fmt: skip
    got = got.double()
    expected, left = master_after(case), numbers_of(case) % n
    yield Claim(f"{call}: whether any has changed", torch.equal(got, start_of(case).double()), False, UNCHANGED,
                told="all", shown="none")  # fmt: skip
    if left:
        old, new = got[-left:], [round(number, 4) for number in expected[-left:].tolist()]
        yield Claim(f"{call}: the last {left} of them" if left > 1 else f"{call}: the last one",
                    torch.equal(old, start_of(case)[-left:].double()), False, LEFT_OVER,
                    told=new, shown=f"{old.tolist()}, as at the beginning")  # fmt: skip
    yield Claim(
        f"{call}: their numbers", got, expected, partial(unexplained, got, expected), partial(mistakes, case), HALF_A_STEP,
        scale=2.0, mistake_digits=MORE_THAN_A_STEP,
    )  # fmt: skip
    off = int((got != rounded(expected)).sum())
    yield Claim(f"{call}: how many are rounded to another number", off, range(1 + len(got) // 800), DIGITS_LOST,
                told="hardly any")  # fmt: skip
    kept, whole = may_keep(case), 4 * len(got)
    yield Claim(f"{call}: what a rank keeps", seen["kept"], Between(-math.inf, kept), "a rank keeps more than the fp32 "
                "master weights and velocity of its shard: 8 bytes for each of its parameters",
                [(Between(whole + kept // 2 - ROOM), VIEW)], told=f"at most {kept:,} bytes",
                shown=f"{seen['kept']:,} bytes")  # fmt: skip
    enough = STEPS * (n * shard_of(case) * (4 + 2) + ROOM)
    yield Claim(f"{call}: what is sent", seen["sent"], Between(0, enough), TRAFFIC, told=f"at most {enough:,} bytes",
                shown=f"{seen['sent']:,} bytes")  # fmt: skip


def unexplained(got, expected):
    """Where no mistake below fits."""
    if agree(got, expected, NEAR, scale=2.0):
        return f"{DIGITS_LOST}. Or is the rule another one: the velocity first, and then lr times the velocity?"
    return "follow one number: its gradients on all ranks, the velocity, the master weight, the weight in bf16"


def mistakes(case):
    """The weights with each combination of faults, and why."""
    for faults in combinations():
        yield master_after(case, faults), cause(faults)
