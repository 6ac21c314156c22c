"""Question 1: what TrainingArguments will do, predicted and then counted in a training."""

from math import ceil, floor
from typing import NamedTuple

import torch
from torch import nn

from ddp_course.checks.claims import Claim, hold
from ddp_course.checks.ex08.on_ranks import LEARNING_RATE, PRELOADED, TIMEOUT, Meeting, a_trainer, settings
from ddp_course.checks.predictions import likely, numbers
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.launch import start_server

NAMES = [
    "examples per update",
    "micro-batches of the last update of an epoch",
    "updates of the whole training",
    "updates of the warm-up",
]


class Settings(NamedTuple):
    """The arguments of plan, and what follows from them."""

    examples: int
    ranks: int
    batch_size: int
    accumulation: int
    epochs: float
    warmup: float

    def __str__(self):
        *others, warmup = self
        return f"plan({', '.join(map(str, others))}, {warmup:.3g})"

    @property
    def batches(self):
        """Those of an epoch."""
        return ceil(self.examples / self.batch_size)

    @property
    def of_rank(self):
        """The batches of an epoch on each rank."""
        return ceil(self.batches / self.ranks)

    @property
    def updates(self):
        """Those of an epoch."""
        return ceil(self.of_rank / self.accumulation)

    @property
    def alone(self):
        """The updates of an epoch, if one rank had all batches."""
        return ceil(self.batches / self.accumulation)

    @property
    def steps(self):
        """The updates of the training."""
        return ceil(self.epochs * self.updates)

    @property
    def warming(self):
        return self.warm_up(self.steps)

    def warm_up(self, steps, rounded=ceil):
        return rounded(self.warmup * steps) if self.warmup < 1 else self.warmup


# ---- what the ranks observe ----


class Counting(nn.Module):
    """A network that notes how many examples each call has."""

    def __init__(self):
        super().__init__()
        self.linear, self.sizes = nn.Linear(1, 1), []

    def forward(self, inputs):
        self.sizes.append(len(inputs))
        return {"loss": self.linear(inputs).mean()}


def predictions(plan, cases):
    """What the answer returns for each case. cases: tuples of its arguments, and words."""
    predicted = []
    for case, words in cases:
        with trying(words):
            predicted.append(numbers(plan(*case), len(NAMES)))
    return predicted


def counted(cases):
    """What a training of each case has really done: {"updates": for each update, the
    examples of each of its micro-batches on this rank; "rates": the learning rate of each
    update}.
    """
    meeting = Meeting()
    return [counted_in_one(meeting, *case) for case in cases]


def counted_in_one(meeting, examples, ranks, batch_size, accumulation, epochs, warmup):
    options = {
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": accumulation,
        "num_train_epochs": epochs,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": warmup,
        "logging_strategy": "no",
    }
    model, updates, rates = Counting(), [], []

    def note(optimizer, *_):
        rates.append(optimizer.param_groups[0]["lr"])
        updates.append(list(model.sizes))
        model.sizes.clear()

    with settings(meeting, **options) as made:
        rows = [{"inputs": torch.ones(1)} for _ in range(examples)]
        trainer = a_trainer(model, made, rows)
        trainer.optimizer.register_step_post_hook(note)
        trainer.train()
    return {"updates": updates, "rates": rates}


def what_happened(case, seen):
    """The four numbers, counted in a training. seen: that of each rank."""
    first = [sum(of_rank["updates"][0]) for of_rank in seen]
    last, rates = seen[0]["updates"][case.updates - 1], seen[0]["rates"]
    warming = [rate for rate in rates if rate < LEARNING_RATE * 0.999]
    return [sum(first), len(last), len(rates), len(warming)]


# ---- what is claimed ----

ROUND_TWICE = (
    "round up twice: each epoch ends with an update, full or not, and so does the training, even within an epoch"
)
ONE_TOO_MANY = "// and + 1 gives one too many where nothing is left over: math.ceil rounds up only if something is"
DIVIDED_FIRST = "the batches of an epoch are divided among the ranks first"
OTHERWISE = [
    "an update takes one batch for each rank and each micro-batch",
    "follow the batches: all of them, those of one rank, and what is left after its full updates",
    "each rank's micro-batches make the updates of an epoch, and the last of them may be short",
    "a warmup_steps below 1 is a part of all updates of the training; from 1 on it is their number",
]
MISTAKES = [
    [
        (lambda s: s.batch_size * s.accumulation, "that is one rank's part: all ranks take part in an update"),
        (lambda s: s.batch_size * s.ranks, "that is one micro-batch of all ranks: an update has several"),
        (lambda s: s.batch_size, "that is one micro-batch of one rank"),
    ],
    [
        (lambda s: s.accumulation, "the last update of an epoch takes what is left, which is less than "
         "gradient_accumulation_steps here"),
        (lambda s: s.of_rank % s.accumulation, "no update has 0 micro-batches: where the batches of a rank divide evenly, "
         "the last update is a full one"),
        (lambda s: s.of_rank - s.of_rank // s.accumulation * s.accumulation, ONE_TOO_MANY),
        (lambda s: s.batches - (s.alone - 1) * s.accumulation, DIVIDED_FIRST),
        (lambda s: s.batches // s.ranks % s.accumulation, "where the batches do not divide evenly, every rank still gets "
         "the same number, rounded up: prepare repeats examples"),
    ],
    [
        (lambda s: s.updates, "that is one epoch"),
        (lambda s: ceil(s.epochs * (s.of_rank // s.accumulation)), "the short last update of an epoch is an update, too"),
        (lambda s: floor(s.epochs * s.updates), ROUND_TWICE),
        (lambda s: ceil(s.epochs * s.of_rank / s.accumulation), ROUND_TWICE),
        (lambda s: floor(s.epochs * s.updates) + 1, ONE_TOO_MANY),
        (lambda s: ceil(s.epochs * (s.of_rank // s.accumulation + 1)), ONE_TOO_MANY),
        (lambda s: ceil(s.epochs) * s.updates, "the last epoch is not a whole one: num_train_epochs may be a fraction"),
        (lambda s: ceil(s.epochs * s.of_rank), "these are micro-batches, and several of them make an update"),
        (lambda s: ceil(s.epochs * s.alone), DIVIDED_FIRST),
    ],
    [
        (lambda s: s.warm_up(s.steps, floor), "Trainer rounds the warm-up up, not down"),
        (lambda s: s.warm_up(s.steps, lambda part: floor(part) + 1), ONE_TOO_MANY),
        (lambda s: s.warmup, "a warmup_steps below 1 is a part of all updates, not their number"),
        (lambda s: ceil(s.warmup * s.steps), "a warmup_steps of 1 or more is a number of updates"),
        (lambda s: s.warm_up(s.updates), "it is a part of the whole training, not of one epoch"),
        (lambda s: s.warming * s.ranks, "each update is one step of Trainer's schedule, on any number of ranks"),
        (lambda s: s.warming * s.accumulation, "the schedule counts updates, not micro-batches"),
    ],
]  # fmt: skip


def claims(cases, predicted, here, truth):
    """That the four numbers predicted for one case are those counted in its training. here:
    its place among the cases; truth: the numbers.
    """
    case, got = cases[here], predicted[here]
    yield Claim(
        f"what {case} returns", isinstance(got, list), True,
        "return four numbers, in the order of the list above", told="four numbers", shown=got,
    )  # fmt: skip
    shuffled = [(number, "the four numbers are right, but not in this order") for number in got]
    for place, (name, number) in enumerate(zip(NAMES, truth)):
        seen = [each[place] if isinstance(each, list) else None for each in predicted]

        def mistakes(place=place, seen=seen):
            return (shuffled if sorted(got) == sorted(truth) else []) + likely(MISTAKES[place], cases, seen, here)

        yield Claim(
            f"{name}, in {case}, compared with a training", got[place], float(number), OTHERWISE[place], mistakes,
            told=number, shown=f"{got[place]:g}",
        )  # fmt: skip


@question(
    "Follow the examples: into batches of per_device_train_batch_size, the batches to the ranks, and each rank's "
    "batches into updates. In each of these three steps something can be left over. What becomes of it?",
    "Batches: examples / batch size, rounded up. Per rank: batches / ranks, rounded up, since prepare repeats some. "
    "Updates per epoch: that / accumulation steps, rounded up, since the last update of an epoch may be short. Trainer "
    "rounds up in the end, too: look at Trainer.set_initial_training_values?? and TrainingArguments.get_warmup_steps??.",
    "batches = math.ceil(math.ceil(examples / batch_size) / ranks); updates = math.ceil(batches / accumulation). "
    "The last update has batches - (updates - 1) * accumulation micro-batches; the training has math.ceil(epochs * "
    "updates) updates, and the warm-up math.ceil(warmup * that) if warmup < 1, otherwise warmup.",
)
def check_plan(answer, draw):
    """The four numbers must be those of a real training with these settings."""
    start_server(*PRELOADED)  # where none runs yet
    kinds = draw.sample(["a part", "a number"], 2)
    cases = [draw_case(draw, n, kind) for n, kind in zip((2, 3), kinds) for draw_case in (with_rests, without_a_rest)]
    told = [(tuple(case), str(case)) for case in cases]
    [predicted] = answer.on_ranks(predictions, told, timeout=TIMEOUT)
    for n in (2, 3):
        places = [place for place, case in enumerate(cases) if case.ranks == n]
        seen = answer.without(counted, [tuple(cases[place]) for place in places], nproc=n, timeout=TIMEOUT)
        for place, *of_ranks in zip(places, *seen):
            hold(claims(cases, predicted, place, what_happened(cases[place], of_ranks)))


def with_rests(draw, ranks, warm_up):
    """Settings with which something is left over in every step. warm_up: "a part" or "a
    number".
    """
    while True:
        batch_size, accumulation = draw.randint(2, 4), draw.randint(3, 5)
        examples = draw.randint(4 * ranks * batch_size, 11 * ranks * batch_size)
        warmup = draw.choice([0.15, 0.3, 0.45]) if warm_up == "a part" else draw.randint(2, 4)
        epochs = draw.choice([1.4, 1.5, 2.1, 2.25, 2.4])
        case = Settings(examples, ranks, batch_size, accumulation, epochs, warmup)
        left_over = [
            ceil(epochs * case.of_rank / accumulation) != case.steps,
            examples % batch_size,
            case.batches % ranks,
            case.of_rank % accumulation,
            case.updates > 1,
            round(epochs * case.updates) < case.steps,  # round() is wrong
            warmup >= 1 or 0.1 < warmup * case.steps % 1 < 0.45,
            4 < case.steps <= 14,
        ]
        if all(left_over):
            return case


def without_a_rest(draw, ranks, warm_up):
    """Settings with which everything divides evenly. warm_up: that of the other settings;
    these have it the other way.
    """
    batch_size, accumulation, updates = draw.randint(2, 4), draw.randint(2, 4), draw.choice([2, 3])
    warmup = 1 if warm_up == "a part" else 0.5
    return Settings(ranks * batch_size * accumulation * updates, ranks, batch_size, accumulation, 2, warmup)
