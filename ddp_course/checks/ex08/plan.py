"""Question 1: what TrainingArguments will do, predicted and then counted in a training."""

import math

import torch
from torch import nn

from ddp_course.checks.ex08.on_ranks import LEARNING_RATE, PRELOADED, TIMEOUT, Meeting, a_trainer, settings
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.launch import start_server

NAMES = [
    "examples per update",
    "micro-batches of the last update of an epoch",
    "updates of the whole training",
    "updates of the warm-up",
]


class Counting(nn.Module):
    """A network that notes how many examples each call has."""

    def __init__(self):
        super().__init__()
        self.linear, self.sizes = nn.Linear(1, 1), []

    def forward(self, inputs):
        self.sizes.append(len(inputs))
        return {"loss": self.linear(inputs).mean()}


def prediction(plan, case, n):
    """What the answer returns."""
    examples, *others = case
    with trying(in_words(case, n)):
        return numbers(plan(examples, n, *others))


def counted(case):
    """What a training has really done: {"updates": for each update, the examples of each
    of its micro-batches on this rank; "rates": the learning rate of each update}.
    """
    meeting, (examples, batch_size, accumulation, epochs, warmup) = Meeting(), case
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


def numbers(returned):
    """What plan returned, as numbers, or in words if it is something else."""
    if not isinstance(returned, tuple | list) or len(returned) != len(NAMES):
        return "nothing (None)" if returned is None else str(returned)[:80]
    try:
        return [float(number) for number in returned]
    except (TypeError, ValueError):
        return str(returned)[:80]


def in_words(case, n):
    examples, batch_size, accumulation, epochs, warmup = case
    return f"plan({examples}, {n}, {batch_size}, {accumulation}, {epochs}, {warmup:.3g})"


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
    fraction_first = draw.random() < 0.5
    for place, n in enumerate((2, 3)):
        case = a_case(draw, n, fraction=(place == 0) == fraction_first)
        [predicted] = answer.on_ranks(prediction, case, n, timeout=TIMEOUT)
        seen = answer.without(counted, case, nproc=n, timeout=TIMEOUT)
        judge_plan(predicted, seen, case)


def a_case(draw, n, fraction):
    """Settings with which something is left over in every step."""
    while True:
        batch_size, accumulation = draw.randint(2, 4), draw.randint(3, 5)
        examples = draw.randint(4 * n * batch_size, 11 * n * batch_size)
        epochs = draw.choice([1.5, 2.25, 2.5])
        batches, of_rank, updates = shares(examples, n, batch_size, accumulation)
        steps = math.ceil(epochs * updates)
        warmup = draw.choice([0.15, 0.3, 0.45]) if fraction else draw.randint(2, 4)
        left_over = [
            math.ceil(epochs * of_rank / accumulation) != steps,
            examples % batch_size,
            batches % n,
            of_rank % accumulation,
            epochs * updates % 1,
            not fraction or 0.1 < warmup * steps % 1 < 0.9,
            steps <= 14,
        ]
        case = examples, batch_size, accumulation, epochs, warmup
        if all(left_over) and told_apart(case, n):
            return case


def shares(examples, n, batch_size, accumulation):
    """The batches of an epoch, those of each rank, and the updates."""
    batches = math.ceil(examples / batch_size)
    of_rank = math.ceil(batches / n)
    return batches, of_rank, math.ceil(of_rank / accumulation)


def what_happened(seen, updates):
    """The four numbers, counted in a training. updates: of an epoch."""
    first = [sum(of_rank["updates"][0]) for of_rank in seen]
    short, rates = seen[0]["updates"][updates - 1], seen[0]["rates"]
    warming = [rate for rate in rates if rate < LEARNING_RATE * 0.999]
    return [sum(first), len(short), len(rates), len(warming)]


def told_apart(case, n):
    """Whether no two mistakes lead to the same number."""
    for mistakes in looks(case, n):
        causes = {}
        for number, cause in mistakes:
            if causes.setdefault(number, cause) != cause:
                return False
    return True


def judge_plan(got, seen, case):
    n, examples = len(seen), case[0]
    updates = shares(examples, n, *case[1:3])[2]
    truth = what_happened(seen, updates)
    checked = in_words(case, n)
    if isinstance(got, str):
        cause = "return four numbers, in the order of the list above"
        raise Wrong(f"what {checked} returns", expected="four numbers", got=got, cause=cause)
    for place, (name, number) in enumerate(zip(NAMES, truth)):
        if not abs(got[place] - number) <= 1e-6:  # NaN, too
            cause = cause_of(place, got, truth, case, n)
            what = f"{name}, in {checked}, compared with a training"
            raise Wrong(what, expected=number, got=f"{got[place]:g}", cause=cause)


def cause_of(place, got, truth, case, n):
    """Why a number may be wrong: the first mistake that leads to it."""
    if sorted(got) == sorted(truth):
        return "the four numbers are right, but not in this order"
    number = got[place]
    for wrong, cause in looks(case, n)[place]:
        if abs(number - wrong) < 1e-6:
            return cause
    return [
        "an update takes one batch for each rank and each micro-batch",
        "follow the batches: all of them, those of one rank, and what is left after its full updates",
        "each rank's micro-batches make the updates of an epoch, and the last of them may be short",
        "a warmup_steps below 1 is a part of all updates of the training; from 1 on it is their number",
    ][place]


def looks(case, n):
    """For each of the four numbers, what mistakes make of it, and their causes."""
    examples, batch_size, accumulation, epochs, warmup = case
    batches, of_rank, updates = shares(examples, n, batch_size, accumulation)
    steps = math.ceil(epochs * updates)
    alone = math.ceil(batches / accumulation)
    fewer = of_rank // accumulation
    rounds = (
        "round up twice: each epoch ends with an update, full or not, and so does the training, even within an epoch"
    )
    one_epoch = [(updates, "that is one epoch")] if epochs > 2 else []
    number = [
        (math.ceil(warmup * steps), "a warmup_steps of 1 or more is a number of updates"),
        (warmup * n, "each update is one step of Trainer's schedule, on any number of ranks"),
        (warmup * accumulation, "the schedule counts updates, not micro-batches"),
    ]
    fraction = [
        (math.floor(warmup * steps), "Trainer rounds the warm-up up, not down"),
        (warmup, "a warmup_steps below 1 is a part of all updates, not their number"),
        (math.ceil(warmup * updates), "it is a part of the whole training, not of one epoch"),
    ]
    return [
        [
            (batch_size * accumulation, "that is one rank's part: all ranks take part in an update"),
            (batch_size * n, "that is one micro-batch of all ranks: an update has several"),
            (batch_size, "that is one micro-batch of one rank"),
        ],
        [
            (accumulation, "the last update of an epoch takes what is left, which is less than "
             "gradient_accumulation_steps here"),
            (batches - (alone - 1) * accumulation, "the batches of an epoch are divided among the ranks first"),
            (batches // n % accumulation, "where the batches do not divide evenly, every rank still gets the same "
             "number, rounded up: prepare repeats examples"),
        ],
        one_epoch
        + [
            (math.ceil(epochs * fewer), "the short last update of an epoch is an update, too"),
            (math.floor(epochs * updates), rounds),
            (math.ceil(epochs * of_rank / accumulation), rounds),
            (math.ceil(epochs) * updates, "the last epoch is not a whole one: num_train_epochs may be a fraction"),
            (math.ceil(epochs * of_rank), "these are micro-batches, and several of them make an update"),
            (math.ceil(epochs * alone), "the batches of an epoch are divided among the ranks first"),
        ],
        fraction if warmup < 1 else number,
    ]  # fmt: skip
