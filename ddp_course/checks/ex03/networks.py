"""The network that the answers of questions 1 and 2 are tried on, and how precise its
gradients must be.
"""

import torch
from torch import nn

from ddp_course.checks.training import fill
from ddp_course.judge.verdict import Wrong


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
        return self.last(
            torch.tanh(self.middle(torch.tanh(self.first(x * self.scale))))
        )


def equal_in_64_bits(some, other):
    """Whether two float64 tensors of the same shape agree, which they do not if one of
    them was converted to 32 bits in between.
    """
    return torch.allclose(some.double(), other, rtol=1e-10, atol=1e-12)


def judge_digits(checked, where, mean, got):
    """Raise Wrong if `got` is the mean with numbers that were rounded, to 16 bits at
    worst.
    """
    error = (got.double() - mean).abs().max().item()
    if error < 0.01 * mean.abs().max().item():
        raise Wrong(checked, rank=where, expected="the mean, in 64 bits", got=f"numbers that are off by up to {error:.1e}",
                    cause="the numbers have lost digits on their way: keep the precision of the gradients")  # fmt: skip
