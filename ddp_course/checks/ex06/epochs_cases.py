"""What question 5 tries an answer on, and what training on it gives: in one process, or on
ranks that make mistakes.
"""

from itertools import product
from typing import NamedTuple

import torch

from ddp_course.checks.training import Chain, a_batch, state


def draw_case(draw, n, every):
    """Epochs of which some have a whole number of windows, and one is shorter than a window."""
    some = lambda: draw.randrange(1, max(2, every))  # noqa: E731
    lengths = [2 * every + some(), every, some(), every + some()]
    case = {"n": n, "every": every, "lengths": draw.sample(lengths, len(lengths)), "size": draw.randint(2, 4)}
    case |= {"width": draw.randint(3, 5), "seed": draw.randrange(10**6), "rate": 0.02, "decay": draw.choice([0.7, 0.8])}
    return case


def rate_of(case, update):
    return case["rate"] * case["decay"] ** update


def a_network(case):
    return Chain(case["width"], 4, case["seed"])


def epochs_of(case, rank):
    """The micro-batches of a rank, (inputs, targets), a list per epoch."""
    size, width, seed = case["size"], case["width"], case["seed"] + 1000 * (rank + 1)
    pair = lambda seed: (a_batch(size, width, seed), a_batch(size, width, seed + 1))  # noqa: E731
    return [
        [pair(seed + 100 * epoch + 2 * number) for number in range(length)]
        for epoch, length in enumerate(case["lengths"])
    ]


def updates_of(case):
    return sum(-(-length // case["every"]) for length in case["lengths"])


class Faults(NamedTuple):
    """What ranks do that one process does not; "" is right."""

    rest: str = ""  # of an epoch: leaks, lost, every, own, own every
    rate: str = ""  # each, epoch, late, first
    share: str = ""  # sum, small, alone


def combinations():
    """Those with one fault first."""
    rests, rates = ("", "leaks", "lost", "every", "own", "own every"), ("", "each", "epoch", "late", "first")
    every = [Faults(*each) for each in product(rests, rates, ("", "sum", "small", "alone")) if any(each)]
    return sorted(every, key=lambda faults: sum(map(bool, faults)))


def trained(case, rank=0, faults=Faults()):
    """The parameters of a rank at the end. Without faults, one process has all micro-batches
    of the ranks, joined.
    """
    of_ranks = [epochs_of(case, r) for r in range(case["n"])]
    apart = "own" in faults.rest or faults.share == "alone"
    if not apart:
        of_ranks = [[[*map(pair_of_all, zip(*parts))] for parts in zip(*of_ranks)]]
    networks = [a_network(case) for _ in of_ranks]
    update, seen, every, waiting = 0, 0, case["every"], [0.0 for _ in of_ranks]
    for epoch, length in enumerate(case["lengths"]):
        first = update
        if faults.rest == "lost":
            waiting = [0.0 for _ in of_ranks]
        for begin in range(0, length, every):
            window = range(begin, min(begin + every, length))
            seen, short = seen + len(window), len(window) < every
            divisor = len(window) if faults.rest in ("", "own") else every
            divisor = {"sum": 1, "small": divisor * case["n"]}.get(faults.share, divisor)
            waiting = [
                old + gradient_of(network, [epochs[epoch][i] for i in window]) / divisor
                for old, network, epochs in zip(waiting, networks, of_ranks)
            ]
            if short and faults.rest in ("leaks", "lost"):
                continue
            mean = sum(waiting) / len(waiting)
            own = faults.share == "alone" or (short and "own" in faults.rest)
            rates = {"": update, "each": seen - 1, "epoch": update - first, "late": update + 1, "first": 0}
            for network, mine in zip(networks, waiting):
                step(network, mine if own else mean, rate_of(case, rates[faults.rate]))
            update, waiting = update + 1, [0.0 for _ in of_ranks]
    return state(networks[rank if apart else 0])


def pair_of_all(pairs):
    return tuple(torch.cat(tensors) for tensors in zip(*pairs))


def gradient_of(network, micro_batches):
    """The sum of the gradients of their mean losses, as one vector."""
    loss = sum((network(inputs) - targets).pow(2).mean() for inputs, targets in micro_batches)
    return torch.cat([value.flatten() for value in torch.autograd.grad(loss, list(network.parameters()))])


@torch.no_grad()
def step(network, gradient, rate):
    parameters = list(network.parameters())
    for value, part in zip(parameters, gradient.split([value.numel() for value in parameters])):
        value -= rate * part.view_as(value)
