"""The networks and the data with which question 5 tries an answer."""

import torch
from torch import nn

from ddp_course.checks.training import fill

INPUTS, WIDTH, CLASSES, TESTS = 5, 4, 3, 7


def network_of(case):
    """The backbone and the head, nn.Sequential in float64, which have been trained before."""
    backbone = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
    norm = nn.BatchNorm1d(WIDTH, eps=0.01, momentum=case["momentum"])
    head = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    for layer in (backbone[1], norm):
        layer.num_batches_tracked += 40
    return fill(backbone, case["seed"]), fill(head, case["seed"] + 1)


def batches_of(case):
    """The data of all ranks: epochs[epoch][step][rank] is a pair of inputs and labels.
    The inputs differ between the ranks, as those of hospitals do.
    """
    generator = torch.Generator().manual_seed(case["seed"] + 2)
    ranks, steps, epochs = (range(case[what]) for what in ("ranks", "steps", "epochs"))
    return [[[samples(case["size"], rank, generator) for rank in ranks] for _ in steps] for _ in epochs]


def test_set(case):
    """A pair of inputs and labels."""
    return samples(TESTS, 0.5, torch.Generator().manual_seed(case["seed"] + 3))


def samples(number, mean, generator):
    inputs = mean + torch.randn(number, INPUTS, generator=generator, dtype=torch.float64)
    return inputs, inputs[:, :CLASSES].argmax(dim=1)


def described(case):
    return (
        f"fine_tune on {case['ranks']} ranks, {case['epochs']} epochs of {case['steps']} batches, each of "
        f"{case['size']} samples per rank"
    )
