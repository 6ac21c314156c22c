"""The network of question 5, its initial values, its batches, and one process that trains it."""

import statistics
import zlib
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

INPUTS, OUTPUTS, BLOCKS = 6, 4, 10
RATE = 0.01


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.expand, self.project = linear(width, hidden), linear(hidden, width)

    def forward(self, x):
        return x + self.project(torch.tanh(self.expand(x)))


class Network(nn.Module):
    """Blocks between two small layers, and a buffer by which inputs are multiplied."""

    def __init__(self, width, hidden):
        super().__init__()
        self.register_buffer("scale", torch.ones(INPUTS, dtype=torch.float64))
        self.first, self.last = linear(INPUTS, width), linear(width, OUTPUTS)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(BLOCKS))

    def forward(self, x):
        x = self.first(x * self.scale)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


linear = partial(nn.Linear, dtype=torch.float64)


def on_meta(case):
    with torch.device("meta"):
        return Network(case["width"], case["hidden"])


def shapes_of(network):
    return {name: value.shape for name, value in network.state_dict().items()}


def initial_value(shapes, seed, name):
    """A parameter or buffer at the beginning, whole. Raises KeyError for an unknown name."""
    shape = shapes[name]
    generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
    value = torch.randn(shape, generator=generator, dtype=torch.float64)
    if name == "scale":
        return 1 + 0.2 * value
    inputs = shape[1] if len(shape) == 2 else 100
    return value / inputs**0.5


def initial_state(case):
    shapes = shapes_of(on_meta(case))
    return {name: initial_value(shapes, case["seed"], name) for name in shapes}


def batches_of(case, rank):
    """[(inputs, targets), ...] of a rank, float64; held-out samples where the rank is None."""
    generator = torch.Generator().manual_seed(case["seed"])
    hidden = torch.randn(INPUTS, OUTPUTS, generator=generator, dtype=torch.float64)
    generator.manual_seed(case["seed"] + 1 + (case["n"] if rank is None else rank))
    pairs = []
    for size in [64] if rank is None else case["sizes"]:
        inputs = torch.randn(size, INPUTS, generator=generator, dtype=torch.float64)
        pairs.append((inputs, torch.tanh(inputs @ hidden)))
    return pairs


@torch.no_grad()
def held_out_loss(case, state):
    network = on_meta(case)
    network.load_state_dict(state, assign=True)
    [(inputs, targets)] = batches_of(case, None)
    return F.mse_loss(network(inputs), targets).item()


# ---- one process ----


def mean(of_ranks):
    return [torch.stack(gradients).mean(0) for gradients in zip(*of_ranks)]


def norm_of(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients]).norm()


def clipped(gradients, max_norm):
    scale = (max_norm / (norm_of(gradients) + 1e-6)).clamp(max=1)
    return [gradient * scale for gradient in gradients]


def median_norm(case):
    """A norm that about half of the updates exceed."""
    norms = []

    def note(of_ranks):
        norms.append(norm_of(mean(of_ranks)).item())
        return mean(of_ranks)

    by_one_process(case, note)
    return round(statistics.median(norms), 1)


def by_one_process(case, combined=None, left_out=0, **options):
    """The state after training.

    For wrong answers, combined: what a step is made with, of all ranks' gradients; left_out: batches at the end; options:
    others of AdamW.
    """
    combined = combined or (lambda of_ranks: clipped(mean(of_ranks), case["max_norm"]))
    network = on_meta(case)
    network.load_state_dict(initial_state(case), assign=True)
    parameters = list(network.parameters())
    optimizer = torch.optim.AdamW(parameters, **{"lr": RATE} | options)
    batches = list(zip(*(batches_of(case, rank) for rank in range(case["n"]))))
    for of_ranks in batches[: len(batches) - left_out]:
        losses = [F.mse_loss(network(inputs), targets) for inputs, targets in of_ranks]
        gradients = [torch.autograd.grad(loss, parameters) for loss in losses]
        for parameter, gradient in zip(parameters, combined(gradients)):
            parameter.grad = gradient
        optimizer.step()
    return {name: value.detach() for name, value in network.state_dict().items()}
