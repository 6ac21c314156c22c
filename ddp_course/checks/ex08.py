"""Exercise 08: uneven examples and their loss in Trainer, and a callback that stops all ranks together."""

import gc
import json
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_course.checks.judge import Wrong, question, trying
from ddp_course.checks.training import fill
from ddp_course.checks.watch import Watch
from ddp_course.launch import RankError, start_server

TIMEOUT = 40  # seconds for ranks that have yet to import transformers; they need two where it is there
PATIENCE = 4  # seconds that a rank waits for the others at the end of a step

# ---- Trainer on ranks ----


class Meeting:
    """Where ranks leave notes for each other. It takes no collectives: those are for the answers to use, or misuse."""

    def __init__(self):
        self.rank, self.n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.TCPStore(*address, is_master=False)

    def notes(self, topic, note, patience=PATIENCE):
        """Leave a note; return those of all ranks, in their order, with None for those that did not come."""
        self.store.set(f"{topic}/{self.rank}", json.dumps(note))
        deadline, notes = time.monotonic() + patience, []
        for rank in range(self.n):
            with suppress(dist.DistStoreError):
                time_left = max(deadline - time.monotonic(), 0.01)
                self.store.wait([f"{topic}/{rank}"], timedelta(seconds=time_left))
            notes.append(self.left_by(rank, topic))
        return notes

    def left_by(self, rank, topic):
        """The note of a rank, None where there is none."""
        key = f"{topic}/{rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None


@contextmanager
def settings(meeting, **options):
    """TrainingArguments for small trainings on a CPU. They join the process group, for the length of the block."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # or Accelerate warns of it
    from transformers.trainer import TrainingArguments

    gc.freeze()  # Trainer collects garbage: it need not look for it in all that was imported
    meeting.notes("imported", True, patience=TIMEOUT)
    with tempfile.TemporaryDirectory() as folder:
        made = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_timeout=2 * PATIENCE,
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
        try:
            yield made
        finally:
            made.distributed_state.destroy_process_group()


def a_trainer(model, made, examples, **options):
    from transformers.trainer import Trainer
    from transformers.trainer_callback import PrinterCallback

    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    trainer = Trainer(model, made, train_dataset=examples, optimizers=(optimizer, None), **options)
    trainer.remove_callback(PrinterCallback)
    return trainer


# ---- 1: an uneven task ----

WORDS, WIDTH, CLASSES, LEARNING_RATE = 7, 4, 11, 0.1
LENGTHS = range(3, 10)  # of examples; there are more classes, so that the two cannot be mixed up unnoticed
BATCH_SIZE = 2
IGNORED = -100


class Tagger(nn.Module):
    """Classes for each token, from the token alone, in 64 bits."""

    def __init__(self, seed):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, CLASSES)
        fill(self, seed)

    def forward(self, tokens):
        return {"logits": self.linear(torch.tanh(self.embedding(tokens)))}


def an_example(draw, counting=None):
    """An example of any length; counting: how many of its targets count, all but a few where it is left out."""
    length = draw.choice(LENGTHS)
    counting = draw.randint(2, length) if counting is None else counting
    targets = torch.tensor([draw.randrange(CLASSES) for _ in range(length)])
    targets[draw.sample(range(length), length - counting)] = IGNORED
    return {"tokens": torch.tensor([draw.randrange(1, WORDS) for _ in range(length)]), "targets": targets}


def padded(batch, name, value):
    return nn.utils.rnn.pad_sequence([example[name] for example in batch], True, value)


def count(batch):
    """How many of its targets count."""
    return sum(int((example["targets"] != IGNORED).sum()) for example in batch)


def collated(collate, mean_loss, batches):
    seen = []
    for batch in batches:
        with trying(f"collate, with examples of {in_row(map(length_of, batch))} tokens"):
            returned = collate(batch)
        seen.append(dict(returned) if isinstance(returned, Mapping) else returned)
    return seen


def length_of(example):
    return len(example["tokens"])


def in_row(things):
    """'1', '1 and 2', '1, 2 and 3'"""
    *first, last = map(str, things)
    return f"{', '.join(first)} and {last}" if first else last


def trained(collate, mean_loss, examples, accumulation, seed):
    """Train on these examples; the parameters after each update, or what was odd about a loss."""

    def noted(outputs, labels, num_items_in_batch):
        loss = mean_loss(outputs, labels, num_items_in_batch=num_items_in_batch)
        if not isinstance(loss, torch.Tensor) or loss.dim() > 0 or not loss.requires_grad:
            raise OddLoss(loss)
        return loss

    options = {"per_device_train_batch_size": BATCH_SIZE, "gradient_accumulation_steps": accumulation}
    with settings(Meeting(), num_train_epochs=1, logging_strategy="no", **options) as made:
        model, history = Tagger(seed), []
        trainer = a_trainer(model, made, examples, data_collator=collate, compute_loss_func=noted)
        trainer.optimizer.register_step_post_hook(lambda *_: history.append(joined(model.parameters())))
        try:
            trainer.train()
        except OddLoss as odd:
            loss = odd.args[0]
            of_tensor = {"shape": list(loss.shape)} if isinstance(loss, torch.Tensor) else {}
            return {"loss": loss, **of_tensor}
        return {"history": history}


class OddLoss(Exception):
    """A loss that Trainer could not train on."""


def joined(tensors):
    """Their numbers in a row."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@question(
    "nn.utils.rnn.pad_sequence pads a list of tensors. For the loss, look at what Trainer does with it: "
    "show(Trainer.compute_loss) in a cell, and Trainer.training_step.",
    "pad_sequence(..., batch_first=True, padding_value=...). Means of micro-batches cannot be added up, sums can: "
    "F.cross_entropy(..., reduction='sum'), and divide by one number that is the same in all of them. Trainer "
    "multiplies by the number of processes itself, since DDP divides by it.",
    "collate: pad_sequence([example['tokens'] for example in examples], batch_first=True), and the same of the targets "
    "with padding_value=-100. mean_loss: F.cross_entropy(outputs['logits'].transpose(1, 2), labels, reduction='sum') / "
    "num_items_in_batch, and nothing else.",
)
def check_uneven(answer, draw):
    """Batches are padded as they should be, and each update of Trainer is that of one process on the joined window."""
    start_server("transformers.trainer")  # where none runs yet
    check_collate(answer, draw)
    for n in (1, 2):
        accumulation, seed = draw.choice([3, 5]), draw.randrange(10**6)
        batches = uneven_batches(draw, n, accumulation)
        seen = training_on(answer, batches, accumulation, seed, n)
        judge_training(seen, batches, accumulation, seed)


def check_collate(answer, draw):
    batches = [[an_example(draw) for _ in range(size)] for size in (3, 2, 1, 2)]
    while not uneven(batches):
        batches = [[an_example(draw) for _ in range(size)] for size in (3, 2, 1, 2)]
    for batch, got in zip(batches, answer.on_ranks(collated, batches, timeout=TIMEOUT)[0]):
        checked = f"collate, with {len(batch)} examples of {in_row(map(length_of, batch))} tokens"
        checked = checked.replace("1 examples", "1 example")
        expected = {"tokens": padded(batch, "tokens", 0), "labels": padded(batch, "targets", IGNORED)}
        if not isinstance(got, dict) or got.keys() != expected.keys():
            raise Wrong(checked, expected="a dict of tokens and labels", got=kind_of(got),
                        cause=cause_of_names(got))  # fmt: skip
        for name, tensor in expected.items():
            if not isinstance(got[name], torch.Tensor) or got[name].dtype != torch.long:
                cause = "tokens and labels are whole numbers, int64, each in one tensor: torch.zeros and torch.full " \
                        "take dtype=torch.long"  # fmt: skip
                raise Wrong(f"{name} of {checked}", expected="a tensor of torch.int64",
                            got=kind_of(got[name]), cause=cause)  # fmt: skip
            if got[name].shape != tensor.shape:
                raise Wrong(f"the shape of {name} of {checked}", expected=tuple(tensor.shape),
                            got=tuple(got[name].shape), cause=cause_of_shape(got[name], tensor))  # fmt: skip
            if not torch.equal(got[name], tensor):
                raise Wrong(f"{name} of {checked}", expected=rows(tensor), got=rows(got[name]),
                            cause=cause_of_padding(name, got[name], batch))  # fmt: skip


def uneven(batches):
    """Whether order and padding can be seen: the longest example is not the first, nor the lengths in order."""
    lengths = [list(map(length_of, batch)) for batch in batches]
    first = lengths[0]
    different = len(set(first)) == 3 and first not in (sorted(first), sorted(first, reverse=True))
    return different and len({max(of_batch) for of_batch in lengths}) > 2


def kind_of(thing):
    """What something is, in a few words. Of a rank's tuples came lists, of its objects texts, as 'a Thing'."""
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
        return "Trainer looks for the name labels: it counts them, and gives them to the loss; all else goes to the model"
    return (
        "the model is called with what the dict holds, by name, save for labels: return these two and no more"
    )


def cause_of_shape(got, expected):
    batch, longest = expected.shape
    if got.shape == (longest, batch):
        return "rows and columns have changed places: pad_sequence wants to be told batch_first=True"
    if got.shape[:1] == (batch,) and got.dim() == 2:
        if got.shape[1] > longest:
            return "it is padded further than the longest example of this batch, and the model works on it for nothing"
        return "examples were cut: the longest of the batch decides how long the rows are"
    return "each example is a row, and shorter ones are padded: (batch, longest)"


def rows(tensor):
    return "\n".join(" ".join(f"{number:4}" for number in row) for row in tensor.tolist())


def cause_of_padding(name, got, batch):
    tensors = [example["tokens" if name == "tokens" else "targets"] for example in batch]
    fill_value = 0 if name == "tokens" else IGNORED

    def arranged(row_of):
        return torch.stack([row_of(tensor) for tensor in tensors])

    def with_end(tensor, value):
        return F.pad(tensor, (0, got.shape[1] - len(tensor)), value=value)

    if torch.equal(
        got, arranged(lambda tensor: F.pad(tensor, (got.shape[1] - len(tensor), 0), value=fill_value))
    ):
        return "the padding stands before the examples, and belongs behind them"
    if sorted(got.tolist()) == sorted(arranged(lambda tensor: with_end(tensor, fill_value)).tolist()):
        return "the rows are not in the order of the examples"
    if name == "tokens" and torch.equal(got, arranged(lambda tensor: with_end(tensor, IGNORED))):
        return "-100 is for labels: a model that looks up tokens in a table has no row -100; pad with 0"
    if name == "labels" and torch.equal(got, arranged(lambda tensor: with_end(tensor, 0))):
        return "0 is a class as any other, and the padding would be counted and learned: pad with -100"
    if name == "labels" and torch.equal(got, arranged(lambda tensor: with_end(tensor[1:], IGNORED))):
        return "the targets were shifted: here the target of a token stands at the token's own place"
    return f"row i holds the {'tokens' if name == 'tokens' else 'targets'} of example i, unchanged, and then padding"


def uneven_batches(draw, n, accumulation):
    """Batches for an epoch of three windows, the last one shorter, in Trainer's order: rank r gets r, r + n, ...

    In the first window all batches have labels that count, and not equally many; in the second, one has none.
    """
    length = 2 * accumulation + draw.randint(1, accumulation - 1)
    batches = [[an_example(draw) for _ in range(BATCH_SIZE)] for _ in range(n * length)]
    empty = draw.randrange(n * accumulation, 2 * n * accumulation)
    batches[empty] = [an_example(draw, counting=0) for _ in range(BATCH_SIZE)]
    first = [count(batch) for batch in batches[: n * accumulation]]
    return batches if max(first) >= 2 * min(first) else uneven_batches(draw, n, accumulation)


def training_on(answer, batches, accumulation, seed, n):
    """`trained` on n ranks. Where the loss raises an error that says little, raise Wrong and say more."""
    examples = [example for batch in batches for example in batch]
    try:
        return answer.on_ranks(trained, examples, accumulation, seed, nproc=n, timeout=TIMEOUT)
    except RankError as error:
        for text, cause in TOLD.items():
            if text in error.message:
                raise Wrong(f"mean_loss, on {ranks(n)}", rank=f"{error.rank} of {n}", expected="a loss",
                            got=error.message.splitlines()[0], cause=cause) from None  # fmt: skip
        raise


TOLD = {
    "Expected target size": "F.cross_entropy wants the classes in the second place: logits.transpose(1, 2), or "
    "logits.flatten(0, 1) and labels.flatten()",
    "-100 is out of bounds": "-100 is no class that could be looked up: F.cross_entropy leaves it out by itself, if "
    "ignore_index is left as it is",
}  # fmt: skip


def ranks(n):
    return f"{n} rank{'s' * (n > 1)}"


def judge_training(seen, batches, accumulation, seed):
    """Raise Wrong unless each update is that of one process on its whole window."""
    n, network = len(seen), Tagger(seed)
    for rank, of_rank in enumerate(seen):
        if "loss" in of_rank:
            loss, shape = of_rank["loss"], of_rank.get("shape")
            cause = (
                "Trainer calls backward on it, so it has to be the tensor that was computed from the logits"
            )
            cause = "the losses of the tokens have to become one: sum them" if shape else cause
            cause = "the function ends without a return" if loss is None else cause
            raise Wrong(f"what mean_loss returns, on {ranks(n)}", rank=f"{rank} of {n}", got=kind_of(loss),
                        expected="a tensor without dimensions, with a gradient", cause=cause)  # fmt: skip
    for update in range(3):
        window = batches[n * accumulation * update : n * accumulation * (update + 1)]
        length = len(window) // n
        checked = f"update {update + 1} on {ranks(n)}, gradient_accumulation_steps={accumulation}"
        checked += (
            f", at the end of the epoch: {length} micro-batch{'es' * (length > 1)}" if update == 2 else ""
        )
        start = joined(network.parameters())
        truth = sum(gradient(network, batch) for batch in window) / sum(map(count, window))
        for rank, of_rank in reversed(list(enumerate(seen))):
            got = (start - of_rank["history"][update]) / LEARNING_RATE
            if not agree(got, truth):
                cause = cause_of_update(got, truth, network, window, n, accumulation)
                raise Wrong(f"{checked}: its gradient, for all parameters in a row", rank=f"{rank} of {n}",
                            expected=truth, got=got, cause=cause)  # fmt: skip
        nn.utils.vector_to_parameters(start - LEARNING_RATE * truth, network.parameters())


def agree(some, other):
    """Whether two gradients are equal, as far as 32 bits can tell: a loss may be computed in those."""
    return bool((some - other).norm() <= 1e-4 * other.norm())


def gradient(network, batch, loss_of=None):
    """Of the sum of the losses that count in a batch, or of loss_of(logits, labels), in a row."""
    labels = padded(batch, "targets", IGNORED)
    logits = network(padded(batch, "tokens", 0))["logits"]
    loss = (loss_of or sum_of_losses)(logits, labels)
    return joined(torch.autograd.grad(loss, list(network.parameters())))


def sum_of_losses(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def cause_of_update(got, truth, network, window, n, accumulation):
    """What a wrong gradient looks like. window: the batches of all ranks."""
    if got.isnan().any():
        return "a micro-batch in which nothing counts has no mean: 0/0 is nan, and stays it. Its sum is 0"
    items = sum(map(count, window))
    sums = [gradient(network, batch) for batch in window]
    places = [len(batch) * max(map(length_of, batch)) for batch in window]
    means = sum(one / max(count(batch), 1) for one, batch in zip(sums, window))
    of_places = sum(one / place for one, place in zip(sums, places))

    def computed(loss_of):
        return sum(gradient(network, batch, loss_of) for batch in window) / items

    shares = [1, 1 / accumulation, 1 / n, 1 / n / accumulation]
    looks = [
        ([sum(sums)], "it is the sum over all labels that count: divide it by num_items_in_batch"),
        ([truth / accumulation], f"it is {accumulation} times too small: num_items_in_batch is of the whole window, "
         "so do not divide by the accumulation steps, too"),
        ([truth * accumulation], f"it is {accumulation} times too large: with a loss function of your own, Trainer "
         "does not divide by the accumulation steps, so there is nothing to undo"),
        ([truth * n], f"it is {n} times too large: Trainer multiplies by the number of processes itself"),
        ([truth / n], f"it is {n} times too small: num_items_in_batch is of all ranks, so do not divide by their "
         "number, too"),
        ([means * share for share in shares], "each micro-batch is divided by how many count in itself, as "
         "reduction='mean' does it, and then one with few weighs as much as one with many: take the sum, "
         "and divide by num_items_in_batch"),
        ([of_places * share for share in shares], "each micro-batch is divided by all its places, padding among "
         "them: take the sum, and divide by num_items_in_batch"),
        ([means / items, of_places / items], "it is divided twice, by what is in the micro-batch and by "
         "num_items_in_batch: take the sum first, and not the mean"),
        ([computed(counts_padding)], "labels of -100 were taken for class 0, and count"),
        ([computed(reshapes)], "reshape and view leave the numbers in their order, so that classes and places get "
         "mixed up: logits.transpose(1, 2), or logits.flatten(0, 1)"),
        ([computed(shifts)], "the logits were compared with the next token's labels: here the label of a token "
         "stands at the token's own place"),
    ]  # fmt: skip
    for values, cause in looks:
        if any(agree(got, value) for value in values):
            return cause
    return "is it the sum of the losses of all labels that count, divided by num_items_in_batch, and nothing else?"


def counts_padding(logits, labels):
    return sum_of_losses(logits, labels.clamp(min=0))


def reshapes(logits, labels):
    batch, length, classes = logits.shape
    return F.cross_entropy(logits.reshape(batch, classes, length), labels, reduction="sum")


def shifts(logits, labels):
    return sum_of_losses(logits[:, :-1], labels[:, 1:])


# ---- 2: all stop together ----

EPOCH, MAX_STEPS = 4, 9  # steps
STOPS = [1, 2, 5, 6]  # steps after which the next one is not the end of an epoch, nor the last of all
APART = "the ranks are apart: "


class Square(nn.Module):
    """A small network that returns its own loss."""

    def __init__(self, seed):
        super().__init__()
        self.linear = fill(nn.Linear(3, 2), seed)

    def forward(self, inputs):
        return {"loss": self.linear(inputs).pow(2).mean()}


def trainings(stop_together, cases, seed):
    """A training for each case, {rank: the step at which it wants to stop}; what was seen of each.

    calls: what this rank's should_stop was asked; steps: how many were taken; ends: of each step, the notes of all ranks.
    """
    meeting, seen = Meeting(), []
    rank, n = meeting.rank, meeting.n
    if n == 1:  # as a program that nobody has launched, and that has no process group
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    torch.manual_seed(seed)
    examples = [{"inputs": torch.randn(3, dtype=torch.float64)} for _ in range(2 * EPOCH * n)]
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "logging_steps": 1}
    with settings(meeting, max_steps=MAX_STEPS, **options) as made:
        for number, case in enumerate(cases):
            calls, ends = [], []

            def should_stop(step, calls=calls, wish=case.get(rank)):
                calls.append(step)
                if step == wish:
                    time.sleep(0.1)  # who does not wait for this rank will not know of it
                return step == wish

            trainer = a_trainer(Square(seed), made, examples, callbacks=[stop_together(should_stop)])
            meet_at_the_ends(trainer, meeting, number, ends)
            with suppress(Parted), trying(in_words(case, n)):
                trainer.train()
                notes = meeting.notes(f"{number}/ended", True)
                if None in notes:
                    late = f"rank {notes.index(None)} is still at it"
                    raise RuntimeError(f"{APART}rank {rank} has ended its training, {late}")
            seen.append({"calls": calls, "steps": trainer.state.global_step, "ends": ends})
            if ends and disagree(ends[-1]):
                break  # one more training would only make them wait
        return seen


def meet_at_the_ends(trainer, meeting, number, ends):
    """Have the ranks meet when all callbacks have been called at the end of a step, and before one waits for another."""
    handler = trainer.callback_handler
    call_all = handler.on_step_end

    def on_step_end(args, state, control):
        with Watch() as watch:
            control = call_all(args, state, control)
        flags = {name: getattr(control, name, None) for name in FLAGS}
        note = {name: None if flag is None else bool(flag) for name, flag in flags.items()}
        note |= {"kind": type(control).__name__, "sent": len(watch.log)}
        notes = meeting.notes(f"{number}/{state.global_step}", note)
        if None in notes:
            other = notes.index(None)
            gone = meeting.left_by(other, f"{number}/ended")
            does = "has ended its training" if gone else "has not come back from its callback"
            where = f"rank {meeting.rank} is at the end of step {state.global_step}"
            raise RuntimeError(f"{APART}{where}, rank {other} {does}")
        ends.append(notes)
        if disagree(notes):
            raise Parted
        return control

    handler.on_step_end = on_step_end


FLAGS = ["should_training_stop", "should_epoch_stop", "should_log"]


class Parted(Exception):
    """The ranks would not go on together."""


def disagree(notes):
    return len({note["should_training_stop"] for note in notes}) > 1 or not_a_control(notes)


def not_a_control(notes):
    return any(note[name] is None for note in notes for name in FLAGS)


def in_words(case, n):
    if not case:
        return "should_stop is never true"
    [step] = set(case.values())
    who = f"rank {next(iter(case))} alone" if len(case) < n else "all ranks"
    return f"should_stop({step}) is true" + f" on {who}" * (n > 1)


@question(
    "What one rank knows and the others need is a case for a collective. It takes part in it who calls it: so all ranks, "
    "in every step, whatever they want themselves.",
    "0 or 1 from each rank, as a tensor of integers, and one dist.all_reduce of it, with dist.ReduceOp.MAX or the sum. "
    "Where there is no process group, dist.is_initialized() is False, and a rank's own wish is all there is.",
    "wish = torch.tensor(int(self.should_stop(state.global_step)), device=args.device); if dist.is_initialized(): "
    "dist.all_reduce(wish, dist.ReduceOp.MAX); if wish: control.should_training_stop = True",
)
def check_stop_together(answer, draw):
    """All ranks stop after the first step at which one of them wants to, or where Trainer ends by itself."""
    start_server("transformers.trainer")  # where none runs yet
    for n in (2, 3, 1):
        one, other, common = draw.sample(STOPS, 3)
        cases = [{}, {draw.randrange(1, n): one}, {0: other}, dict.fromkeys(range(n), common)]
        cases = cases if n > 1 else [{}, {0: one}]
        judge_stops(cases, stopped(answer, cases, draw.randrange(10**6), n))


def stopped(answer, cases, seed, n):
    """`trainings` on n ranks. Where they end badly, and it is known why, raise Wrong and say so."""
    try:
        return answer.on_ranks(trainings, cases, seed, nproc=n, timeout=TIMEOUT)
    except RankError as error:
        said = error.message.splitlines()[0] if error.message else ""
        if APART in said:
            cause = ALONE if "ended its training" in said else ONE_SIDED
            raise Wrong(checked_in(error.message, n), expected="all ranks at the end of the same step",
                        got=said.split(APART)[1], cause=cause) from None  # fmt: skip
        if n == 1 and "process group has not been initialized" in said:
            cause = (
                "a process that is started by python alone has no process group, and nobody to ask: look at "
            )
            cause += "dist.is_initialized() first"
            raise Wrong(checked_in(error.message, n), expected="a stop, without the others", got=said,
                        cause=cause) from None  # fmt: skip
        raise


ALONE = "no rank has waited to hear what the others want. One that stops alone leaves them in their next backward, " \
        "where they wait for it: the decision needs a collective, in every step"  # fmt: skip
ONE_SIDED = "a collective ends when all ranks have called it: call it in every step, and also where this rank wants to " \
            "go on"  # fmt: skip


def checked_in(message, n):
    """What was tried, from the note that `trying` has put under an error."""
    case = message.splitlines()[-1].removeprefix("(in ").removesuffix(")")
    return f"StopTogether on {ranks(n)}, where {case}"


def judge_stops(cases, seen):
    """Raise Wrong unless all ranks have asked in each step, and have stopped together when they should."""
    n = len(seen)
    done = [[of_rank[number] for of_rank in seen] for number in range(len(seen[0]))]
    for case, of_ranks in zip(cases, done):
        notes = of_ranks[0]["ends"][-1]
        checked = f"StopTogether on {ranks(n)}, where {in_words(case, n)}"
        if not_a_control(notes):
            raise Wrong(checked, expected="control, or nothing at all", got=f"a {notes[0]['kind']}",
                        cause="Trainer takes what a callback returns for the new control: change the one that was given, "
                        "and return that or nothing")  # fmt: skip
        if disagree(notes):
            stop = [rank for rank, note in enumerate(notes) if note["should_training_stop"]]
            go_on = [rank for rank in range(n) if rank not in stop]
            cause = (
                ALONE
                if not notes[0]["sent"]
                else "the ranks have communicated, and still not all of them know: "
            )
            cause += "reduce and gather bring the result to one rank, all_reduce and all_gather to all" \
                     if notes[0]["sent"] else ""  # fmt: skip
            raise Wrong(f"{checked}: step {len(of_ranks[0]['ends'])}", expected="the same decision on all ranks",
                        got=f"rank {in_row(stop)} stops, rank {in_row(go_on)} goes on", cause=cause)  # fmt: skip
    for case, of_ranks in zip(cases, done):
        for rank, of_rank in enumerate(of_ranks):
            calls, steps = of_rank["calls"], of_rank["steps"]
            if calls != list(range(1, steps + 1)):
                raise Wrong(f"what should_stop was asked in StopTogether, where {in_words(case, n)}",
                            rank=f"{rank} of {n}", expected=f"each step from 1 to {steps}, once",
                            got=in_row(calls) if calls else "nothing", cause=cause_of_calls(calls))  # fmt: skip
    ends = [of_ranks[0]["steps"] for of_ranks in done]
    for case, of_ranks, end in zip(cases, done, ends):
        truth = min(case.values(), default=MAX_STEPS)
        if end != truth:
            notes = [note for of_step in of_ranks[0]["ends"] for note in of_step]
            raise Wrong(f"StopTogether on {ranks(n)}, where {in_words(case, n)}, and max_steps={MAX_STEPS}",
                        expected=f"the end after step {truth}, on all ranks", got=f"the end after step {end}",
                        cause=cause_of_end(end, truth, notes, cases, ends))  # fmt: skip
    for case, of_ranks in zip(cases, done):
        for step, notes in enumerate(of_ranks[0]["ends"], 1):
            if not all(note["should_log"] for note in notes):
                raise Wrong(f"control.should_log at the end of step {step}, where {in_words(case, n)}",
                            expected="True, as with logging_steps=1", got="False", cause="a new TrainerControl knows "
                            "nothing of what others have asked for: change the one that was given")  # fmt: skip


def cause_of_calls(calls):
    if not calls:
        return "what this rank wants, it alone knows: every rank has to ask its own should_stop"
    if not all(type(call) is int for call in calls):
        return "should_stop takes the number of the step, state.global_step"
    if calls[0] == 0:
        return (
            "step 1 is the first: ask on_step_end, where state.global_step is 1 after it, and not before it"
        )
    if len(set(calls)) < len(calls):
        return "it is asked more than once for a step: keep its answer, and mind that a step has several micro-batches"
    if all(call % EPOCH == 0 for call in calls):
        return f"it is asked at the ends of epochs, that is once in {EPOCH} steps"
    return "ask at the end of every step, until the training stops"


def cause_of_end(end, truth, notes, cases, ends):
    """Why a training did not end where it should. notes: those of its steps; ends: where all the trainings ended."""
    if end > MAX_STEPS:
        return "Trainer itself wanted to stop at max_steps, and was overruled: set should_training_stop to True where " \
               "somebody wants to stop, and else leave it as it is"  # fmt: skip
    if end < truth:
        return "no rank wanted to stop so soon: is should_stop taken for its opposite?"
    if any(note["should_epoch_stop"] for note in notes):
        return "should_epoch_stop ends the epoch, and then the next one begins: should_training_stop ends the training"
    if end == truth + 1:
        return "it comes one step late: every rank has to know the decision before it begins the next step"
    if end % EPOCH == 0:
        return "it comes at the end of the epoch: decide on_step_end"
    heard = [case for case, end in zip(cases, ends) if case and end == min(case.values())]
    if heard and all(len(case) == len(cases[-1]) for case in heard):
        return "it takes all ranks, or most, to stop: one that wants to is enough, as with the maximum or the sum"
    if heard and all(0 in case for case in heard):
        return "only what rank 0 wants counts: a broadcast tells the others of it, but nobody of their wishes"
    if heard:
        return "one rank can stop them all, and several at once cannot: the sum of their wishes is more than 1 then"
    return "nobody has stopped: it is control.should_training_stop that Trainer looks at"
