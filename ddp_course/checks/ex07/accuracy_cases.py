"""The networks and samples with which question 3 tries an answer."""

import math

import torch

from ddp_course.checks.ported import RecordingNetwork
from ddp_course.checks.samples import CLASSES, Numbered


def comes_in_training(place):
    """Whether the network of a case, by its place, is in training mode before."""
    return place % 2 == 0


def in_training(seed):
    """The network in the middle of training: it has gradients, and one of its
    parameters is frozen.
    """
    network = RecordingNetwork(seed, mixing=True)
    network.layers[0].bias.requires_grad_(False)
    for number, parameter in enumerate(network.parameters()):
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, number + 0.5)
    return network


def half_known(size, seed, joined):
    """Samples for which the network is right on the first `joined` ones, which may be
    repeated, and on half of the others, but not on the last.
    """
    data, generator = Numbered(size, seed + size), torch.Generator().manual_seed(seed)
    guesses = guesses_of(data, seed)
    data.labels = guesses.clone()
    if size > joined:
        others = joined + torch.randperm(size - joined, generator=generator)
        unknown = [*others[: math.ceil(len(others) / 2)].tolist(), size - 1]
        data.labels[unknown] = (guesses[unknown] + 1) % CLASSES
    return data


@torch.no_grad()
def guesses_of(data, seed):
    return RecordingNetwork(seed, mixing=True).eval().layers(data.inputs[:, 1:]).argmax(dim=1)
