"""What a pipeline step computes, right or with faults, in one process."""

from itertools import product
from typing import NamedTuple

import torch
from torch.nn import functional as F

from ddp_course.checks.ex18.step_cases import micro_batches, stage_of

CAUSES = {
    "mean": "this is a mean of the micro-batches' means, in which a sample of a smaller micro-batch counts more: the share "
    "of a micro-batch is its samples divided by all samples",
    "sum": "the losses of the micro-batches are added up here: each counts with its share of the samples",
    "twice": "a micro-batch's share is already in the loss on the last rank, and so in each gradient that it sends: do not "
    "multiply it in again on an earlier rank",
    "one buffer": "backward needs the input of each micro-batch, which autograd has kept without a copy: another message "
    "was received into its memory meanwhile. Receive each micro-batch into memory of its own",
    "added up": "this rank sends back gradients that grow from micro-batch to micro-batch: the inputs of all of them are "
    "one leaf, whose .grad adds up. Each micro-batch needs an input of its own",
}


class Faults(NamedTuple):
    share: str = ""  # "mean", "sum": of a micro-batch in the loss
    again: str = ""  # "an m-th", "share": multiplied in once more on each rank before the last
    kept: str = ""  # "all", "forward": which messages one buffer receives
    grown: str = ""  # "grown": x.grad is that of all micro-batches so far

    def cause(self):
        names = [self.kept and "one buffer", self.again and "twice", self.grown and "added up", self.share]
        return CAUSES[next(name for name in names if name)]


def combinations():
    """Those of one fault first."""
    every = product(("", "mean", "sum"), ("", "an m-th", "share"), ("", "all", "forward"), ("", "grown"))
    found = [Faults(*one) for one in every if any(one)]
    return sorted(found, key=lambda faults: sum(map(bool, faults)))


def simulated(case, rank, step, faults=Faults(), only=None):
    """A rank's gradients {name: tensor}; the loss is 'loss'. only: of one micro-batch."""
    n, (inputs, targets) = len(case["depths"]), micro_batches(case, step)
    stages, samples = [stage_of(case, r) for r in range(n)], sum(map(len, inputs))
    true = [len(x) / samples for x in inputs]
    share = {"": true, "mean": [1 / len(inputs)] * len(inputs), "sum": [1.0] * len(inputs)}[faults.share]
    again = {"": [1.0] * len(inputs), "an m-th": [1 / len(inputs)] * len(inputs), "share": true}[faults.again]
    buffers, kept, loss = [torch.empty_like(inputs[0]) for _ in range(n)], [], 0.0
    for i, x in enumerate(inputs):
        kept.append([])
        for r, stage in enumerate(stages):
            x = x.detach().clone().requires_grad_()
            y = stage(x)
            kept[i].append((x, y))
            buffers[r][: len(x)] = x.detach()
            x = y
        loss += share[i] * F.mse_loss(y, targets[i])
        kept[i][-1] = kept[i][-1][0], share[i] * F.mse_loss(y, targets[i])
    grown = [torch.zeros_like(inputs[0]) for _ in range(n)]
    for i in range(len(inputs)) if only is None else [only]:
        gradient = None
        for r in reversed(range(n)):
            x, y = kept[i][r]
            if faults.kept == "all" and r < n - 1:
                buffers[r][: len(x)] = gradient
            if faults.kept and r > 0:
                x.data.copy_(buffers[r][: len(x)])
            y.backward(gradient if r == n - 1 else again[i] * gradient)
            grown[r][: len(x)] += x.grad
            gradient = grown[r][: len(x)].clone() if faults.grown else x.grad
    return {name: value.grad for name, value in stages[rank].named_parameters()} | {"loss": loss.item()}
