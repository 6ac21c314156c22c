"""What question 5 tries an answer on, and what training on it gives in one process, right or
with faults.
"""

from itertools import product
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ddp_course.checks.ex08.on_ranks import LEARNING_RATE
from ddp_course.checks.ported import PRIMES, Case, RecordingNetwork, data_of
from ddp_course.checks.samples import CLASSES

ACCUMULATION = {2: 3, 3: 2}  # on so many ranks
BATCHES = {2: 4, 3: 3}  # of an epoch on each rank: the last update of an epoch has one batch
BATCH_SIZES = 4, 5  # neither the ranks nor the micro-batches of an update: factors have to differ


class Weighted(NamedTuple):
    """A training: on n ranks, with a weight per class. errors: the eval_error of each epoch."""

    n: int
    batch_size: int
    weights: list
    errors: list
    seed: int

    def __str__(self):
        return f"a training of {len(self.errors)} epochs on {self.n} ranks"

    @property
    def samples(self):
        return self.n * BATCHES[self.n] * self.batch_size

    @property
    def data(self):
        """The training set and the test set."""
        return data_of(Case(self.samples, PRIMES[0], self.seed))

    @property
    def lowest(self):
        """The first evaluation with the lowest error, from 0."""
        return self.errors.index(min(self.errors))


class Named(nn.Module):
    """Takes inputs by name, and returns a dict. Its buffer counts the batches of training."""

    def __init__(self, seed):
        super().__init__()
        self.network = RecordingNetwork(seed)
        self.register_buffer("batches", torch.tensor(0))

    def forward(self, inputs):
        if self.training:
            self.batches += 1
        return {"logits": self.network(inputs)}


class Rows:
    """A data set of dicts."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        inputs, label = self.data[index]
        return {"inputs": inputs, "labels": label}


def draw_case(draw, n):
    """On two ranks the second of three errors is the lowest; on three, the first and the last."""
    low, *others = sorted(number / 100 for number in draw.sample(range(10, 90), 3))
    draw.shuffle(others)
    errors = [others[0], low, others[1]] if n == 2 else [low, others[0], low]
    weights = draw.sample([0.25, 0.5, 2.0, 3.0, 5.0], CLASSES)
    return Weighted(n, draw.choice(BATCH_SIZES), weights, errors, draw.randrange(10**6))


# ---- one process ----

KINDS = "", "micro-batches", "update", "plain"
SCALES = "", "k less", "k more", "K less", "K more", "last", "n less", "n more", "sum", "b less"


def factor(scale, n, k, batch_size):
    """k: the micro-batches that each rank has in the update. K is their number in all but the
    last update of an epoch.
    """
    full = ACCUMULATION[n]
    factors = {
        "": 1,
        "k less": 1 / k,
        "k more": k,
        "K less": 1 / full,
        "K more": full,
        "last": k / full,
        "n less": 1 / n,
        "n more": n,
        "sum": batch_size,
        "b less": 1 / batch_size,
    }
    return factors[scale]


def combinations():
    """Pairs of a kind and a scale, those with one fault first."""
    return sorted(list(product(KINDS, SCALES))[1:], key=lambda pair: sum(map(bool, pair)))


def trained(case, updates, kind="", scale="", start=0):
    """The parameters after each of these updates, vectors. updates: lists of rounds, each the
    batches of all ranks; start: whose network it is.
    """
    network, (data, _), history = RecordingNetwork(case.seed + start), case.data, []
    for rounds in updates:
        gradients = [gradient(network, data, batch, case, kind) for batches in rounds for batch in batches]
        mean = sum(gradients) / len(gradients)
        if kind == "update":
            mean = mean / torch.cat([weights_of(batch, data, case) for batch in sum(rounds, [])]).mean()
        rate = LEARNING_RATE * factor(scale, case.n, len(rounds), case.batch_size)
        moved = parameters_to_vector(network.parameters()).detach() - rate * mean
        vector_to_parameters(moved, network.parameters())
        history.append(moved)
    return history


def gradient(network, data, batch, case, kind):
    """That of the loss of a micro-batch, one vector."""
    losses = F.cross_entropy(network.layers(data.inputs[batch, 1:]), data.labels[batch], reduction="none")
    weights = weights_of(batch, data, case)
    if kind == "plain":
        weights = torch.ones_like(weights)
    loss = (weights * losses).mean()
    if kind == "micro-batches":
        loss = loss / weights.mean()
    return parameters_to_vector(torch.autograd.grad(loss, list(network.parameters())))


def weights_of(batch, data, case):
    return torch.tensor(case.weights, dtype=torch.float64)[data.labels[batch]]
