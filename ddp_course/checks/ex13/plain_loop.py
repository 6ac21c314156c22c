"""The notebook's loop in plain PyTorch, which question 3 ports: its network, its batches,
and what one process makes of those of all ranks.
"""

import torch
from torch import nn
from torch.nn import functional as F

from ddp_course.checks.samples import CLASSES, WIDTH, Numbered
from ddp_course.checks.training import fill, state

RATE, MOMENTUM, DECAY = 0.1, 0.9, 0.2  # the notebook's loop names them


class Network(nn.Module):
    """A small network in 32 bits. It ignores its first input, a sample's number."""

    def __init__(self, seed):
        super().__init__()
        sizes = nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES)
        self.layers = fill(nn.Sequential(*sizes), seed).float()

    def forward(self, inputs):
        return self.layers(inputs[:, 1:])


def micro_batches(case, ranks):
    """For each rank, its micro-batches, pairs of inputs and labels."""
    count, size = case["length"], case["batch_size"]
    data = Numbered(count * ranks * size, case["seed"])
    inputs, labels = data.inputs.float().split(size), data.labels.split(size)
    pairs = list(zip(inputs, labels))
    return [pairs[rank::ranks] for rank in range(ranks)]


def by_one_process(case, ranks, mistake=None):
    """The loop in 64 bits on the batches of all ranks: (the parameters at the end, for
    each update its losses by rank and micro-batch).

    mistake: 'again', losses divided by the accumulation twice; 'last', gradients of the
    last micro-batch only; 'swapped', biases decay in place of matrices.
    """
    network, window, history = Network(case["seed"]).double(), case["window"], []
    parameters = list(network.parameters())
    averages = [torch.zeros_like(parameter) for parameter in parameters]
    of_ranks = micro_batches(case, ranks)
    for begin in range(0, case["length"] // window * window, window):
        losses = [
            [F.cross_entropy(network(inputs.double()), labels) for inputs, labels in mine[begin : begin + window]]
            for mine in of_ranks
        ]
        counted = [mine[-1:] if mistake == "last" else mine for mine in losses]
        total = sum(map(sum, counted)) / ranks / window
        total = total / window if mistake == "again" else total
        gradients = torch.autograd.grad(total, parameters)
        norm = sum(gradient.pow(2).sum() for gradient in gradients).sqrt()
        clip = min(1.0, case["max_norm"] / norm.item()) if case["max_norm"] else 1.0
        with torch.no_grad():
            for parameter, gradient, average in zip(parameters, gradients, averages):
                decays = (parameter.dim() > 1) != (mistake == "swapped")
                average.mul_(MOMENTUM).add_(gradient * clip + DECAY * parameter * decays)
                parameter -= RATE * average
        history.append([[loss.item() for loss in mine] for mine in losses])
    return state(network), history
