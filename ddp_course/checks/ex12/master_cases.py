"""The weights and gradients with which question 5 tries an answer, and what it gives, right
or with faults, in one process.
"""

from collections import namedtuple
from itertools import product

import torch

from ddp_course.checks.ex12.counted import ROOM

STEPS, DECAY = 12, 0.9
CAUSES = {
    "rounded": "the master weights have been read from the weights in bf16, so they have been rounded in each step, and "
    "small updates are lost: the master weights are what is kept, and the weights follow from them",
    "sum": "the gradients have been added up over the ranks: their mean is needed",
    "own": "each shard has been updated with the gradients of its own rank only: the mean is over all ranks",
    "twice": "the gradients have been divided by the number of ranks twice",
    "no momentum": "this is plain SGD: the velocity remembers 0.9 of what it was, from step to step",
    "no decay": "the velocity adds up all gradients: it becomes 0.9 * v plus the mean gradient",
    "bf16": "some digits are lost on the way: the velocity is in fp32",
    "uphill": "the weights go up: lr * v is subtracted",
}
CHOICES = {
    "master": ("", "rounded"),
    "gradient": ("", "sum", "own", "twice"),
    "velocity": ("", "no momentum", "no decay", "bf16"),
    "sign": ("", "uphill"),
}
Faults = namedtuple("Faults", CHOICES, defaults=[""] * len(CHOICES))


def described(case):
    return f"{STEPS} steps on {case['n']} ranks with {numbers_of(case):,} parameters"


def numbers_of(case):
    return sum(torch.Size(shape).numel() for shape in case["shapes"])


def shard_of(case):
    return -(-numbers_of(case) // case["n"])


def may_keep(case):
    return 8 * shard_of(case) + ROOM


def start_of(case):
    """All parameters, as one vector in bf16. All stay below 2, where steps get longer."""
    generator = torch.Generator().manual_seed(case["seed"])
    sizes = 1 + 0.5 * torch.rand(numbers_of(case), generator=generator)
    return (sizes * torch.randn(numbers_of(case), generator=generator).sign()).bfloat16()


def gradients_of(case):
    """gradients[rank][step], each a vector in bf16. They point about the same way in all
    steps, so that small updates add up; the last ones are large enough to be seen.
    """
    generator = torch.Generator().manual_seed(case["seed"] + 1)
    numbers = numbers_of(case)
    same = torch.randn(numbers, generator=generator).clamp(-3, 3)
    same[-case["n"] :] = 2.0
    noise = torch.randn(case["n"], STEPS, numbers, generator=generator)
    return list((same + 0.5 * noise).bfloat16())


def master_after(case, faults=Faults()):
    """The master weights after all steps, float64."""
    n, gradients = case["n"], torch.stack(gradients_of(case)).double()
    owner = torch.arange(numbers_of(case)) // shard_of(case)
    combined = {"": gradients.mean(0), "sum": gradients.sum(0), "twice": gradients.mean(0) / n}
    combined["own"] = gradients.gather(0, owner.expand(1, STEPS, -1))[0]
    master, velocity = start_of(case).double(), 0.0
    decay = {"no momentum": 0.0, "no decay": 1.0}.get(faults.velocity, DECAY)
    for gradient in combined[faults.gradient]:
        velocity = decay * velocity + gradient
        if faults.velocity == "bf16":
            velocity = rounded(velocity)
        if faults.master:
            master = rounded(master)
        master = master - case["lr"] * velocity * (-1 if faults.sign else 1)
    return master


def rounded(vector):
    return vector.bfloat16().double()


def cause(faults):
    return CAUSES[next(filter(None, faults))]


def combinations():
    """Those of one fault, and then of two."""
    found = [Faults(*one) for one in product(*CHOICES.values())]
    return [one for many in (1, 2) for one in found if sum(map(bool, one)) == many]
