"""A network that records which samples it gets, and what is claimed of a training run with
it, for questions 1, 3, 5 and 7.
"""

from collections import Counter
from functools import partial
from itertools import combinations, pairwise

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ddp_course.checks.claims import Claim, agree, hold, on_every_rank
from ddp_course.checks.samples import CLASSES, WIDTH, Numbered, an_example, how_often, in_words
from ddp_course.checks.training import descend

LEARNING_RATE = 0.1
DIGITS = 8  # of parameters, in 64 bits


class RecordingNetwork(nn.Module):
    """A small network, in 64 bits, that ignores the samples' numbers but records them.

    start: its parameters when it was first trained, one vector; trained: the samples of each training
    step, a list of lists; tested: those of each other call.
    """

    def __init__(self, norm=False):
        super().__init__()
        middle = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), middle, nn.Tanh(), nn.Linear(8, CLASSES)).double()
        self.start, self.trained, self.tested = None, [], []

    def forward(self, inputs):
        numbers = inputs[:, 0].long().tolist()
        if self.training and torch.is_grad_enabled():
            self.start = parameters_of(self) if self.start is None else self.start
            self.trained.append(numbers)
        else:
            self.tested.append(numbers)
        return self.layers(inputs[:, 1:])


def parameters_of(network):
    """All parameters, as one vector."""
    return parameters_to_vector(network.parameters()).detach().clone()


def record_of(network):
    if not isinstance(network, RecordingNetwork):
        return {"network": "None" if network is None else f"a {type(network).__name__}"}
    return {"network": None, "start": network.start, "end": parameters_of(network), "trained": network.trained,
            "tested": network.tested}  # fmt: skip


def replayed(data, start, steps, learning_rate=LEARNING_RATE):
    """The parameters of one process that starts at `start` and takes these steps, lists
    of sample numbers.
    """
    network = RecordingNetwork()
    vector_to_parameters(start.clone(), network.parameters())
    for numbers in steps:
        F.cross_entropy(network(data.inputs[numbers]), data.labels[numbers]).backward()
        descend(network, learning_rate)
    return parameters_of(network)


# ---- what is claimed ----

ALONE = "each rank has trained alone, without averaging gradients: call the wrapped model in the loop"
SAME_ORDER = "every epoch has the same order: does the sampler know which epoch it is?"


def hold_training(checked, records, samples, epochs, batch_size, seed, same_order=SAME_ORDER, alone=ALONE):
    """Raise Wrong unless the ranks divided the samples of each epoch and trained like one
    process. records: `record_of` each rank's network.
    """
    on_every_rank(partial(some_training, checked), records)
    hold(shares(checked, [record["trained"] for record in records], samples, epochs, batch_size, same_order))
    on_every_rank(partial(like_one_process, checked, Numbered(samples, seed), alone), records)


def some_training(checked, rank, records):
    record = records[rank]
    untrained = record["network"] or ("" if record["trained"] else "a network that was never called in training mode")
    yield Claim(checked, untrained, "", "return the network that the loop trains, wrapped or not",
                told="the trained network from make_model()")  # fmt: skip
    yield Claim(f"the parameters at the end of {checked}", agree(record["end"], record["start"], DIGITS), False,
                "the parameters have not changed: does the optimizer have the parameters of this network?",
                told="different from those at the start", shown="the same")  # fmt: skip


def shares(checked, trained, samples, epochs, batch_size, same_order):
    """Claims that each epoch used each sample once, in batches of one size, in a new order.
    trained: for each rank, the samples of each step.
    """
    n, share = len(trained), samples // len(trained)
    flat = [sum(steps, []) for steps in trained]
    yield Claim(f"how many samples each rank is trained on, in {checked}", list(map(len, flat)), [epochs * share] * n,
                "does exactly one rank see each sample once in each epoch?",
                [([epochs * samples] * n, "every rank goes through all samples: divide them among the ranks")],
                told=f"{epochs} epochs of {share}")  # fmt: skip
    yield Claim(f"the sizes of the batches in {checked}", sorted({len(step) for steps in trained for step in steps}),
                [batch_size], "batch_size is the number of samples per step of one rank: leave it unchanged")  # fmt: skip
    orders = [[numbers[epoch * share : (epoch + 1) * share] for numbers in flat] for epoch in range(epochs)]
    for epoch, parts in enumerate(orders):
        tally = how_often(parts, samples)
        yield Claim(f"epoch {epoch} of {checked}, all ranks together", tally, Counter({1: samples}),
                    "the ranks' shares do not fit together: they must come from one shuffle, so from one seed",
                    [(Counter({n: share, 0: samples - share}), "all ranks are trained on the same samples: divide them "
                      "among the ranks")], told="each sample once",
                    shown=f"{in_words(tally)}: {an_example(parts, samples)}")  # fmt: skip
    sorts = all(a < b for part in orders[0] for a, b in pairwise(part))
    for one, other in combinations(range(epochs), 2):
        yield Claim(f"the order of the samples in {checked}", orders[one] == orders[other], False,
                    "nothing is shuffled: the samples come in the data set's order" if sorts else same_order,
                    told="a different order in each epoch",
                    shown=f"{orders[one][0][:6]} ... on rank 0 in epochs {one} and {other}")  # fmt: skip


def like_one_process(checked, data, alone, rank, records):
    n, end, start = len(records), records[rank]["end"], records[0]["start"]
    steps = [record["trained"] for record in records]
    joined = [sum(parts, []) for parts in zip(*steps)]

    def mistakes():
        of_each = [replayed(data, start, own) for own in steps]
        return [
            (of_each[rank], alone),
            (of_each[0], "this is what rank 0 would end with alone: a copy of its network loses what the others have "
             "learned. Average the gradients, in each step"),
            (sum(of_each) / n, "this is the mean of networks that were trained apart, which is another network: average the "
             "gradients, in each step"),
            (replayed(data, start, joined, LEARNING_RATE * n), "every step is too long by a factor of the number of ranks: "
             "did you multiply the learning rate or the loss, or sum the gradients?"),
            (replayed(data, start, joined, LEARNING_RATE / n), "every step is too short by a factor of the number of ranks: "
             "DDP already averages, so do not divide"),
        ]  # fmt: skip

    otherwise = "is the gradient of each step the mean over the joined batch, and is the optimizer the given one?"
    if not agree(end, records[0]["end"], DIGITS):
        otherwise = (
            "the ranks started from the same parameters, but have diverged: is every step the same on all ranks?"
        )
    yield Claim(f"the parameters before the first step of {checked}", records[rank]["start"], start, "the ranks must start "
                "from the same parameters: DDP broadcasts rank 0's when you wrap the model", digits=DIGITS)  # fmt: skip
    yield Claim(f"the parameters at the end of {checked}, compared with one process on the joined batches", end,
                replayed(data, start, joined), otherwise, mistakes, DIGITS)  # fmt: skip
