"""The three briefs of question 1, and the best plan that a search finds for each."""

from functools import cache
from typing import NamedTuple

from ddp_course import lesson21
from ddp_course.checkpoints.resumable import best_interval
from ddp_course.estimates.memory import Mesh
from ddp_course.estimates.step_time import GPUS
from ddp_course.estimates.transformer import MODELS, run_of

HOUR, WEEK = 3600, 7 * 24 * 3600


class Brief(NamedTuple):
    """What a plan is wanted for. number: what its number is, for a verdict."""

    model: str
    gpus: int
    gpu: str
    context: int
    number: str
    most: int = 10**6  # sequences per step
    least: int = 1
    stages: tuple = (0, 1, 3)
    room: float = lesson21.FREE * 80e9  # bytes per rank
    tokens: float = 0.0  # to train on until the deadline
    deadline: float = 0.0  # seconds
    noise: float = 0.0  # scale, tokens
    failures: tuple = ()  # GPU hours between two, seconds of saving, of a restart


BRIEFS = {
    "tonight": Brief(
        "llama3-8b", 4, "a100", 4096, "GB per rank at the highest moment of this plan", most=32, room=45e9,
        tokens=500e6, deadline=12 * HOUR,
    ),
    "week": Brief(
        "llama3-1b", 32, "h100", 8192, "billions of useful tokens in the week, with failures", noise=500e3,
        failures=(400, 400, 3600),
    ),
    "cluster": Brief(
        "llama3-70b", 512, "h100", 32768, "the bubble, in percent of this plan's step", least=64, most=64, stages=(0, 1),
    ),
}  # fmt: skip


def model_of(brief):
    return MODELS[brief.model]


def plan_of(brief, written):
    """The lesson's Plan of what was handed in. written: as plans_form.written gives it."""
    how = {name: written[name] for name in ("stage", "recompute", "chunks")}
    run = run_of(
        model_of(brief), Mesh(**written["mesh"]), brief.context, written["batch"], written["micro_batch"], **how
    )
    return lesson21.plan_of(model_of(brief), run, brief.gpu)


def tokens_of(plan):
    """Of a step."""
    return plan.run.batch * plan.run.context


def waste(brief, plan):
    """How many times as many samples a run needs as one with tiny batches."""
    return 1 + tokens_of(plan) / brief.noise if brief.noise else 1.0


def per_token(brief, plan):
    """Seconds for a token, or for a useful one: what the best plan has least of."""
    return plan.seconds() / tokens_of(plan) * waste(brief, plan)


@cache
def best_of(brief):
    """The best plan of all meshes, and of batches that are a power of two, or three times
    one.
    """
    model, found = model_of(brief), []
    sizes = {times * 2**power for times in (1, 3) for power in range(8)}
    for batch in sorted(size for size in sizes if brief.least <= size <= brief.most):
        for mesh in lesson21.meshes(model, brief.gpus, brief.context, GPUS[brief.gpu].per_machine):
            for run in lesson21.runs_on(mesh, model, brief.context, batch):
                plan = lesson21.plan_of(model, run, brief.gpu)
                if run.stage in brief.stages and plan.kept.total() <= brief.room:
                    found.append(plan)
    return min(found, key=lambda plan: per_token(brief, plan))


# ---- the number that decides ----


def gigabytes(brief, plan):
    return plan.kept.total() / 1e9


def lost(brief, alone=False, saving=True, restart=True, hour=HOUR, interval_hour=None, redone=0.5):
    """The share of time that failures and checkpoints cost, at the best interval. hour: what
    is taken for its seconds; interval_hour: for the best interval only. redone: the share of
    an interval that a failure takes back.
    """
    hours, save, start = brief.failures
    between = hours * hour / (1 if alone else brief.gpus)
    interval = best_interval(save, between / hour * (interval_hour or hour))
    return saving * save / interval + (interval * redone + restart * start) / between


def useful(brief, plan, wasted=True, gone=None):
    """Billions of tokens in the week that count."""
    time = WEEK * (1 - (lost(brief) if gone is None else gone))
    return time / plan.seconds() * tokens_of(plan) / (waste(brief, plan) if wasted else 1) / 1e9


def bubble(brief, plan):
    return 100 * plan.parts.bubble / plan.seconds()


def slots_idle(plan):
    """(p - 1) / (v m + p - 1), of a pipeline without messages."""
    waits = plan.run.mesh.pipeline - 1
    return waits / (plan.run.chunks * plan.run.micro_batches() + waits)


def computing(plan):
    return plan.parts.products + plan.parts.attention


NUMBERS = {"tonight": gigabytes, "week": useful, "cluster": bubble}
NUMBER_MISTAKES = {
    "tonight": [
        (lambda brief, plan: plan.kept.total(), "these are bytes: a GB is 1e9 of them"),
        (lambda brief, plan: plan.kept.total() / 2**30, "these are GiB, of 2**30 bytes: a GB is 1e9"),
        (lambda brief, plan: 4 * gigabytes(brief, plan), "this is what all four ranks keep: return that of one"),
        (lambda brief, plan: sum(plan.kept[:3]) / 1e9, "these are the states only: activations and the highest moment of a "
         "step take memory, too"),
        (lambda brief, plan: sum(plan.kept[:4]) / 1e9, "the highest moment is missing: gathered weights, logits, or a block "
         "that is recomputed"),
        (lambda brief, plan: plan.kept.activations / 1e9, "these are the activations only: return all that a rank keeps"),
    ],
    "week": [
        (lambda brief, plan: 1e9 * useful(brief, plan), "these are tokens: return billions of them"),
        (lambda brief, plan: 1e3 * useful(brief, plan), "these are millions of tokens: return billions of them"),
        (lambda brief, plan: useful(brief, plan, wasted=False), "a batch of B tokens (not sequences) with a noise "
         "scale of S needs 1 + B / S times as many tokens: divide by that"),
        (lambda brief, plan: useful(brief, plan, wasted=False, gone=0), "your number leaves out both the "
         "failures and the noise scale"),
        (lambda brief, plan: useful(brief, plan, gone=0), "checkpoints, failures and restarts cost time, too"),
        (lambda brief, plan: useful(brief, plan, gone=lost(brief, alone=True)), "this is how often one GPU fails: 32 of "
         "them fail 32 times as often"),
        (lambda brief, plan: useful(brief, plan, gone=lost(brief, restart=False)), "each failure costs a restart, too"),
        (lambda brief, plan: useful(brief, plan, gone=lost(brief, saving=False)), "this has only one of two parts, which "
         "are equally large at the best interval: saving, and half an interval that is redone after a failure"),
        (lambda brief, plan: useful(brief, plan, gone=lost(brief, hour=1)), "the time between failures is in hours here: "
         "saving and restarts are in seconds, so take seconds for it, too"),
        (lambda brief, plan: useful(brief, plan, gone=lost(brief, interval_hour=1)), "best_interval takes both of its times "
         "in the same unit: give it the seconds between failures, and not the hours"),
        (lambda brief, plan: useful(brief, plan) / 7, "this is a day: return the tokens of the week"),
        (lambda brief, plan: useful(brief, plan, gone=lost(brief, redone=1)), "on average, a failure takes back half of an "
         "interval, and not a whole one"),
        (lambda brief, plan: useful(brief, plan, gone=0) / (1 + lost(brief)), "the lost share is a share of the whole week: "
         "multiply by 1 - lost"),
        (lambda brief, plan: useful(brief, plan, gone=1 - lost(brief)), "these are the tokens of the time that was lost: "
         "return those of the rest"),
        (lambda brief, plan: useful(brief._replace(noise=2 * brief.noise), plan), "this is with the lesson's noise scale: "
         "take the brief's"),
        (lambda brief, plan: useful(brief, plan, gone=lost(brief, redone=0, restart=False)), "this has only what saving "
         "costs: failures cost time, too"),
    ],
    "cluster": [
        (lambda brief, plan: bubble(brief, plan) / 100, "this is a share from 0 to 1: return percent"),
        (lambda brief, plan: 100 * plan.parts.bubble / computing(plan), "this is the bubble as a share of computing: divide "
         "by the seconds of the whole step"),
        (lambda brief, plan: plan.parts.bubble, "these are seconds: return percent of the step"),
        (lambda brief, plan: 100 * slots_idle(plan), "this is lesson 18's share of slots: a step also has messages, so "
         "divide the seconds of plan.parts.bubble by those of the step"),
        (lambda brief, plan: 100 * (1 - computing(plan) / plan.seconds()), "this is all that is not computing: return the "
         "bubble only, without messages"),
    ],
}  # fmt: skip
