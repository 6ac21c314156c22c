"""Exercise 08: uneven examples and their loss in Trainer, and a callback that stops all
ranks together.
"""

import json
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext, suppress

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_course.checks.training import fill
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import RankError, start_server
from ddp_course.ranks.watch import Watch
from ddp_course.school.judge import Wrong, question, trying

# what the ranks begin with: Trainer, and what it imports on the way
PRELOADED = ["transformers.trainer", "datasets", "deepspeed"]
TIMEOUT = 40  # seconds, for ranks that have yet to import these; else they need two
PATIENCE = 4  # seconds that a rank waits for the others at the end of a step

# ---- Trainer on ranks ----


class Meeting:
    """Where ranks leave notes for each other, without any collective: those are for the
    answers.
    """

    def __init__(self):
        self.rank, self.n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.TCPStore(*address, is_master=False)

    def leave(self, topic, note):
        self.store.set(f"{topic}, {self.rank}", json.dumps(note))

    def notes(self, topic, note, patience=PATIENCE):
        """Leave a note; return those of all ranks, in their order, with None for those
        that did not come.
        """
        self.leave(topic, note)
        keys, deadline = (
            [f"{topic}, {rank}" for rank in range(self.n)],
            time.monotonic() + patience,
        )
        while not self.store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.002)
        return [self.left_by(rank, topic) for rank in range(self.n)]

    def left_by(self, rank, topic):
        """The note of a rank, None where there is none."""
        key = f"{topic}, {rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None


@contextmanager
def settings(meeting, **options):
    """TrainingArguments for small trainings on a CPU; and the process group, where a
    launch has set it up.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # or Accelerate warns of it
    from transformers.trainer import TrainingArguments

    meeting.notes("imported", True, patience=TIMEOUT)
    launched = "RANK" in os.environ
    group = process_group(timeout=2 * PATIENCE) if launched else nullcontext()
    with group, tempfile.TemporaryDirectory() as folder:
        yield TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_find_unused_parameters=False,
            train_sampling_strategy="sequential",
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            save_strategy="no",
            remove_unused_columns=False,
            report_to="none",
            disable_tqdm=True,
            **options,
        )


def a_trainer(model, made, examples, **options):
    from transformers.trainer import Trainer
    from transformers.trainer_callback import PrinterCallback

    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    trainer = Trainer(
        model, made, train_dataset=examples, optimizers=(optimizer, None), **options
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


# ---- 1: an uneven task ----

WORDS, WIDTH, CLASSES, LEARNING_RATE = 7, 4, 11, 0.1
LENGTHS = range(
    3, 10
)  # of examples; there are more classes, so that the two cannot be mixed up unnoticed
BATCH_SIZE, ACCUMULATION = 2, 3
IGNORED = -100


class Tagger(nn.Module):
    """Classes for each token, from the token alone, in 64 bits."""

    def __init__(self, seed):
        super().__init__()
        self.embedding, self.linear = (
            nn.Embedding(WORDS, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )
        fill(self, seed)

    def forward(self, tokens):
        return {"logits": self.linear(torch.tanh(self.embedding(tokens)))}


def an_example(draw, counting=None):
    """An example of any length. counting: how many of its targets count, two or more
    where left out.
    """
    length = draw.choice(LENGTHS)
    counting = draw.randint(2, length) if counting is None else counting
    targets = torch.tensor([draw.randrange(CLASSES) for _ in range(length)])
    targets[draw.sample(range(length), length - counting)] = IGNORED
    return {
        "tokens": torch.tensor([draw.randrange(1, WORDS) for _ in range(length)]),
        "targets": targets,
    }


def padded(batch, name, value, side="right"):
    return nn.utils.rnn.pad_sequence(
        [example[name] for example in batch], True, value, side
    )


def count(batch):
    """How many of its targets count."""
    return sum(int((example["targets"] != IGNORED).sum()) for example in batch)


def collated(collate, mean_loss, batches):
    seen = []
    for batch in batches:
        with trying(f"collate, with {lengths_of(batch)}"):
            returned = collate(batch)
        seen.append(dict(returned) if isinstance(returned, Mapping) else returned)
    return seen


def length_of(example):
    return len(example["tokens"])


def lengths_of(batch):
    return f"example{'s' * (len(batch) > 1)} of {in_row(map(length_of, batch))} tokens"


def in_row(things):
    """'1', '1 and 2', '1, 2 and 3'"""
    *first, last = map(str, things)
    return f"{', '.join(first)} and {last}" if first else last


def trained(collate, mean_loss, examples, seed):
    """Train on these examples: this rank's losses, and the parameters after each
    update.

    odd: a loss that nothing can be trained on, if there was one, in a list; then there
    is no more.
    """
    losses, history = [], []

    def noted(outputs, labels, num_items_in_batch):
        logits = outputs["logits"]
        loss = mean_loss(outputs, labels, num_items_in_batch=num_items_in_batch)
        if (
            not isinstance(loss, torch.Tensor)
            or loss.dim() > 0
            or not comes_from(logits, loss)
        ):
            raise OddLoss(loss)
        losses.append(loss.item())
        return loss

    options = {
        "per_device_train_batch_size": BATCH_SIZE,
        "gradient_accumulation_steps": ACCUMULATION,
    }
    with settings(
        Meeting(), num_train_epochs=1, logging_strategy="no", **options
    ) as made:
        model = Tagger(seed)
        trainer = a_trainer(
            model, made, examples, data_collator=collate, compute_loss_func=noted
        )
        trainer.optimizer.register_step_post_hook(
            lambda *_: history.append(joined(model.parameters()))
        )
        try:
            trainer.train()
        except OddLoss as odd:
            return {"odd": odd.args}
    return {"odd": [], "losses": losses, "history": history}


class OddLoss(Exception):
    """Trainer cannot train on it, or DDP would wait for its gradients."""


def comes_from(logits, loss):
    """Whether the backward of a loss leads to the logits."""
    if not loss.requires_grad:
        return False
    return (
        torch.autograd.grad(loss, logits, retain_graph=True, allow_unused=True)[0]
        is not None
    )


def joined(tensors):
    """Their numbers in a row."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@question(
    "nn.utils.rnn.pad_sequence pads a list of tensors. Then ask what Trainer does with the loss, before and "
    "after: from transformers import Trainer, and Trainer.compute_loss?? in a cell shows you.",
    "pad_sequence(..., batch_first=True, padding_value=...). Means of micro-batches cannot be added up, sums "
    "can: F.cross_entropy(..., reduction='sum'), and divide by one number that is the same in all of them. "
    "Trainer multiplies by the number of processes itself, since DDP divides by it.",
    "collate: pad_sequence([example['tokens'] for example in examples], batch_first=True), and the same of "
    "the targets with padding_value=-100. mean_loss: F.cross_entropy(outputs['logits'].transpose(1, 2), "
    "labels, reduction='sum') / num_items_in_batch, and nothing else.",
)
def check_uneven(answer, draw):
    """Batches are padded, and each update of Trainer is that of one process on the
    joined window.
    """
    start_server(*PRELOADED)  # where none runs yet
    check_collate(answer, draw)
    for n in (1, 2):
        batches, seed = uneven_batches(draw, n), draw.randrange(10**6)
        judge_training(training_on(answer, batches, seed, n), batches, seed)


def check_collate(answer, draw):
    batches = telling_batches(draw)
    for batch, got in zip(
        batches, answer.on_ranks(collated, batches, timeout=TIMEOUT)[0]
    ):
        checked = f"collate, with {lengths_of(batch)}"
        expected = {
            "tokens": padded(batch, "tokens", 0),
            "labels": padded(batch, "targets", IGNORED),
        }
        if not isinstance(got, dict) or got.keys() != expected.keys():
            raise Wrong(checked, expected="a dict of tokens and labels", got=kind_of(got),
                        cause=cause_of_names(got))  # fmt: skip
        for name, tensor in expected.items():
            if not isinstance(got[name], torch.Tensor) or got[name].dtype != torch.long:
                raise Wrong(f"{name} of {checked}", expected="a tensor of torch.int64",
                            got=kind_of(got[name]), cause="tokens and labels are whole numbers, each in one "
                            "tensor: torch.zeros and torch.full take dtype=torch.long")  # fmt: skip
            if got[name].shape != tensor.shape:
                raise Wrong(f"the shape of {name} of {checked}", expected=tuple(tensor.shape),
                            got=tuple(got[name].shape), cause=cause_of_shape(got[name], tensor))  # fmt: skip
            if not torch.equal(got[name], tensor):
                raise Wrong(f"{name} of {checked}", expected=rows(tensor), got=rows(got[name]),
                            cause=cause_of_padding(name, got[name], batch))  # fmt: skip


def telling_batches(draw):
    """Batches in which order and padding can be seen: three lengths in no order, rows
    of several lengths.
    """
    batches = [[an_example(draw) for _ in range(size)] for size in (3, 2, 1, 2)]
    lengths = [list(map(length_of, batch)) for batch in batches]
    first, longest = lengths[0], set(map(max, lengths))
    ordered = first in (sorted(first), sorted(first, reverse=True))
    return (
        telling_batches(draw)
        if ordered or len(set(first)) < 3 or len(longest) < 3
        else batches
    )


def kind_of(thing):
    """What something is, in a few words. A rank's tuples come as lists, its objects as
    texts, 'a Thing'.
    """
    match thing:
        case None:
            return "nothing (None)"
        case torch.Tensor():
            return f"a tensor of {thing.dtype}, shape {tuple(thing.shape)}"
        case dict():
            return f"a dict of {in_row(thing)}" if thing else "an empty dict"
        case list():
            return "a list, or a tuple"
    return thing


def cause_of_names(got):
    if got is None:
        return "the function ends without a return"
    if isinstance(got, dict) and "targets" in got:
        return "Trainer looks for the name labels, to count them and for the loss: all else is the model's"
    return "the model is called with all that the dict holds, save for labels: return these two and no more"


def cause_of_shape(got, expected):
    batch, longest = expected.shape
    if got.shape == (longest, batch):
        return "rows and columns have changed places: pad_sequence wants to be told batch_first=True"
    if got.shape[:1] == (batch,) and got.dim() == 2:
        if got.shape[1] > longest:
            return "it is padded further than the longest example of this batch: so much work for nothing"
        return (
            "examples were cut: the longest of the batch decides how long the rows are"
        )
    return "each example is a row, and shorter ones are padded: (batch, longest)"


def rows(tensor):
    return "\n".join(
        " ".join(f"{number:4}" for number in row) for row in tensor.tolist()
    )


def cause_of_padding(name, got, batch):
    of, value = ("tokens", 0) if name == "tokens" else ("targets", IGNORED)
    truth = padded(batch, of, value)
    if torch.equal(got, padded(batch, of, value, side="left")):
        return "the padding stands before the examples, and belongs behind them"
    if sorted(got.tolist()) == sorted(truth.tolist()):
        return "the rows are not in the order of the examples"
    if name == "tokens" and torch.equal(got, padded(batch, of, IGNORED)):
        return "-100 is for labels: a model that looks up tokens in a table has no row -100; pad with 0"
    if name == "labels" and torch.equal(got, padded(batch, of, 0)):
        return "0 is a class as any other, and the padding would be counted and learned: pad with -100"
    if name == "labels" and torch.equal(
        got, F.pad(truth[:, 1:], (0, 1), value=IGNORED)
    ):
        return "the targets were shifted: here the target of a token stands at the token's own place"
    return f"row i holds the {of} of example i, unchanged, and then padding"


def uneven_batches(draw, n):
    """Batches for an epoch of three windows, the last one shorter, in the order of
    Trainer's sampler.

    In the first window all have labels that count, some twice as many as others. In the
    second, the last one of some rank has none: at that one, DDP waits for all.
    """
    window = n * ACCUMULATION
    length = 2 * window + n * draw.randrange(1, ACCUMULATION)
    batches = [[an_example(draw) for _ in range(BATCH_SIZE)] for _ in range(length)]
    batches[2 * window - draw.randint(1, n)] = [
        an_example(draw, counting=0) for _ in range(BATCH_SIZE)
    ]
    first = list(map(count, batches[:window]))
    return batches if max(first) >= 2 * min(first) else uneven_batches(draw, n)


def training_on(answer, batches, seed, n):
    """`trained` on n ranks. Where the loss raises an error that says little, raise
    Wrong and say more.
    """
    examples = [example for batch in batches for example in batch]
    try:
        return answer.on_ranks(trained, examples, seed, nproc=n, timeout=TIMEOUT)
    except RankError as error:
        for text, cause in TOLD.items():
            if text in error.message:
                raise Wrong(f"mean_loss, on {ranks(n)}", rank=f"{error.rank} of {n}", expected="a loss",
                            got=error.message.splitlines()[0], cause=cause) from None  # fmt: skip
        raise


TOLD = {
    "Expected target size": "F.cross_entropy wants the classes in the second place: logits.transpose(1, 2), "
    "or logits.flatten(0, 1) and labels.flatten()",
    "-100 is out of bounds": "-100 is no class that could be looked up: F.cross_entropy leaves it out by "
    "itself, if ignore_index is left as it is",
}


def ranks(n):
    return f"{n} rank{'s' * (n > 1)}"


def judge_training(seen, batches, seed):
    """Raise Wrong unless each update is that of one process on its whole window."""
    n, network = len(seen), Tagger(seed)
    for rank, of_rank in enumerate(seen):
        for loss in of_rank["odd"]:
            raise Wrong(f"what mean_loss returns, on {ranks(n)}", rank=f"{rank} of {n}", got=kind_of(loss),
                        expected="a tensor without dimensions, computed from the logits",
                        cause=cause_of_odd_loss(loss))  # fmt: skip
    for update in range(3):
        window = batches[n * ACCUMULATION * update : n * ACCUMULATION * (update + 1)]
        length = len(window) // n
        checked = f"update {update + 1} on {ranks(n)}, of {length} micro-batch{'es' * (length > 1)}"
        start = joined(network.parameters())
        truth = sum(gradient(network, batch) for batch in window) / sum(
            map(count, window)
        )
        for rank, of_rank in reversed(list(enumerate(seen))):
            got = (start - of_rank["history"][update]) / LEARNING_RATE
            if not agree(got, truth):
                cause = cause_of_update(got, truth, network, window, n)
                raise Wrong(f"{checked}: its gradient, for all parameters in a row", rank=f"{rank} of {n}",
                            expected=truth, got=got, cause=cause)  # fmt: skip
        nn.utils.vector_to_parameters(
            start - LEARNING_RATE * truth, network.parameters()
        )
    for rank, of_rank in enumerate(seen):
        if not torch.tensor(of_rank["losses"]).isfinite().all():
            raise Wrong(f"the losses of the micro-batches, on {ranks(n)}", rank=f"{rank} of {n}",
                        expected="numbers", got=in_row(f"{loss:.3f}" for loss in of_rank["losses"]),
                        cause=NO_MEAN)  # fmt: skip


NO_MEAN = "a micro-batch in which nothing counts has no mean: 0/0 is nan, and stays it. Its sum is 0"


def cause_of_odd_loss(loss):
    if loss is None:
        return "the function ends without a return"
    if isinstance(loss, torch.Tensor) and loss.dim() > 0:
        return "the losses of the tokens have to become one: sum them"
    return "its backward has to lead to the logits, also where nothing counts: DDP waits for the gradients"


def agree(some, other):
    """Whether two gradients are equal, as far as 32 bits can tell: a loss may be
    computed in those.
    """
    return bool((some - other).norm() <= 1e-4 * other.norm())


def gradient(network, batch, loss_of=None):
    """Of the sum of the losses that count in a batch, or of loss_of(logits, labels), in
    a row.
    """
    labels = padded(batch, "targets", IGNORED)
    logits = network(padded(batch, "tokens", 0))["logits"]
    loss = (loss_of or sum_of_losses)(logits, labels)
    return joined(torch.autograd.grad(loss, list(network.parameters())))


def sum_of_losses(logits, labels):
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def cause_of_update(got, truth, network, window, n):
    """What a wrong gradient looks like. window: the batches of all ranks."""
    if got.isnan().any():
        return NO_MEAN
    items = sum(map(count, window))
    sums = [gradient(network, batch) for batch in window]
    places = [len(batch) * max(map(length_of, batch)) for batch in window]
    means = sum(one / max(count(batch), 1) for one, batch in zip(sums, window))
    of_places = sum(one / place for one, place in zip(sums, places))

    def computed(loss_of):
        return sum(gradient(network, batch, loss_of) for batch in window) / items

    shares = [1, 1 / ACCUMULATION, 1 / n, 1 / n / ACCUMULATION]
    looks = [
        ([sum(sums)], "it is the sum over all labels that count: divide it by num_items_in_batch"),
        ([truth / ACCUMULATION], f"it is {ACCUMULATION} times too small: num_items_in_batch is of the whole "
         "window, so do not divide by the accumulation steps, too"),
        ([truth * ACCUMULATION], f"it is {ACCUMULATION} times too large: with a loss function of your own, "
         "Trainer does not divide by the accumulation steps, so there is nothing to undo"),
        ([truth * n], f"it is {n} times too large: Trainer multiplies by the number of processes itself"),
        ([truth / n], f"it is {n} times too small: num_items_in_batch is of all ranks, so do not divide by "
         "their number, too"),
        ([means * share for share in shares], "each micro-batch is divided by how many count in itself, as "
         "reduction='mean' does it, and then one with few weighs as much as one with many: take the sum, "
         "and divide by num_items_in_batch"),
        ([of_places * share for share in shares], "each micro-batch is divided by all its places, padding "
         "among them: take the sum, and divide by num_items_in_batch"),
        ([means / items, of_places / items], "it is divided twice, by what is in the micro-batch and by "
         "num_items_in_batch: take the sum first, and not the mean"),
        ([computed(counts_padding)], "labels of -100 were taken for class 0, and count"),
        ([computed(reshapes)], "reshape and view leave the numbers in their order, so that classes and "
         "places get mixed up: logits.transpose(1, 2), or logits.flatten(0, 1)"),
        ([computed(shifts)], "the logits were compared with the next token's labels: here the label of a "
         "token stands at the token's own place"),
    ]  # fmt: skip
    for values, cause in looks:
        if any(agree(got, value) for value in values):
            return cause
    return "is it the sum of the losses of all labels that count, over num_items_in_batch, and nothing else?"


def counts_padding(logits, labels):
    return sum_of_losses(logits, labels.clamp(min=0))


def reshapes(logits, labels):
    batch, length, classes = logits.shape
    return F.cross_entropy(
        logits.reshape(batch, classes, length), labels, reduction="sum"
    )


def shifts(logits, labels):
    return sum_of_losses(logits[:, :-1], labels[:, 1:])


# ---- 2: all stop together ----

EPOCH, MAX_STEPS = 4, 9  # steps
STOPS = [
    1,
    2,
    5,
    6,
]  # steps after which the next one is not the end of an epoch, nor the last of all


class Square(nn.Module):
    """A small network that returns its own loss."""

    def __init__(self, seed):
        super().__init__()
        self.linear = fill(nn.Linear(3, 2), seed)

    def forward(self, inputs):
        return {"loss": self.linear(inputs).pow(2).mean()}


def trainings(stop_together, cases, seed):
    """A training for each case, {rank: the step at which it wants to stop}; what was
    seen of each.

    calls: what this rank's should_stop was asked; steps: how many were taken; ends: the
    notes of all ranks at the end of each step, and of each epoch.
    """
    meeting, seen = Meeting(), []
    rank, n = meeting.rank, meeting.n
    if n == 1:  # as a program that nobody has launched, and that has no process group
        for name in (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
        ):
            del os.environ[name]
    torch.manual_seed(seed)
    examples = [
        {"inputs": torch.randn(3, dtype=torch.float64)} for _ in range(2 * EPOCH * n)
    ]
    options = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
    }
    with settings(meeting, max_steps=MAX_STEPS, **options) as made:
        for number, case in enumerate(cases):
            calls, ends = [], []

            def should_stop(step, calls=calls, wish=case.get(rank)):
                calls.append(step)
                if step == wish:
                    time.sleep(
                        0.1
                    )  # who does not wait for this rank will not know of it
                return step == wish

            trainer = a_trainer(
                Square(seed), made, examples, callbacks=[stop_together(should_stop)]
            )
            meet_at_the_ends(trainer, meeting, number, ends)
            with suppress(Parted), trying(f"a training where {in_words(case, n)}"):
                trainer.train()
            seen.append(
                {"calls": calls, "steps": trainer.state.global_step, "ends": ends}
            )
            if disagree(ends):
                break  # in one more training, they would only wait for each other
        return seen


def meet_at_the_ends(trainer, meeting, number, ends):
    """Have the ranks meet at the ends of steps and epochs, before one waits for another
    in vain.
    """

    def then_meet(event):
        call_all = getattr(trainer.callback_handler, event)

        def call_and_meet(args, state, control):
            place = f"training {number}, {event}, step {state.global_step}"
            meeting.leave(f"to {place}", True)
            with Watch() as watch:
                control = call_all(args, state, control)
            flags = {name: getattr(control, name, None) for name in FLAGS}
            note = {
                name: None if flag is None else bool(flag)
                for name, flag in flags.items()
            }
            note |= {
                "event": event,
                "kind": type(control).__name__,
                "sent": len(watch.log),
            }
            notes = meeting.notes(place, note)
            if None in notes:
                other = notes.index(None)
                stands = STUCK if meeting.left_by(other, f"to {place}") else GOES_ON
                where = f"the end of the {event.split('_')[1]}, after step {state.global_step}"
                raise RuntimeError(
                    f"{APART}rank {meeting.rank} has come to {where}, rank {other} {stands}"
                )
            ends.append(notes)
            if disagree(ends):
                raise Parted
            return control

        return call_and_meet

    for event in ("on_step_end", "on_epoch_end"):
        setattr(trainer.callback_handler, event, then_meet(event))


FLAGS = ["should_training_stop", "should_epoch_stop", "should_log"]
APART = "the ranks are apart: "
STUCK, GOES_ON = "has not returned from its callback there", "goes on with the epoch"


class Parted(Exception):
    """The ranks would not go on together."""


def disagree(ends):
    """Whether, in the last of these steps, some ranks stop and others go on, or have
    lost the control.
    """
    flags = {note["should_training_stop"] for notes in ends[-1:] for note in notes}
    return len(flags) > 1 or None in flags


def in_words(case, n):
    if not case:
        return "should_stop is never true"
    [step] = set(case.values())
    who = f"rank {next(iter(case))} alone" if len(case) < n else "all ranks"
    return f"should_stop({step}) is true" + f" on {who}" * (n > 1)


@question(
    "What one rank knows and the others need is a case for a collective. It ends when all ranks have called "
    "it: so all call it, in every step, whatever they want themselves.",
    "0 or 1 from each rank, as a tensor of integers, and one dist.all_reduce of it, with dist.ReduceOp.MAX "
    "or the sum. Where there is no process group, dist.is_initialized() is False: then there is nobody else.",
    "wish = torch.tensor(int(self.should_stop(state.global_step)), device=args.device); if "
    "dist.is_initialized(): dist.all_reduce(wish, dist.ReduceOp.MAX); if wish: "
    "control.should_training_stop = True",
)
def check_stop_together(answer, draw):
    """All ranks stop after the first step at which one of them wants to, or where
    Trainer ends by itself.
    """
    start_server(*PRELOADED)  # where none runs yet
    for n in (2, 3, 1):
        one, other, common = draw.sample(STOPS, 3)
        cases = [{}, {0: one}] if n == 2 else []
        cases += [{draw.randrange(1, n): other}] if n > 1 else []
        cases += [dict.fromkeys(range(n), common)]
        judge_stops(cases, stopped(answer, cases, draw.randrange(10**6), n))


def stopped(answer, cases, seed, n):
    """`trainings` on n ranks. Where they end badly, and it is known why, raise Wrong
    and say so.
    """
    try:
        return answer.on_ranks(trainings, cases, seed, nproc=n, timeout=TIMEOUT)
    except RankError as error:
        said = error.message.splitlines()[0] if error.message else ""
        if APART in said:
            cause = ONE_SIDED if STUCK in said else ALONE
            raise Wrong(checked_in(error.message, n), expected="all ranks at the end of the same step",
                        got=said.split(APART)[1], cause=cause) from None  # fmt: skip
        if n == 1 and "process group has not been initialized" in said:
            raise Wrong(checked_in(error.message, n), expected="a stop that needs no others", got=said,
                        cause=NO_GROUP) from None  # fmt: skip
        raise


NO_GROUP = "a process that python alone has started has no process group: look at dist.is_initialized() first"
ALONE = (
    "no rank has waited to hear what the others want. One that stops alone leaves them in their next "
    "backward, where they wait for it: the decision needs a collective, in every step"
)
ONE_SIDED = (
    "a collective ends when all ranks have called it: call it in every step, and also where this rank wants "
    "to go on"
)


def checked_in(message, n):
    """What was tried, from the note that `trying` has put under an error."""
    case = (
        message.splitlines()[-1].removeprefix("(in a training where ").removesuffix(")")
    )
    return f"StopTogether on {ranks(n)}, where {case}"


def judge_stops(cases, seen):
    """Raise Wrong unless all ranks have asked in each step, and have stopped together
    when they should.
    """
    n = len(seen)
    done = [[of_rank[number] for of_rank in seen] for number in range(len(seen[0]))]
    for case, (first, *_) in zip(cases, done):
        if disagree(first["ends"]):
            checked = f"step {first['steps']} on {ranks(n)}, where {in_words(case, n)}"
            tell_of_the_parting(checked, first["ends"][-1])
    for case, of_ranks in zip(cases, done):
        for rank, of_rank in enumerate(of_ranks):
            calls, steps = of_rank["calls"], of_rank["steps"]
            if calls != list(range(1, steps + 1)):
                raise Wrong(f"what should_stop was asked, where {in_words(case, n)}", rank=f"{rank} of {n}",
                            expected=f"each step from 1 to {steps}, once",
                            got=in_row(calls) if calls else "nothing",
                            cause=cause_of_calls(calls))  # fmt: skip
    for case, (first, *_) in zip(cases, done):
        if first["steps"] != (truth := end_of(case)):
            raise Wrong(f"StopTogether on {ranks(n)}, where {in_words(case, n)}, and max_steps={MAX_STEPS}",
                        expected=f"the end after step {truth}, on all ranks",
                        got=f"the end after step {first['steps']}",
                        cause=cause_of_end(case, first, cases, done))  # fmt: skip
    for case, (first, *_) in zip(cases, done):
        of_steps = [
            notes for notes in first["ends"] if notes[0]["event"] == "on_step_end"
        ]
        for step, notes in enumerate(of_steps, 1):
            if not all(note["should_log"] for note in notes):
                raise Wrong(f"control.should_log at the end of step {step}, where {in_words(case, n)}",
                            expected="True, as with logging_steps=1", got="False",
                            cause="a new TrainerControl knows nothing of what others have asked for: change "
                            "the one that was given")  # fmt: skip


def tell_of_the_parting(checked, notes):
    stops = [note["should_training_stop"] for note in notes]
    if None in stops:
        kind = notes[stops.index(None)]["kind"]
        raise Wrong(checked, expected="control, or nothing at all", got=f"a {kind}",
                    cause="Trainer takes what a callback returns for the new control: change the one that "
                    "was given, and return that or nothing")  # fmt: skip
    cause = ALONE
    if notes[0]["sent"]:
        cause = "the ranks have communicated, and still not all of them know: reduce and gather bring the "
        cause += "result to one rank, all_reduce and all_gather to all"
    got = f"rank {stops.index(True)} stops, rank {stops.index(False)} goes on"
    raise Wrong(
        checked, expected="the same decision on all ranks", got=got, cause=cause
    )


def end_of(case):
    """The step after which a training has to end."""
    return min(case.values(), default=MAX_STEPS)


def cause_of_calls(calls):
    if not calls:
        return "what this rank wants, it alone knows: every rank has to ask its own should_stop"
    if not all(type(call) is int for call in calls):
        return "should_stop takes the number of the step, state.global_step"
    if len(set(calls)) < len(calls):
        return "it is asked more than once in a step, which may have several micro-batches: keep its answer"
    if calls[0] == 0:
        return "the first step is 1: ask on_step_end, when state.global_step is 1, and not before it"
    if all(call % EPOCH == 0 or call == MAX_STEPS for call in calls):
        return f"it is asked at the ends of epochs, that is once in {EPOCH} steps"
    return "ask at the end of every step, until the training stops"


def cause_of_end(case, seen, cases, done):
    """Why a training did not end where it should. done: all of them, of each case, on
    each rank.
    """
    end, truth = seen["steps"], end_of(case)
    if end > MAX_STEPS:
        return OVERRULED
    if end < truth:
        return "no rank wanted to stop so soon: is should_stop taken for its opposite?"
    if any(note["should_epoch_stop"] for notes in seen["ends"] for note in notes):
        return "should_epoch_stop ends the epoch, and another one begins: should_training_stop ends them all"
    if end == truth + 1:
        return "it comes one step late: every rank has to know the decision before it begins the next step"
    if end % EPOCH == 0:
        return "it comes at the end of the epoch: decide on_step_end"
    heard = [
        case
        for case, (first, *_) in zip(cases, done)
        if case and first["steps"] == end_of(case)
    ]
    if not heard:
        return "nobody has stopped: it is control.should_training_stop that Trainer looks at"
    decisive = set.intersection(*map(set, heard))
    if decisive == set(cases[-1]):
        return "it takes all ranks, or most, to stop: one that wants to is to be enough, as with a maximum"
    if decisive:
        return f"only what rank {min(decisive)} wants counts: it tells the others, and hears nothing from them"
    return "one rank can stop them all, and several at once cannot: the sum of their wishes is more than 1"


OVERRULED = (
    "Trainer itself wanted to stop at max_steps, and was overruled: set should_training_stop to True where "
    "somebody wants to stop, and else leave it as it is"
)
