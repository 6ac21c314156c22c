"""What question 2 claims of a training with mean_loss, and what its mistakes lead to."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from ddp_course.checks.claims import Claim
from ddp_course.checks.ex08.on_ranks import LEARNING_RATE, in_row, ranks
from ddp_course.checks.ex08.uneven_cases import ACCUMULATION, IGNORED, count, length_of, padded
from ddp_course.checks.ex08.uneven_collate import kind_of

NO_MEAN = "a micro-batch without labels that count has no mean: 0/0 is nan, and nan stays nan. Its sum is 0"
UNCLEAR = {  # errors, by what they say
    "Expected target size": "F.cross_entropy needs the classes in the second dimension: use logits.transpose(1, 2), "
    "or logits.flatten(0, 1) and labels.flatten()",
    "-100 is out of bounds": "-100 is not a class that can be looked up: F.cross_entropy ignores it with the "
    "default ignore_index",
}


def returns_a_loss(rank, of_ranks):
    """The claims that come first: with such a loss, there is no training."""
    seen, on = of_ranks[rank], f"on {ranks(len(of_ranks))}"
    clear = lambda: next(cause for text, cause in UNCLEAR.items() if text in seen["raised"])  # noqa: E731
    yield Claim(f"mean_loss, {on}", seen["raised"], None, clear, told="a loss")
    odd = seen["odd"]
    otherwise = "its backward must reach the logits, even if no label counts: DDP waits for the gradients"
    if odd and isinstance(odd[0], torch.Tensor) and odd[0].dim() > 0:
        otherwise = "return one loss instead of one per token: sum them"
    yield Claim(f"what mean_loss returns, {on}", odd, [], otherwise, [([None], "the function ends without a return")],
                told="a tensor without dimensions, computed from the logits",
                shown=kind_of(odd[0]) if odd else "")  # fmt: skip


def like_one_process(network, number, window, rank, of_ranks):
    """The claim that a rank's update is that of one process. network: before the update, in
    one process; number: of the update, from 1; window: the batches of all ranks.
    """
    n, truth, length = len(of_ranks), mean_gradient(network, window), len(window) // len(of_ranks)
    got = (joined(network.parameters()) - of_ranks[rank]["history"][number - 1]) / LEARNING_RATE
    otherwise = "is it the sum of the losses of all labels that count, over num_items_in_batch, and nothing else?"
    yield Claim(f"update {number} on {ranks(n)}, of {length} micro-batch{'es' * (length > 1)}: its gradient, for all "
                "parameters in a row", got, truth, NO_MEAN if got.isnan().any() else otherwise,
                partial(mistakes, network, window, truth, n), digits=5)  # fmt: skip


def numbers_and_inputs(rank, of_ranks):
    """Claims that no loss is nan, and that mean_loss has left its inputs alone."""
    seen, on = of_ranks[rank], f"on {ranks(len(of_ranks))}"
    yield Claim(f"the losses of the micro-batches, {on}", torch.tensor(seen["losses"]).isfinite().all().item(), True,
                NO_MEAN, told="numbers", shown=in_row(f"{loss:.3f}" for loss in seen["losses"]))  # fmt: skip
    for name in seen["written"][:1]:
        yield Claim(f"the {name} after mean_loss, {on}", "changed", "as before", f"mean_loss writes into the {name}, which "
                    "belong to Trainer: work on a copy")  # fmt: skip


# ---- gradients, of the right loss and of likely mistakes ----


def joined(tensors):
    """Their values as one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def descend(network, window):
    """The update of one process."""
    start = joined(network.parameters())
    nn.utils.vector_to_parameters(start - LEARNING_RATE * mean_gradient(network, window), network.parameters())


def mean_gradient(network, window, loss_of=None):
    return sum(gradient(network, batch, loss_of) for batch in window) / sum(map(count, window))


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


def mistakes(network, window, truth, n):
    """Pairs of a gradient and its cause. truth: the right one."""
    items, steps, computed = sum(map(count, window)), ACCUMULATION, partial(mean_gradient, network, window)
    sums = [gradient(network, batch) for batch in window]
    places = [len(batch) * max(map(length_of, batch)) for batch in window]
    means = sum(one / max(count(batch), 1) for one, batch in zip(sums, window))
    of_places = sum(one / place for one, place in zip(sums, places))
    instead = "use the sum, and divide by num_items_in_batch"
    twice = (
        "it is divided twice, by the labels of the micro-batch and by num_items_in_batch: use the sum instead of the"
    )
    shares = [1, 1 / steps, 1 / n, 1 / n / steps]
    return [
        (sum(sums), "it is the sum over all labels that count: divide it by num_items_in_batch"),
        (truth / steps, f"it is {steps} times too small: num_items_in_batch already covers the whole update, so do not "
         "divide by the accumulation steps, too"),
        (truth * steps, f"it is {steps} times too large: with your own loss function, Trainer does not divide by the "
         "accumulation steps, so there is nothing to undo"),
        (truth * n, f"it is {n} times too large: Trainer multiplies by the number of processes itself"),
        (truth / n, f"it is {n} times too small: num_items_in_batch already covers all ranks, so do not divide by the "
         "number of ranks, too"),
        *[(means * share, "each micro-batch is divided by its own number of labels, as with reduction='mean', so one with "
           f"few labels counts as much as one with many: {instead}") for share in shares],
        *[(of_places * share, "each micro-batch is divided by the number of its places, including padding: "
           f"{instead}") for share in shares],
        *[(value / items, f"{twice} mean") for value in (means, of_places)],
        (computed(counts_padding), "labels of -100 were treated as class 0, so they count"),
        (computed(reshapes), "reshape and view keep the order of the numbers, so they mix up classes and places: "
         "logits.transpose(1, 2), or logits.flatten(0, 1)"),
        (computed(shifts), "the logits were compared with the next token's labels: here the label of a token is at the "
         "token's own place"),
    ]  # fmt: skip


def counts_padding(logits, labels):
    return sum_of_losses(logits, labels.clamp(min=0))


def reshapes(logits, labels):
    batch, length, classes = logits.shape
    return F.cross_entropy(logits.reshape(batch, classes, length), labels, reduction="sum")


def shifts(logits, labels):
    return sum_of_losses(logits[:, :-1], labels[:, 1:])
