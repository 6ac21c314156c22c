"""Question 1: predict an epoch of a DDP program."""

from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_course.checks.ex04.recorded import RecordingNetwork
from ddp_course.checks.samples import Numbered, how_often
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.environment import process_group

WHAT = ["the number of steps", "the samples of the last step on each rank", "the samples that are used twice"]  # fmt: skip


def predictions(answer, cases):
    """For each case, what the answer returns."""
    with process_group() as (rank, n):
        seen = []
        for samples, batch_size in cases:
            with trying(f"epoch_plan({samples}, {batch_size}, {n})"):
                seen.append(as_numbers(answer(samples, batch_size, n)))
        return seen


def trained(cases):
    """For each case, the samples of this rank's steps."""
    with process_group():
        return [an_epoch(*case) for case in cases]


def as_numbers(returned):
    try:
        return [float(number) for number in returned]
    except (TypeError, ValueError):
        return f"{returned!r}"


def an_epoch(samples, batch_size):
    """Train for an epoch; return the samples of each step on this rank."""
    data = Numbered(samples, seed=0)
    model = DistributedDataParallel(RecordingNetwork())
    sampler = DistributedSampler(data)
    for inputs, labels in DataLoader(data, batch_size, sampler=sampler):
        F.cross_entropy(model(inputs), labels).backward()
    return model.module.trained


def draw_cases(draw, n):
    """(samples, batch size): with rests that differ for a rank, for shares that are
    rounded down, and for one process; with one sample too many; and without any rest.
    """
    while True:
        batch_size = draw.randint(4, 7)
        whole = n * batch_size * draw.randint(2, 4)
        more = n * draw.randint(1, batch_size - 2) + draw.choice([1, n - 1])
        last = -(-more // n)
        rests = {last, n * last, more // n, more % batch_size, batch_size, 0}
        if len(rests) == 6:
            break
    return [(whole + more, batch_size), (whole + 1, batch_size), (whole, batch_size)]


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
        epochs = answer.without(trained, cases, nproc=n, timeout=10)
        for place, case in enumerate(cases):
            steps = [of_rank[place] for of_rank in epochs]
            shares = [sum(of_rank, []) for of_rank in steps]
            twice = how_often(shares, case[0]).get(2, 0)
            counted = [len(steps[0]), len(steps[0][-1]), twice]
            for rank, of_rank in enumerate(seen):
                judge_prediction(*case, n, rank, of_rank[place], counted)


def judge_prediction(samples, batch_size, n, rank, predicted, counted):
    where, checked = f"{rank} of {n}", f"epoch_plan({samples}, {batch_size}, {n})"
    if not isinstance(predicted, list) or len(predicted) != 3:
        raise Wrong(checked, rank=where, expected="three numbers", got=predicted,
                    cause="return three numbers: steps, samples of the last step on each rank, samples that are used "
                    "twice")  # fmt: skip
    for what, got, expected in zip(WHAT, predicted, counted):
        if got != expected:
            found = looks(samples, batch_size, n, *counted)[what]
            causes = [cause for value, cause in found[:-1] if value == got]
            raise Wrong(f"{checked}: {what}, predicted and counted", rank=where, expected=f"{expected}, as counted",
                        got=f"{got:g}", cause=causes[0] if causes else found[-1])  # fmt: skip


def looks(samples, batch_size, n, steps, last, twice):
    """For each number, wrong ones with their causes, and the cause of all others."""
    share = -(-samples // n)
    smaller = share // batch_size if share % batch_size else None
    return {
        WHAT[0]: [
            (-(-samples // batch_size), "these are the steps of one process: each rank has only its share of the samples"),
            (samples // batch_size, "these are the steps of one process: each rank has only its share of the samples"),
            (smaller, "the last batch is smaller than the others, but it is a step, too: DataLoader drops it only with "
             "drop_last=True"),
            (share / batch_size, "a step is a step, even with a smaller batch: round up"),
            (samples / n / batch_size, "a step is a step, even with a smaller batch: round up"),
            (steps + 1, "one step too many: after a division without a rest, no step is left over"),
            "the sampler gives each rank a share, and the loader makes batches of it; both round up",
        ],
        WHAT[1]: [
            (0, "without a rest, the last batch is a full one"),
            (batch_size, "the last batch is what is left of a rank's share"),
            (samples // n % batch_size, "the sampler rounds the length of a share up, not down"),
            (samples % batch_size, "this is what is left for one process: each rank makes batches of its own share"),
            (n * last, "these are the samples of all ranks: count those of one"),
            "it is what is left of a rank's share after the full batches",
        ],
        WHAT[2]: [
            (samples % n, "so many are left over if shares are rounded down; the sampler rounds up: how many are missing "
             "then?"),
            (0, "the shares have the same length: where samples are missing, the sampler repeats some"),
            "all shares together have more samples than the data set: how many more?",
        ],
    }  # fmt: skip
