"""What question 2 claims of collate."""

from itertools import permutations

import torch
from torch.nn import functional as F

from ddp_course.checks.claims import Between, Claim
from ddp_course.checks.ex08.on_ranks import in_row
from ddp_course.checks.ex08.uneven_cases import IGNORED, lengths_of, padded


def pads(batch, seen):
    """Claims that collate has made one batch of these examples, and has left them alone."""
    checked, got = f"collate, with {lengths_of(batch)}", seen["made"]
    right = {"tokens": padded(batch, "tokens", 0), "labels": padded(batch, "targets", IGNORED)}
    yield Claim(checked, isinstance(got, dict) and got.keys() == right.keys(), True, cause_of_names(got),
                told="a dict of tokens and labels", shown=kind_of(got))  # fmt: skip
    for name, tensor in right.items():
        whole = isinstance(got[name], torch.Tensor) and got[name].dtype == torch.long
        yield Claim(f"{name} of {checked}", whole, True, "tokens and labels are whole numbers, each in one tensor: "
                    "torch.zeros and torch.full take dtype=torch.long", told="a tensor of torch.int64",
                    shown=kind_of(got[name]))  # fmt: skip
        shape, (many, longest) = tuple(got[name].shape), tensor.shape
        yield Claim(f"the shape of {name} of {checked}", list(shape), [many, longest], "each example is a row, and shorter "
                    "ones are padded: (batch, longest)", [
                        ([longest, many], "rows and columns are swapped: pass batch_first=True to pad_sequence"),
                        ([many, Between(longest + 1)], "it is padded beyond the longest example of this batch, which "
                         "wastes work"),
                        ([many, Between(0, longest - 1)], "examples were cut: the rows must be as long as the longest "
                         "example of the batch"),
                    ], told=(many, longest), shown=shape)  # fmt: skip
        of, value = ("tokens", 0) if name == "tokens" else ("targets", IGNORED)
        yield Claim(f"{name} of {checked}", got[name], tensor, f"row i holds the {of} of example i, unchanged, and then "
                    "padding", mistakes(batch, of, value, tensor), told=rows(tensor), shown=rows(got[name]))  # fmt: skip
    yield Claim(f"the examples after {checked}", seen["spoiled"], False, "collate changes the examples themselves, and in "
                "the next epoch Trainer takes the same ones again: read them only", told="as before",
                shown="something else")  # fmt: skip


def mistakes(batch, of, value, right):
    yield padded(batch, of, value, side="left"), "the padding is before the examples, but it belongs after them"
    for order in permutations(range(len(batch))):
        yield right[list(order)], "the rows are not in the order of the examples"
    if of == "tokens":
        cause = "-100 is for labels: a model that looks up tokens in a table has no row -100; pad with 0"
        yield padded(batch, of, IGNORED), cause
    else:
        cause = "0 is a class like any other, so the padding would be counted and learned: pad with -100"
        yield padded(batch, of, 0), cause
        shifted = F.pad(right[:, 1:], (0, 1), value=IGNORED)
        yield shifted, "the targets were shifted: here the target of a token is at the token's own place"


def cause_of_names(got):
    if got is None:
        return "the function ends without a return"
    if isinstance(got, dict) and "targets" in got:
        return "Trainer needs the name labels, to count the labels and for the loss; all other entries go to the model"
    return "the model is called with all entries of the dict except labels: return only these two"


def kind_of(thing):
    """What something is, in a few words. A rank's tuples come as lists, its objects as
    texts, 'a Thing'.
    """
    match thing:
        case None:
            return "nothing (None)"
        case torch.Tensor():
            return f"a tensor of {thing.dtype}, shape {tuple(thing.shape)}"
        case dict():
            return f"a dict of {in_row(thing)}" if thing else "an empty dict"
        case list():
            return "a list, or a tuple"
    return thing


def rows(tensor):
    return "\n".join(" ".join(f"{number:4}" for number in row) for row in tensor.tolist())
