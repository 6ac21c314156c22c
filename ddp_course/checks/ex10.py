"""Exercise 10: a learning rate schedule, groups for weight decay, and a stream of
tokens divided among the ranks.
"""

import math
import random

import torch
from torch import nn

from ddp_course.scenery.models import GPT
from ddp_course.school.judge import Wrong, question, trying

# ---- 1: the schedule ----


def rates_of(learning_rate, cases, seed):
    """The rates of all updates, for each case. They are asked for in a random order, as
    after resuming.
    """
    rates = [[None] * case["steps"] for case in cases]
    order = [
        (run, step) for run, of_run in enumerate(rates) for step in range(len(of_run))
    ]
    random.Random(seed).shuffle(order)
    for run, step in order:
        case = cases[run]
        with trying(f"update {step} of {case['steps']}, warmup {case['warmup']}"):
            rates[run][step] = float(learning_rate(step, **case))
    return rates


def true_rate(step, steps, warmup, first, peak, last):
    if step < warmup:
        return first + (peak - first) * step / warmup
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return last + (peak - last) * (1 + math.cos(math.pi * done)) / 2


@question(
    "There are two parts: a line before `warmup`, and then a cosine. For each part, find a number that goes from 0 to "
    "1 during it.",
    "On the line, step / warmup goes from 0 to 1, from `first` to `peak`. On the cosine, done = (step - warmup) / "
    "(steps - 1 - warmup) goes from 0 to 1, and cos(pi * done) goes from 1 to -1: (1 + cos(pi * done)) / 2 goes from "
    "1 to 0.",
    "if step < warmup: return first + (peak - first) * step / warmup. Then done as above, with max(1, ...) around the "
    "divisor, and return last + (peak - last) * (1 + math.cos(math.pi * done)) / 2.",
)
def check_learning_rate(answer, draw):
    """The rates of all updates of several runs: also without a warm-up, and with a
    warm-up of nearly the whole run.
    """
    cases = []
    for warmup, more in [
        (draw.randrange(4, 9), draw.randrange(12, 20)),
        (0, draw.randrange(5, 9)),
        (5, 2),
        (5, 1),
    ]:
        first, peak = draw.uniform(1e-6, 1e-4), draw.uniform(1e-3, 1e-2)
        last = peak * draw.choice([0.0, 0.03, 0.2, 0.5])
        cases.append(
            {
                "steps": warmup + more,
                "warmup": warmup,
                "first": first,
                "peak": peak,
                "last": last,
            }
        )
    [rates] = answer.on_ranks(rates_of, cases, draw.randrange(10**6))
    for case, got in zip(cases, rates):
        expected = [true_rate(step, **case) for step in range(case["steps"])]
        for step, (rate, truth) in enumerate(zip(got, expected)):
            if not abs(rate - truth) <= 1e-6 * case["peak"]:
                checked = f"update {step} of {case['steps']}, warm-up {case['warmup']}, from {case['first']:.2g} to "
                checked += f"{case['peak']:.2g} to {case['last']:.2g}"
                raise Wrong(checked, expected=f"{truth:.4g}", got=f"{rate:.4g}",
                            cause=cause_of_rate(case, got, expected, step))  # fmt: skip


def cause_of_rate(case, got, expected, step):
    """The likely cause of a wrong schedule, from its first wrong rate."""
    first, peak, last, warmup, steps = (
        case[name] for name in ("first", "peak", "last", "warmup", "steps")
    )

    def is_like(rule):
        with_rule = [rule(number) for number in range(steps)]
        return all(
            abs(one - other) <= 1e-6 * peak for one, other in zip(got, with_rule)
        )

    def cosine(done):
        return last + (peak - last) * (1 + math.cos(math.pi * done)) / 2

    def line(number):
        return first + (peak - first) * number / warmup if warmup else peak

    looks = {
        "updates count from 0: the first one has `first`, and update number `warmup` has `peak`":
            lambda n: first + (peak - first) * (n + 1) / warmup if n < warmup else expected[n],
        "the warm-up begins at `first`, not at 0": lambda n: peak * n / warmup if n < warmup else expected[n],
        "the cosine begins at the end of the warm-up: it starts at update `warmup` and is steps - 1 - warmup long":
            lambda n: line(n) if n < warmup else cosine(n / max(1, steps - 1)),
        "the last update, number steps - 1, must have `last`; yours would reach it one update later":
            lambda n: line(n) if n < warmup else cosine((n - warmup) / (steps - warmup)),
        "the cosine ends at `last`, which need not be a tenth of the peak":
            lambda n: line(n) if n < warmup else peak * (0.1 + 0.9 * (1 + math.cos(
                math.pi * (n - warmup) / max(1, steps - 1 - warmup))) / 2),
        "the cosine ends at `last`, not at 0":
            lambda n: line(n) if n < warmup else cosine((n - warmup) / max(1, steps - 1 - warmup)) * peak / (peak - last)
            - last * peak / (peak - last),
        "from peak to last it is a straight line: use (1 + cos(pi * done)) / 2":
            lambda n: line(n) if n < warmup else peak + (last - peak) * (n - warmup) / max(1, steps - 1 - warmup),
        "the cosine goes half a period, from cos(0) to cos(pi)":
            lambda n: line(n) if n < warmup else last + (peak - last)
            * (1 + math.cos(math.pi * (n - warmup) / max(1, steps - 1 - warmup) / 2)) / 2,
        "after the warm-up it stays at `peak`": lambda n: line(n) if n < warmup else peak,
    }  # fmt: skip
    for cause, rule in looks.items():
        if warmup and is_like(rule):
            return cause
    if step < warmup:
        return "in the warm-up, the rate must be on a line: first + (peak - first) * step / warmup"
    return "after the warm-up: last + (peak - last) * (1 + cos(pi * done)) / 2, with done from 0 to 1"


# ---- 2: groups for weight decay ----


class Odd(nn.Module):
    """A network with parts of real ones: a convolution, a frozen matrix, a scale of one
    number, a tied head.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.convolution = nn.Conv1d(6, 6, 3)
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight


NETWORKS = {
    "a GPT": lambda: GPT(vocabulary=11, context=4, layers=2, heads=2, width=6),
    "a network with a convolution, a frozen layer, a scale and a tied head": Odd,
    "a Linear without bias": lambda: nn.Linear(3, 2, bias=False),
}


def groups_of(parameter_groups, decay):
    """For each network: which parameters are in which group, by name, and whether AdamW
    takes the groups and steps.
    """
    seen = []
    for words, make in NETWORKS.items():
        torch.manual_seed(0)
        network = make()
        names = {id(value): name for name, value in network.named_parameters()}
        with trying(words):
            groups = list(parameter_groups(network, decay))
            found = []
            for group in groups:
                parameters = (
                    [group["params"]]
                    if isinstance(group["params"], torch.Tensor)
                    else list(group["params"])
                )
                decays = group.get("weight_decay")
                found += [
                    [names.get(id(one), "a stranger"), decays] for one in parameters
                ]
            torch.optim.AdamW(
                [{**group, "params": list(group["params"])} for group in groups],
                lr=1e-3,
            )
        seen.append(found)
    return seen


@question(
    "The number of dimensions, parameter.dim(), distinguishes a matrix from a vector. A convolution's weight has three "
    "or four dimensions, and counts as a matrix.",
    "model.parameters() gives a tied parameter once. Go through it, leave out those with requires_grad=False, and put "
    "each into one of two lists.",
    "trained = [p for p in model.parameters() if p.requires_grad]; return [{'params': [p for p in trained if p.dim() >= "
    "2], 'weight_decay': weight_decay}, {'params': [p for p in trained if p.dim() < 2], 'weight_decay': 0.0}]",
)
def check_parameter_groups(answer, draw):
    """Each trained parameter must be in one group, once; matrices are decayed, vectors
    are not.
    """
    decay = round(draw.uniform(0.05, 0.3), 3)
    [seen] = answer.on_ranks(groups_of, decay)
    for (words, make), found in zip(NETWORKS.items(), seen):
        judge_groups(words, make(), decay, found)


def judge_groups(words, network, decay, found):
    checked = f"the groups of {words}, weight_decay={decay}"
    names = [name for name, _ in found]
    trained = {
        name: value for name, value in network.named_parameters() if value.requires_grad
    }
    for name in sorted(set(names)):
        if name not in trained:
            cause = "a frozen parameter has no gradient, so leave it out of the optimizer: check requires_grad"
            if name == "a stranger":
                cause = (
                    "put the parameters themselves into the groups, not copies of them"
                )
            raise Wrong(
                checked,
                expected="the parameters that are trained",
                got=f"{name}, too",
                cause=cause,
            )
        if (times := names.count(name)) > 1:
            cause = "if a parameter is in two groups, or twice in one, AdamW refuses it or updates it twice"
            raise Wrong(
                checked, expected=f"{name} once", got=f"{times} times", cause=cause
            )
    decays = dict(found)
    for name, value in trained.items():
        if name not in decays:
            cause = "this parameter is in no group, so it would never be trained"
            raise Wrong(
                checked,
                expected=f"{name} in a group",
                got="it is in no group",
                cause=cause,
            )
        truth = decay if value.dim() >= 2 else 0.0
        others = {
            other for known, other in found if other and trained[known].dim() >= 2
        }
        if value.dim() >= 2 and decays[name] and len(others) == 1:
            cause = "the matrices have a weight decay, but not the one that the function was given"
        elif decays[name] is None:
            cause = "the group has no 'weight_decay', so it gets AdamW's default of 0.01: set 0.0"
        elif value.dim() < 2:
            cause = "a bias, a norm's factor or a single number sets a level, so it must not be pulled towards 0"
        elif "norm" in name or "bias" in name:
            cause = "check its number of dimensions, not its name"
        elif "embedding" in name:
            cause = "an embedding is a matrix, too, and here it is also the head"
        else:
            cause = "a weight with two or more dimensions must be decayed, for example that of a Linear or a convolution"
        if decays[name] is None or not abs(decays[name] - truth) < 1e-12:
            raise Wrong(checked, expected=f"{name} {tuple(value.shape)}: weight_decay {truth}",
                        got=f"weight_decay {decays[name]}", cause=cause)  # fmt: skip


# ---- 3: a stream of tokens ----


def dealt(deal_out, cases):
    """What the answer returns on each rank, for each case: lists of (tokens, targets)."""
    seen = []
    for case in cases:
        stream = (
            torch.arange(case["length"]) + 1000
        )  # token i is 1000 + i, so each token shows its place
        of_ranks = []
        for rank in range(case["ranks"]):
            with trying(
                f"{case['length']} tokens, context {case['context']}, rank {rank} of {case['ranks']}"
            ):
                given = stream.clone()
                pairs = deal_out(given, case["context"], rank, case["ranks"])
                of_ranks.append(
                    [[torch.as_tensor(one).tolist() for one in pair] for pair in pairs]
                )
        seen.append(of_ranks)
    return seen


@question(
    "Window w begins at place w * context of the stream, on any rank. The last window needs context + 1 tokens, because "
    "its last target comes after it. So how many windows are there?",
    "(length - 1) // context of them. All ranks must have the same number, otherwise one would wait for the others "
    "in its last update: each has count // ranks windows, and rank r takes windows r, r + ranks, and so on.",
    "count = (len(stream) - 1) // context // ranks * ranks; starts = range(rank * context, count * context, ranks * "
    "context); return [(stream[s : s + context], stream[s + 1 : s + context + 1]) for s in starts]",
)
def check_deal_out(answer, draw):
    """Each window must be on exactly one rank, all ranks have the same number, and
    targets are one place later.
    """
    cases = []
    for ranks in (1, 2, 3, 4):
        context = draw.randrange(3, 8)
        windows = ranks * draw.randrange(2, 5)
        for extra in (1, context, 1 + context * draw.randrange(0, ranks)):
            cases.append(
                {
                    "length": windows * context + extra,
                    "context": context,
                    "ranks": ranks,
                }
            )
    cases.append({"length": 4, "context": 4, "ranks": 1})
    [seen] = answer.on_ranks(dealt, cases)
    for case, of_ranks in zip(cases, seen):
        judge_dealing(case, of_ranks)


def judge_dealing(case, of_ranks):
    length, context, ranks = case["length"], case["context"], case["ranks"]
    checked = f"a stream of {length} tokens, context {context}, {ranks} rank{'s' * (ranks > 1)}"
    each = (length - 1) // context // ranks
    for rank, pairs in enumerate(of_ranks):
        where = f"{rank} of {ranks}"
        for pair in pairs:
            if len(pair) != 2 or len(pair[0]) != context or len(pair[1]) != context:
                lengths = [len(one) for one in pair]
                cause = "each window is a pair of tokens and targets, both of them `context` long: the last target is "
                cause += "the token after the window, so the stream must be long enough to include it"
                raise Wrong(
                    checked,
                    rank=where,
                    expected=f"{context} tokens, {context} targets",
                    got=lengths,
                    cause=cause,
                )
            if pair[0] != list(range(pair[0][0], pair[0][0] + context)):
                cause = "the tokens of a window are adjacent, in the order of the text"
                raise Wrong(
                    checked,
                    rank=where,
                    expected=list(range(pair[0][0], pair[0][0] + context)),
                    got=pair[0],
                    cause=cause,
                )
            if [token + 1 for token in pair[0]] != pair[1]:
                cause = "targets are the same text one place later: stream[start + 1 : start + context + 1]"
                if pair[0] == pair[1]:
                    cause = (
                        "targets and tokens are the same, so there is nothing to predict. "
                        + cause
                    )
                raise Wrong(
                    checked,
                    rank=where,
                    expected=[token + 1 for token in pair[0]],
                    got=pair[1],
                    cause=cause,
                )
    places = [[pair[0][0] - 1000 for pair in pairs] for pairs in of_ranks]
    judge_windows(checked, case, places, each)


def judge_windows(checked, case, places, each):
    """Raise Wrong unless the ranks' windows, by their starts, are adjacent and as many
    on each rank.
    """
    context, ranks = case["context"], case["ranks"]
    counts = [len(of_rank) for of_rank in places]
    everything = sorted(start for of_rank in places for start in of_rank)
    for before, now in zip(everything, everything[1:]):
        if now - before < context:
            rank = next(rank for rank, of_rank in enumerate(places) if now in of_rank)
            cause = "windows overlap, so some tokens are learnt twice: a window must begin where the last one ends"
            if now == before:
                cause = "two ranks have the same window, or one rank has it twice: rank r takes windows r, r + ranks, ..."
            raise Wrong(checked, rank=f"{rank} of {ranks}", expected=f"windows that begin {context} apart",
                        got=f"at {before} and {now}", cause=cause)  # fmt: skip
    if len(set(counts)) > 1:
        cause = (
            "a rank with one more window would wait for the others in its last update: give all ranks the smallest "
            "number"
        )
        raise Wrong(
            checked, expected=f"{each} windows on each rank", got=counts, cause=cause
        )
    if counts[0] != each:
        cause = "the last target needs one more token than the windows: (length - 1) // context windows fit"
        if counts[0] < each:
            cause = "tokens are lost: (length - 1) // context windows fit, and each rank takes that // ranks of them"
        raise Wrong(
            checked, expected=f"{each} windows on each rank", got=counts[0], cause=cause
        )
    expected = list(range(0, each * ranks * context, context))
    if everything != expected:
        cause = "some windows in the middle are on no rank: windows begin at 0 and are adjacent"
        raise Wrong(
            checked, expected=f"windows at {expected}", got=everything, cause=cause
        )
    for rank, starts in enumerate(places):
        dealt_in_turn = expected[rank::ranks]
        if starts != dealt_in_turn:
            cause = "every window is on one rank, but they were not dealt in turn: rank r takes windows r, r + ranks, ..."
            if starts == expected[rank * each : (rank + 1) * each]:
                cause = (
                    "each rank has a block of neighbouring windows: deal them in turn, so that all ranks read the same "
                    "part of the text at a time"
                )
            elif sorted(starts) == dealt_in_turn:
                cause = "these are the right windows, but not in the order of the text"
            raise Wrong(
                checked,
                rank=f"{rank} of {ranks}",
                expected=f"windows at {dealt_in_turn}",
                got=starts,
                cause=cause,
            )
