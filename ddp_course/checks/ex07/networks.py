"""The networks that the answers are tested with, which sample went through them, and
where that leads.
"""

import torch
from torch import nn
from torch.nn import functional as F

from ddp_course.checks.samples import CLASSES, WIDTH
from ddp_course.checks.training import a_look, equal, fill, state
from ddp_course.judge.verdict import Wrong

# Accelerate is imported on the ranks only, so that the judging process need not wait
# for it. The fork server imports it for the ranks, with those of its dependencies that
# are installed.
PRELOADED = ["accelerate", "datasets", "deepspeed"]

# the record of this process's networks; not in the network, because a copy would have
# its own
RECORD = []


class RecordingNetwork(nn.Module):
    """A small network, in 64 bits, that ignores its first input, a sample's number, but
    records it.

    mixing: with BatchNorm and Dropout, which behave differently in training and in
    evaluation.
    """

    def __init__(self, seed, mixing=False):
        super().__init__()
        middle = [nn.BatchNorm1d(8), nn.Dropout(0.5)] if mixing else []
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), *middle, nn.Tanh(), nn.Linear(8, CLASSES))
        fill(self, seed)

    def forward(self, inputs):
        outputs = self.layers(inputs[:, 1:])
        training = any(module.training for module in self.modules())
        numbers = inputs[:, 0].long().tolist()
        RECORD.append(
            {"samples": numbers, "training": training, "gradient": outputs.requires_grad, "network": id(self)}
        )
        return outputs


def trained_on():
    """The samples of each training step of this process, a list of lists."""
    return [entry["samples"] for entry in RECORD if entry["gradient"]]


def never_trained(network):
    """Whether training steps were taken, but none with this network."""
    networks = {entry["network"] for entry in RECORD if entry["gradient"]}
    return bool(networks) and id(network) not in networks


def changed(data, original):
    """Which of the caller's tensors an answer has changed."""
    now = {"samples": data.inputs, "labels": data.labels}
    before = {"samples": original.inputs, "labels": original.labels}
    return [name for name in now if not torch.equal(now[name], before[name])]


def judge_inputs(checked, names, where):
    """Raise Wrong if an answer has changed the tensors that the caller gave it."""
    for name in names:
        cause = f"{name} belongs to the caller, who may use it again: work on a copy"
        raise Wrong(f"{name} after {checked}", rank=where, expected="as before",
                    got="other numbers", cause=cause)  # fmt: skip


def in_words(returned):
    return "None" if returned is None else f"a {type(returned).__name__}"


def judge_samples(checked, trained, samples, batch_size, epochs=1, window=1):
    """Raise Wrong unless the ranks divided the samples, and each update used the next
    samples in order.

    trained: for each rank, the samples of each of its batches; window: how many of
    these make an update.
    """
    n, share = len(trained), samples // len(trained)
    seen = [set(sum(batches, [])) for batches in trained]
    counts = [sum(map(len, batches)) for batches in trained]

    def wrong_count(rank, cause):
        expected = f"{epochs} epoch{'s' * (epochs > 1)} of {share}"
        return Wrong(f"how many samples a process is trained on, in {checked}", rank=f"{rank} of {n}",
                     expected=expected, got=counts[rank], cause=cause)  # fmt: skip

    for rank, count in enumerate(counts):
        if count == 0:
            raise wrong_count(rank, "no samples went through the network that should be trained")
        if len(seen[rank]) == samples and count >= epochs * samples:
            cause = "every process goes through all samples: prepare the loader, too, and loop over what "
            raise wrong_count(rank, cause + "prepare returns")
    sizes = sorted({len(batch) for batches in trained for batch in batches})
    if sizes != [batch_size]:
        cause = "batch_size is the batch size per process: the accelerator leaves it unchanged, and so "
        cause += "should you"
        raise Wrong(f"the sizes of the batches in {checked}", expected=batch_size,
                    got=", ".join(map(str, sizes)), cause=cause)  # fmt: skip
    for rank, count in enumerate(counts):
        if count == share and count < epochs * share and len(set.union(*seen)) == samples:
            raise wrong_count(rank, "that is one epoch only")
        if count < epochs * share:
            cause = "samples are left out: if a sampler divides them, and then prepare does, too, each "
            raise wrong_count(rank, cause + "process has a share of a share")
        if count > epochs * share:
            cause = "each sample must go through the network once in each epoch, on one process"
            raise wrong_count(rank, cause)
    joined = n * batch_size * window
    for update in range(epochs * samples // joined):
        begin = update * joined % samples
        of_ranks = [sum(batches[update * window : (update + 1) * window], []) for batches in trained]
        together = sorted(sum(of_ranks, []))
        if together != list(range(begin, begin + joined)):
            cause = "the samples come in a different order: without a shuffle, and distributed batch by batch, "
            cause += "each update must use the next samples of the data"
            if len(set(together)) < len(together):
                cause = "several processes are trained on the same samples: each sample must go to one process"
            got = ", ".join(f"{numbers} on rank {rank}" for rank, numbers in enumerate(of_ranks))
            raise Wrong(f"the samples of update {update + 1}, of all processes together, in {checked}",
                        expected=f"samples {begin} to {begin + joined - 1}", got=got,
                        cause=cause)  # fmt: skip


def ends(networks, data, trained, rate, window=1, averaged=True, each=False, clears="after"):
    """The states of all ranks' networks after SGD on these batches.

    trained: for each rank, the samples of each of its batches; window: how many of
    these make an update. The other arguments are mistakes. averaged=False: gradients
    are not averaged. each: there is a step after each batch, though gradients are
    averaged only at the end of a window. clears: gradients are cleared 'after' a step,
    or 'before' the backward of the last batch of a window, or 'never'.
    """
    for place, batches in enumerate(zip(*trained), 1):
        full = place % window == 0
        if full and clears == "before":
            for network in networks:
                network.zero_grad()
        for network, numbers in zip(networks, batches):
            outputs = network.layers(data.inputs[numbers, 1:])
            (F.cross_entropy(outputs, data.labels[numbers]) / window).backward()
        if full and averaged:
            average_gradients(networks)
        if full or each:
            for network in networks:
                step(network, rate, clears == "after")
    return [state(network) for network in networks]


def average_gradients(networks):
    for parameters in zip(*(network.parameters() for network in networks)):
        mean = sum(parameter.grad for parameter in parameters) / len(parameters)
        for parameter in parameters:
            parameter.grad = mean.clone()


@torch.no_grad()
def step(network, rate, clears):
    for parameter in network.parameters():
        parameter -= rate * parameter.grad
        if clears:
            parameter.grad = None


def judge_ends(checked, got, start, those_that, looks, copied):
    """Raise Wrong unless all ranks have ended where one process does; say what it looks
    like instead.

    got: the ranks' states; start: where they began; those_that: gives the states in
    which ranks end that make the mistakes in its arguments; looks: pairs of a list of
    such mistakes and their cause; copied: whether some network that came back was never
    trained, but another was.
    """
    truth = those_that()[0]
    for rank, end in enumerate(got):
        if equal(end, truth):
            continue
        cause = "do you use plain SGD with the given learning rate, on the mean cross entropy of the batch?"
        if copied:
            cause = "another network was trained, such as a copy, and not the one that comes back: return the one "
            cause += "that the optimizer changes"
        elif not all(equal(other, got[0]) for other in got):
            cause = "the processes end with different networks: does each of them take every step?"
        elif equal(end, start):
            cause = "the network has not changed: does the optimizer step, and does it have these parameters?"
        for mistakes, likely in [] if copied else looks:
            if any(all(map(equal, got, those_that(**mistake))) for mistake in mistakes):
                cause = likely
                break
        checked = f"the parameters after {checked}, compared with one process on the joined batches"
        raise Wrong(checked, rank=f"{rank} of {len(got)}", expected=a_look(truth), got=a_look(end),
                    cause=cause)  # fmt: skip
