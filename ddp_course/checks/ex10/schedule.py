"""A learning rate schedule that need not know the end of the run."""

import math
import random

from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong


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
        with trying(f"update {step} of {in_words(case)}"):
            rates[run][step] = float(learning_rate(step, **case))
    return rates


def in_words(case):
    words = f"{case['steps']} updates, warmup={case['warmup']}, decay={case['decay']}, "
    return words + f"{case['first']:.2g} to {case['peak']:.2g} to {case['last']:.2g}"


def true_rate(step, steps, warmup, decay, first, peak, last):
    if step < warmup:
        return first + (peak - first) * step / warmup
    held = steps - 1 - decay  # the last update with the peak
    if step <= held:
        return peak
    return peak + (last - peak) * math.sqrt((step - held) / decay)


@question(
    "There are three parts. For the first and the last, find a number that goes from 0 to 1 during it. Which update is "
    "the last one that has `peak`?",
    "In the warm-up, step / warmup goes from 0 to 1. The decay has `decay` updates and ends with number steps - 1, so "
    "number steps - 1 - decay still has `peak`, and done = (step - (steps - 1 - decay)) / decay goes from there to 1. "
    "Compare before you divide: `warmup` and `decay` may be 0.",
    "if step < warmup: return first + (peak - first) * step / warmup. held = steps - 1 - decay; if step <= held: return "
    "peak. Otherwise return peak + (last - peak) * math.sqrt((step - held) / decay).",
)
def check_learning_rate(answer, draw):
    """The rates of all updates of several runs: also without a warm-up, without a decay,
    and without anything in between.
    """
    cases, shares = [], draw.sample([0.0, 0.03, 0.2, 0.4, 0.6], 5)
    for (warmup, stable, decay), share in zip(
        [
            (draw.randrange(4, 9), draw.randrange(3, 9), draw.randrange(5, 9)),
            (0, draw.randrange(3, 6), draw.randrange(3, 6)),
            (draw.randrange(3, 6), 0, draw.randrange(3, 6)),
            (draw.randrange(3, 6), draw.randrange(3, 6), 0),
            (0, 0, 1),
        ],
        [0.25, *shares],
    ):
        first, peak = draw.uniform(1e-5, 1e-4), draw.uniform(1e-3, 1e-2)
        case = {"steps": warmup + 1 + stable + decay, "warmup": warmup, "decay": decay}
        cases.append(case | {"first": first, "peak": peak, "last": share * peak})
    [rates] = answer.on_ranks(rates_of, cases, draw.randrange(10**6))
    for case, got in zip(cases, rates):
        judge_rates(case, got)


def judge_rates(case, got):
    """Raise Wrong unless each update has its rate."""
    expected = [true_rate(step, **case) for step in range(case["steps"])]
    for step, (rate, truth) in enumerate(zip(got, expected)):
        if not abs(rate - truth) <= 1e-6 * case["peak"]:
            digits = 4 if f"{rate:.4g}" != f"{truth:.4g}" else 9
            raise Wrong(
                f"update {step} of {in_words(case)}",
                expected=f"{truth:.{digits}g}",
                got=f"{rate:.{digits}g}",
                cause=cause_of_rate(case, got, step),
            )


def cause_of_rate(case, got, step):
    """The likely cause of a wrong schedule, from its first wrong rate."""
    steps, warmup, decay, first, peak, last = case.values()
    held = steps - 1 - decay

    def down(done):
        return peak + (last - peak) * done

    def with_decay(rule):
        return lambda n: rule((n - held) / decay) if n > held else true_rate(n, **case)

    def with_warmup(rule):
        return lambda n: rule(n) if n < warmup else true_rate(n, **case)

    def cosine_over_all(step):
        done = (step - warmup) / (steps - 1 - warmup)
        return down((1 - math.cos(math.pi * done)) / 2)

    looks = [
        (with_warmup(lambda n: first + (peak - first) * (n + 1) / warmup),
         "updates count from 0: the first one has `first`, and update number `warmup` has `peak`"),
        (with_warmup(lambda n: first + (peak - first) * (n + 1) / (warmup + 1)),
         "that is lesson 10's warm-up: here update 0 has `first`, and the line begins there"),
        (with_warmup(lambda n: peak * n / warmup), "the warm-up begins at `first`, not at 0"),
        (with_warmup(lambda n: peak * (n + 1) / (warmup + 1)),
         "that is lesson 10's warm-up: here update 0 has `first`, and the line begins there"),
        (with_decay(down), "from `peak` to `last` it is a straight line: use the root of done"),
        (with_decay(lambda done: down((1 - math.cos(math.pi * done)) / 2)),
         "from `peak` to `last` it is a cosine: use the root of done"),
        (with_decay(lambda done: down(done**2)), "the rate falls fast at first and slowly at the end: use the root of "
         "done, not its square"),
        (with_decay(lambda done: down(1 - math.sqrt(1 - done))), "the rate falls fast at first and slowly at the end: "
         "take the root of done, not of 1 - done"),
        (with_decay(lambda done: peak * (1 - math.sqrt(done))), "the decay ends at `last`, not at 0"),
        (with_decay(lambda done: peak * (1 - 0.9 * math.sqrt(done))),
         "the decay ends at `last`, which need not be a tenth of the peak"),
        (lambda n: true_rate(n, **case) if n <= held else down(math.sqrt((n - held - 1) / decay)),
         "the last update, number steps - 1, must have `last`: yours would reach it one update later"),
        (lambda n: true_rate(n, **case) if n <= held else down(math.sqrt((n - held - 1) / max(1, decay - 1))),
         "`decay` updates are below the peak: yours keeps the peak for one update more"),
        (lambda n: true_rate(n, **case) if n <= warmup else down(math.sqrt((n - warmup) / (steps - 1 - warmup))),
         "the decay begins too early: between warm-up and decay, the rate stays at `peak`"),
        (lambda n: true_rate(n, **case) if n <= warmup else cosine_over_all(n),
         "that is a cosine over the whole run: here the rate stays at `peak`, and only the last `decay` updates fall"),
        (lambda n: true_rate(n, **case) if n <= held else peak, "after the warm-up it stays at `peak` to the end"),
    ]  # fmt: skip
    for rule, cause in looks:
        if warmup and decay and held > warmup and is_like(got, rule, peak):
            return cause
    if step < warmup:
        return "in the warm-up, the rate must be on a line: first + (peak - first) * step / warmup"
    if step <= held:
        return "from update `warmup` to update steps - 1 - decay, the rate is `peak`, whatever `steps` is"
    return "in the decay: peak + (last - peak) * sqrt(done), with done from 0, at the last update with `peak`, to 1"


def is_like(got, rule, peak):
    """Whether rates are those of a rule, a function of the update's number."""
    return all(abs(rate - rule(step)) <= 1e-6 * peak for step, rate in enumerate(got))
