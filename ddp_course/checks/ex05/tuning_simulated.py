"""What fine-tuning gives, right or with faults, in one process."""

import copy
from collections import namedtuple
from itertools import product

import torch
from torch import nn
from torch.nn import functional as F

from ddp_course.checks.ex05.tuning_cases import WIDTH, batches_of, network_of, test_set
from ddp_course.checks.training import descend, gradients_of, state

CAUSES = {
    "never again": "from the second epoch on, the BatchNorm of the head has normalised with its running statistics: "
    "model.eval() is in force until model.train() is called, so call that at the start of each epoch",
    "never eval": "the test set has been normalised with its own statistics, and has changed the running ones: evaluate in "
    "eval mode",
    "always eval": "the BatchNorm of the head was in eval mode in training: it is trained, so put it into train mode",
    "own statistics": "each rank has normalised with the statistics of its own batch: convert the BatchNorm of the head",
    "new": "the new SyncBatchNorm begins with a weight of 1, a bias of 0, statistics of its own and other options: keep the "
    "parameters, buffers and options of the layer that it replaces",
    "options": "the new SyncBatchNorm has the default eps and momentum: keep those of the layer that it replaces",
    "train mode": "the backbone has normalised with the statistics of the batch: in eval mode it uses its running ones",
    "sum": "the steps are larger by the number of ranks: the loss is a mean over the samples, and DDP averages over ranks",
    "added up": "the gradients of all steps are added up: set them to None after each step",
}
CAUSES["train mode, synchronised"] = CAUSES["train mode"]
CHOICES = {
    "modes": ("", "never again", "never eval", "always eval"),  # of the head
    "norm": ("", "own statistics"),  # of each rank
    "layer": ("", "new", "options"),  # that replaces the BatchNorm
    "backbone": ("", "train mode", "train mode, synchronised"),
    "gradient": ("", "sum", "added up"),  # over the ranks; over the steps
}
Faults = namedtuple("Faults", CHOICES, defaults=[""] * len(CHOICES))


def cause(faults):
    return CAUSES[next(filter(None, faults))]


def combinations():
    """Those of one fault, and then of two."""
    found = [Faults(*one) for one in product(*CHOICES.values())]
    return [one for many in (1, 2) for one in found if sum(map(bool, one)) == many]


def tuned(case, faults=Faults()):
    """The state of the network {name: tensor}, and the loss of the test set after each
    epoch.
    """
    backbone, head = network_of(case)
    backbone.requires_grad_(False).eval()
    frozen = copy.deepcopy(backbone).train(bool(faults.backbone))  # only what the head gets from it counts
    if faults.layer:
        old, head[1] = head[1], nn.BatchNorm1d(WIDTH).double()
    if faults.layer == "options":
        head[1].load_state_dict(old.state_dict())
    losses = []
    for number, epoch in enumerate(batches_of(case)):
        head.train(not (faults.modes == "always eval" or (faults.modes == "never again" and number > 0)))
        for parts in epoch:
            if faults.backbone == "train mode, synchronised":
                parts = joined(parts)
            features = [(frozen(inputs), labels) for inputs, labels in parts]
            backward(head, features if faults.norm else joined(features))
            gradients = gradients_of(head)
            descend(head, case["lr"] * (case["ranks"] if faults.gradient == "sum" else 1))
            if faults.gradient == "added up":
                for name, parameter in head.named_parameters():
                    parameter.grad = gradients[name]
        head.train(faults.modes == "never eval")
        inputs, labels = test_set(case)
        with torch.no_grad():
            # in train mode, all ranks join their test sets
            copies = 1 if faults.norm else case["ranks"]
            outputs = head(backbone(inputs).repeat(copies, 1))
            losses.append(F.cross_entropy(outputs, labels.repeat(copies)).item())
    return state(nn.Sequential(backbone, head)), losses


def joined(parts):
    """One pair in the place of one per rank."""
    return [tuple(map(torch.cat, zip(*parts)))]


def backward(head, parts):
    """The gradient of the mean of the parts' losses. The first part's running statistics
    stay, as DDP sends those of rank 0 to all ranks.
    """
    before = {name: value.clone() for name, value in head.named_buffers()}
    for features, labels in reversed(parts):
        for name, value in head.named_buffers():
            value.copy_(before[name])
        (F.cross_entropy(head(features), labels) / len(parts)).backward()
