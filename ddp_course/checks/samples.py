"""Numbered samples, and counts of them: which samples each rank had, how often, and the
counts that an answer returned.
"""

from collections import Counter

import torch
from torch.utils.data import Dataset

WIDTH, CLASSES = 5, 3


class Numbered(Dataset):
    """Random samples of CLASSES classes: inputs, float64 (1 + WIDTH,), and a label. The
    first input is the sample's own number, starting with `first`.
    """

    def __init__(self, samples, seed, first=0):
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.arange(first, first + samples, dtype=torch.float64)
        random_inputs = torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64)
        self.inputs = torch.cat([numbers[:, None], random_inputs], dim=1)
        self.labels = torch.randint(CLASSES, (samples,), generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


def how_often(given, samples):
    """How many samples occur how often: {1: 12, 2: 2} is 12 samples once, 2 samples
    twice.
    """
    counts = Counter(index for share in given for index in share)
    return Counter(counts[sample] for sample in range(samples))


def in_words(tally):
    words = {0: "not at all", 1: "once", 2: "twice"}
    groups = sorted(tally.items(), key=lambda group: (-group[1], group[0]))
    counted = [(f"{many} sample{'s' * (many > 1)}", words.get(times, f"{times} times")) for times, many in groups]
    return ", ".join(f"{samples} {times}" for samples, times in counted)


def an_example(given, samples):
    """The sample that most ranks have, and up to two samples that no rank has."""
    owners = [[rank for rank, share in enumerate(given) if sample in share] for sample in range(samples)]
    most = max(range(samples), key=lambda sample: len(owners[sample]))
    texts = [f"sample {most} is on rank{'s' * (len(owners[most]) > 1)} {', '.join(map(str, owners[most]))}"]
    return ", ".join(texts + [f"sample {sample} on none" for sample in range(samples) if not owners[sample]][:2])


def two_numbers(returned):
    """(correct, seen) as a tensor, or None if `returned` is not two numbers."""
    try:
        pair = torch.tensor([float(number) for number in returned], dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return None
    return pair if len(pair) == 2 and pair.isfinite().all() else None


def same_as(expected):
    return lambda number: abs(number - expected) < 1e-6
