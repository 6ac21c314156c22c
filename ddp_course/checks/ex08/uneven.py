"""Question 2: uneven examples, and their loss."""

from collections.abc import Mapping
from copy import deepcopy
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from ddp_course.checks.ex08.on_ranks import (
    LEARNING_RATE,
    PRELOADED,
    TIMEOUT,
    Meeting,
    a_trainer,
    in_row,
    ranks,
    settings,
)
from ddp_course.checks.training import fill
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.launch import RankError, start_server

WORDS, WIDTH, CLASSES = 7, 4, 11
LENGTHS = range(3, 10)  # of examples; there are more classes, so that the two cannot be mixed up unnoticed
BATCH_SIZE, ACCUMULATION = 2, 3
IGNORED = -100


class Tagger(nn.Module):
    """Classes for each token, from the token alone, in 64 bits."""

    def __init__(self, seed):
        super().__init__()
        self.embedding, self.linear = (nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, CLASSES))
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
    return {"tokens": torch.tensor([draw.randrange(WORDS) for _ in range(length)]), "targets": targets}


def padded(batch, name, value, side="right"):
    return nn.utils.rnn.pad_sequence([example[name] for example in batch], True, value, side)


def count(batch):
    """How many of its targets count."""
    return sum(int((example["targets"] != IGNORED).sum()) for example in batch)


def collated(collate, mean_loss, batches):
    seen = []
    for batch in batches:
        with trying(f"collate, with {lengths_of(batch)}"):
            returned = collate(copied := deepcopy(batch))
        made = dict(returned) if isinstance(returned, Mapping) else returned
        seen.append({"made": made, "spoiled": spoiled(copied, batch)})
    return seen


def spoiled(examples, originals):
    """Whether examples, a list of dicts of tensors, differ from what they were."""
    return len(examples) != len(originals) or any(
        now.keys() != before.keys() or any(not torch.equal(now[name], before[name]) for name in before)
        for now, before in zip(examples, originals)
    )


def length_of(example):
    return len(example["tokens"])


def lengths_of(batch):
    return f"example{'s' * (len(batch) > 1)} of {in_row(map(length_of, batch))} tokens"


def trained(collate, mean_loss, examples, seed):
    """Train on these examples: this rank's losses, and the parameters after each
    update.

    odd: a loss that nothing can be trained on, if there was one, in a list; then there
    is no more.
    """
    losses, history, written = [], [], []

    def noted(outputs, labels, num_items_in_batch):
        logits = outputs["logits"]
        given = {"logits": logits, "labels": labels, "num_items_in_batch": num_items_in_batch}
        before = {name: value.detach().clone() for name, value in given.items()}
        loss = mean_loss(outputs, labels, num_items_in_batch=num_items_in_batch)
        written.extend(name for name, value in before.items() if not torch.equal(given[name], value))
        written.extend(["outputs"] * (list(outputs) != ["logits"] or outputs["logits"] is not logits))
        if not isinstance(loss, torch.Tensor) or loss.dim() > 0 or not comes_from(logits, loss):
            raise OddLoss(loss)
        losses.append(loss.item())
        return loss

    options = {"per_device_train_batch_size": BATCH_SIZE, "gradient_accumulation_steps": ACCUMULATION}
    with settings(Meeting(), num_train_epochs=1, logging_strategy="no", **options) as made:
        model = Tagger(seed)
        trainer = a_trainer(model, made, examples, data_collator=collate, compute_loss_func=noted)
        trainer.optimizer.register_step_post_hook(lambda *_: history.append(joined(model.parameters())))
        try:
            trainer.train()
        except OddLoss as odd:
            return {"odd": odd.args}
    return {"odd": [], "losses": losses, "history": history, "written": written}


class OddLoss(Exception):
    """Trainer cannot train on this loss, or DDP would wait for its gradients."""


def comes_from(logits, loss):
    """Whether the backward of a loss leads to the logits."""
    if not loss.requires_grad:
        return False
    return torch.autograd.grad(loss, logits, retain_graph=True, allow_unused=True)[0] is not None


def joined(tensors):
    """Their values as one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@question(
    "nn.utils.rnn.pad_sequence pads a list of tensors. Then find out what Trainer does with the loss, before and "
    "after: from transformers import Trainer, and Trainer.compute_loss?? in a cell shows you.",
    "pad_sequence(..., batch_first=True, padding_value=...). Means of micro-batches cannot be added up, sums "
    "can: F.cross_entropy(..., reduction='sum'), and divide by one number that is the same in all of them. "
    "Trainer multiplies by the number of processes itself, since DDP divides by it.",
    "collate: pad_sequence([example['tokens'] for example in examples], batch_first=True), and the same of "
    "the targets with padding_value=-100. mean_loss: F.cross_entropy(outputs['logits'].transpose(1, 2), "
    "labels, reduction='sum') / num_items_in_batch, and nothing else.",
)
def check_uneven(answer, draw):
    """Batches must be padded, and each update of Trainer must be that of one process on
    the joined window.
    """
    start_server(*PRELOADED)  # where none runs yet
    judge_collate(answer, draw)
    for n in (1, 2):
        batches, seed = uneven_batches(draw, n), draw.randrange(10**6)
        judge_training(training_on(answer, batches, seed, n), batches, seed)


def judge_collate(answer, draw):
    batches = telling_batches(draw)
    [of_rank] = answer.on_ranks(collated, batches, timeout=TIMEOUT)
    for batch, seen in zip(batches, of_rank):
        checked, got = f"collate, with {lengths_of(batch)}", seen["made"]
        expected = {"tokens": padded(batch, "tokens", 0), "labels": padded(batch, "targets", IGNORED)}
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
        if seen["spoiled"]:
            raise Wrong(f"the examples after {checked}", expected="as before", got="something else",
                        cause="collate changes the examples themselves, and in the next epoch Trainer takes "
                        "the same ones again: read them only")  # fmt: skip


def telling_batches(draw):
    """Batches in which order and padding can be seen: three lengths in no order, rows
    of several lengths.
    """
    batches = [[an_example(draw) for _ in range(size)] for size in (3, 2, 1, 2)]
    lengths = [list(map(length_of, batch)) for batch in batches]
    first, longest = lengths[0], set(map(max, lengths))
    later_is_shorter = any(a > b for a, b in pairwise(map(max, lengths)))
    ordered = first in (sorted(first), sorted(first, reverse=True))
    return (
        telling_batches(draw) if ordered or not later_is_shorter or len(set(first)) < 3 or len(longest) < 3 else batches
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
        return "Trainer needs the name labels, to count the labels and for the loss; all other entries go to the model"
    return "the model is called with all entries of the dict except labels: return only these two"


def cause_of_shape(got, expected):
    batch, longest = expected.shape
    if got.shape == (longest, batch):
        return "rows and columns are swapped: pass batch_first=True to pad_sequence"
    if got.shape[:1] == (batch,) and got.dim() == 2:
        if got.shape[1] > longest:
            return "it is padded beyond the longest example of this batch, which wastes work"
        return "examples were cut: the rows must be as long as the longest example of the batch"
    return "each example is a row, and shorter ones are padded: (batch, longest)"


def rows(tensor):
    return "\n".join(" ".join(f"{number:4}" for number in row) for row in tensor.tolist())


def cause_of_padding(name, got, batch):
    of, value = ("tokens", 0) if name == "tokens" else ("targets", IGNORED)
    truth = padded(batch, of, value)
    if torch.equal(got, padded(batch, of, value, side="left")):
        return "the padding is before the examples, but it belongs after them"
    if sorted(got.tolist()) == sorted(truth.tolist()):
        return "the rows are not in the order of the examples"
    if name == "tokens" and torch.equal(got, padded(batch, of, IGNORED)):
        return "-100 is for labels: a model that looks up tokens in a table has no row -100; pad with 0"
    if name == "labels" and torch.equal(got, padded(batch, of, 0)):
        return "0 is a class like any other, so the padding would be counted and learned: pad with -100"
    if name == "labels" and torch.equal(got, F.pad(truth[:, 1:], (0, 1), value=IGNORED)):
        return "the targets were shifted: here the target of a token is at the token's own place"
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
    batches[2 * window - draw.randint(1, n)] = [an_example(draw, counting=0) for _ in range(BATCH_SIZE)]
    first = list(map(count, batches[:window]))
    return batches if max(first) >= 2 * min(first) else uneven_batches(draw, n)


def training_on(answer, batches, seed, n):
    """`trained` on n ranks. If the loss raises an unclear error, raise Wrong with a
    clearer one.
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
    "Expected target size": "F.cross_entropy needs the classes in the second dimension: use logits.transpose(1, 2), "
    "or logits.flatten(0, 1) and labels.flatten()",
    "-100 is out of bounds": "-100 is not a class that can be looked up: F.cross_entropy ignores it with the "
    "default ignore_index",
}


def judge_training(seen, batches, seed):
    """Raise Wrong unless each update is that of one process on its whole update."""
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
        truth = sum(gradient(network, batch) for batch in window) / sum(map(count, window))
        for rank, of_rank in reversed(list(enumerate(seen))):
            got = (start - of_rank["history"][update]) / LEARNING_RATE
            if not agree(got, truth):
                cause = cause_of_update(got, truth, network, window, n)
                raise Wrong(f"{checked}: its gradient, for all parameters in a row", rank=f"{rank} of {n}",
                            expected=truth, got=got, cause=cause)  # fmt: skip
        nn.utils.vector_to_parameters(start - LEARNING_RATE * truth, network.parameters())
    for rank, of_rank in enumerate(seen):
        if not torch.tensor(of_rank["losses"]).isfinite().all():
            raise Wrong(f"the losses of the micro-batches, on {ranks(n)}", rank=f"{rank} of {n}",
                        expected="numbers", got=in_row(f"{loss:.3f}" for loss in of_rank["losses"]),
                        cause=NO_MEAN)  # fmt: skip
        if of_rank["written"]:
            name = of_rank["written"][0]
            raise Wrong(f"the {name} after mean_loss, on {ranks(n)}", rank=f"{rank} of {n}",
                        expected="as before", got="changed",
                        cause=f"mean_loss writes into the {name}, which belong to Trainer: work on a copy")  # fmt: skip


NO_MEAN = "a micro-batch without labels that count has no mean: 0/0 is nan, and nan stays nan. Its sum is 0"


def cause_of_odd_loss(loss):
    if loss is None:
        return "the function ends without a return"
    if isinstance(loss, torch.Tensor) and loss.dim() > 0:
        return "return one loss instead of one per token: sum them"
    return "its backward must reach the logits, even if no label counts: DDP waits for the gradients"


def agree(some, other):
    """Whether two gradients are equal within the precision of 32 bits, in which a loss
    may be computed.
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
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def cause_of_update(got, truth, network, window, n):
    """The likely cause of a wrong gradient. window: the batches of all ranks."""
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
        ([truth / ACCUMULATION], f"it is {ACCUMULATION} times too small: num_items_in_batch already covers the whole "
         "update, so do not divide by the accumulation steps, too"),
        ([truth * ACCUMULATION], f"it is {ACCUMULATION} times too large: with your own loss function, Trainer does "
         "not divide by the accumulation steps, so there is nothing to undo"),
        ([truth * n], f"it is {n} times too large: Trainer multiplies by the number of processes itself"),
        ([truth / n], f"it is {n} times too small: num_items_in_batch already covers all ranks, so do not divide by "
         "the number of ranks, too"),
        ([means * share for share in shares], "each micro-batch is divided by its own number of labels, as with "
         "reduction='mean', so one with few labels counts as much as one with many: use the sum, and divide by "
         "num_items_in_batch"),
        ([of_places * share for share in shares], "each micro-batch is divided by the number of its places, "
         "including padding: use the sum, and divide by num_items_in_batch"),
        ([means / items, of_places / items], "it is divided twice, by the labels of the micro-batch and by "
         "num_items_in_batch: use the sum instead of the mean"),
        ([computed(counts_padding)], "labels of -100 were treated as class 0, so they count"),
        ([computed(reshapes)], "reshape and view keep the order of the numbers, so they mix up classes and places: "
         "logits.transpose(1, 2), or logits.flatten(0, 1)"),
        ([computed(shifts)], "the logits were compared with the next token's labels: here the label of a token is "
         "at the token's own place"),
    ]  # fmt: skip
    for values, cause in looks:
        if any(agree(got, value) for value in values):
            return cause
    return "is it the sum of the losses of all labels that count, over num_items_in_batch, and nothing else?"


def counts_padding(logits, labels):
    return sum_of_losses(logits, labels.clamp(min=0))


def reshapes(logits, labels):
    batch, length, classes = logits.shape
    return F.cross_entropy(logits.reshape(batch, classes, length), labels, reduction="sum")


def shifts(logits, labels):
    return sum_of_losses(logits[:, :-1], labels[:, 1:])
