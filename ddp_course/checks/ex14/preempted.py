"""A network that is trained while signals come, and what one process makes of the same
updates, for question 5.
"""

import os
import resource
import signal
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from ddp_course.checks.samples import CLASSES, WIDTH, Numbered
from ddp_course.checks.training import fill, state
from ddp_course.ranks.environment import process_group

RATE, MOMENTUM, WIDE = 0.1, 0.9, 64
SOME_BYTES = 4096  # that ranks other than 0 may write to a file; a checkpoint has more


class Noted(nn.Module):
    """A small network, in 64 bits, that notes the numbers of the samples that it gets.

    alarm: called with the numbers and the outputs of each call, or None.
    """

    def __init__(self, seed):
        super().__init__()
        layers = nn.Linear(WIDTH, WIDE), nn.Tanh(), nn.Linear(WIDE, CLASSES)
        self.layers = fill(nn.Sequential(*layers), seed)
        self.seen, self.alarm = [], None
        with torch.no_grad():
            for parameter in self.parameters():
                parameter /= 3

    def forward(self, inputs):
        numbers = inputs[:, 0].long().tolist()
        outputs = self.layers(inputs[:, 1:])
        self.seen.append(numbers)
        if self.alarm:
            self.alarm(numbers, outputs)
        return outputs


class Alarm:
    """Sends this process a signal once, in the middle of an update.

    numbers: the samples of that update. moment: "forward" or "backward". limit: the
    bytes that the process may write to a file from then on, or None; more kill it.
    """

    def __init__(self, numbers, kind, moment, limit):
        self.numbers, self.kind, self.moment = set(numbers), kind, moment
        self.limit, self.sent = limit, False

    def __call__(self, numbers, outputs):
        if self.sent or not self.numbers & set(numbers):
            return
        if self.moment == "backward" and outputs.requires_grad:
            outputs.register_hook(lambda _: self.send())
        else:
            self.send()

    def send(self):
        if not self.sent:
            self.sent = True
            if self.limit:
                limit_files(self.limit)
            for _ in range(2):  # a scheduler repeats it
                os.kill(os.getpid(), self.kind)


def limit_files(size=None):
    """Let the system kill this process when it writes more than this to a file; None
    allows as much as before.
    """
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if size else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size or hard, hard))


SMALL = {15: 5}  # chunk(4) makes three parts of it


def data_of(run):
    """Numbered samples, and the numbers of each update's samples: each occurs once."""
    sizes = [SMALL.get(update, run["size"]) for update in range(run["updates"])]
    order = torch.Generator().manual_seed(run["seed"] + 1)
    batches = torch.randperm(sum(sizes), generator=order).split(sizes)
    return Numbered(sum(sizes), run["seed"]), list(batches)


def train_once(train, run, path, alarms, only_rank_0):
    """Call the answer on this rank; return what it returned, the parameters, and the
    samples of each call of the network.

    alarms: {rank: (update, signal, moment, limit)}. only_rank_0: the others are killed
    if they write a checkpoint.
    """
    with process_group(timeout=6) as (rank, _):
        data, batches = data_of(run)
        network = Noted(run["seed"])
        if rank in alarms:
            update, *how = alarms[rank]
            network.alarm = Alarm(batches[update].tolist(), *how)
        if rank and only_rank_0:
            limit_files(SOME_BYTES)
        given = [batch.clone() for batch in batches]
        torch.manual_seed(run["seed"] + rank)
        with held(path) as kept:
            returned = train(network, (data.inputs, data.labels), given, Path(path))
        limit_files()
        seen = {"losses": as_floats(returned), "seen": network.seen}
        seen["written over"] = not kept()
        return seen | {"end": state(network)}


@contextmanager
def held(path):
    """Gives a function that says whether the file that is at a path now has its content
    still, also if another one has taken its place.
    """
    if not os.path.exists(path):
        yield lambda: True
        return
    with open(path, "rb") as file:
        before = file.read()

        def kept():
            file.seek(0)
            return file.read() == before

        found = []
        yield lambda: found[0]
        found.append(kept())


def as_floats(returned):
    """A list of numbers of any kind, tensors, too, as floats; anything else unchanged."""
    if isinstance(returned, str | dict) or returned is None:
        return returned
    try:
        return [float(loss) for loss in returned]
    except (TypeError, ValueError, RuntimeError):
        return returned


class OneProcess:
    """What one process makes of the updates: `losses`, and `ends`, the parameters before
    the first update and after each.

    shares: for each update, the samples of each rank; the gradient is then the mean of
    the means over these, which is a mistake. forget: the update before which the
    momentum is lost. momentum: of the optimizer. factor: on its learning rate.
    """

    def __init__(self, run, shares=None, forget=None, momentum=MOMENTUM, factor=1.0):
        data, batches = data_of(run)
        network = Noted(run["seed"])
        averages = [torch.zeros_like(parameter) for parameter in network.parameters()]
        self.losses, self.ends = [], [state(network)]
        for update, batch in enumerate(batches):
            parts = [batch]
            if shares is not None:
                parts = [torch.tensor(part) for part in shares[update] if part] or parts
            means = [F.cross_entropy(network(data.inputs[part]), data.labels[part]) for part in parts]
            loss = sum(means) / len(means)
            gradients = torch.autograd.grad(loss, list(network.parameters()))
            if update == forget:
                averages = [torch.zeros_like(average) for average in averages]
            with torch.no_grad():
                for each in zip(network.parameters(), averages, gradients):
                    parameter, average, gradient = each
                    average.mul_(momentum).add_(gradient)
                    parameter -= RATE * factor * average
            self.losses.append(loss.item())
            self.ends.append(state(network))
