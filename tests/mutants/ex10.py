"""Exercise 10: pretraining a GPT."""

import copy
import itertools
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

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
    return rising if step < warmup else by_cases(step, steps, warmup, decay, first, peak, last)


@wrong("learning_rate", "ZeroDivisionError", "your code raised")
def divides_by_no_decay(step, steps, warmup, decay, first, peak, last):
    done = (step - (steps - 1 - decay)) / decay
    falling = peak + (last - peak) * math.sqrt(max(0, done))
    return line(step, warmup, first, peak) if step < warmup else falling


@wrong("learning_rate", "on a line|the rate is `peak`|in the decay")
def counts_its_calls(step, steps, warmup, decay, first, peak, last, calls=[-1]):  # noqa: B006
    calls[0] = (calls[0] + 1) % steps
    return by_cases(calls[0], steps, warmup, decay, first, peak, last)


@wrong("learning_rate", "the rate is `peak`|no update is below|on a line|in the decay")
def first_if_there_is_one_update(step, steps, warmup, decay, first, peak, last):
    return first if steps == 1 else by_cases(step, steps, warmup, decay, first, peak, last)


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
    return [{"params": [value], "weight_decay": weight_decay * decays(value)} for value in trained(model)]


@wrong("parameter_groups", "this is the weight of an nn.Embedding")
def by_names_of_embeddings(model, weight_decay):
    """A tied head that comes first gives the weight its name."""
    tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding)}
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    decays = [p for n, p in named if p.dim() > 1 and n not in tables]
    others = [p for n, p in named if p.dim() <= 1 or n in tables]
    return [{"params": decays, "weight_decay": np.float64(weight_decay)}, {"params": others, "weight_decay": 0.0}]


@wrong("parameter_groups", "this is the weight of an nn.Embedding")
def embeddings_too(model, weight_decay):
    """What lesson 10 does, without frozen parameters."""
    return two_groups(trained(model), lambda value: value.dim() >= 2, weight_decay)


@wrong("parameter_groups", "a frozen parameter has no gradient|weight of an nn.Embedding")
def lesson_tens_groups(model, weight_decay):
    from ddp_course import lesson10

    return lesson10.parameter_groups(model, weight_decay)


@wrong("parameter_groups", "look at the module, not at its name|weight of an nn.Embedding")
def by_name(model, weight_decay):
    tables = {id(p) for name, p in model.named_parameters() if "embedding" in name}
    return two_groups(trained(model), lambda p: p.dim() >= 2 and id(p) not in tables, weight_decay)


@wrong("parameter_groups", "this is the weight of an nn.Embedding")
def of_exactly_that_type(model, weight_decay):
    tables = {id(m.weight) for m in model.modules() if type(m) is torch.nn.Embedding}
    return two_groups(trained(model), lambda p: p.dim() >= 2 and id(p) not in tables, weight_decay)


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
    return [{"params": decays, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


@wrong("parameter_groups", "a bias, a norm's factor or a single number|nn.Embedding")
def everything_decays(model, weight_decay):
    return two_groups(trained(model), lambda value: True, weight_decay)


@wrong("parameter_groups", "a frozen parameter has no gradient")
def frozen_ones_too(model, weight_decay):
    return two_groups(model.parameters(), rightly(model), weight_decay)


@wrong("parameter_groups", "a weight with two or more dimensions must be decayed")
def only_matrices(model, weight_decay):
    decays = rightly(model)
    return two_groups(trained(model), lambda value: decays(value) and value.dim() == 2, weight_decay)


@wrong("parameter_groups", "it has no|gets AdamW's default")
def says_nothing(model, weight_decay):
    groups = two_groups(trained(model), rightly(model), weight_decay)
    del groups[1]["weight_decay"]
    return groups


@wrong("parameter_groups", "this is the weight of an nn.Embedding")
def embeddings_of_the_first_level(model, weight_decay):
    tables = {id(m.weight) for m in model.children() if isinstance(m, torch.nn.Embedding)}
    return two_groups(trained(model), lambda p: p.dim() >= 2 and id(p) not in tables, weight_decay)


@wrong("parameter_groups", "a weight with two or more dimensions must be decayed")
def embeddings_by_value(model, weight_decay):
    tables = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    is_table = lambda p: any(torch.equal(p, table) for table in tables)  # noqa: E731
    return two_groups(trained(model), lambda p: p.dim() >= 2 and not is_table(p), weight_decay)


@wrong("parameter_groups", "this is the weight of an nn.Embedding")
def by_the_first_module(model, weight_decay):
    """A tied head may come before the embedding."""
    tables, seen = set(), set()
    for module in model.modules():
        for value in module.parameters(recurse=False):
            if id(value) not in seen and isinstance(module, torch.nn.Embedding):
                tables.add(id(value))
            seen.add(id(value))
    return two_groups(trained(model), lambda p: p.dim() >= 2 and id(p) not in tables, weight_decay)


@wrong("parameter_groups", "a weight with two or more dimensions must be decayed")
def without_dimensions_of_1(model, weight_decay):
    decays = rightly(model)
    return two_groups(trained(model), lambda p: decays(p) and p.squeeze().dim() >= 2, weight_decay)


@wrong("parameter_groups", "but not the one that the function was given")
def no_decay_is_the_default(model, weight_decay):
    return two_groups(trained(model), rightly(model), weight_decay or 0.1)


@wrong("parameter_groups", "in two groups, or twice in one")
def tied_ones_twice(model, weight_decay):
    named = [value for _, value in model.named_parameters(remove_duplicate=False) if value.requires_grad]
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
        return (c.parameters, flops(c) if flops else right_flops, sent(c) if sent else right_sent)

    return [predict_update]


@right("predict_update", several=True)
def by_parts():
    return costs()


@right("predict_update")
def on_meta(vocabulary, context, layers, width, heads, kv_heads, hidden, windows, ranks):
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
    return np.array([total, 3 * forward * windows * context, 4 * 2 * (ranks - 1) * (total / ranks)])


@wrong("predict_update", "the head is not tied", several=True)
def as_gpt2():
    return costs(tables=1)


@wrong("predict_update", "key and value have fewer heads", several=True)
def all_heads():
    return costs(per_layer=lambda w, h, kv, hidden: 4 * w**2 + 3 * w * hidden)


@wrong("predict_update", "the MLP has three matrices", several=True)
def two_matrices():
    return costs(per_layer=lambda w, h, kv, hidden: in_layer(w, h, kv, hidden) - w * hidden)


@wrong("predict_update", "each layer has two norms", several=True)
def one_norm():
    return costs(norms=1)


@wrong("predict_update", "the MLP is `hidden` wide", several=True)
def four_times_the_width():
    return costs(per_layer=lambda w, h, kv, hidden: in_layer(w, h, kv, 4 * w))


@wrong("predict_update", "one of them is missing|tied|fewer heads")
def lesson_tens_model(vocabulary, context, layers, width, heads, kv_heads, hidden, windows, ranks):
    from ddp_course.models.gpt import GPT

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
    return costs(flops=lambda c: c.tokens * (6 * c.matrices + c.attention * c.kv_heads / c.heads))


@wrong("predict_update", "that is 6 per parameter and token", several=True)
def six_per_parameter_and_nothing_else():
    return costs(flops=lambda c: 6 * c.tokens * c.parameters)


@wrong("predict_update", "nothing is recomputed here", several=True)
def with_checkpointing():
    return costs(flops=lambda c: c.tokens * (8 * c.matrices + c.attention * 4 / 3))


@wrong("predict_update", "not one for each head", several=True)
def one_number_per_head():
    return costs(flops=lambda c: c.tokens * (6 * c.matrices + c.attention * c.heads / c.width))


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


def rounds(documents, size, start, more=1, keep=True):
    """The tokens of each round, and `more` that follow it, as soon as they are there.

    keep: whether what is left of a document goes on in the next.
    """
    kept = torch.empty(0, dtype=torch.int64)
    for document in documents:
        done = min(start, len(document))
        start -= done
        kept = torch.cat([kept if keep else kept[:0], document[done:]])
        while len(kept) >= size + more:
            yield kept[: size + more]
            kept = kept[size:]


@right("deal_out")
def as_lists(documents, context, rank, ranks, start):
    """Token by token, in lists."""
    tokens = itertools.chain.from_iterable(map(torch.Tensor.tolist, documents))
    tokens = itertools.islice(tokens, start, None)
    last = list(itertools.islice(tokens, 1))
    while len(more := list(itertools.islice(tokens, ranks * context))) == (ranks * context):
        round_ = last + more
        yield map(torch.tensor, pair(round_, rank * context, context))
        last = round_[-1:]


@right("deal_out")
def a_window_at_a_time(documents, context, rank, ranks, start):
    """Cuts all windows, and holds back this rank's until the round is complete."""
    mine = None
    for number, window in enumerate(rounds(documents, context, start)):
        if number % ranks == rank:
            mine = window[:-1].clone(), window[1:].clone()
        if number % ranks == ranks - 1:
            yield mine


@wrong("deal_out", "yield a window as soon as its round is complete")
def one_document_ahead(documents, context, rank, ranks, start):
    """In NumPy; knows the next document before it works on this one."""
    kept, size = np.empty(0, dtype=np.int64), ranks * context
    following = next(documents, None)
    while following is not None:
        document, following = following.numpy(), next(documents, None)
        kept = np.concatenate([kept, document[start:]])
        start = max(0, start - len(document))
        for _ in range((len(kept) - 1) // size):
            yield map(torch.from_numpy, pair(kept, rank * context, context))
            kept = kept[size:]


@right("deal_out")
def counts_places(documents, context, rank, ranks, start):
    """By the absolute place of each window; `offset` is that of the first kept token."""
    kept, offset, begin = torch.empty(0, dtype=torch.int64), 0, start
    for document in documents:
        kept = torch.hstack([kept, document])
        while offset + len(kept) > begin + ranks * context:
            yield pair(kept, begin + rank * context - offset, context)
            begin += ranks * context
        drop = min(len(kept), max(0, begin - offset))
        kept, offset = kept[drop:], offset + drop


@wrong("deal_out", "yield a window as soon as its round is complete")
def joins_the_corpus(documents, context, rank, ranks, start):
    stream = torch.cat([torch.empty(0, dtype=torch.int64), *documents])[start:]
    count = (len(stream) - 1) // context // ranks * ranks
    for number in range(rank, count, ranks):
        yield pair(stream, number * context, context)


@wrong("deal_out", "yield a window as soon as its round is complete")
def torchs_sampler(documents, context, rank, ranks, start):
    """Lesson 10's windows, with torch's sampler."""
    from ddp_course.data.text import Windows
    from torch.utils.data import DistributedSampler

    stream = torch.cat([torch.empty(0, dtype=torch.int64), *documents])[start:]
    windows = Windows(stream.numpy(), context)
    sampler = DistributedSampler(windows, ranks, rank, shuffle=False, drop_last=True)
    return [windows[index] for index in sampler]


@wrong("deal_out", "TypeError|no len|not subscriptable", "your code raised")
def lesson_tens_windows(documents, context, rank, ranks, start):
    from ddp_course.data.text import Windows

    windows = Windows(documents, context)
    return [windows[index] for index in range(rank, len(windows), ranks)]


@wrong("deal_out", "yield a window as soon as its round is complete")
def reads_in_batches(documents, context, rank, ranks, start):
    while some := list(itertools.islice(documents, 50)):
        joined = iter([torch.cat(some)])
        yield from a_window_at_a_time(joined, context, rank, ranks, start)
        start = max(0, start - sum(map(len, some)))


@wrong("deal_out", "too small for a whole corpus")
def keeps_everything(documents, context, rank, ranks, start):
    kept, begin = torch.empty(0, dtype=torch.int64), start
    for document in documents:
        kept = torch.cat([kept, document])
        while len(kept) > begin + ranks * context:
            yield pair(kept, begin + rank * context, context)
            begin += ranks * context


@wrong("deal_out", "too small for a whole corpus")
def keeps_a_list(documents, context, rank, ranks, start):
    kept, begin = [], start
    for document in documents:
        kept.extend(document.tolist())
        while len(kept) > begin + ranks * context:
            yield map(torch.tensor, pair(kept, begin + rank * context, context))
            begin += ranks * context


@wrong("deal_out", "too small for a whole corpus")
def keeps_all_documents(documents, context, rank, ranks, start):
    """Joins only what a round needs, but has every document in a list."""
    every = []

    def remembered():
        for document in documents:
            every.append(document)
            yield document

    yield from a_window_at_a_time(remembered(), context, rank, ranks, start)


@wrong("deal_out", "too small for a whole corpus")
def keeps_its_own_windows(documents, context, rank, ranks, start):
    had = []
    for window in a_window_at_a_time(documents, context, rank, ranks, start):
        had.append([part.clone() for part in window])
        yield window


@wrong("deal_out", "the tokens that are left out stay in memory")
def in_views_of_the_last_documents(documents, context, rank, ranks, start):
    """An empty slice of a document keeps all of its tokens in memory."""
    last, size = [], ranks * context
    for document in documents:
        last.append(document[start:])
        start = max(0, start - len(document))
        while sum(map(len, last)) > size:
            round_ = torch.cat(last)
            yield pair(round_, rank * context, context)
            last = [round_[size:]]


@right("deal_out")
def token_by_token(documents, context, rank, ranks, start):
    tokens = (token for document in documents for token in document)
    kept = []
    for token in itertools.islice(tokens, start, None):
        kept.append(token)
        if len(kept) > ranks * context:
            yield pair(torch.stack(kept), rank * context, context)
            kept = kept[-1:]


@wrong("deal_out", "yield a window only when its round is complete|before its round")
def as_soon_as_it_is_there(documents, context, rank, ranks, start):
    for number, window in enumerate(rounds(documents, context, start)):
        if number % ranks == rank:
            yield window[:-1], window[1:]


@wrong("deal_out", "tokens for one more round|both of them `context` long")
def without_the_last_target(documents, context, rank, ranks, start):
    for round_ in rounds(documents, ranks * context, start, more=0):
        yield pair(round_, rank * context, context)


@wrong("deal_out", "tokens for one more round")
def waits_for_two_tokens(documents, context, rank, ranks, start):
    for round_ in rounds(documents, ranks * context, start, more=2):
        yield pair(round_, rank * context, context)


@wrong("deal_out", "there is nothing to predict")
def no_shift(documents, context, rank, ranks, start):
    for tokens, _ in a_window_at_a_time(documents, context, rank, ranks, start):
        yield tokens, tokens


@wrong("deal_out", "one place later")
def the_other_way(documents, context, rank, ranks, start):
    for tokens, targets in a_window_at_a_time(documents, context, rank, ranks, start):
        yield targets, tokens


@wrong("deal_out", "two ranks have the same window, or one rank has it twice")
def everybody_all(documents, context, rank, ranks, start):
    yield from a_window_at_a_time(documents, context, 0, 1, start)


@wrong("deal_out", "windows overlap|first `start` tokens")
def sliding(documents, context, rank, ranks, start):
    for round_ in rounds(documents, ranks, start, more=context):
        yield pair(round_, rank, context)


@wrong("deal_out", "tokens between two windows are lost|tokens for one more round")
def a_token_between(documents, context, rank, ranks, start):
    """Takes context + 1 tokens for each window, and begins the next one behind them."""
    for round_ in rounds(documents, ranks * (context + 1), start, more=0):
        yield pair(round_, rank * (context + 1), context)


@wrong("deal_out", "tokens between two windows are lost|first `start`|one more round")
def document_by_document(documents, context, rank, ranks, start):
    """What is left of a document is dropped."""
    for round_ in rounds(documents, ranks * context, start, keep=False):
        yield pair(round_, rank * context, context)


@wrong("deal_out", "lost|two ranks|in turn|round|`start`|adjacent")
def deals_documents(documents, context, rank, ranks, start):
    """As split_dataset_by_node does with a streaming dataset: every ranks-th example."""
    mine = itertools.islice(documents, rank, None, ranks)
    for round_ in rounds(mine, context, start):
        yield round_[:-1], round_[1:]


@wrong("deal_out", "first `start` tokens of the whole stream")
def from_the_beginning(documents, context, rank, ranks, start):
    yield from a_window_at_a_time(documents, context, rank, ranks, 0)


@wrong("deal_out", "first `start` tokens of the whole stream|not windows")
def leaves_out_windows(documents, context, rank, ranks, start):
    yield from a_window_at_a_time(documents, context, rank, ranks, start * context)


@wrong("deal_out", "not those of each document|nor of each|are adjacent|are left out|one more round")
def leaves_out_of_each_document(documents, context, rank, ranks, start):
    cut = (document[start:] for document in documents)
    yield from a_window_at_a_time(cut, context, rank, ranks, 0)


@wrong("deal_out", "a block of neighbouring windows")
def in_blocks(documents, context, rank, ranks, start):
    windows = list(a_window_at_a_time(documents, context, 0, 1, start))
    each = len(windows) // ranks
    yield from windows[rank * each : (rank + 1) * each]


@wrong("deal_out", "not in the order of the text")
def backwards(documents, context, rank, ranks, start):
    windows = a_window_at_a_time(documents, context, rank, ranks, start)
    yield from list(windows)[::-1]


@wrong("deal_out", "they were not dealt in turn")
def there_and_back(documents, context, rank, ranks, start):
    """Snakes through the ranks: 0, 1, 2, 2, 1, 0."""
    for number, round_ in enumerate(rounds(documents, ranks * context, start)):
        place = ranks - 1 - rank if number % 2 else rank
        yield pair(round_, place * context, context)


@wrong("deal_out", "must not change|both of them|one place later|same window")
def in_a_buffer(documents, context, rank, ranks, start):
    """Yields views of one buffer, which the next round overwrites."""
    buffer = torch.empty(ranks * context + 1, dtype=torch.int64)
    for round_ in rounds(documents, ranks * context, start):
        buffer.copy_(round_)
        yield pair(buffer, rank * context, context)


@wrong("deal_out", "does something remain from an earlier call")
def goes_on_where_the_last_call_ended(
    documents,
    context,
    rank,
    ranks,
    start,
    kept=[],  # noqa: B006
):
    for document in documents:
        kept += document[start:].tolist()
        start = max(0, start - len(document))
        while len(kept) > ranks * context:
            yield map(torch.tensor, pair(kept, rank * context, context))
            del kept[: ranks * context]


@wrong("deal_out", "a tensor of int64 with one dimension")
def in_floats(documents, context, rank, ranks, start):
    """torch.empty(0) is a tensor of float32."""
    documents = itertools.chain([torch.empty(0)], documents)
    for round_ in rounds(documents, ranks * context, start):
        yield pair(round_.float(), rank * context, context)


@wrong("deal_out", "a tensor of int64 with one dimension")
def without_targets(documents, context, rank, ranks, start):
    for round_ in rounds(documents, ranks * context, start):
        yield round_[rank * context :][: context + 1]


@wrong("deal_out", "a list instead of a tensor")
def in_lists(documents, context, rank, ranks, start):
    for window in a_window_at_a_time(documents, context, rank, ranks, start):
        yield tuple(part.tolist() for part in window)


@wrong("deal_out", "torch.int32[^$]*cross_entropy takes int64 only")
def in_32_bits(documents, context, rank, ranks, start):
    for window in a_window_at_a_time(documents, context, rank, ranks, start):
        yield tuple(part.int() for part in window)


@wrong("deal_out", "enough for several rounds|more documents were read")
def a_round_per_document(documents, context, rank, ranks, start):
    kept, size = torch.empty(0, dtype=torch.int64), ranks * context
    for document in documents:
        done = min(start, len(document))
        start -= done
        kept = torch.cat([kept, document[done:]])
        if len(kept) > size:
            yield pair(kept, rank * context, context)
            kept = kept[size:]


@wrong("deal_out", "tokens between two windows are lost|tokens for one more round")
def takes_off_the_last_target(documents, context, rank, ranks, start):
    for round_ in rounds(documents, ranks * context + 1, start, more=0):
        yield pair(round_, rank * context, context)


@wrong("deal_out", "the first `start` tokens of the whole stream")
def divides_the_start(documents, context, rank, ranks, start):
    yield from counts_places(documents, context, rank, ranks, start // 2)


@right("deal_out")
def all_rounds_of_a_document(documents, context, rank, ranks, start):
    kept, size = torch.zeros(0, dtype=torch.long), ranks * context
    for document in documents:
        kept = torch.cat((kept, document[start:]))
        start = max(0, start - len(document))
        many = max(0, len(kept) - 1) // size
        tokens = kept[: many * size].view(many, ranks, context)
        targets = kept[1 : many * size + 1] if many else kept[:0]
        targets = targets.view(many, ranks, context)
        yield from zip(tokens[:, rank], targets[:, rank])
        kept = kept[many * size :].clone()


@wrong("predict_update", "nan")
def predicts_nan(*_, **__):
    return [float("nan")] * 3


@right("predict_update")
def list_of_shapes(vocabulary, context, layers, width, heads, kv_heads, hidden, windows, ranks):
    """All matrices and vectors as a list of shapes; forward and backward as three products."""
    size = width // heads
    shapes = [(width, heads * size), (width, kv_heads * size), (width, kv_heads * size), (heads * size, width)]
    shapes += [(width, hidden), (width, hidden), (hidden, width)]
    matrices = layers * shapes + [(width, vocabulary)]
    weights = sum(map(math.prod, matrices))
    vectors = (1 + 2 * layers) * width
    parameters = weights + vectors + vocabulary * width
    products = weights * windows * context + layers * windows * heads * 2 * context**2 * size
    return parameters, 3 * 2 * products, parameters * torch.float32.itemsize * 2 * (ranks - 1) / ranks


@right("predict_update")
def as_a_tensor(vocabulary, context, layers, width, heads, kv_heads, hidden, windows, ranks):
    block = 2 * width * width + 2 * width * width * kv_heads // heads + 3 * width * hidden + 2 * width
    total = 2 * vocabulary * width + layers * block + width
    multiplied = total - vocabulary * width - (2 * layers + 1) * width
    of_token = 6 * multiplied + 12 * layers * width * context
    sent = 8 * total - 8 * total / ranks
    return torch.tensor([total, windows * context * of_token, sent], dtype=torch.float64)


@right("predict_update")
def step_by_step_of_the_ring(vocabulary, context, layers, width, heads, kv_heads, hidden, windows, ranks):
    """Adds up the pieces that the ring sends; a dict's values."""
    narrow = width * kv_heads // heads
    weights = layers * (width * (width + narrow + narrow + width) + hidden * 3 * width) + vocabulary * width
    costs = {"parameters": weights + vocabulary * width + width * (layers + layers + 1)}
    forward = 2 * weights * context + layers * 2 * (2 * context * context * width)
    costs["flops"] = windows * (forward + 2 * forward)
    costs["sent"] = sum(4 * costs["parameters"] / ranks for _ in range(2 * (ranks - 1)))
    return costs.values()


@wrong("predict_update", "norms have parameters, too", several=True)
def without_norms():
    def predict_update(**case):
        parameters, flops, _ = costs()[0](**case)
        parameters -= (2 * case["layers"] + 1) * case["width"]
        return parameters, flops, 8 * parameters * (case["ranks"] - 1) / case["ranks"]

    return [predict_update]


@wrong("predict_update", "there is one more norm, before the head", several=True)
def without_the_last_norm():
    def predict_update(**case):
        parameters, flops, sent = costs()[0](**case)
        return parameters - case["width"], flops, sent

    return [predict_update]


@wrong("predict_update", "each layer has two norms, and there is one more", several=True)
def one_norm_per_layer_only():
    def predict_update(**case):
        parameters, flops, sent = costs()[0](**case)
        return parameters - (case["layers"] + 1) * case["width"], flops, sent

    return [predict_update]


@wrong("predict_update", "a factor for each number, and no bias", several=True)
def norms_with_a_bias():
    def predict_update(**case):
        parameters, flops, sent = costs()[0](**case)
        return parameters + (2 * case["layers"] + 1) * case["width"], flops, sent

    return [predict_update]


@wrong("predict_update", "positions have no parameters here", several=True)
def learns_positions():
    def predict_update(**case):
        parameters, flops, sent = costs()[0](**case)
        return parameters + case["context"] * case["width"], flops, sent

    return [predict_update]


@wrong("predict_update", "the head is a matrix that is multiplied with each token", several=True)
def forgets_the_head():
    return costs(flops=lambda c: c.tokens * (6 * c.layers * c.layer + c.attention))


@wrong("predict_update", "a multiplication and an addition are two operations", several=True)
def multiply_adds():
    return costs(flops=lambda c: c.tokens * (3 * c.matrices + c.attention / 2))


@wrong("predict_update", "that is for one window", several=True)
def of_one_window():
    return costs(flops=lambda c: c.context * (6 * c.matrices + c.attention))


@wrong("predict_update", "do not divide them by the ranks again", several=True)
def divides_the_windows():
    return costs(flops=lambda c: c.tokens * (6 * c.matrices + c.attention) / c.ranks)


@wrong("predict_update", "6 per parameter of each matrix that is multiplied", several=True)
def norms_are_multiplied_too():
    return costs(flops=lambda c: c.tokens * (6 * (c.parameters - c.table) + c.attention))


@wrong("predict_update", "6 per parameter of each matrix that is multiplied|attention", several=True)
def attention_of_one_layer():
    return costs(flops=lambda c: c.tokens * (6 * c.matrices + c.attention / c.layers))


@wrong("predict_update", "a ring sends 2", several=True)
def twice_the_gradient():
    return costs(sent=lambda c: 8 * c.parameters)


@wrong("predict_update", "of 4 bytes for each parameter", several=True)
def one_way_of_all_others():
    return costs(sent=lambda c: 8 * c.parameters * c.ranks / (c.ranks + 1))


@wrong("predict_update", "that is half", several=True)
def gradients_in_half_precision():
    return costs(sent=lambda c: 4 * c.parameters * (c.ranks - 1) / c.ranks)


@wrong("predict_update", "return three numbers")
def as_a_dict_of_names(**case):
    parameters, flops, sent = costs()[0](**case)
    return {"parameters": parameters, "flops": flops, "sent": sent}


@right("parameter_groups")
def with_a_set(model, weight_decay):
    tables = {m.weight for m in model.modules() if issubclass(type(m), torch.nn.Embedding)}
    groups = {True: [], False: []}
    for parameter in filter(lambda p: p.requires_grad, model.parameters()):
        groups[parameter.ndim > 1 and parameter not in tables].append(parameter)
    return [dict(params=groups[yes], weight_decay=weight_decay if yes else 0) for yes in (False, True)]


@right("parameter_groups")
def without_empty_groups(model, weight_decay):
    groups = two_groups(trained(model), rightly(model), weight_decay)
    return tuple(group for group in groups if group["params"])


@right("parameter_groups")
def as_a_generator(model, weight_decay):
    """A generator of groups, with other options in them."""
    decays = rightly(model)
    yield {"params": [p for p in trained(model) if not decays(p)], "weight_decay": 0.0, "name": "others"}
    yield {"params": (p for p in trained(model) if decays(p)), "weight_decay": weight_decay, "lr": 1e-4}


@wrong("parameter_groups", "this is the weight of an nn.Embedding")
def by_the_name_of_the_class(model, weight_decay):
    """Finds embeddings by their class's name."""
    tables = {id(m.weight) for m in model.modules() if type(m).__name__ == "Embedding"}
    return two_groups(trained(model), lambda p: p.dim() >= 2 and id(p) not in tables, weight_decay)


@wrong("parameter_groups", "a weight with two or more dimensions must be decayed")
def linears_only(model, weight_decay):
    weights = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear)} - tables_of(model)
    return two_groups(trained(model), lambda p: id(p) in weights, weight_decay)


@wrong("parameter_groups", "this is the weight of an nn.Embedding")
def a_tied_head_decays(model, weight_decay):
    """It is a Linear's weight, after all."""
    linears = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    tables = tables_of(model) - linears
    return two_groups(trained(model), lambda p: p.dim() >= 2 and id(p) not in tables, weight_decay)


@wrong("parameter_groups", "a bias, a norm's factor or a single number")
def by_the_name_bias(model, weight_decay):
    tables, named = tables_of(model), {id(p): name for name, p in model.named_parameters()}
    keeps = lambda p: not named[id(p)].endswith("bias") and id(p) not in tables
    return two_groups(trained(model), keeps, weight_decay)


@wrong("parameter_groups", "a bias, a norm's factor or a single number")
def more_than_one_number(model, weight_decay):
    tables = tables_of(model)
    return two_groups(trained(model), lambda p: p.numel() > 1 and id(p) not in tables, weight_decay)


@wrong("parameter_groups", "this parameter is in no group")
def leaves_the_embeddings_out(model, weight_decay):
    tables = tables_of(model)
    others = [p for p in trained(model) if id(p) not in tables]
    return two_groups(others, lambda p: p.dim() >= 2, weight_decay)


@wrong("parameter_groups", "in two groups, or twice in one")
def module_by_module_and_twice(model, weight_decay):
    """Two layers that share a weight put it into the list twice."""
    tables, decays, others, seen = tables_of(model), [], [], set()
    for module in model.modules():
        for value in module.parameters(recurse=False):
            if not value.requires_grad or id(value) in tables & seen:
                continue
            seen.add(id(value))
            (decays if value.dim() >= 2 and id(value) not in tables else others).append(value)
    return [{"params": decays, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


@wrong("parameter_groups", "this parameter is in no group|must be decayed")
def drops_what_is_shared(model, weight_decay):
    """Takes only those that one layer has."""
    named = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    decays, tables = rightly(model), tables_of(model)
    once = [p for p in trained(model) if named.count(id(p)) == 1 or id(p) in tables]
    return two_groups(once, decays, weight_decay)


@wrong("parameter_groups", "weight of an nn.Embedding|must be decayed")
def the_wrong_way_round(model, weight_decay):
    decays = rightly(model)
    return two_groups(trained(model), lambda p: not decays(p), weight_decay)


@wrong("parameter_groups", "AttributeError|TypeError|has no attribute", "your code raised")
def by_name_and_parameter(model, weight_decay):
    """named_parameters() gives pairs."""
    return two_groups(model.named_parameters(), lambda p: p.dim() >= 2, weight_decay)


@right("deal_out")
def with_unfold(documents, context, rank, ranks, start):
    """All windows of what is kept as rows of a view, of which this rank takes its own."""
    kept = torch.tensor([], dtype=torch.long)
    for document in documents:
        skipped, start = document[:start], max(start - len(document), 0)
        kept = torch.cat((kept, document[len(skipped) :]))
        whole = max(0, (len(kept) - 1) // (context * ranks)) * ranks
        if not whole:
            continue
        rows = kept.unfold(0, context + 1, context)[:whole]
        for row in rows[rank::ranks].clone():
            yield row[:-1], row[1:]
        kept = kept[whole * context :].clone()


@right("deal_out")
def as_a_class(documents, context, rank, ranks, start):
    """An iterator with its own state."""

    class Stream:
        def __init__(self):
            self.kept, self.skip = torch.zeros(0, dtype=torch.int64), start

        def __iter__(self):
            return self

        def __next__(self):
            while len(self.kept) <= ranks * context:
                document = next(documents)
                self.kept = torch.cat([self.kept, document[self.skip :]])
                self.skip -= min(self.skip, len(document))
            part = self.kept[rank * context : (rank + 1) * context + 1].clone()
            self.kept = self.kept[ranks * context :].clone()
            return part[:-1], part[1:]

    return Stream()


@right("deal_out")
def by_a_queue(documents, context, rank, ranks, start):
    from collections import deque

    queue, seen = deque(), 0
    for document in documents:
        for token in document.tolist():
            seen += 1
            if seen <= start:
                continue
            queue.append(token)
            if len(queue) == ranks * context + 1:
                round_ = torch.tensor(queue)
                tokens, targets = round_[:-1].view(ranks, context), round_[1:].view(ranks, context)
                yield tokens[rank], targets[rank]
                for _ in range(ranks * context):
                    queue.popleft()


@wrong("deal_out", "both of them `context` long")
def pads_the_last_round(documents, context, rank, ranks, start):
    stream = torch.cat([torch.empty(0, dtype=torch.int64), *documents])[start:]
    for begin in range(rank * context, max(0, len(stream) - 1), ranks * context):
        tokens, targets = pair(stream, begin, context)
        yield tokens, targets


@wrong(
    "deal_out",
    "first `start` tokens of the whole stream|`start` tokens of the whole stream, not windows|one more round",
)
def leaves_out_whole_documents(documents, context, rank, ranks, start):
    """Drops each document in which the first `start` tokens end."""
    following = iter(documents)
    while start > 0 and (document := next(following, None)) is not None:
        start -= len(document)
    yield from a_window_at_a_time(following, context, rank, ranks, 0)


@wrong("deal_out", "first `start` tokens of the whole stream")
def start_of_each_rank(documents, context, rank, ranks, start):
    yield from counts_places(documents, context, rank, ranks, start * ranks)


@wrong("deal_out", "first `start` tokens of the whole stream")
def one_token_more(documents, context, rank, ranks, start):
    yield from counts_places(documents, context, rank, ranks, start + (start > 0))


@wrong("deal_out", "the token after the window, and not the window's first")
def targets_wrap_around(documents, context, rank, ranks, start):
    """roll() puts the first token at the end."""
    for tokens, _ in a_window_at_a_time(documents, context, rank, ranks, start):
        yield tokens, tokens.roll(-1)


@wrong("deal_out", "targets are the same text one place later|are adjacent")
def two_places_later(documents, context, rank, ranks, start):
    for round_ in rounds(documents, ranks * context, start, more=2):
        yield pair(round_, rank * context, context)[0], round_[rank * context + 2 :][:context]


@wrong("deal_out", "two ranks have the same window")
def rank_from_one(documents, context, rank, ranks, start):
    yield from a_window_at_a_time(documents, context, max(0, rank - 1), ranks, start)


@wrong("deal_out", "not dealt in turn")
def the_next_ranks_windows(documents, context, rank, ranks, start):
    yield from a_window_at_a_time(documents, context, (rank + 1) % ranks, ranks, start)


@wrong("deal_out", "more documents were read than this round needs")
def two_documents_ahead(documents, context, rank, ranks, start):
    def ahead():
        waiting = list(itertools.islice(documents, 3))
        while waiting:
            yield waiting.pop(0)
            waiting += itertools.islice(documents, 1)

    yield from a_window_at_a_time(ahead(), context, rank, ranks, start)


@wrong("deal_out", "a pair, tokens and targets")
def as_a_row_of_a_batch(documents, context, rank, ranks, start):
    for tokens, targets in a_window_at_a_time(documents, context, rank, ranks, start):
        yield tokens[None], targets[None]


@wrong("deal_out", "too small for a whole corpus")
def joins_all_documents_so_far(documents, context, rank, ranks, start):
    so_far, begin = [], start
    for document in documents:
        so_far.append(document)
        while sum(map(len, so_far)) > begin + ranks * context:
            yield pair(torch.cat(so_far), begin + rank * context, context)
            begin += ranks * context


@wrong("deal_out", "first `start` tokens of the whole stream|one more round|not of this stream|nothing is left")
def counts_back_from_the_end(documents, context, rank, ranks, start):
    """A stream shorter than `start` gives what is left from its end."""
    stream = torch.cat([torch.empty(0, dtype=torch.int64), *documents])
    stream = stream[-(len(stream) - start) :] if len(stream) != start else stream[:0]
    for begin in range(0, (len(stream) - 1) // (ranks * context) * ranks * context, ranks * context):
        yield pair(stream, begin + rank * context, context)


@wrong("deal_out", "the tokens that are left out stay in memory")
def collects_what_is_left_out(documents, context, rank, ranks, start):
    kept, size = torch.empty(0, dtype=torch.int64), ranks * context
    for document in documents:
        kept = torch.cat([kept, document])
        if len(kept) >= start:
            kept, start = kept[start:], 0
            while len(kept) > size:
                yield pair(kept, rank * context, context)
                kept = kept[size:]


@wrong("deal_out", "two ranks have the same window, or one rank has it twice")
def asks_the_process_group(documents, context, rank, ranks, start):
    if dist.is_initialized():
        rank = dist.get_rank()
    for window in rounds(documents, ranks * context, start):
        yield pair(window, rank * context, context)


# ---- pretrain ----


def pretraining(
    network, tokens, windows, *, batch=8, rate=0.002, optimizer=torch.optim.AdamW, schedule=True, split=None, each=None,
    starts=True, averages=True, shift=1, zero=True, steps=True, seed=0, between=lambda done: None, **options,
):  # fmt: skip
    """Right by default, without DDP. split: (rank, ranks, all places) to this rank's; each: how many it takes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    context, parameters = network.context, list(network.parameters())
    if starts:
        for value in parameters:
            dist.broadcast(value.data, src=0)
    generator = torch.Generator().manual_seed(seed)
    places = torch.randperm((len(tokens) - 2) // context, generator=generator) * context
    mine = split(rank, ranks, places) if split else places[rank:windows:ranks]
    batches = mine[: each and each(windows, ranks)].split(batch)
    optimizer = optimizer(parameters, lr=rate, **options)
    for number, some in enumerate(batches):
        if schedule:
            optimizer.param_groups[0]["lr"] = rate * min(
                1, 10 * (number + 1) / len(batches), 1.1 - number / len(batches)
            )
        rows = tokens[some[:, None] + torch.arange(context + 2)]
        network(rows[:, :context], rows[:, shift : context + shift]).backward()
        if averages:
            gradients = torch.nn.utils.parameters_to_vector([value.grad for value in parameters]) / ranks
            dist.all_reduce(gradients)
            for value, part in zip(parameters, gradients.split([value.numel() for value in parameters])):
                value.grad = part.view_as(value)
        if steps:
            optimizer.step()
        if zero:
            optimizer.zero_grad()
        between(network)


def pretrained(**options):
    """An answer of that kind."""
    return [named(partial(pretraining, **options))]


def named(answer):
    def pretrain(network, tokens, windows):
        answer(network, tokens, windows)

    return pretrain


@right("pretrain", several=True)
def own_all_reduce():
    return pretrained()


@right("pretrain", several=True)
def without_a_schedule():
    return pretrained(schedule=False)


@wrong("pretrain", "a frozen parameter does not learn", several=True)
def with_frozen_positions():
    def pretrain(network, tokens, windows):
        pretraining(network, tokens, windows)
        network.position_embedding.requires_grad_(False)

    return [pretrain]


@right("pretrain", several=True)
def a_low_rate():
    return pretrained(schedule=False, rate=0.001)


@right("pretrain", several=True)
def a_high_rate():
    return pretrained(rate=0.005)


@right("pretrain", several=True)
def larger_batches():
    return pretrained(batch=16, rate=0.003)


@right("pretrain", several=True)
def larger_batches_at_a_low_rate():
    return pretrained(batch=16, rate=0.001)


@right("pretrain", several=True)
def by_momentum():
    return pretrained(optimizer=torch.optim.SGD, momentum=0.9, rate=0.2)


@right("pretrain", several=True)
def smaller_batches():
    return pretrained(batch=4)


@right("pretrain", several=True)
def other_places_on_each_rank():
    return pretrained(split=lambda rank, ranks, places: places[rank * len(places) // ranks :][:3000])


@right("pretrain", several=True)
def in_the_order_of_the_text():
    """Each rank reads its own half from the start."""
    return pretrained(split=lambda rank, ranks, places: places.sort().values[rank * len(places) // ranks :][:3000])


@right("pretrain")
def with_ddp_and_evaluations(network, tokens, windows):
    """Places anywhere in the text, drawn by each rank; clips; evaluates now and then, which is free."""
    from torch.nn.parallel import DistributedDataParallel

    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    model, context = DistributedDataParallel(network), network.context
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    updates = windows // dist.get_world_size() // 5
    for update in range(updates):
        begins = torch.randint(len(tokens) - context, (5, 1), generator=generator)
        rows = tokens[begins + torch.arange(context + 1)]
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if update % 100 == 0:
            with torch.no_grad():
                network(tokens[: 64 * context].view(64, context))


@right("pretrain")
def with_a_sampler_and_an_average(network, tokens, windows):
    """A data set and loader; DDP on a copy; the mean of the weights of the last updates is loaded."""
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    context = network.context
    rows = tokens[: (len(tokens) - 1) // context * context + 1].unfold(0, context + 1, context)
    loader = DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows, seed=7))
    mine = copy.deepcopy(network)
    model = DistributedDataParallel(mine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    updates = windows // (4 * dist.get_world_size())
    average = torch.optim.swa_utils.AveragedModel(mine)
    for update, batch in enumerate(itertools.islice(loader, updates)):
        model(batch[:, :-1], batch[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if update > 0.9 * updates:
            average.update_parameters(mine)
    network.load_state_dict(average.module.state_dict())


@right("pretrain", several=True)
def three_quarters_are_enough():
    return pretrained(each=lambda windows, ranks: 3 * windows // (4 * ranks))


@wrong("pretrain", "each rank has used the whole budget", several=True)
def budget_for_each():
    return pretrained(split=lambda rank, ranks, places: places[rank::ranks], each=lambda windows, ranks: windows)


@wrong("pretrain", "evaluation is free under")
def evaluates_with_gradients(network, tokens, windows):
    pretraining(network, tokens, windows)
    network(tokens[:320].view(10, 32))


@wrong("pretrain", "the ranks train on the same windows", several=True)
def same_windows():
    return pretrained(split=lambda rank, ranks, places: places, each=lambda windows, ranks: windows // ranks)


@wrong("pretrain", "the ranks train on the same windows", several=True)
def same_windows_in_another_order():
    return pretrained(split=lambda rank, ranks, places: places[:3008].roll(500 * rank))


@wrong("pretrain", "one rank has trained alone")
def rank_0_alone(network, tokens, windows):
    if dist.get_rank() == 0:
        pretraining(
            network, tokens, windows, starts=False, averages=False, split=lambda rank, ranks, places: places[:1500]
        )
    for value in network.parameters():
        dist.broadcast(value.data, src=0)


@wrong("pretrain", "one rank has more windows")
def uneven_shares(network, tokens, windows):
    share = lambda rank, ranks, places: places[:1500] if rank else places[1500:2000]  # noqa: E731
    pretraining(network, tokens, windows, split=share, averages=False)
    for value in network.parameters():
        dist.all_reduce(value.data)
        value.data /= 2


@wrong("pretrain", "each rank has drawn its own weights", several=True)
def own_starts():
    return pretrained(starts=False)


@wrong("pretrain", "each rank has trained with its own gradients", several=True)
def own_gradients():
    return pretrained(averages=False)


@wrong("pretrain", "each rank has trained with its own gradients", several=True)
def own_starts_and_gradients():
    return pretrained(averages=False, starts=False)


@wrong("pretrain", "each rank has trained with its own gradients")
def calls_the_network(network, tokens, windows):
    from torch.nn.parallel import DistributedDataParallel

    DistributedDataParallel(network)
    pretraining(network, tokens, windows, averages=False)


@wrong("pretrain", "nothing was trained")
def does_nothing(network, tokens, windows):
    pass


@wrong("pretrain", "the weights have not changed", several=True)
def never_steps():
    return pretrained(steps=False)


@wrong("pretrain", "another network was trained")
def trains_a_copy(network, tokens, windows):
    pretraining(copy.deepcopy(network), tokens, windows)


@wrong("pretrain", "repeat its input", several=True)
def its_own_input():
    return pretrained(shift=0)


@wrong("pretrain", "the one right after it", several=True)
def shifted_twice():
    return pretrained(shift=2)


@wrong("pretrain", "the one right after it")
def shifted_twice_with_a_loss_of_its_own(network, tokens, windows):
    class Shifting(torch.nn.Module):
        context = network.context

        def __init__(self):
            super().__init__()
            self.inner = network

        def forward(self, inputs, targets):
            return F.cross_entropy(self.inner(inputs)[:, :-1].flatten(0, 1), targets[:, 1:].flatten())

    pretraining(Shifting(), tokens, windows)


@wrong("pretrain", "learnt hardly anything", several=True)
def a_tiny_rate():
    return pretrained(rate=1e-5)


@wrong("pretrain", "learnt hardly anything|the recipe", several=True)
def a_low_rate_of_sgd():
    return pretrained(rate=0.001, optimizer=torch.optim.SGD)


@wrong("pretrain", "diverge", several=True)
def a_huge_rate():
    return pretrained(rate=1.0)


@wrong("pretrain", "a smaller batch makes more updates", several=True)
def large_batches():
    return pretrained(batch=128)


@wrong("pretrain", "windows were used", several=True)
def an_eighth_of_the_budget():
    return pretrained(each=lambda windows, ranks: windows // (8 * ranks))


@wrong("pretrain", "set to zero", several=True)
def gradients_pile_up():
    return pretrained(zero=False)


@wrong("pretrain", "weights were different at", several=True)
def averages_once_at_the_end():
    def answer(network, tokens, windows):
        pretraining(network, tokens, windows, averages=False, starts=False)
        for value in network.parameters():
            dist.all_reduce(value.data)
            value.data /= dist.get_world_size()

    return [named(answer)]


@wrong("pretrain", "not a piece of the text")
def made_up_tokens(network, tokens, windows):
    pretraining(network, tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(1))], windows)


@wrong("pretrain", "do not change the text")
def changes_the_text(network, tokens, windows):
    pretraining(network, tokens, windows)
    tokens[0] += 1


@wrong("pretrain", "leave the network in the form")
def stays_in_float64(network, tokens, windows):
    pretraining(network.double(), tokens, windows)


@wrong("pretrain", "the head is tied")
def unties_the_head(network, tokens, windows):
    network.head.weight = torch.nn.Parameter(network.head.weight.detach().clone())
    pretraining(network, tokens, windows)


@wrong("pretrain", "gradients are off")
def gradients_off(network, tokens, windows):
    pretraining(network, tokens, windows)
    torch.set_grad_enabled(False)


@wrong("pretrain", "NaN or infinite")
def ends_in_nan(network, tokens, windows):
    pretraining(network, tokens, windows)
    with torch.no_grad():
        network.norm.weight.fill_(math.nan)


# ---- bits_per_byte ----


def evaluation(
    network, tokens, sizes, context, stride, *, cuts=True, of_targets=True, one_quotient=True, modes="both", unit=2,
    shared=True, reduces=True, late=0, per_token=False, first=True,
):  # fmt: skip
    """Bits per byte; by default they are right."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    was_training = network.training
    if modes != "none":
        network.eval()
    totals = torch.zeros(2, dtype=torch.float64)
    starts = range(0, len(tokens) - 1, stride)
    for start in starts[rank::ranks] if shared else starts:
        inputs, targets = tokens[start : start + context], tokens[start + 1 : start + context + 1]
        inputs = inputs[: len(targets)]
        with torch.no_grad():
            losses = F.cross_entropy(network(inputs[None])[0], targets, reduction="none")
        new = (context - stride + late) * (cuts and (start > 0 or not first))
        lengths = sizes[targets if of_targets else inputs]
        totals += torch.stack([losses[new:].sum(), (lengths**0 if per_token else lengths)[new:].sum()])
    if modes == "both":
        network.train(was_training)
    elif modes == "always trains":
        network.train()
    totals[0] /= math.log(unit)
    if reduces and one_quotient:
        dist.all_reduce(totals)
    value = totals[0] / totals[1]
    if reduces and not one_quotient:
        dist.all_reduce(value)
        value /= ranks
    return value.item()


AGAIN, MEAN, INPUTS = "are scored twice", "mean of the ranks' own bits", "bytes of the inputs"


@wrong("bits_per_byte", f"{AGAIN}|{MEAN}|{INPUTS}")
def as_it_is_given(*args):
    return evaluation(*args, cuts=False, of_targets=False, one_quotient=False)


@wrong("bits_per_byte", AGAIN)
def overlap_left(*args):
    return evaluation(*args, cuts=False)


@wrong("bits_per_byte", MEAN)
def mean_left(*args):
    return evaluation(*args, one_quotient=False)


@wrong("bits_per_byte", INPUTS)
def inputs_left(*args):
    return evaluation(*args, of_targets=False)


@wrong("bits_per_byte", AGAIN)
def overlap_and_mean_left(*args):
    return evaluation(*args, cuts=False, one_quotient=False)


@wrong("bits_per_byte", AGAIN)
def overlap_and_inputs_left(*args):
    return evaluation(*args, cuts=False, of_targets=False)


@wrong("bits_per_byte", f"{MEAN}|{INPUTS}")
def mean_and_inputs_left(*args):
    return evaluation(*args, one_quotient=False, of_targets=False)


@wrong("bits_per_byte", "one target too many")
def one_too_many(*args):
    return evaluation(*args, late=-1)


@wrong("bits_per_byte", "one target too few")
def one_too_few(*args):
    return evaluation(*args, late=1)


@wrong("bits_per_byte", "the first window is cut, too")
def cuts_the_first(*args):
    return evaluation(*args, first=False)


@wrong("bits_per_byte", "cross_entropy gives nats")
def in_nats(*args):
    return evaluation(*args, unit=math.e)


@wrong("bits_per_byte", "bits per token")
def for_each_token(*args):
    return evaluation(*args, per_token=True)


@wrong("bits_per_byte", "this rank's windows alone")
def does_not_add_up(*args):
    return evaluation(*args, reduces=False)


@wrong("bits_per_byte", "each window goes through the network once")
def all_ranks_do_everything(*args):
    return evaluation(*args, shared=False, reduces=False)


@wrong("bits_per_byte", "with dropout, the value depends on chance")
def in_the_mode_that_it_has(*args):
    return evaluation(*args, modes="none")


@wrong("bits_per_byte", "put the network back")
def stays_in_evaluation(*args):
    return evaluation(*args, modes="eval")


@wrong("bits_per_byte", "put the network back")
def trains_afterwards(*args):
    return evaluation(*args, modes="always trains")


@wrong("bits_per_byte", "do not change them")
def changes_the_sizes(network, tokens, sizes, context, stride):
    value = evaluation(network, tokens, sizes, context, stride)
    sizes[0] = 1
    return value


@wrong("bits_per_byte", "some digits are lost")
def in_single_precision(*args):
    return torch.tensor(evaluation(*args)).float().item()


@wrong("bits_per_byte", "is each token but the first scored once")
def from_the_perplexities(*args):
    """Two to the power of it: another number that people give."""
    return 2 ** evaluation(*args)


@right("bits_per_byte")
def by_marks_and_messages(network, tokens, sizes, context, stride):
    """Targets that are not new are marked with -100; blocks of windows; a tensor is returned."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mode = network.training
    network.train(False)
    starts = list(range(0, max(1, len(tokens) - 1 - (context - stride)), stride))
    share = -(-len(starts) // ranks)
    bits, length = 0.0, 0
    with torch.no_grad():
        for start in starts[rank * share : (rank + 1) * share]:
            targets = tokens[start + 1 : start + context + 1].clone()
            if start:
                targets[: context - stride] = -100
            logits = network(tokens[None, start : start + len(targets)]).squeeze(0)
            bits += F.cross_entropy(logits, targets, reduction="sum").item() / math.log(2)
            length += sizes[targets[targets >= 0]].sum().item()
    network.train(mode)
    of_ranks = [None] * ranks
    dist.all_gather_object(of_ranks, (bits, length))
    bits, length = map(sum, zip(*of_ranks))
    return torch.tensor(bits / length, dtype=torch.float64)


@right("bits_per_byte")
def scored_one_by_one(network, tokens, sizes, context, stride):
    """A set of what is scored; the bytes of the whole text, which all ranks know."""
    mode, nats = network.training, torch.zeros(1, dtype=torch.float64)
    network.eval()
    scored = 0
    for number, start in enumerate(range(0, len(tokens) - 1, stride)):
        end = min(start + context, len(tokens) - 1)
        if number % dist.get_world_size() == dist.get_rank() and end > scored:
            logits = network(tokens[start:end].unsqueeze(0)).detach()[0]
            for place in range(scored, end):
                nats -= logits[place - start].log_softmax(0)[tokens[place + 1]]
        scored = max(scored, end)
    network.train(mode)
    dist.all_reduce(nats)
    return nats.item() / sizes[tokens[1:]].sum().item() / math.log(2)


@wrong("bits_per_byte", "the windows at the end are shorter")
def only_the_last_stride(network, tokens, sizes, context, stride):
    """The last `stride` targets of each window but the first."""
    return in_one_pass(
        network, tokens, sizes, context, stride, new=lambda start, losses: losses[-stride:] if start else losses
    )


@wrong("bits_per_byte", "none of them should have most of the work")
def all_on_rank_0(network, tokens, sizes, context, stride):
    share = lambda starts, rank, ranks: starts if rank == 0 else []  # noqa: E731
    return in_one_pass(network, tokens, sizes, context, stride, share=share)


@wrong("bits_per_byte", "sum of the ranks' own")
def sum_of_quotients(network, tokens, sizes, context, stride):
    return in_one_pass(network, tokens, sizes, context, stride, join=lambda totals, each: each.sum())


@wrong("bits_per_byte", "do not multiply")
def times_log_2(*args):
    return in_one_pass(*args) * math.log(2) ** 2


@right("bits_per_byte")
def shares_that_follow_one_another(network, tokens, sizes, context, stride):
    def share(starts, rank, ranks):
        each = -(-len(starts) // ranks)
        return starts[rank * each : (rank + 1) * each]

    return in_one_pass(network, tokens, sizes, context, stride, share=share)


def in_one_pass(
    network, tokens, sizes, context, stride, new=None, share=lambda starts, rank, ranks: starts[rank::ranks],
    join=lambda totals, each: totals.sum(0)[0] / totals.sum(0)[1],
):  # fmt: skip
    """Gathers the totals of all ranks. new: of a window's losses, those that are new."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    new = new or (lambda start, losses: losses[context - stride if start else 0 :])
    was, own = network.training, torch.zeros(2, dtype=torch.float64)
    network.eval()
    for start in share(range(0, len(tokens) - 1, stride), rank, ranks):
        window = tokens[start : start + context + 1]
        with torch.no_grad():
            losses = F.cross_entropy(network(window[None, :-1])[0], window[1:], reduction="none")
        own += torch.stack([new(start, losses).sum() / math.log(2), new(start, sizes[window[1:]]).sum().double()])
    network.train(was)
    totals = [torch.zeros_like(own) for _ in range(ranks)]
    dist.all_gather(totals, own)
    totals = torch.stack(totals)
    return join(totals, (totals[:, 0] / totals[:, 1].clamp(min=1))).item()


@wrong("bits_per_byte", "each token but the first scored once")
def without_tokens_of_no_bytes(network, tokens, sizes, context, stride):
    """Those are scored as well."""
    real, sums = F.cross_entropy, in_one_pass
    has_bytes = lambda logits, targets, **more: real(logits, targets, **more) * (sizes[targets] > 0)  # noqa: E731
    F.cross_entropy = has_bytes
    try:
        return sums(network, tokens, sizes, context, stride)
    finally:
        F.cross_entropy = real
