"""A network that only pretends to compute, to see what communication costs."""

import time

import torch
from torch import nn


class Sleep(torch.autograd.Function):
    """Passes a tensor on after some seconds; its backward takes twice as long."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None


class SleepyLinear(nn.Linear):
    """A linear layer that takes `per_sample` seconds for each sample of its input, and
    twice as long in backward. It sleeps, so it needs no core, as on a GPU.
    """

    def __init__(self, inputs, outputs, per_sample):
        super().__init__(inputs, outputs)
        self.per_sample = per_sample

    def forward(self, x):
        return Sleep.apply(super().forward(x), self.per_sample * len(x))


class SleepyMLP(nn.Sequential):
    """convnets.MLP with layers that sleep: as long on a busy machine as on another.

    Takes float32 (batch, 1, 28, 28) or (batch, 784); returns log-probabilities, float32
    (batch, 10). A step takes 3 * depth * per_sample * batch seconds.
    """

    def __init__(self, width=384, depth=20, per_sample=5e-5):
        sizes = [784, *[width] * (depth - 1), 10]
        layers = [nn.Flatten()]
        for before, after in zip(sizes, sizes[1:]):
            layers += [SleepyLinear(before, after, per_sample), nn.ReLU()]
        super().__init__(*layers[:-1], nn.LogSoftmax(dim=1))
