"""A network that records which samples it gets, and how this record is used to judge a
training run, for questions 1, 5 and 7.
"""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from ddp_course.checks.samples import CLASSES, WIDTH, Numbered, an_example, how_often, in_words
from ddp_course.checks.training import a_look, descend, equal, state
from ddp_course.judge.verdict import Wrong

LEARNING_RATE = 0.1


class RecordingNetwork(nn.Module):
    """A small network, in 64 bits, that ignores the samples' numbers but records them.

    start: its parameters when it was first trained; trained: the samples of each training
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
            self.start = self.start or state(self)
            self.trained.append(numbers)
        else:
            self.tested.append(numbers)
        return self.layers(inputs[:, 1:])


def record_of(network):
    if not isinstance(network, RecordingNetwork):
        return {"network": "None" if network is None else f"a {type(network).__name__}"}
    return {"network": None, "start": network.start, "end": state(network), "trained": network.trained,
            "tested": network.tested}  # fmt: skip


ALONE = "each rank has trained alone, without averaging gradients: call the wrapped model in the loop"
SAME_ORDER = "every epoch has the same order: does the sampler know which epoch it is?"


def judge_training(checked, records, samples, epochs, batch_size, seed, same_order=SAME_ORDER, alone=ALONE):
    """Raise Wrong unless the ranks divided the samples of each epoch and trained like
    one process.
    """
    n = len(records)
    for rank, record in enumerate(records):
        where = f"{rank} of {n}"
        if record["network"] or not record["trained"]:
            raise Wrong(checked, rank=where, expected="the trained network from make_model()",
                        got=record["network"] or "a network that was never called in training mode",
                        cause="return the network that the loop trains, wrapped or not")  # fmt: skip
        if equal(record["end"], record["start"]):
            raise Wrong(f"the parameters at the end of {checked}", rank=where, expected="different from those at "
                                                                                        "the start",
                        got="the same", cause="the parameters have not changed: does the optimizer have the parameters "
                        "of this network?")  # fmt: skip
    judge_samples(checked, records, samples, epochs, batch_size, same_order)

    data, start = Numbered(samples, seed), records[0]["start"]
    for rank, record in enumerate(records):
        if not equal(record["start"], start):
            raise Wrong(f"the parameters before the first step of {checked}", rank=f"{rank} of {n}",
                        expected=a_look(start), got=a_look(record["start"]), cause="the ranks must start from the "
                        "same parameters: DDP broadcasts rank 0's when you wrap the model")  # fmt: skip
    for rank, record in enumerate(records):
        if not equal(record["end"], records[0]["end"]):
            cause = (
                "the ranks started from the same parameters, but have diverged: is every step the same on all ranks?"
            )
            if equal(record["end"], replayed(data, start, record["trained"])):
                cause = alone
            raise Wrong(f"the parameters at the end of {checked}", rank=f"{rank} of {n}",
                        expected=f"as on rank 0: {a_look(records[0]['end'])}", got=a_look(record["end"]),
                        cause=cause)  # fmt: skip
    joined = [sum(parts, []) for parts in zip(*(record["trained"] for record in records))]
    truth, got = replayed(data, start, joined), records[0]["end"]
    if not equal(got, truth):
        cause = "is the gradient of each step the mean over the joined batch, and is the optimizer the given one?"
        if equal(got, replayed(data, start, joined, LEARNING_RATE * n)):
            cause = (
                "every step is too long by a factor of the number of ranks: did you multiply the learning rate or "
                "the loss, or sum the gradients?"
            )  # fmt: skip
        if equal(got, replayed(data, start, joined, LEARNING_RATE / n)):
            cause = "every step is too short by a factor of the number of ranks: DDP already averages, so do not divide"
        raise Wrong(f"the parameters at the end of {checked}, compared with one process on the joined batches",
                    rank=f"0 of {n}", expected=a_look(truth), got=a_look(got), cause=cause)  # fmt: skip


def judge_samples(checked, records, samples, epochs, batch_size, same_order):
    """Raise Wrong unless each epoch used each sample once, in batches of one size, in a
    new order.
    """
    n = len(records)
    flat = [[number for step in record["trained"] for number in step] for record in records]
    share = samples // n
    for rank, numbers in enumerate(flat):
        if len(numbers) != epochs * share:
            cause = "does exactly one rank see each sample once in each epoch?"
            if len(numbers) == epochs * samples:
                cause = "every rank goes through all samples: divide them among the ranks"
            raise Wrong(f"how many samples a rank is trained on, in {checked}", rank=f"{rank} of {n}",
                        expected=f"{epochs} epochs of {share}", got=len(numbers), cause=cause)  # fmt: skip
    sizes = sorted({len(step) for record in records for step in record["trained"]})
    if sizes != [batch_size]:
        raise Wrong(f"the sizes of the batches in {checked}", expected=batch_size, got=", ".join(map(str, sizes)),
                    cause="batch_size is the number of samples per step of one rank: leave it unchanged")  # fmt: skip
    for epoch in range(epochs):
        parts = [numbers[epoch * share : (epoch + 1) * share] for numbers in flat]
        if how_often(parts, samples) != {1: samples}:
            cause = "the ranks' shares do not fit together: they must come from one shuffle, so from one seed"
            if all(part == parts[0] for part in parts):
                cause = "all ranks are trained on the same samples: divide them among the ranks"
            raise Wrong(f"epoch {epoch} of {checked}, all ranks together", expected="each sample once",
                        got=f"{in_words(how_often(parts, samples))}: {an_example(parts, samples)}", cause=cause)  # fmt: skip
    orders = [[numbers[epoch * share : (epoch + 1) * share] for numbers in flat] for epoch in range(epochs)]
    for epoch, (one, other) in enumerate(pairwise(orders)):
        if one == other:
            cause = same_order
            if all(a < b for part in one for a, b in pairwise(part)):
                cause = "nothing is shuffled: the samples come in the data set's order"
            raise Wrong(f"the order of the samples in {checked}", rank=f"0 of {n}", expected="a different order in "
                                                                                             "each epoch",
                        got=f"{one[0][:6]} ... in epochs {epoch} and {epoch + 1}", cause=cause)  # fmt: skip


def replayed(data, start, steps, learning_rate=LEARNING_RATE):
    """The parameters of one process that starts at `start` and takes these steps, lists
    of sample numbers.
    """
    network = RecordingNetwork()
    network.load_state_dict(start)
    for numbers in steps:
        F.cross_entropy(network(data.inputs[numbers]), data.labels[numbers]).backward()
        descend(network, learning_rate)
    return state(network)
