"""A learning rate schedule that need not know the end of the run."""

from math import cos, pi, sqrt

from ddp_course.checks.functions import check_function
from ddp_course.judge.question import question


def schedule(up=lambda n, warmup, first, peak: first + (peak - first) * n / warmup, down=sqrt, begin=0, end=0, to=None):
    """The right rate, or one with a mistake in a part of it.

    up: the warm-up; down: from 0 to 1 in the decay; begin, end: by how many updates it is
    late; to: what the decay leads to, as a share of the peak, in place of `last`.
    """

    def rate(step, steps, warmup, decay, first, peak, last):
        if step < warmup:
            return up(step, warmup, first, peak)
        held = steps - 1 - decay
        if step <= held:
            return peak
        low = last if to is None else to * peak
        return peak + (low - peak) * down(max(0, step - held - begin) / (decay - begin + end))

    return rate


def falls_at_once(down):
    """No part of the run stays at the peak: the decay begins after the warm-up."""

    def rate(step, steps, warmup, **others):
        return schedule(down=down)(step, steps, warmup, **others | {"decay": steps - 1 - warmup})

    return rate


LESSON_10 = "that is lesson 10's warm-up: here update 0 has `first`, and the line begins there"
MISTAKES = {
    "updates count from 0: the first one has `first`, and update number `warmup` has `peak`":
        schedule(up=lambda n, warmup, first, peak: first + (peak - first) * (n + 1) / warmup),
    LESSON_10: schedule(up=lambda n, warmup, first, peak: first + (peak - first) * (n + 1) / (warmup + 1)),
    f"{LESSON_10}, not at 0": schedule(up=lambda n, warmup, first, peak: peak * (n + 1) / (warmup + 1)),
    "the warm-up begins at `first`, not at 0": schedule(up=lambda n, warmup, first, peak: peak * n / warmup),
    "from `peak` to `last` it is a straight line: use the root of done": schedule(down=lambda done: done),
    "from `peak` to `last` it is a cosine: use the root of done": schedule(down=lambda done: (1 - cos(pi * done)) / 2),
    "the rate must fall fast at first and slowly at the end: use the root of done, not its square":
        schedule(down=lambda done: done**2),
    "the rate must fall fast at first and slowly at the end: take the root of done, not of 1 - done":
        schedule(down=lambda done: 1 - sqrt(1 - done)),
    "the decay ends at `last`, not at 0": schedule(to=0),
    "the decay ends at `last`, which need not be a tenth of the peak": schedule(to=0.1),
    "the last update, number steps - 1, must have `last`: yours would reach it one update later": schedule(begin=1, end=1),
    "`decay` updates are below the peak: yours keeps the peak for one update more": schedule(begin=1),
    "the decay begins too early: between warm-up and decay, the rate stays at `peak`": falls_at_once(sqrt),
    "that is a cosine over the whole run: here the rate stays at `peak`, and only the last `decay` updates fall":
        falls_at_once(lambda done: (1 - cos(pi * done)) / 2),
    "after the warm-up it stays at `peak` to the end": schedule(to=1),
}  # fmt: skip


def of_this_part(case, got):
    """What must hold in the part of the run to which an update belongs."""
    if case["step"] < case["warmup"]:
        return "in the warm-up, the rate must be on a line: first + (peak - first) * step / warmup"
    if case["step"] <= case["steps"] - 1 - case["decay"]:
        return "from update `warmup` to update steps - 1 - decay, the rate is `peak`, whatever `steps` is"
    return "in the decay: peak + (last - peak) * sqrt(done), with done from 0, at the last update with `peak`, to 1"


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
    some, cases = lambda: draw.randrange(3, 9), []
    runs = [(some() + 1, some(), some() + 2), (0, some(), some()), (some(), 0, some()), (some(), some(), 0), (0, 0, 1)]
    runs += [(0, 0, 0)]  # one update
    for (warmup, stable, decay), share in zip(runs, [0.25, *draw.sample([0.0, 0.03, 0.2, 0.4, 0.6], 5)]):
        run = {
            "steps": warmup + 1 + stable + decay,
            "warmup": warmup,
            "decay": decay,
            "first": draw.uniform(1e-5, 1e-4),
        }
        run["peak"] = draw.uniform(1e-3, 1e-2)
        cases += [{"step": step} | run | {"last": share * run["peak"]} for step in range(run["steps"])]
    check_function(
        answer, draw, "learning_rate", cases, schedule(), MISTAKES, of_this_part,
        scale=lambda case: case["peak"],
    )  # fmt: skip
