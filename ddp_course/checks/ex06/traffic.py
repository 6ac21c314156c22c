"""Question 1: what the ranks send in an epoch with accumulation."""

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import hold
from ddp_course.checks.traffic import as_measured, as_prediction
from ddp_course.checks.training import Chain, a_batch
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group


class Epoch(NamedTuple):
    """A case to predict. quiet: whether all but the last micro-batch of an update are
    inside no_sync.
    """

    width: int
    layers: int
    frozen: int  # how many layers at the beginning do not train
    dtype: str
    batches: int
    every: int
    quiet: bool


def a_network(epoch):
    network = Chain(epoch.width, epoch.layers, seed=1)
    for value in list(network.parameters())[: epoch.frozen]:
        value.requires_grad_(False)
    return network.to(getattr(torch, epoch.dtype))


def measured(epochs):
    """For each epoch: the number of buckets, the all-reduces of this rank, their bytes."""
    with process_group(timeout=4):
        return [measured_epoch(Epoch(*epoch)) for epoch in epochs]


def measured_epoch(epoch):
    network = a_network(epoch)
    layer = next(network.parameters()).nbytes
    model = DistributedDataParallel(network, bucket_cap_mb=1.5 * layer / 2**20)
    x = a_batch(2, epoch.width, 2).to(getattr(torch, epoch.dtype))
    for _ in range(2):  # DDP knows the order of the gradients only after its first step
        loss = model(x).sum()
        with CheckedWatch() as once:
            loss.backward()
    with CheckedWatch() as watch:
        for first in range(0, epoch.batches, epoch.every):
            last = min(first + epoch.every, epoch.batches) - 1
            dist.all_reduce(torch.tensor(len(x)))
            for place in range(first, last + 1):
                with model.no_sync() if epoch.quiet and place < last else nullcontext():
                    model(x).sum().backward()
    sent = sum(entry["bytes"] for entry in watch.log)
    return [len(once.log), len(watch.log), sent]


def predictions(traffic, epochs, buckets):
    found = []
    for epoch, number in zip(map(lambda fields: Epoch(*fields), epochs), buckets):
        with trying(in_words(epoch, number)):
            returned = traffic(a_network(epoch), number, epoch.batches, epoch.every, epoch.quiet)
        found.append(as_prediction(returned))
    return found


def in_words(epoch, buckets):
    network = f"{epoch.layers} layers of {epoch.width} x {epoch.width} {epoch.dtype} weights"
    if epoch.frozen:
        network += f", the first {epoch.frozen} frozen"
    return (
        f"traffic of a network with {network}, in buckets={buckets}; batches={epoch.batches}, "
        f"every={epoch.every}, quiet={epoch.quiet}"
    )  # fmt: skip


def total(epoch, buckets, updates=None, passes=None, size=None, frozen=False, counted=True, of_count=8):
    """All-reduces and bytes of an epoch, with one of its numbers replaced by a mistake."""
    values = [value for value in a_network(epoch).parameters() if frozen or value.requires_grad]
    gradients = sum(value.numel() * (size or value.element_size()) for value in values)
    updates = -(-epoch.batches // epoch.every) if updates is None else updates
    if passes is None:
        passes = updates if epoch.quiet else epoch.batches
    return [passes * buckets + updates * counted, passes * gradients + updates * counted * of_count]


OTHERWISE = (
    "all-reduces: one per update for the number of items, and one per bucket for each backward pass that sends",
    "bytes: all gradients, once for each backward pass that sends, and 8 for the number of items of each update",
)


def mistakes(expected, epoch, buckets):
    """Of a prediction: what it gives, and the cause."""
    full, other = epoch.batches // epoch.every, -(-epoch.batches // epoch.every)
    loud = "without no_sync, the gradients are sent after each micro-batch"
    if epoch.quiet:
        loud = "with no_sync, only the last micro-batch of an update sends the gradients"
    frozen = "a frozen parameter has no gradient: only those with requires_grad count"
    passes = other if epoch.quiet else epoch.batches
    gradients = (expected[1] - 8 * other) // passes
    of_each_bucket = [expected[0], expected[1] + (buckets - 1) * passes * gradients]
    return [
        (total(epoch, buckets, updates=full), "the last update of the epoch is shorter, but it is an update: round up"),
        (total(epoch, buckets, updates=full + 1), "the micro-batches make whole updates here, so no short one follows"),
        (total(epoch, buckets, passes=epoch.batches if epoch.quiet else other), loud),
        (total(epoch, buckets, updates=epoch.batches, passes=other if epoch.quiet else epoch.batches),
         "the number of items is summed once per update, not once per micro-batch"),
        (total(epoch, buckets, counted=False), "the all-reduce of the number of items is missing: one per update"),
        (total(epoch, buckets, of_count=4), "the number of items is an int64 and has 8 bytes"),
        (total(epoch, buckets, size=4, of_count=4), f"a number of {epoch.dtype} has another size, and an int64 has 8 bytes"),
        (total(epoch, buckets, size=1), "these are numbers, not bytes: multiply by element_size()"),
        (total(epoch, buckets, size=4), "the numbers of this network are float64: 8 bytes each"),
        (total(epoch, buckets, size=8), "the numbers of this network are float32: 4 bytes each"),
        (total(epoch, buckets, frozen=True), frozen),
        (of_each_bucket, "all buckets together have the gradients once, so do not multiply their bytes by `buckets`"),
        (total(epoch, 1), "each backward pass that sends calls one all-reduce per bucket"),
        ([2 * number for number in expected], "it is what both ranks send: count the all-reduces of one rank"),
    ]  # fmt: skip


@question(
    "How many updates are in the epoch, with the short one at its end? How many backward passes send gradients, with "
    "no_sync and without? The rest is multiplication.",
    "updates = batches / every, rounded up. With no_sync, one backward pass per update sends; without, each micro-batch "
    "does. Each such pass sends all gradients, in `buckets` all-reduces. Which parameters have a gradient, and how many "
    "bytes has each number?",
    "updates = -(-batches // every); passes = updates if quiet else batches; gradients = sum(p.numel() * "
    "p.element_size() for p in network.parameters() if p.requires_grad). All-reduces: passes * buckets + updates; bytes: "
    "passes * gradients + updates * 8.",
)
def check_traffic(answer, draw):
    """The predicted all-reduces and bytes of several epochs must be those that two real
    ranks then have.
    """
    every = draw.randint(3, 4)
    batches = 2 * every
    rest = draw.randint(1, every - 1)
    made = [
        Epoch(draw.randint(4, 9), 5, 0, "float32", batches, every, True),
        Epoch(draw.randint(4, 9), 5, 0, "float32", batches, every, False),
        Epoch(draw.randint(4, 9), 4, 0, "float32", batches + rest, every, True),
        Epoch(draw.randint(4, 9), 5, 2, "float32", batches + rest, every, True),
        Epoch(draw.randint(4, 9), 5, 1, "float64", batches + rest, every, False),
        Epoch(draw.randint(4, 9), 4, 0, "float64", rest, every, True),
        Epoch(draw.randint(4, 9), 4, 0, "float32", batches, 1, True),
    ]
    epochs = [tuple(epoch) for epoch in made]
    truth = answer.without(measured, epochs, nproc=2)[0]
    buckets = [number for number, _, _ in truth]
    [predicted] = answer.on_ranks(predictions, epochs, buckets)
    for epoch, (number, *expected), got in zip(made, truth, predicted):
        call = in_words(epoch, number)
        hold(as_measured(call, got, expected, mistakes(expected, epoch, number), OTHERWISE))
