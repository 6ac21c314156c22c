"""The network and the examples with which question 2 tries an answer."""

from itertools import pairwise

import torch
from torch import nn

from ddp_course.checks.ex08.on_ranks import in_row
from ddp_course.checks.training import fill

WORDS, WIDTH, CLASSES = 7, 4, 11
LENGTHS = range(3, 10)  # of examples; there are more classes, so that the two cannot be mixed up unnoticed
BATCH_SIZE, ACCUMULATION = 2, 3
IGNORED = -100


class Tagger(nn.Module):
    """Classes for each token, from the token alone, in 64 bits."""

    def __init__(self, seed):
        super().__init__()
        self.embedding, self.linear = (nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, CLASSES))
        fill(self, seed)

    def forward(self, tokens):
        return {"logits": self.linear(torch.tanh(self.embedding(tokens)))}


def an_example(draw, counting=None):
    """An example of any length. counting: how many of its targets count, two or more
    where left out.
    """
    length = draw.choice(LENGTHS)
    counting = draw.randint(2, length) if counting is None else counting
    targets = torch.tensor([draw.randrange(CLASSES) for _ in range(length)])
    targets[draw.sample(range(length), length - counting)] = IGNORED
    return {"tokens": torch.tensor([draw.randrange(WORDS) for _ in range(length)]), "targets": targets}


def telling_batches(draw):
    """Batches in which order and padding can be seen: three lengths in no order, rows
    of several lengths.
    """
    batches = [[an_example(draw) for _ in range(size)] for size in (3, 2, 1, 2)]
    lengths = [list(map(length_of, batch)) for batch in batches]
    first, longest = lengths[0], set(map(max, lengths))
    later_is_shorter = any(a > b for a, b in pairwise(map(max, lengths)))
    ordered = first in (sorted(first), sorted(first, reverse=True))
    too_few = len(set(first)) < 3 or len(longest) < 3
    return telling_batches(draw) if ordered or not later_is_shorter or too_few else batches


def uneven_batches(draw, n):
    """Batches for an epoch of three windows, the last one shorter, in the order of
    Trainer's sampler.

    In the first window all have labels that count, some twice as many as others. In the
    second, the last one of some rank has none: at that one, DDP waits for all.
    """
    window = n * ACCUMULATION
    length = 2 * window + n * draw.randrange(1, ACCUMULATION)
    batches = [[an_example(draw) for _ in range(BATCH_SIZE)] for _ in range(length)]
    batches[2 * window - draw.randint(1, n)] = [an_example(draw, counting=0) for _ in range(BATCH_SIZE)]
    first = list(map(count, batches[:window]))
    return batches if max(first) >= 2 * min(first) else uneven_batches(draw, n)


def padded(batch, name, value, side="right"):
    return nn.utils.rnn.pad_sequence([example[name] for example in batch], True, value, side)


def count(batch):
    """How many of its targets count."""
    return sum(int((example["targets"] != IGNORED).sum()) for example in batch)


def length_of(example):
    return len(example["tokens"])


def lengths_of(batch):
    return f"example{'s' * (len(batch) > 1)} of {in_row(map(length_of, batch))} tokens"
