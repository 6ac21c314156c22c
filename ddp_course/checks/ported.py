"""Scripts for one device that a learner has ported: what a rank observes of such a script,
what one process ends with, and the claims that all ports have to meet.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ddp_course.checks.claims import Claim
from ddp_course.checks.samples import CLASSES, WIDTH, Numbered, how_often, in_words
from ddp_course.checks.training import fill

DIGITS = 8  # of parameters, in 64 bits
PRIMES = [37, 73]  # of test samples: no smaller number has the same share, and much is repeated to fill a batch

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


class Case(NamedTuple):
    """How many samples there are to train and to test on."""

    train: int
    test: int
    seed: int


class Sizes(NamedTuple):
    """What the script is given, besides a network and data."""

    batch_size: int
    every: int
    epochs: int
    max_norm: float


def data_of(case):
    """A training set and a test set, which goes on with the numbers. Their labels are what
    another network says.
    """
    train_set, test_set = Numbered(case.train, case.seed), Numbered(case.test, case.seed + 1, first=case.train)
    teacher = RecordingNetwork(case.seed + 9)
    for data in (train_set, test_set):
        data.labels = teacher.layers(data.inputs[:, 1:]).argmax(dim=1)
    return train_set, test_set


# ---- what the ranks observe ----


def observed(network, path):
    """What a script has made of the network, and of the samples; and what it has saved."""
    kinds = {"trained": True, "tested": False}
    return {
        "trained": trained_on(),
        "tested": sum((entry["samples"] for entry in RECORD if not entry["gradient"]), []),
        "modes": {
            name: sorted({entry["training"] for entry in RECORD if entry["gradient"] is kind})
            for name, kind in kinds.items()
        },
        "end": parameters_to_vector(network.parameters()).detach(),
        "copied": never_trained(network),
        "saves": path.exists(),
        "files": sorted(file.name for file in path.parent.iterdir()),
        "saved": saved_in(path),
    }


def saved_in(path):
    """What torch.load reads from a file: {"names": of the tensors, "values": one vector},
    or None.
    """
    try:
        state = torch.load(path, weights_only=True)
        values = torch.cat([tensor.double().flatten() for tensor in state.values()])
        return {"names": list(state), "values": values}
    except Exception:  # of many kinds, by what there is in the file
        return None


def as_number(returned):
    """A number, NumPy's and torch's, too; anything else in words."""
    try:
        return float(returned)
    except (TypeError, ValueError, RuntimeError):
        return "nothing" if returned is None else f"a {type(returned).__name__}"


# ---- what one process ends with ----


def start_of(seed):
    """The parameters of a network before the training, one vector."""
    return parameters_to_vector(RecordingNetwork(seed).parameters()).detach()


def gradient(network, data, numbers):
    """Of the mean cross entropy of these samples, one vector."""
    numbers = list(numbers)
    loss = F.cross_entropy(network.layers(data.inputs[numbers, 1:]), data.labels[numbers])
    return parameters_to_vector(torch.autograd.grad(loss, list(network.parameters())))


def first_norm(data, seed):
    """The norm of the gradient of all samples before the training."""
    return gradient(RecordingNetwork(seed), data, range(len(data))).norm().item()


def descended(data, seed, updates, rates, rule, momentum=0.9):
    """The parameters of a process after these updates, one vector.

    updates: lists of rounds, each a list of the batches of all processes; rates: the
    learning rate of each update; rule: makes one gradient of those of all batches,
    (rounds, processes, numbers).
    """
    network, velocity = RecordingNetwork(seed), 0
    for rounds, rate in zip(updates, rates):
        parts = [torch.stack([gradient(network, data, batch) for batch in batches]) for batches in rounds]
        velocity = momentum * velocity + rule(torch.stack(parts))
        vector_to_parameters(
            parameters_to_vector(network.parameters()).detach() - rate * velocity, network.parameters()
        )
    return parameters_to_vector(network.parameters()).detach()


def joined(max_norm, scale=1):
    """A rule: clip the mean of all, times a scale."""
    return lambda parts: clipped(scale * parts.mean((0, 1)), max_norm)


def clipped(vector, max_norm):
    return vector * min(1, max_norm / (vector.norm().item() + 1e-6))  # as torch's clip_grad_norm_ does


@torch.no_grad()
def guessed_right(case, parameters):
    """For each sample of the test set, whether a network with these parameters is right."""
    network, (_, data) = RecordingNetwork(case.seed), data_of(case)
    vector_to_parameters(parameters, network.parameters())
    return (network.layers(data.inputs[:, 1:]).argmax(dim=1) == data.labels).tolist()


# ---- what is claimed ----


def modes(checked, seen):
    for name, right in (("trained", [True]), ("tested", [False])):
        got = seen["modes"][name]
        yield Claim(f"the mode in which the network is {name} in {checked}", got, right, "it is trained in training mode "
                    "and tested in evaluation mode and without gradients, as in the given script",
                    [([], f"no sample went through the network while it is {name}")],
                    told="training mode" if right[0] else "evaluation mode",
                    shown=" and ".join(("evaluation", "training")[mode] for mode in got) or "nothing")  # fmt: skip


def epochs_of(trained, epochs):
    """For each epoch a list of its rounds, each the batches of all processes. trained: for
    each process, the samples of each of its batches.
    """
    rounds = [list(of_ranks) for of_ranks in zip(*trained)]
    length = len(rounds) // epochs
    return [rounds[begin : begin + length] for begin in range(0, length * epochs, length)]


def shuffled(checked, trained, samples, epochs, same):
    """Claims that each epoch has each sample once, in an order of its own. same: the cause,
    where the order is the same.
    """
    orders = [sum(sum(of_all, []), []) for of_all in epochs_of(trained, epochs)]
    for number, order in enumerate(orders, 1):
        yield Claim(f"how often each sample is used in epoch {number} of {checked}", sorted(order), list(range(samples)),
                    "in each epoch, each sample goes through the network once, on one process", told="once",
                    shown=in_words(how_often([order], samples)))  # fmt: skip
    for name, other in (("of the data set", list(range(samples))), ("of epoch 1", orders[0])):
        yield Claim(f"the order of the samples in epoch 2 of {checked}", orders[1] == other, False, same,
                    told="a new shuffle", shown=f"that {name}")  # fmt: skip


def sends_once(checked, updates, every, no_sync, rank, of_ranks):
    """Claims that all gradients are sent once per update. every: the micro-batches per
    update, of each process; no_sync: the cure where they are sent with each of them.
    """
    if len(of_ranks) > 1:
        yield Claim(f"how often all gradients are sent in {checked}, with {updates} updates",
                    of_ranks[rank]["reduced"] // start_of(0).nbytes, updates, "the gradients are sent once per update", [
                        (updates * every, "the numbers are right, but the gradients are sent with each micro-batch: "
                         f"{no_sync}"),
                        (updates * (every + 1), "the numbers are right, but the gradients are sent with each micro-batch, "
                         f"and once more with each update: {no_sync}"),
                    ])  # fmt: skip


def exact(checked, case, truth, causes, rank, of_ranks):
    """Claims that the processes share the evaluation, that no sample is left out, and that
    all know the accuracy. causes: where they do not share it, where a process has its own
    result, and where some are repeated.

    How often they evaluate, and in which batches, is theirs. A library fills a short batch
    with the first samples, so a process may see some that another one has: then it has seen
    some more often than others.
    """
    not_shared, own, repeated = causes
    right, got, n = guessed_right(case, truth), of_ranks[rank]["accuracy"], len(of_ranks)
    seen = [set(of_rank["tested"]) for of_rank in of_ranks]
    all_alike = len(seen[rank]) == case.test and len(of_ranks[rank]["tested"]) % case.test == 0
    yield Claim(f"the test samples that a process evaluates in {checked}", n > 1 and all_alike, False, not_shared,
                told=f"a part of the {case.test}", shown=f"all {case.test}")  # fmt: skip
    yield Claim(f"how many of the {case.test} test samples are evaluated in {checked}", len(set.union(*seen)), case.test,
                "samples of the test set are left out: does its loader drop the last batch?")  # fmt: skip
    tested = [of_ranks[rank]["tested"], sum((of_rank["tested"] for of_rank in of_ranks), [])]
    counts = [sum(right[number - case.train] for number in numbers) for numbers in tested]
    likely = [
        (count / many, cause)
        for count, numbers, cause in zip(counts, tested, (own, repeated))
        for many in (max(len(numbers), 1), case.test)
    ]
    likely.append((float(sum(right)), "return the share of the samples that are right, not their number"))
    yield Claim(f"the accuracy that {checked} returns, with {case.test} test samples", got, sum(right) / case.test,
                "each sample of the test set counts once, and every process returns the result", likely,
                told=f"{sum(right) / case.test:.6f} ({sum(right)} of {case.test})")  # fmt: skip


def one_file(checked, truth, every, wrapped, rank, of_ranks):
    """Claims that process 0 alone saves model.pt, the parameters at the end. every: the cause
    where all save; wrapped: mistakes, by the names in the file.
    """
    saves, saved, of_all = of_ranks[rank]["saves"], of_ranks[rank]["saved"], any(each["saves"] for each in of_ranks)
    yield Claim(f"model.pt after {checked}", saves, rank == 0, every if of_all else "process 0 saves model.pt in the "
                "current folder", told="no file of this process" if rank else "a file of this process",
                shown="there is one" if saves else "there is none")  # fmt: skip
    if rank > 0:
        return
    names = list(RecordingNetwork(0).state_dict())
    yield Claim(f"the names in model.pt after {checked}", saved and saved["names"], names, "the file holds the state_dict "
                "of the network, as the given script saves it", wrapped(names), told=", ".join(names),
                shown=", ".join(saved["names"]) if saved else "no state_dict of tensors")  # fmt: skip
    yield Claim(f"the parameters in model.pt after {checked}", saved["values"], truth, "save the network after the "
                "training", digits=DIGITS)  # fmt: skip
