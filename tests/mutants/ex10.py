"""Exercise 10: pretraining a GPT."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import torch

from mutants import right, wrong

# ---- learning_rate ----


def line(step, warmup, first, peak):
    return first + (peak - first) * step / warmup


@right("learning_rate")
def by_torch(step, steps, warmup, decay, first, peak, last):
    """Returns a tensor."""
    ends = torch.tensor([first, peak, last], dtype=torch.float64)
    if step < warmup:
        return torch.lerp(ends[0], ends[1], step / warmup)
    left = steps - 1 - step
    return torch.lerp(ends[1], ends[2], math.sqrt(max(0, decay - left) / max(1, decay)))


@right("learning_rate")
def in_numpy(step, steps, warmup, decay, first, peak, last):
    """The whole schedule, of which one rate is taken."""
    rates = np.full(steps, peak)
    rates[:warmup] = np.linspace(first, peak, warmup + 1)[:-1]
    if decay:
        rates[-decay:] += (last - peak) * np.sqrt(np.arange(1, decay + 1) / decay)
    return rates[step]


@right("learning_rate")
def by_cases(step, steps, warmup, decay, first, peak, last):
    match step:
        case _ if step < warmup:
            return line(step, warmup, first, peak)
        case _ if step + decay < steps:
            return peak
        case _:
            done = 1 - (steps - 1 - step) / decay
            return peak - (peak - last) * done**0.5


def schedule(rising=line, falling=math.sqrt, end=lambda peak, last: last, later=0):
    """An answer with another warm-up, another decay, or another end."""

    def learning_rate(step, steps, warmup, decay, first, peak, last):
        held = steps - 1 - decay + later
        if step < warmup:
            return rising(step, warmup, first, peak)
        if step <= held:
            return peak
        done = falling((step - held) / decay)
        return peak + (end(peak, last) - peak) * done

    return [learning_rate]


@wrong("learning_rate", "updates count from 0: the first one has `first`", several=True)
def one_too_early():
    return schedule(rising=lambda n, w, first, peak: line(n + 1, w, first, peak))


@wrong("learning_rate", "begins at `first`, not at 0", several=True)
def from_zero():
    return schedule(rising=lambda n, w, first, peak: peak * n / w)


@wrong("learning_rate", "that is lesson 10's warm-up", several=True)
def with_lesson_tens_warmup():
    return schedule(rising=lambda n, w, first, peak: peak * (n + 1) / (w + 1))


@wrong("learning_rate", "it is a straight line", several=True)
def straight_down():
    return schedule(falling=lambda done: done)


@wrong("learning_rate", "it is a cosine", several=True)
def down_a_cosine():
    return schedule(falling=lambda done: (1 - math.cos(math.pi * done)) / 2)


@wrong("learning_rate", "not its square", several=True)
def squared():
    return schedule(falling=lambda done: done**2)


@wrong("learning_rate", "not of 1 - done", several=True)
def root_of_the_rest():
    return schedule(falling=lambda done: 1 - math.sqrt(1 - done))


@wrong("learning_rate", "ends at `last`, not at 0", several=True)
def down_to_zero():
    return schedule(end=lambda peak, last: 0.0)


@wrong("learning_rate", "need not be a tenth of the peak", several=True)
def ends_at_a_tenth():
    return schedule(end=lambda peak, last: peak / 10)


@wrong("learning_rate", "yours would reach it one update later", several=True)
def never_quite_there():
    return schedule(later=1)


@wrong("learning_rate", "yours keeps the peak for one update more")
def one_update_short(step, steps, warmup, decay, first, peak, last):
    if step < warmup:
        return line(step, warmup, first, peak)
    if step <= steps - decay:
        return peak if decay else peak
    return peak + (last - peak) * math.sqrt((step - steps + decay) / (decay - 1))


@wrong("learning_rate", "the decay begins too early")
def nothing_in_between(step, steps, warmup, decay, first, peak, last):
    if step < warmup:
        return line(step, warmup, first, peak)
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return peak + (last - peak) * math.sqrt(done)


@wrong("learning_rate", "that is a cosine over the whole run")
def a_cosine(step, steps, warmup, decay, first, peak, last):
    if step < warmup:
        return line(step, warmup, first, peak)
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return last + (peak - last) * (1 + math.cos(math.pi * done)) / 2


@wrong("learning_rate", "stays at `peak` to the end")
def no_decay(step, steps, warmup, decay, first, peak, last):
    return line(step, warmup, first, peak) if step < warmup else peak


@wrong("learning_rate", "lesson 10's warm-up|on a line|the rate is `peak`|cosine")
def lesson_tens(step, steps, warmup, decay, first, peak, last):
    from ddp_course import lesson10  # here, or all ranks of all candidates import it

    args = SimpleNamespace(learning_rate=peak, warmup=warmup)
    return lesson10.learning_rate(step, steps, args)


@wrong("learning_rate", "ZeroDivisionError", "your code raised")
def divides_by_no_warmup(step, steps, warmup, decay, first, peak, last):
    rising = line(step, warmup, first, peak)
    return (
        rising
        if step < warmup
        else by_cases(step, steps, warmup, decay, first, peak, last)
    )


@wrong("learning_rate", "ZeroDivisionError", "your code raised")
def divides_by_no_decay(step, steps, warmup, decay, first, peak, last):
    done = (step - (steps - 1 - decay)) / decay
    falling = peak + (last - peak) * math.sqrt(max(0, done))
    return line(step, warmup, first, peak) if step < warmup else falling


@wrong("learning_rate", "on a line|the rate is `peak`|in the decay")
def counts_its_calls(step, steps, warmup, decay, first, peak, last, calls=[-1]):  # noqa: B006
    calls[0] = (calls[0] + 1) % steps
    return by_cases(calls[0], steps, warmup, decay, first, peak, last)


# ---- parameter_groups ----


def tables_of(model):
    return {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}


def trained(model):
    return [value for value in model.parameters() if value.requires_grad]


def two_groups(parameters, decays, weight_decay):
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if decays(p)], "weight_decay": weight_decay},
        {"params": [p for p in parameters if not decays(p)], "weight_decay": 0.0},
    ]


def rightly(model):
    """Which parameters decay, as a function."""
    tables = tables_of(model)
    return lambda value: value.dim() >= 2 and id(value) not in tables


@right("parameter_groups")
def module_by_module(model, weight_decay):
    """By modules, each parameter when it is met first; an empty third group."""
    decays, others, seen = [], [], set()
    embeddings = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    for module in [*embeddings, *model.modules()]:
        for value in module.parameters(recurse=False):
            if value in seen or not value.requires_grad:
                continue
            seen.add(value)
            is_table = isinstance(module, torch.nn.Embedding)
            (others if is_table or value.ndim < 2 else decays).append(value)
    groups = [{"params": others, "weight_decay": 0}, {"params": [], "weight_decay": 0}]
    return [*groups, {"params": iter(decays), "weight_decay": weight_decay}]


@right("parameter_groups")
def a_group_for_each(model, weight_decay):
    decays = rightly(model)
    return [
        {"params": [value], "weight_decay": weight_decay * decays(value)}
        for value in trained(model)
    ]


@right("parameter_groups")
def by_names_of_embeddings(model, weight_decay):
    tables = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding)
    }
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    decays = [p for n, p in named if p.dim() > 1 and n not in tables]
    others = [p for n, p in named if p.dim() <= 1 or n in tables]
    return [
        {"params": decays, "weight_decay": np.float64(weight_decay)},
        {"params": others, "weight_decay": 0.0},
    ]


@wrong("parameter_groups", "this is the weight of an nn.Embedding")
def embeddings_too(model, weight_decay):
    """What lesson 10 does, without frozen parameters."""
    return two_groups(trained(model), lambda value: value.dim() >= 2, weight_decay)


@wrong(
    "parameter_groups", "a frozen parameter has no gradient|weight of an nn.Embedding"
)
def lesson_tens_groups(model, weight_decay):
    from ddp_course import lesson10

    return lesson10.parameter_groups(model, weight_decay)


@wrong(
    "parameter_groups", "look at the module, not at its name|weight of an nn.Embedding"
)
def by_name(model, weight_decay):
    tables = {id(p) for name, p in model.named_parameters() if "embedding" in name}
    return two_groups(
        trained(model), lambda p: p.dim() >= 2 and id(p) not in tables, weight_decay
    )


@wrong("parameter_groups", "this is the weight of an nn.Embedding")
def of_exactly_that_type(model, weight_decay):
    tables = {id(m.weight) for m in model.modules() if type(m) is torch.nn.Embedding}
    return two_groups(
        trained(model), lambda p: p.dim() >= 2 and id(p) not in tables, weight_decay
    )


@wrong("parameter_groups", "this is the weight of an nn.Embedding")
def children_only(model, weight_decay):
    """A tied embedding is met in the head, too."""
    decays, others, seen = [], [], set()
    for module in reversed(list(model.modules())):
        for value in module.parameters(recurse=False):
            if value in seen or not value.requires_grad:
                continue
            seen.add(value)
            is_table = isinstance(module, torch.nn.Embedding)
            (others if is_table or value.ndim < 2 else decays).append(value)
    return [
        {"params": decays, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


@wrong("parameter_groups", "a bias, a norm's factor or a single number|nn.Embedding")
def everything_decays(model, weight_decay):
    return two_groups(trained(model), lambda value: True, weight_decay)


@wrong("parameter_groups", "a frozen parameter has no gradient")
def frozen_ones_too(model, weight_decay):
    return two_groups(model.parameters(), rightly(model), weight_decay)


@wrong("parameter_groups", "a weight with two or more dimensions must be decayed")
def only_matrices(model, weight_decay):
    decays = rightly(model)
    return two_groups(
        trained(model), lambda value: decays(value) and value.dim() == 2, weight_decay
    )


@wrong("parameter_groups", "it has no|gets AdamW's default")
def says_nothing(model, weight_decay):
    groups = two_groups(trained(model), rightly(model), weight_decay)
    del groups[1]["weight_decay"]
    return groups


@wrong("parameter_groups", "in two groups, or twice in one")
def tied_ones_twice(model, weight_decay):
    named = [
        value
        for _, value in model.named_parameters(remove_duplicate=False)
        if value.requires_grad
    ]
    return two_groups(named, rightly(model), weight_decay)


@wrong("parameter_groups", "this parameter is in no group")
def forgets_the_vectors(model, weight_decay):
    return two_groups(trained(model), rightly(model), weight_decay)[:1]


@wrong("parameter_groups", "not copies of them")
def of_a_copy(model, weight_decay):
    model = copy.deepcopy(model)
    return two_groups(trained(model), rightly(model), weight_decay)


@wrong("parameter_groups", "not the one that the function was given")
def always_a_tenth(model, weight_decay):
    return two_groups(trained(model), rightly(model), 0.1)


# ---- predict_update ----


def in_layer(width, heads, kv_heads, hidden):
    return 2 * width**2 + 2 * width * kv_heads * (width // heads) + 3 * width * hidden


def costs(per_layer=in_layer, norms=2, tables=2, flops=None, sent=None):
    """An answer with some part of it different.

    flops, sent: functions of a namespace with the arguments and what follows from them.
    """

    def predict_update(**case):
        c = SimpleNamespace(**case)
        c.layer = per_layer(c.width, c.heads, c.kv_heads, c.hidden)
        c.table, c.tokens = c.vocabulary * c.width, c.windows * c.context
        c.parameters = tables * c.table + c.layers * (c.layer + norms * c.width)
        c.parameters += c.width
        c.matrices = c.table + c.layers * c.layer
        c.attention = 12 * c.layers * c.width * c.context
        right_flops = c.tokens * (6 * c.matrices + c.attention)
        right_sent = 8 * c.parameters * (c.ranks - 1) / c.ranks
        return (
            c.parameters,
            flops(c) if flops else right_flops,
            sent(c) if sent else right_sent,
        )

    return [predict_update]


@right("predict_update", several=True)
def by_parts():
    return costs()


@right("predict_update")
def on_meta(
    vocabulary, context, layers, width, heads, kv_heads, hidden, windows, ranks
):
    """Builds the matrices without memory and counts; NumPy numbers."""
    from torch import nn

    narrow = width // heads * kv_heads
    with torch.device("meta"):
        sizes = [(width, width), (width, narrow), (width, narrow), (width, width)]
        sizes += [(width, hidden), (width, hidden), (hidden, width)]
        block = [nn.Linear(a, b, bias=False) for a, b in sizes]
        net = nn.ModuleList(block * 1)
    one = sum(p.numel() for p in net.parameters())
    total = np.int64(layers) * (one + 2 * width) + width + 2 * vocabulary * width
    multiplied = layers * one + vocabulary * width
    forward = 2 * multiplied + 4 * layers * width * context
    return np.array(
        [total, 3 * forward * windows * context, 4 * 2 * (ranks - 1) * (total / ranks)]
    )


@wrong("predict_update", "the head is not tied", several=True)
def as_gpt2():
    return costs(tables=1)


@wrong("predict_update", "key and value have fewer heads", several=True)
def all_heads():
    return costs(per_layer=lambda w, h, kv, hidden: 4 * w**2 + 3 * w * hidden)


@wrong("predict_update", "the MLP has three matrices", several=True)
def two_matrices():
    return costs(
        per_layer=lambda w, h, kv, hidden: in_layer(w, h, kv, hidden) - w * hidden
    )


@wrong("predict_update", "each layer has two norms", several=True)
def one_norm():
    return costs(norms=1)


@wrong("predict_update", "the MLP is `hidden` wide", several=True)
def four_times_the_width():
    return costs(per_layer=lambda w, h, kv, hidden: in_layer(w, h, kv, 4 * w))


@wrong("predict_update", "one of them is missing|tied|fewer heads")
def lesson_tens_model(
    vocabulary, context, layers, width, heads, kv_heads, hidden, windows, ranks
):
    from ddp_course.scenery.models import GPT

    with torch.device("meta"):
        model = GPT(vocabulary, context, layers, heads, width)
    count = sum(p.numel() for p in model.parameters())
    flops = model.flops_per_token() * windows * context
    return count, flops, 8 * count * (ranks - 1) / ranks


@wrong("predict_update", "the embedding is a table", several=True)
def six_per_parameter():
    return costs(flops=lambda c: c.tokens * (6 * c.parameters + c.attention))


@wrong("predict_update", "attention is missing", several=True)
def without_attention():
    return costs(flops=lambda c: 6 * c.tokens * c.matrices)


@wrong("predict_update", "although half of it is masked", several=True)
def causal_half():
    return costs(flops=lambda c: c.tokens * (6 * c.matrices + c.attention / 2))


@wrong("predict_update", "every head of the query attends", several=True)
def attention_of_shared_heads():
    return costs(
        flops=lambda c: c.tokens * (6 * c.matrices + c.attention * c.kv_heads / c.heads)
    )


@wrong("predict_update", "that is 6 per parameter and token", several=True)
def six_per_parameter_and_nothing_else():
    return costs(flops=lambda c: 6 * c.tokens * c.parameters)


@wrong("predict_update", "nothing is recomputed here", several=True)
def with_checkpointing():
    return costs(flops=lambda c: c.tokens * (8 * c.matrices + c.attention * 4 / 3))


@wrong("predict_update", "not one for each head", several=True)
def one_number_per_head():
    return costs(
        flops=lambda c: c.tokens * (6 * c.matrices + c.attention * c.heads / c.width)
    )


@wrong("predict_update", "backward takes twice as many", several=True)
def forward_only():
    return costs(flops=lambda c: c.tokens * (2 * c.matrices + c.attention / 3))


@wrong("predict_update", "that is for one token", several=True)
def per_token():
    return costs(flops=lambda c: 6 * c.matrices + c.attention)


@wrong("predict_update", "that is for all ranks together", several=True)
def all_ranks():
    return costs(flops=lambda c: c.ranks * c.tokens * (6 * c.matrices + c.attention))


@wrong("predict_update", "a ring sends 2", several=True)
def the_gradient_once():
    return costs(sent=lambda c: 4 * c.parameters)


@wrong("predict_update", "goes around the ring twice", several=True)
def once_around():
    return costs(sent=lambda c: 4 * c.parameters * (c.ranks - 1) / c.ranks)


@wrong("predict_update", "these are numbers, not bytes", several=True)
def numbers_for_bytes():
    return costs(sent=lambda c: 2 * c.parameters * (c.ranks - 1) / c.ranks)


@wrong("predict_update", "what all ranks send together", several=True)
def of_all_ranks():
    return costs(sent=lambda c: 8 * c.parameters * (c.ranks - 1))


@wrong("predict_update", "a single rank has nobody", several=True)
def a_rank_at_least():
    return costs(sent=lambda c: 8 * c.parameters * max(1, c.ranks - 1) / c.ranks)


@wrong("predict_update", "return three numbers")
def two_of_them(vocabulary, width, **_):
    return vocabulary * width, 6 * vocabulary * width


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
