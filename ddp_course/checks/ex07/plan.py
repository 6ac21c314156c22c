"""Question 1: what prepare makes of a loader, an optimizer and a scheduler, predicted and
then counted in a real loop.
"""

import math
import warnings
from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader

from ddp_course.checks.claims import Claim, on_every_rank
from ddp_course.checks.ex07.networks import PRELOADED
from ddp_course.checks.predictions import numbers
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.launch import start_server


def predictions(plan, cases, n):
    """What the answer predicts in each case, for n processes."""
    found = []
    for samples, batch_size, accumulation, epochs, prepared in cases:
        with trying(in_words((samples, batch_size, accumulation, epochs, prepared), n)):
            returned = plan(samples, batch_size, n, accumulation, epochs, prepared)
        found.append(numbers(returned, 4))
    return found


def counted(cases):
    """What a real loop counts in each case, on this process."""
    from accelerate import Accelerator

    seen = []
    for case in cases:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case[2])
        accelerator.wait_for_everyone()
        seen.append(a_run(accelerator, *case))
    accelerator.end_training()
    return seen


def a_run(accelerator, samples, batch_size, accumulation, epochs, prepared):
    """Lesson 7's loop with a scheduler, and counters."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    plain, first = scheduler, scheduler.last_epoch
    loader = DataLoader(torch.arange(samples), batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if prepared:
        scheduler = accelerator.prepare(scheduler)
    batches, updates = [], 0
    # torch warns of a scheduler that steps while the optimizer waits
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
    for _ in range(epochs):
        for batch in loader:
            batches.append(batch.tolist())
            with accelerator.accumulate(model):
                accelerator.backward(model(batch[:, None].float()).mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            updates += accelerator.sync_gradients
    steps = plain.last_epoch - first
    return {"batches": batches, "updates": updates, "steps": steps}


def in_words(case, n):
    samples, batch_size, accumulation, epochs, prepared = case
    return f"plan({samples}, {batch_size}, {n}, {accumulation}, {epochs}, {prepared})"


@question(
    "Write down 14 samples in batches of 4 for 3 processes: which batches does each process get, and what is missing "
    "to make all of them full and equally many? The map under `Who sees which sample` in the lesson shows it.",
    "Batches: samples / batch size, rounded up; per process: that / processes, rounded up. All of these are full. "
    "Updates per epoch: batches per process / accumulation, rounded up, since `accumulate` ends the last update at "
    "the end of the loader. For the scheduler, see number 4 under `Break it`.",
    "batches = math.ceil(math.ceil(samples / batch_size) / processes); repeated = batches * processes * batch_size - "
    "samples; updates = epochs * math.ceil(batches / accumulation); the scheduler takes updates * processes steps if "
    "it is prepared, and epochs * batches if not.",
)
def check_plan(answer, draw):
    """The four numbers must be those of a real loop on these processes."""
    start_server(*PRELOADED)  # where none runs yet
    for n in (2, 3):
        cases = [a_case(draw, n, prepared) for prepared in (True, False)]
        batch_size, more = draw.randint(3, 5), draw.randint(2, 3)
        joined = n * batch_size
        cases.append((joined * more, batch_size, 1, 1, True))  # nothing is left over
        cases.append((joined * 2 * more - 1, batch_size, more, 2, False))  # only in the last batch
        # an update never gets all its batches; as many epochs as processes would hide mistakes
        cases.append((joined * more - batch_size, batch_size, more + 1, 5 - n, True))
        predicted = answer.on_ranks(predictions, cases, n, nproc=n, timeout=20)
        of_ranks = answer.without(counted, cases, nproc=n, timeout=20)
        for case, got, seen in zip(cases, zip(*predicted), zip(*of_ranks)):
            on_every_rank(partial(claims, case, truth(case, seen)), list(got))


def a_case(draw, n, prepared):
    """Sizes with which something is left over in every step."""
    while True:
        batch_size, accumulation = draw.randint(3, 5), draw.randint(3, 5)
        samples, epochs = (draw.randint(4 * n * batch_size, 12 * n * batch_size), draw.randint(2, 3))
        batches = math.ceil(samples / batch_size)
        of_each = math.ceil(batches / n)
        case = samples, batch_size, accumulation, epochs, prepared
        left_over = samples % batch_size, batches % n, of_each % accumulation
        if all(left_over) and told_apart(case, n):
            return case


def told_apart(case, n):
    """Whether no two mistakes lead to the same number."""
    for *mistakes, _ in mistakes_in(case, n).values():
        causes = {}
        for number, cause in mistakes:
            if causes.setdefault(number, cause) != cause:
                return False
    return True


def truth(case, of_ranks):
    """The four numbers, of what real loops have counted."""
    samples, epochs, first = case[0], case[3], of_ranks[0]
    seen = sum(len(batch) for one in of_ranks for batch in one["batches"])
    return [len(first["batches"]) // epochs, seen // epochs - samples, first["updates"], first["steps"]]


# ---- what is claimed ----


def claims(case, truth, rank, of_ranks):
    n, got = len(of_ranks), of_ranks[rank]
    call = in_words(case, n)
    yield Claim(f"what {call} returns", isinstance(got, list), True, "return four numbers, in the order of the list above",
                told="four numbers", shown=got)  # fmt: skip
    yield Claim(f"what {call} returns", got != truth and sorted(got) == sorted(truth), False, "the four numbers are right, "
                "but not in this order", told=truth, shown=got)  # fmt: skip
    for one, number, (what, [*mistakes, otherwise]) in zip(got, truth, mistakes_in(case, n).items()):
        yield Claim(f"{what}, in {call}, compared with a real loop", one, float(number), otherwise,
                    [(float(value), cause) for value, cause in mistakes], told=number, shown=f"{one:g}")  # fmt: skip


def mistakes_in(case, n):
    """For each of the four numbers, what mistakes make of it and their causes, and the cause
    of all others.
    """
    samples, batch_size, accumulation, epochs, prepared = case
    batches = math.ceil(samples / batch_size)
    of_each = math.ceil(batches / n)
    updates = epochs * math.ceil(of_each / accumulation)
    too_few = (
        "prepare repeats samples until every process has equally many batches, and all of them are full: these are more "
        "than one sample, or one batch, per process"
    )
    waits = "a prepared scheduler waits for the last micro-batch of an update"
    unprepared = "this scheduler is not prepared: it steps whenever it is called, in every micro-batch"
    one_epoch = "that is one epoch"
    of_scheduler = [(updates, unprepared), (updates * n, unprepared), (of_each, one_epoch)]
    if prepared:
        of_scheduler = [
            (updates, "a prepared scheduler takes one step for each process at every update"),
            (epochs * of_each, waits),
            (epochs * of_each * n, waits),
            (updates // epochs * n, one_epoch),
        ]
    return {
        "batches per process and epoch": [
            (batches, "the batches are divided among the processes"),
            (batches // n, "where the batches do not divide evenly, none is left out: every process gets the same number, "
             "rounded up"),
            "prepare deals out whole batches, the same number to each process",
        ],
        "repeated samples per epoch": [
            (0, "where the samples do not fill all batches of all processes, prepare repeats some"),
            (batches * batch_size - samples, "that fills up the last batch, but some processes would then have a batch less "
             "than others: prepare repeats whole batches, too"),
            ((of_each * n - batches) * batch_size, "these are the batches that are repeated; the last batch of the data is "
             "filled up, too"),
            (of_each * n - batches, too_few),
            (of_each * n * batch_size, "these are all samples that the processes get; how many of them are repeated?"),
            (-samples % n, too_few),
            "each process gets equally many batches, and all of them full: what is missing is taken from the beginning",
        ],
        "updates of the whole run": [
            (updates // epochs, one_epoch),
            (epochs * (of_each // accumulation), "accumulate ends the last update at the end of the loader, so the short "
             "one makes an update, too"),
            (math.ceil(epochs * of_each / accumulation), "every epoch ends with an update, so an update never goes on into "
             "the next epoch: round up in each epoch"),
            (epochs * of_each, "these are micro-batches, and several of them make an update"),
            (epochs * math.ceil(batches / accumulation), "the batches are divided among the processes first"),
            "each update takes the given number of batches of each process, and every epoch ends with an update",
        ],
        "steps of the scheduler in the whole run": [
            *of_scheduler,
            "a prepared scheduler steps with the updates, once for each process; one that is not prepared steps whenever it "
            "is called",
        ],
    }  # fmt: skip
