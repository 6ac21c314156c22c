"""The text and the network of question 5, and what comes out, right or with faults, in one
process.
"""

import math
from itertools import combinations

import torch
from torch import nn
from torch.nn import functional as F

from ddp_course.checks.training import fill

VOCABULARY, MARK = 12, 0  # the mark begins a text, and has no bytes

CAUSES = {  # of each fault
    "again": "tokens in the overlap of two windows are scored twice, the second time at the start of a window, with "
    "little context: of each window but the first, the first context - stride targets are old",
    "mean of ranks": "this is the mean of the ranks' own bits per byte. The ranks have scored different numbers of bytes: "
    "add up the bits and the bytes of all ranks, and divide then",
    "input bytes": "these are the bytes of the inputs. What is scored are the targets, one place further on: the mark at "
    "the start of the text is never a target, and has no bytes; the last token is one",
    "own part": "this is the value of this rank's windows alone: add up those of all ranks",
    "sum of ranks": "this is the sum of the ranks' own bits per byte: add up the bits and the bytes, and divide then",
    "nats": "cross_entropy gives nats: divide by log(2) for bits",
    "times log 2": "a nat is 1 / log(2) bits: divide by log(2), and do not multiply",
    "per token": "these are bits per token: divide by the bytes of the scored tokens, not by their number",
    "last ones": "the windows at the end are shorter: fewer than `stride` of their targets are new, or none. Leave out the "
    "first context - stride targets, and do not take the last `stride`",
    "one more": "of each window but the first, one target too many is scored: the first context - stride are old",
    "one less": "of each window but the first, one target too few is scored: only the first context - stride are old",
    "from none": "the first window is cut, too: there, all targets are new",
}
PLANTED = ["again", "mean of ranks", "input bytes"]


def fault_sets():
    """Those of one fault first."""
    planted = [set(some) for size in (1, 2, 3) for some in combinations(PLANTED, size)]
    return planted[:3] + [{name} for name in CAUSES if name not in PLANTED] + planted[3:]


class Language(nn.Module):
    """A small causal network: logits float64 (rows, n, VOCABULARY) from tokens (rows, n),
    by the mean of what came before. It notes its rows, and whether it was training.
    """

    def __init__(self, seed, context):
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY)
        self.dropout, self.context = nn.Dropout(0.5), context
        self.rows, self.trained = [], False
        fill(self, seed)

    def forward(self, tokens):
        if tokens.dim() != 2 or tokens.shape[1] > self.context:
            raise ValueError(f"tokens of shape {tuple(tokens.shape)}, and the context is {self.context}")
        self.rows += tokens.tolist()
        self.trained |= self.training
        places = torch.arange(1, tokens.shape[1] + 1)[:, None]
        return self.head(self.dropout(self.table(tokens).cumsum(1) / places))


def text_of(case):
    """(tokens, int64 (length,); the bytes of each token of the vocabulary, int64)."""
    generator = torch.Generator().manual_seed(case["seed"])
    tokens = torch.randint(1, VOCABULARY, (case["length"],), generator=generator)
    sizes = torch.randint(1, 7, (VOCABULARY,), generator=generator)
    tokens[0], sizes[MARK] = MARK, 0
    if case["length"] > 4:  # one that is scored has no bytes, either
        tokens[case["length"] // 2], sizes[1] = 1, 0
    return tokens, sizes


def windows_of(case):
    """For each window: (its inputs, whether it has targets that are new)."""
    tokens, context, stride = text_of(case)[0].tolist(), case["context"], case["stride"]
    for start in range(0, len(tokens) - 1, stride):
        inputs = tokens[start : start + context + 1][:-1]
        yield inputs, start == 0 or len(inputs) > context - stride


@torch.no_grad()
def simulated(case, faults=frozenset()):
    """What each rank returns."""
    tokens, sizes = text_of(case)
    network, context, stride = Language(case["seed"], case["context"]).eval(), case["context"], case["stride"]
    totals = torch.zeros(case["ranks"], 2, dtype=torch.float64)
    for place, start in enumerate(range(0, len(tokens) - 1, stride)):
        window = tokens[start : start + context + 1]
        losses = F.cross_entropy(network(window[None, :-1])[0], window[1:], reduction="none")
        lengths = sizes[window[:-1] if "input bytes" in faults else window[1:]]
        lengths = torch.ones_like(lengths) if "per token" in faults else lengths
        old = context - stride + ("one less" in faults) - ("one more" in faults)
        old = max(0, len(losses) - stride) if "last ones" in faults else old
        new = old if (start or "from none" in faults) and "again" not in faults else 0
        totals[place % case["ranks"]] += torch.stack([losses[new:].sum(), lengths[new:].sum().double()])
    totals[:, 0] /= 1 if "nats" in faults else 1 / math.log(2) if "times log 2" in faults else math.log(2)
    own = totals[:, 0] / totals[:, 1]
    if "own part" in faults:
        return own.tolist()
    value = own.mean() if "mean of ranks" in faults else totals[:, 0].sum() / totals[:, 1].sum()
    value = own.sum() if "sum of ranks" in faults else value
    return [value.item()] * case["ranks"]
