"""The chains with which question 4 tries an answer: layers, micro-batches, targets."""

import torch
from torch import nn

from ddp_course.checks.training import fill


def stage_of(case, rank):
    """The layers of a rank: linear layers, each with a tanh after it."""
    parts = [nn.Sequential(nn.Linear(case["width"], case["width"]), nn.Tanh()) for _ in range(case["depths"][rank])]
    stage = fill(nn.Sequential(*(layer for part in parts for layer in part)), case["seed"] + rank)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter /= case["width"] ** 0.5  # so that tanh is not at its ends
    return stage


def micro_batches(case, step):
    """Inputs and targets, two lists."""
    generator = torch.Generator().manual_seed(case["seed"] * 2 + 100 + step)
    sizes = [case["size"]] * (case["number"] - 1) + [case["last"]]
    make = lambda size: torch.randn(size, case["width"], generator=generator, dtype=torch.float64)  # noqa: E731
    return [make(size) for size in sizes], [make(size) for size in sizes]


def described(case):
    number, size, last = case["number"], case["size"], case["last"]
    sizes = f"{number} micro-batch{'es' * (number > 1)} of {size} samples"
    if last != size:
        sizes = f"{number} micro-batches: {number - 1} of {size} samples, and one of {last}"
    return f"{len(case['depths'])} ranks, {sizes}"
