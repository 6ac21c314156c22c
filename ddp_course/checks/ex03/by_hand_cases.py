"""What question 5 tries an answer on, and what training on it gives: in one process, or on
ranks that make mistakes.
"""

from itertools import product
from typing import NamedTuple

import torch
from torch import nn

from ddp_course.checks.training import fill, state

FIRST, LAST = 3, 4  # inputs and outputs of a sample


class Counting(nn.Module):
    """A network with a buffer, which counts the samples of each forward."""

    def __init__(self, width, seed):
        super().__init__()
        self.samples = []
        self.first, self.last = nn.Linear(FIRST, width), nn.Linear(width, LAST)
        self.register_buffer("scale", torch.ones(FIRST))
        fill(self, seed)

    def forward(self, x):
        self.samples.append(len(x))
        return self.last(torch.tanh(self.first(x * self.scale)))


def draw_case(draw, n):
    """Batches, most of which n ranks cannot share evenly, and a `max_norm` that some of
    their gradients exceed.
    """
    while True:
        sizes = [n * draw.randint(1, 3) + draw.randrange(1, n) for _ in range(3)] + [n * draw.randint(2, 3)]
        sizes[0] = n + 1  # parts of ceil(size / n) samples would leave a rank without one
        draw.shuffle(sizes)
        case = {"n": n, "width": draw.randint(3, 6), "seed": draw.randrange(10**6), "sizes": sizes}
        case |= {"learning_rate": 0.05, "max_norm": draw.choice([6.0, 7.0, 8.0]), "decay": draw.choice([0.7, 0.8])}
        clear = [norm / case["max_norm"] for norm in trained(case)["norms"]]
        if n * min(clear) < 0.8 and max(clear) > 2.2:  # some of the sums over ranks are not clipped, either
            return case


def batches_of(case):
    """A list of (inputs, targets), the same on all ranks."""
    generator = torch.Generator().manual_seed(case["seed"] + 100)
    some = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return [(some(size, FIRST), 6 * (number % 2) * some(size, LAST)) for number, size in enumerate(case["sizes"])]


class Faults(NamedTuple):
    """What ranks do that one process does not; "" is right."""

    start: str = ""  # own
    share: str = ""  # of a rank's mean: equal, whole, small, large
    clip: str = (
        ""  # own, own part, own parts: before the sum, of a gradient that was weighted or not; sum, none, always
    )
    average: str = ""  # own, early, swapped


def combinations():
    """Faults that change the parameters, those with one fault first."""
    clips = ("", "own", "own part", "own parts", "sum", "none", "always")
    every = product(("", "own"), ("", "equal", "whole", "small", "large"), clips)
    return sorted((Faults(*each) for each in every if any(each)), key=lambda faults: sum(map(bool, faults)))


def trained(case, rank=0, faults=None):
    """The parameters and buffers of a rank after training, `moving` averages, and the
    `norms` of its gradients. faults: None for one process with whole batches.
    """
    n = 1 if faults is None else case["n"]
    faults = faults or Faults()
    own = [Counting(case["width"], case["seed"] + r) for r in range(n)]
    for network in own:
        network.scale.copy_(own[0].scale)
    averages = [value.detach().clone() for value in own[rank if faults.average == "own" else 0].parameters()]
    networks = own if faults.start else [own[0]] * n
    norms = []
    for whole in batches_of(case):
        parts = list(zip(*(tensor.tensor_split(n) for tensor in whole)))
        shares = [share_of(len(x), len(whole[0]), n, faults.share) for x, _ in parts]
        gradients = [gradient(*each, n, faults.clip, case["max_norm"]) for each in zip(networks, parts, shares)]
        total = [sum(of_ranks) for of_ranks in zip(*gradients)]
        norms.append(norm_of(total))
        if faults.clip == "sum":  # the sum over the ranks is clipped, and then divided by them
            total = [value / n for value in clipped([n * value for value in total], case["max_norm"])]
        elif faults.clip in ("", "always"):
            total = clipped(total, case["max_norm"], faults.clip)
        step(networks[rank], networks, total, averages, case, faults.average)
    return {"state": state(networks[rank]), "moving": averages, "norms": norms}


def gradient(network, part, share, n, clip, max_norm):
    """What a rank adds to the sum: the gradient of its own mean, by its share."""
    x, y = part
    found = torch.autograd.grad((network(x) - y).pow(2).mean(), list(network.parameters()))
    by = {"own": 1.0, "own part": share, "own parts": n * share}.get(clip)  # what is clipped, in gradients
    if by:
        found = [value / by for value in clipped([by * value for value in found], max_norm)]
    return [share * value for value in found]


def share_of(part, whole, n, fault):
    """By what a rank's mean is multiplied before all are summed."""
    right = part / whole
    return {"": right, "equal": 1 / n, "whole": 1.0, "small": right / n, "large": right * n}[fault]


def norm_of(gradients):
    return sum(value.pow(2).sum() for value in gradients).sqrt().item()


def clipped(gradients, max_norm, always=""):
    factor = max_norm / (norm_of(gradients) + 1e-6)  # as torch has it
    return [value * (factor if always else min(1.0, factor)) for value in gradients]


@torch.no_grad()
def step(network, networks, total, averages, case, fault):
    """SGD on each different network, and the moving averages of the first one."""
    kept = case["decay"] if fault != "swapped" else 1 - case["decay"]
    before = [value.clone() for value in network.parameters()]
    for each in set(networks):
        for value, update in zip(each.parameters(), total):
            value -= case["learning_rate"] * update
    for average, value in zip(averages, before if fault == "early" else network.parameters()):
        average.lerp_(value, 1 - kept)
