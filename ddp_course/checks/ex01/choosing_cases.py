"""What question 5 tries an answer on, and what training on it gives, right or with faults."""

from itertools import product
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ddp_course.checks.training import fill, state

FEATURES, CLASSES, RATE = 4, 3, 0.5


def a_network(seed):
    layers = nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, CLASSES), nn.LogSoftmax(dim=1)
    return fill(nn.Sequential(*layers), seed)


def draw_case(draw):
    """A training whose best epoch is neither the first nor the last, and whose worst is not
    the last. After the best one, the loss rises, and falls again without being as small. The
    mean of the batches' means has its best in another epoch.
    """
    while True:
        case = {"seed": draw.randrange(10**6), "epochs": draw.choice([6, 7]), "train": draw.sample(range(4, 10), 3)}
        case["test"] = [*draw.sample(range(9, 14), 2), draw.randint(2, 4)]
        right = trained(case)
        order = sorted(range(case["epochs"]), key=lambda epoch: right["losses"][epoch])
        last, losses = case["epochs"] - 1, right["losses"]
        falls = any(losses[epoch] < losses[epoch - 1] for epoch in range(order[0] + 2, last + 1))
        means = trained(case, Faults(mean="of means"))["losses"]
        clear = losses[order[1]] > 1.001 * losses[order[0]] and means.index(min(means)) != order[0]
        if 0 < order[0] < last != order[-1] and falls and clear:
            return case


def batches_of(case, kind):
    """A list of (inputs, labels); labels follow the inputs, as far as noise lets them."""
    generator, batches = torch.Generator().manual_seed(case["seed"] + len(kind)), []
    for size in case[kind]:
        inputs, noise = torch.randn(2, size, FEATURES, generator=generator, dtype=torch.float64)
        batches.append((inputs, (inputs + noise)[:, :CLASSES].argmax(dim=1)))
    return batches


class Faults(NamedTuple):
    """What a program does wrong; an empty text is right."""

    mode: str = ""  # stays: eval mode after the first evaluation; never: no training mode; left out: no eval mode
    mean: str = ""  # of means, sum
    reset: str = ""  # kept: gradients add up


def combinations():
    """Those with one fault first."""
    modes = ("", "stays", "never", "left out")
    every = [Faults(*each) for each in product(modes, ("", "of means", "sum"), ("", "kept")) if any(each)]
    return sorted(every, key=lambda faults: sum(map(bool, faults)))


def trained(case, faults=Faults()):
    """The `losses`, and the `states` after each epoch."""
    network, found = a_network(case["seed"]), {"losses": [], "states": []}
    training, tests = batches_of(case, "train"), batches_of(case, "test")
    network.train(faults.mode != "never")
    for _ in range(case["epochs"]):
        network.train(network.training or not faults.mode)
        for inputs, labels in training:
            if not faults.reset:
                network.zero_grad()
            F.nll_loss(network(inputs), labels).backward()
            with torch.no_grad():
                for parameter in network.parameters():
                    parameter -= RATE * parameter.grad
        network.train(faults.mode == "left out")
        with torch.no_grad():
            means = [F.nll_loss(network(inputs), labels).item() for inputs, labels in tests]
        sums = [mean * size for mean, size in zip(means, case["test"])]
        loss = {"": sum(sums) / sum(case["test"]), "of means": sum(means) / len(means), "sum": sum(sums)}[faults.mean]
        found["losses"].append(loss)
        found["states"].append(state(network))
    return found
