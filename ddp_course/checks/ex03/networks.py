"""The network that the answers of questions 1 and 2 are tried on."""

import torch
from torch import nn

from ddp_course.checks.training import fill


class Tied(nn.Module):
    """A small network with everything that makes averaging difficult: tied weights, a
    frozen parameter, a buffer, and layers that are not used in the order of their
    definition.
    """

    def __init__(self, width, seed):
        super().__init__()
        self.middle, self.last, self.first = (nn.Linear(width, width) for _ in range(3))
        self.last.weight = self.first.weight
        self.middle.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(width) + seed % 7)
        fill(self, seed)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x * self.scale)))))
