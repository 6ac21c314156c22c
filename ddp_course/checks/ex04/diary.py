"""A network that writes down which samples it is given, and how a training is judged by
what it wrote: for questions 2, 3 and 6.
"""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from ddp_course.checks.samples import (
    CLASSES,
    WIDTH,
    Numbered,
    an_example,
    how_often,
    in_words,
)
from ddp_course.checks.training import a_look, descend, equal, state
from ddp_course.school.judge import Wrong

LEARNING_RATE = 0.1


class Diary(nn.Module):
    """A small network, in 64 bits, that ignores the samples' numbers but writes them
    down.

    start: its parameters when it was first trained; trained: the samples of each
    training step, a list of lists;
    tested: all samples that it was given otherwise.
    """

    def __init__(self, norm=False):
        super().__init__()
        middle = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 8), middle, nn.Tanh(), nn.Linear(8, CLASSES)
        ).double()
        self.start, self.trained, self.tested = None, [], []

    def forward(self, inputs):
        numbers = inputs[:, 0].long().tolist()
        if self.training and torch.is_grad_enabled():
            self.start = self.start or state(self)
            self.trained.append(numbers)
        else:
            self.tested += numbers
        return self.layers(inputs[:, 1:])


def diary_of(network):
    if not isinstance(network, Diary):
        return {"network": "None" if network is None else f"a {type(network).__name__}"}
    return {"network": None, "start": network.start, "end": state(network), "trained": network.trained,
            "tested": network.tested}  # fmt: skip


SAME_ORDER = "every epoch goes through the samples in one and the same order: does the sampler know which epoch it is?"


def judge_training(
    checked, diaries, samples, epochs, batch_size, seed, same_order=SAME_ORDER
):
    """Raise Wrong unless the ranks shared the samples of each epoch, and trained as one
    process would.
    """
    n = len(diaries)
    for rank, diary in enumerate(diaries):
        where = f"{rank} of {n}"
        if diary["network"] or not diary["trained"]:
            raise Wrong(checked, rank=where, expected="the network that make_model() gave, trained",
                        got=diary["network"] or "a network that was never called in training mode",
                        cause="return the network that the loop has trained, wrapped or not")  # fmt: skip
        if equal(diary["end"], diary["start"]):
            raise Wrong(f"the parameters at the end of {checked}", rank=where, expected="others than at the start",
                        got="the same", cause="the network has not moved: does the optimizer hold the parameters of the "
                        "network that is trained?")  # fmt: skip
    judge_samples(checked, diaries, samples, epochs, batch_size, same_order)

    data, start = Numbered(samples, seed), diaries[0]["start"]
    for rank, diary in enumerate(diaries):
        if not equal(diary["start"], start):
            raise Wrong(f"the parameters before the first step of {checked}", rank=f"{rank} of {n}",
                        expected=a_look(start), got=a_look(diary["start"]), cause="the ranks must begin with the same "
                        "parameters: DDP sends rank 0's to all, if you wrap the model in it")  # fmt: skip
    for rank, diary in enumerate(diaries):
        if not equal(diary["end"], diaries[0]["end"]):
            cause = "the ranks began alike, and have drifted apart: is every step the same on all of them?"
            if equal(diary["end"], replayed(data, start, diary["trained"])):
                cause = "each rank has trained by itself, and nobody averaged the gradients: it is the wrapped model " \
                        "that the loop has to call"  # fmt: skip
            raise Wrong(f"the parameters at the end of {checked}", rank=f"{rank} of {n}",
                        expected=f"as on rank 0: {a_look(diaries[0]['end'])}", got=a_look(diary["end"]),
                        cause=cause)  # fmt: skip
    joined = [sum(parts, []) for parts in zip(*(diary["trained"] for diary in diaries))]
    truth, got = replayed(data, start, joined), diaries[0]["end"]
    if not equal(got, truth):
        cause = "is each step's gradient the mean over the joined batch, and the optimizer the one that was given?"
        if equal(got, replayed(data, start, joined, LEARNING_RATE * n)):
            cause = "every step is as many times too long as there are ranks: was the learning rate or the loss " \
                    "multiplied, or are the gradients summed?"  # fmt: skip
        if equal(got, replayed(data, start, joined, LEARNING_RATE / n)):
            cause = "every step is as many times too short as there are ranks: DDP has averaged already, divide nothing"
        raise Wrong(f"the parameters at the end of {checked}, next to one process with the joined batches",
                    rank=f"0 of {n}", expected=a_look(truth), got=a_look(got), cause=cause)  # fmt: skip


def judge_samples(checked, diaries, samples, epochs, batch_size, same_order):
    """Raise Wrong unless each sample was trained on once in each epoch, in batches of
    one size, in changing order.
    """
    n = len(diaries)
    flat = [
        [number for step in diary["trained"] for number in step] for diary in diaries
    ]
    share = samples // n
    for rank, numbers in enumerate(flat):
        if len(numbers) != epochs * share:
            cause = "is every sample seen once in each epoch, by one rank?"
            if len(numbers) == epochs * samples:
                cause = "every rank goes through all of the samples: nothing has shared them out"
            raise Wrong(f"how many samples a rank is trained on, in {checked}", rank=f"{rank} of {n}",
                        expected=f"{epochs} epochs of {share}", got=len(numbers), cause=cause)  # fmt: skip
    sizes = sorted({len(step) for diary in diaries for step in diary["trained"]})
    if sizes != [batch_size]:
        raise Wrong(f"the sizes of the batches in {checked}", expected=batch_size, got=", ".join(map(str, sizes)),
                    cause="batch_size is the number of samples of one rank's step: leave it as it is")  # fmt: skip
    for epoch in range(epochs):
        parts = [numbers[epoch * share : (epoch + 1) * share] for numbers in flat]
        if how_often(parts, samples) != {1: samples}:
            cause = "the ranks' shares do not fit together: they must come from one shuffle, that is from one seed"
            if all(part == parts[0] for part in parts):
                cause = "all ranks are trained on the same samples: nothing has shared them out"
            raise Wrong(f"epoch {epoch} of {checked}, all ranks together", expected="each sample once",
                        got=f"{in_words(how_often(parts, samples))}: {an_example(parts, samples)}", cause=cause)  # fmt: skip
    orders = [
        [numbers[epoch * share : (epoch + 1) * share] for numbers in flat]
        for epoch in range(epochs)
    ]
    for epoch, (one, other) in enumerate(pairwise(orders)):
        if one == other:
            cause = same_order
            if all(a < b for part in one for a, b in pairwise(part)):
                cause = "nothing is shuffled: the samples come in their own order"
            raise Wrong(f"the order of the samples in {checked}", rank=f"0 of {n}", expected="another in each epoch",
                        got=f"{one[0][:6]} ... in epochs {epoch} and {epoch + 1}", cause=cause)  # fmt: skip


def replayed(data, start, steps, learning_rate=LEARNING_RATE):
    """Where one process ends that begins at `start` and takes these steps, lists of
    sample numbers.
    """
    network = Diary()
    network.load_state_dict(start)
    for numbers in steps:
        F.cross_entropy(network(data.inputs[numbers]), data.labels[numbers]).backward()
        descend(network, learning_rate)
    return state(network)
