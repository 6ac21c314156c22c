"""Exercise 10: pretraining a GPT."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import torch

from ddp_course import lesson10
from mutants import right, wrong

# ---- learning_rate ----


def line(step, warmup, first, peak):
    return first + (peak - first) * step / warmup


def cosine(done, peak, last):
    return last + (peak - last) * (1 + math.cos(math.pi * done)) / 2


def share(step, steps, warmup):
    return (step - warmup) / max(1, steps - 1 - warmup)


@right("learning_rate")
def by_torch(step, steps, warmup, first, peak, last):
    """Returns a tensor, and draws the cosine from a sine."""
    if step < warmup:
        return torch.lerp(
            torch.tensor(first, dtype=torch.float64),
            torch.tensor(peak, dtype=torch.float64),
            step / warmup,
        )
    done = torch.tensor(share(step, steps, warmup), dtype=torch.float64)
    return last + (peak - last) * torch.cos(done * math.pi / 2) ** 2


@right("learning_rate")
def the_smaller_of_the_two(step, steps, warmup, first, peak, last):
    if step >= warmup and steps - 1 <= warmup:
        return peak
    rising = line(step, warmup, first, peak) if warmup else math.inf
    return min(rising, cosine(max(0.0, share(step, steps, warmup)), peak, last))


@wrong("learning_rate", "updates count from 0: the first one has `first`")
def one_too_early(step, steps, warmup, first, peak, last):
    return (
        line(step + 1, warmup, first, peak)
        if step < warmup
        else cosine(share(step, steps, warmup), peak, last)
    )


@wrong("learning_rate", "begins at `first`, not at 0")
def from_zero(step, steps, warmup, first, peak, last):
    return (
        peak * step / warmup
        if step < warmup
        else cosine(share(step, steps, warmup), peak, last)
    )


@wrong("learning_rate", "the cosine begins at the end of the warm-up")
def cosine_over_all(step, steps, warmup, first, peak, last):
    return (
        line(step, warmup, first, peak)
        if step < warmup
        else cosine(step / max(1, steps - 1), peak, last)
    )


@wrong("learning_rate", "the last update, number steps - 1, must have `last`")
def never_quite_there(step, steps, warmup, first, peak, last):
    return (
        line(step, warmup, first, peak)
        if step < warmup
        else cosine((step - warmup) / (steps - warmup), peak, last)
    )


@wrong("learning_rate", "ends at `last`, not at 0")
def down_to_zero(step, steps, warmup, first, peak, last):
    return (
        line(step, warmup, first, peak)
        if step < warmup
        else cosine(share(step, steps, warmup), peak, 0.0)
    )


@wrong("learning_rate", "it is a straight line")
def straight_down(step, steps, warmup, first, peak, last):
    if step < warmup:
        return line(step, warmup, first, peak)
    return peak + (last - peak) * share(step, steps, warmup)


@wrong("learning_rate", "half a period, from cos")
def a_quarter_of_a_period(step, steps, warmup, first, peak, last):
    return (
        line(step, warmup, first, peak)
        if step < warmup
        else cosine(share(step, steps, warmup) / 2, peak, last)
    )


@wrong("learning_rate", "after the warm-up it stays at `peak`")
def no_decay(step, steps, warmup, first, peak, last):
    return line(step, warmup, first, peak) if step < warmup else peak


@wrong("learning_rate", "ZeroDivisionError", "your code raised")
def divides_by_what_may_be_zero(step, steps, warmup, first, peak, last):
    rising = line(step, warmup, first, peak)
    return rising if step < warmup else cosine(share(step, steps, warmup), peak, last)


@wrong("learning_rate", "ZeroDivisionError[\\s\\S]*update 5 of 6", "your code raised")
def forgets_the_single_update(step, steps, warmup, first, peak, last):
    if step < warmup:
        return line(step, warmup, first, peak)
    return cosine((step - warmup) / (steps - 1 - warmup), peak, last)


@right("learning_rate")
def in_numpy(step, steps, warmup, first, peak, last):
    known = [0, warmup] if warmup else [0]
    if step <= warmup:
        return np.interp(step, known, [first, peak] if warmup else [peak])
    x = np.linspace(0, np.pi, steps - warmup)[step - warmup]
    return np.float64((peak + last) / 2 + (peak - last) / 2 * np.cos(x))


@wrong("learning_rate", "need not be a tenth of the peak")
def ends_at_a_tenth(step, steps, warmup, first, peak, last):
    """The end of lesson 10's schedule."""
    return (
        line(step, warmup, first, peak)
        if step < warmup
        else cosine(share(step, steps, warmup), peak, peak / 10)
    )


@wrong("learning_rate", "in the warm-up, the rate must be on a line|begins at `first`")
def lesson_tens(step, steps, warmup, first, peak, last):
    args = SimpleNamespace(learning_rate=peak, warmup=warmup)
    return lesson10.learning_rate(step, steps, args)


@wrong("learning_rate", "on a line|after the warm-up")
def counts_its_calls(step, steps, warmup, first, peak, last, calls=[-1]):  # noqa: B006
    calls[0] = (calls[0] + 1) % steps
    return the_smaller_of_the_two(calls[0], steps, warmup, first, peak, last)


# ---- parameter_groups ----


@right("parameter_groups")
def by_ndim_and_name(model, weight_decay):
    """In another order, with generators, a third group that is empty, and no word of
    decay where it is 0... said so.
    """
    named = {
        name: value for name, value in model.named_parameters() if value.requires_grad
    }
    vectors = [value for value in named.values() if value.ndim < 2]
    return [
        {"params": vectors, "weight_decay": 0},
        {
            "params": [value for value in named.values() if value.ndim >= 2],
            "weight_decay": weight_decay,
        },
        {"params": [], "weight_decay": 0.0},
    ]


@right("parameter_groups")
def a_group_for_each(model, weight_decay):
    return [
        {"params": [value], "weight_decay": weight_decay * (value.dim() > 1)}
        for value in model.parameters()
        if value.requires_grad
    ]


def two_groups(parameters, decays, weight_decay):
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if decays(p)], "weight_decay": weight_decay},
        {"params": [p for p in parameters if not decays(p)], "weight_decay": 0.0},
    ]


def trained(model):
    return [value for value in model.parameters() if value.requires_grad]


@wrong("parameter_groups", "a bias, a norm's factor or a single number")
def everything_decays(model, weight_decay):
    return two_groups(trained(model), lambda value: True, weight_decay)


@wrong("parameter_groups", "a frozen parameter has no gradient")
def frozen_ones_too(model, weight_decay):
    return two_groups(model.parameters(), lambda value: value.dim() >= 2, weight_decay)


@wrong("parameter_groups", "a weight with two or more dimensions must be decayed")
def only_matrices(model, weight_decay):
    return two_groups(trained(model), lambda value: value.dim() == 2, weight_decay)


@wrong("parameter_groups", "an embedding is a matrix, too|a norm's factor")
def only_linear_layers(model, weight_decay):
    linear = {
        id(m.weight)
        for name, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and name != "head"
    }
    return two_groups(trained(model), lambda value: id(value) in linear, weight_decay)


@wrong("parameter_groups", "it has no|gets AdamW's default")
def says_nothing(model, weight_decay):
    return [{"params": [p for p in trained(model) if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in trained(model) if p.dim() < 2]}]  # fmt: skip


@wrong("parameter_groups", "in two groups, or twice in one")
def tied_ones_twice(model, weight_decay):
    named = [
        value
        for _, value in model.named_parameters(remove_duplicate=False)
        if value.requires_grad
    ]
    return two_groups(named, lambda value: value.dim() >= 2, weight_decay)


@wrong("parameter_groups", "this parameter is in no group")
def forgets_the_vectors(model, weight_decay):
    return [
        {
            "params": [p for p in trained(model) if p.dim() >= 2],
            "weight_decay": weight_decay,
        }
    ]


@wrong("parameter_groups", "not copies of them")
def of_a_copy(model, weight_decay):
    return two_groups(
        trained(copy.deepcopy(model)), lambda value: value.dim() >= 2, weight_decay
    )


@wrong("parameter_groups", "not the one that the function was given")
def always_a_tenth(model, weight_decay):
    return two_groups(trained(model), lambda value: value.dim() >= 2, 0.1)


@wrong("parameter_groups", "a frozen parameter has no gradient")
def lesson_tens_groups(model, weight_decay):
    return lesson10.parameter_groups(model, weight_decay)


# ---- deal_out ----


def pair(stream, start, context):
    return stream[start : start + context], stream[start + 1 : start + context + 1]


@right("deal_out")
def all_windows_first(stream, context, rank, ranks):
    """As a matrix; a rank's are every ranks-th row."""
    count = (len(stream) - 1) // context // ranks * ranks
    tokens = stream[: count * context].view(count, context)
    targets = stream[1 : count * context + 1].view(count, context)
    return list(zip(tokens[rank::ranks], targets[rank::ranks]))


@right("deal_out")
def one_by_one(stream, context, rank, ranks):
    windows, start = [], 0
    while start + ranks * context < len(stream):
        windows.append(pair(stream, start + rank * context, context))
        start += ranks * context
    return windows


@wrong("deal_out", "both of them `context` long|needs one more token")
def without_the_last_target(stream, context, rank, ranks):
    count = len(stream) // context // ranks * ranks
    return [
        pair(stream, start, context)
        for start in range(rank * context, count * context, ranks * context)
    ]


@wrong("deal_out", "there is nothing to predict")
def no_shift(stream, context, rank, ranks):
    return [(tokens, tokens) for tokens, _ in one_by_one(stream, context, rank, ranks)]


@wrong("deal_out", "two ranks have the same window, or one rank has it twice")
def everybody_all(stream, context, rank, ranks):
    return one_by_one(stream, context, 0, 1)


@wrong("deal_out", "windows overlap")
def sliding(stream, context, rank, ranks):
    count = (len(stream) - context) // ranks
    return [pair(stream, rank + ranks * number, context) for number in range(count)]


@wrong("deal_out", "would wait for the others in its last update")
def uneven(stream, context, rank, ranks):
    count = (len(stream) - 1) // context
    return [
        pair(stream, number * context, context) for number in range(rank, count, ranks)
    ]


@wrong("deal_out", "tokens are lost")
def a_token_between(stream, context, rank, ranks):
    """Takes context + 1 tokens for each window, and begins the next one behind them."""
    count = len(stream) // (context + 1) // ranks * ranks
    return [
        pair(stream, number * (context + 1), context)
        for number in range(rank, count, ranks)
    ]


@wrong("deal_out", "tokens are lost")
def drops_one_too_many(stream, context, rank, ranks):
    return one_by_one(stream[:-1], context, rank, ranks)


@wrong("deal_out", "one place later")
def the_other_way(stream, context, rank, ranks):
    return [
        (targets, tokens)
        for tokens, targets in one_by_one(stream, context, rank, ranks)
    ]


@wrong("deal_out", "a block of neighbouring windows")
def in_blocks(stream, context, rank, ranks):
    windows = all_windows_first(stream, context, 0, 1)
    each = len(windows) // ranks
    return windows[rank * each : (rank + 1) * each]


@wrong("deal_out", "not in the order of the text")
def backwards(stream, context, rank, ranks):
    return one_by_one(stream, context, rank, ranks)[::-1]


@wrong("deal_out", "they were not dealt in turn")
def there_and_back(stream, context, rank, ranks):
    """Snakes through the ranks: 0, 1, 2, 2, 1, 0."""
    count = (len(stream) - 1) // context // ranks
    order = [
        number * ranks + (ranks - 1 - rank if number % 2 else rank)
        for number in range(count)
    ]
    return [pair(stream, window * context, context) for window in order]
