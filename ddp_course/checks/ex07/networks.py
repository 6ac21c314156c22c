"""The networks that the answers are tested with, and which sample went through them."""

import torch
from torch import nn

from ddp_course.checks.claims import Claim
from ddp_course.checks.samples import CLASSES, WIDTH
from ddp_course.checks.training import fill

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


def inputs_unchanged(checked, names):
    """Claims that an answer has not changed the tensors that the caller gave it."""
    for name in names:
        yield Claim(f"{name} after {checked}", "changed", "unchanged", f"{name} belongs to the caller, who may use it "
                    "again: work on a copy", told="as before", shown="other numbers")  # fmt: skip


def in_words(returned):
    return "None" if returned is None else f"a {type(returned).__name__}"
