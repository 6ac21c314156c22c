"""Question 3: how many steps and forwards a run takes, predicted, and then counted."""

import operator
from contextlib import suppress

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ddp_course.checks.claims import Claim, hold
from ddp_course.checks.ex01.watched import Watched
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question


def predictions(predict_run, runs):
    """What `predict_run` returns for each run."""
    predicted = []
    for run in runs:
        with trying(named(*run)):
            predicted.append(whole_numbers(predict_run(*run)))
    return predicted


def whole_numbers(values):
    """Whole numbers of any kind, also NumPy's, as a list of ints; anything else
    unchanged.
    """
    if isinstance(values, np.ndarray | torch.Tensor) and values.ndim:
        values = values.tolist()
    if isinstance(values, list | tuple):
        return [whole_numbers(value) for value in values]
    with suppress(TypeError):
        return operator.index(values)
    return values


def measurements(runs):
    """Train for real; count the steps and forwards, and the bytes of the largest input,
    of each run.
    """
    return [list(measure(*run)) for run in runs]


def measure(samples, batch_size, limit, epochs):
    model = Watched(torch.zeros(10, 784))
    labels = torch.zeros(samples, dtype=torch.int64)
    images = TensorDataset(torch.zeros(samples, 1, 28, 28), labels)
    loader = DataLoader(images, batch_size)
    steps = 0
    for _ in range(epochs):
        for images, labels in loader:
            for piece in zip(images.split(limit), labels.split(limit)):
                F.nll_loss(model(piece[0]), piece[1], reduction="sum").backward()
            steps += 1
    return steps, model.calls.count("forward"), max(model.bytes)


def named(samples, batch_size, limit, epochs):
    return f"predict_run(samples={samples}, batch_size={batch_size}, limit={limit}, epochs={epochs})"


def ceil(a, b):
    return -(-a // b)


# of each number, formulas with a mistake
STEPS = [
    (lambda s, b, k, e: e * (s // b), "the last, smaller batch needs a step, too: round up"),
    (lambda s, b, k, e: ceil(s * e, b), "each epoch ends with its own smaller batch: round up in each epoch, and "
                                              "then multiply by the epochs"),
    (lambda s, b, k, e: s * e // b, "the last, smaller batch of each epoch needs a step, too: round up in each epoch"),
    (lambda s, b, k, e: ceil(s, b), "these are the steps of one epoch: multiply by the epochs"),
    (lambda s, b, k, e: e * round(s / b), "round() rounds down as well: a smaller last batch always needs a step"),
    (lambda s, b, k, e: e * (s // b + 1), "where the batch size divides the samples, there is no smaller last batch"),
    (lambda s, b, k, e: e * ceil(s, k), "these are steps for each piece of at most `limit` samples: a step is taken "
                                              "once per batch"),
]  # fmt: skip
PASSES = [
    (lambda s, b, k, e: e * ceil(s, b) * ceil(b, k), "the last batch is smaller, and may have fewer pieces than a "
                                                           "full one"),
    (lambda s, b, k, e: e * ceil(s, k), "a piece never has samples of two batches: round up in each batch"),
    (lambda s, b, k, e: ceil(e * s, k), "a piece never has samples of two batches: round up in each batch"),
    (lambda s, b, k, e: e * (s // b) * ceil(b, k), "the pieces of the last, smaller batch are missing"),
    (lambda s, b, k, e: e * ceil(s, b), "these are the steps: a batch that is larger than `limit` takes several "
                                              "forward passes"),
    (lambda s, b, k, e: e * (s // b * (b // k) + s % b // k), "the last piece of a batch is smaller, and needs a "
                                                                   "pass, too: round up"),
    (lambda s, b, k, e: e * (s // b * ceil(b, k) + 1), "the last, smaller batch may have several pieces, or none"),
    (lambda s, b, k, e: e * (s // b * ceil(b, k) + (s % b // k + 1 if s % b else 0)), "where `limit` divides a "
     "batch, there is no smaller last piece: round up"),
    (lambda s, b, k, e: e * (s // b * (b // k + 1) + ceil(s % b, k)), "where `limit` divides a batch, there is no "
                                                                            "smaller last piece: round up"),
    (lambda s, b, k, e: s // b * ceil(b, k) + ceil(s % b, k), "these are the passes of one epoch: multiply by the "
                                                                    "epochs"),
]  # fmt: skip
BYTES = [
    (lambda s, b, k, e: k * 3136, "a batch, or all samples together, can be smaller than `limit`"),
    (lambda s, b, k, e: min(b, k) * 3136, "all samples together can be fewer than a batch"),
    (lambda s, b, k, e: b * 3136, "a whole batch never is in one forward pass if it is larger than `limit`"),
    (lambda s, b, k, e: min(s, b) * 3136, "a whole batch never is in one forward pass if it is larger than `limit`"),
    (lambda s, b, k, e: min(s, b, k) * 784, "these are the numbers: each float32 has 4 bytes"),
    (lambda s, b, k, e: min(b, k) * 784, "these are the numbers: each float32 has 4 bytes"),
    (lambda s, b, k, e: min(s, b, k) * 784 * 8, "a float32 has 32 bits, which are 4 bytes, not 8"),
    (lambda s, b, k, e: min(s, b, k) * 4, "an image has 28 × 28 numbers"),
    (lambda s, b, k, e: min(s, b, k) * 28 * 4, "an image has 28 × 28 numbers"),
    (lambda s, b, k, e: e * min(s, b, k) * 3136, "an epoch needs the memory of the one before again, and no more"),
    (lambda s, b, k, e: s * 3136, "these are the bytes of all images: only one piece is in a forward pass"),
]  # fmt: skip


NUMBERS = [  # (name, formulas with a mistake, what it is)
    ("optimizer steps", STEPS, "each epoch has one step per batch, and its last batch may be smaller"),
    ("forward passes", PASSES, "count the pieces of a full batch and those of the last, smaller batch, in each epoch"),
    ("bytes of the largest input", BYTES,
     "the largest input has as many samples as fit; each has 28 × 28 numbers of 4 bytes"),
]  # fmt: skip


def claims(runs, predicted, measured):
    for run, got in zip(runs, predicted):
        three = isinstance(got, list) and len(got) == 3
        cause = "return three numbers: return steps, passes, bytes"
        if got is None:
            cause, got = "the function ends without a return statement", "nothing (None)"
        yield Claim(named(*run), three, True, cause, told="three whole numbers", shown=got)
    for place, (name, formulas, otherwise) in enumerate(NUMBERS):
        column = [got[place] for got in predicted]
        # a mistake is told where its formula gives the numbers of all runs
        causes = [cause for formula, cause in formulas if [formula(*run) for run in runs] == column]
        for run, got, real in zip(runs, column, measured):
            cause = [*causes, otherwise][0]
            if type(got) is not int:
                cause = "it must be a whole number, an int: round up with math.ceil, and divide with //"
            yield Claim(
                f"the {name}: {named(*run)}", got, real[place], cause,
                told=f"{real[place]}, counted in a real run", shown=repr(got),
            )  # fmt: skip


@question(
    "Take 100 samples in batches of 32. How many batches are there, and how large is the last one? Then cut a batch of "
    "32, and the last one, into pieces of at most 10.",
    "Round up twice: math.ceil(a / b), or -(-a // b). The last batch has samples % batch_size samples, if that is not 0. "
    "A float32 has 4 bytes, and an image has 28 × 28 of them. Which is the largest piece if the limit is larger than a "
    "batch?",
    "full, rest = divmod(samples, batch_size); steps = epochs * (full + (rest > 0)); passes = epochs * (full * "
    "ceil(batch_size / limit) + ceil(rest / limit)); the bytes are min(samples, batch_size, limit) * 28 * 28 * 4",
)
def check_predict_run(answer, draw):
    """The predicted steps, forward passes and bytes must be those of a real run."""
    runs = []
    for _ in range(2):  # every number is rounded somewhere
        batch_size, limit = draw.choice([(16, 5), (20, 7), (24, 9), (30, 11)])
        rest = draw.randint(limit + 1, batch_size - 1)
        runs.append((batch_size * draw.randint(3, 5) + rest, batch_size, limit, 1))
    runs.append((3 * batch_size + 2 * limit, batch_size, limit, 2))  # the pieces of the last batch are equal
    batch_size = draw.choice([12, 18])
    runs += [
        (*runs[0][:3], draw.randint(2, 4)),
        (4 * batch_size, batch_size, batch_size // 3, 2),  # nothing is rounded
        (3 * batch_size + 1, batch_size, batch_size + draw.randint(1, 9), 2),
        (draw.randint(5, 11), batch_size, draw.choice([3, 4]), 3),
        (draw.randint(5, 7), batch_size, draw.randint(8, 11), 3),
    ]
    predicted = answer.on_ranks(predictions, runs)[0]
    hold(claims(runs, predicted, answer.without(measurements, runs)[0]))
