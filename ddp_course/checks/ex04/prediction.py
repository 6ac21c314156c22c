"""Question 1: predict an epoch of a DDP program."""

from functools import partial

from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_course.checks.claims import Claim, on_every_rank
from ddp_course.checks.ex04.recorded import RecordingNetwork
from ddp_course.checks.predictions import numbers
from ddp_course.checks.samples import Numbered, how_often
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group


def predictions(answer, cases):
    """For each case, what the answer returns."""
    with process_group() as (_, n):
        seen = []
        for samples, batch_size in cases:
            with trying(f"epoch_plan({samples}, {batch_size}, {n})"):
                seen.append(numbers(answer(samples, batch_size, n), 3))
        return seen


def trained(cases):
    """For each case, the samples of this rank's steps."""
    with process_group():
        return [an_epoch(*case) for case in cases]


def an_epoch(samples, batch_size):
    """Train for an epoch; return the samples of each step on this rank."""
    data = Numbered(samples, seed=0)
    model = DistributedDataParallel(RecordingNetwork())
    sampler = DistributedSampler(data)
    for inputs, labels in DataLoader(data, batch_size, sampler=sampler):
        F.cross_entropy(model(inputs), labels).backward()
    return model.module.trained


def draw_cases(draw, n):
    """(samples, batch size): with rests that differ for a rank, for shares that are rounded
    down, and for one process; with one sample too many, and one too few; without any rest;
    and with shares that are smaller than a batch.
    """
    while True:
        batch_size = draw.randint(4, 7)
        whole = n * batch_size * draw.randint(2, 4)
        more = n * draw.randint(1, batch_size - 2) + draw.choice([1, n - 1])
        last = -(-more // n)
        rests = {last, n * last, more // n, more % batch_size, batch_size, 0}
        if len(rests) == 6:
            break
    return [(samples, batch_size) for samples in (whole + more, whole + 1, whole, whole - 1, more)]


# ---- what is claimed ----


def claims(case, counted, rank, of_ranks):
    call, got = f"epoch_plan{case}", of_ranks[rank]
    yield Claim(call, isinstance(got, list), True, "return three numbers: steps, samples of the last step on each rank, "
                "samples that are used twice", told="three numbers", shown=got)  # fmt: skip
    for one, expected, (what, [*mistakes, otherwise]) in zip(got, counted, mistakes_in(*case, *counted).items()):
        yield Claim(f"{call}: {what}, predicted and counted", one, float(expected), otherwise,
                    [(float(value), cause) for value, cause in mistakes], told=f"{expected}, as counted",
                    shown=f"{one:g}")  # fmt: skip


def mistakes_in(samples, batch_size, n, steps, last, twice):
    """For each number, what mistakes give and their causes, and the cause of all others."""
    share = -(-samples // n)
    return {
        "the number of steps": [
            (-(-samples // batch_size), "these are the steps of one process: each rank has only its share of the samples"),
            (samples // batch_size, "these are the steps of one process: each rank has only its share of the samples"),
            (share // batch_size, "the last batch is smaller than the others, but it is a step, too: DataLoader drops it "
             "only with drop_last=True"),
            (share / batch_size, "a step is a step, even with a smaller batch: round up"),
            (samples / n / batch_size, "a step is a step, even with a smaller batch: round up"),
            (steps + 1, "one step too many: after a division without a rest, no step is left over"),
            "the sampler gives each rank a share, and the loader makes batches of it; both round up",
        ],
        "the samples of the last step on each rank": [
            (0, "without a rest, the last batch is a full one"),
            (batch_size, "the last batch is what is left of a rank's share"),
            (samples // n % batch_size, "the sampler rounds the length of a share up, not down"),
            (samples % batch_size, "this is what is left for one process: each rank makes batches of its own share"),
            (n * last, "these are the samples of all ranks: count those of one"),
            "it is what is left of a rank's share after the full batches",
        ],
        "the samples that are used twice": [
            (samples % n, "so many are left over if shares are rounded down; the sampler rounds up: how many are missing "
             "then?"),
            (0, "the shares have the same length: where samples are missing, the sampler repeats some"),
            "all shares together have more samples than the data set: how many more?",
        ],
    }  # fmt: skip


@question(
    "Draw it for 14 samples, 4 ranks and batches of 3: first the share of each rank, as in the lesson, and then the batches "
    "of one share.",
    "All shares have the same length, and DistributedSampler rounds it up. DataLoader keeps the last batch, even when it "
    "is smaller. What is left over by a division without a rest?",
    "share = -(-samples // world_size), which rounds up; steps = -(-share // batch_size); the last step has share - (steps "
    "- 1) * batch_size samples; share * world_size - samples are used twice.",
)
def check_epoch_plan(answer, draw):
    """The prediction must be what real ranks do in an epoch."""
    for n in (3, 4):
        cases = draw_cases(draw, n)
        seen = answer.on_ranks(predictions, cases, nproc=n, timeout=10)
        of_ranks = answer.without(trained, cases, nproc=n, timeout=10)
        for place, (case, *steps) in enumerate(zip(cases, *of_ranks)):
            twice = how_often([sum(of_rank, []) for of_rank in steps], case[0])[2]
            counted = len(steps[0]), len(steps[0][-1]), twice
            on_every_rank(partial(claims, (*case, n), counted), [of_rank[place] for of_rank in seen])
