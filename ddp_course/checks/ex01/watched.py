"""What the answers are tested with: a network and an optimizer that record how they are
used.
"""

import numbers
import weakref
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

from ddp_course.checks.claims import Claim


class Watched(nn.Module):
    """A linear network that records how it is used. Takes (b, 1, 28, 28) and, like
    lesson 1's network, nothing else; returns log-probabilities (b, 10).

    calls: 'forward', 'backward' and 'zero_grad', in the order of the calls. modes and
    recording: whether the network and its dropout were in training mode at each forward,
    and whether autograd recorded that forward. kept: of how many forwards before this one
    the activations are in memory. marks: the first pixel of each sample, by forward.
    bytes: of the images, by forward.
    """

    def __init__(self, weight, dropout=0.0):
        super().__init__()
        self.dropout, self.linear = nn.Dropout(dropout), nn.Linear(784, 10, bias=False)
        self.linear.weight = nn.Parameter(weight.clone())
        self.calls, self.modes, self.recording = [], [], []
        self.kept, self.marks, self.bytes = [], [], []
        self.activations = []
        self.linear.weight.register_post_accumulate_grad_hook(lambda _: self.calls.append("backward"))

    def forward(self, images):
        if images.shape[1:] != (1, 28, 28):
            shape = tuple(images.shape)
            raise ValueError(f"the model takes images (b, 1, 28, 28), not {shape}")
        self.calls.append("forward")
        self.modes.append([self.training, self.dropout.training])
        self.recording.append(torch.is_grad_enabled())
        self.kept.append(sum(earlier() is not None for earlier in self.activations))
        self.marks.append(images[:, 0, 0, 0].clone())
        self.bytes.append(images.nbytes)
        activations = self.dropout(images.flatten(1)).clone()  # which autograd saves for backward
        self.activations.append(weakref.ref(activations))
        return F.log_softmax(self.linear(activations), dim=1)

    def zero_grad(self, set_to_none=True):
        self.calls.append("zero_grad")
        super().zero_grad(set_to_none)


class WatchedSGD(torch.optim.SGD):
    """SGD that adds its own 'zero_grad' and 'step' to the calls of a Watched
    network.
    """

    def __init__(self, model, lr, momentum=0.0):
        super().__init__(model.parameters(), lr=lr, momentum=momentum)
        self.calls = model.calls

    def step(self, closure=None):
        self.calls.append("step")
        return super().step(closure)

    def zero_grad(self, set_to_none=True):
        self.calls.append("zero_grad")
        super().zero_grad(set_to_none)


@contextmanager
def noting_state(model):
    """A dict that tells, after the block, what it has left behind for the caller. The
    next block records gradients again.
    """
    left = {}
    yield left
    left["records"] = torch.is_grad_enabled()
    left["trainable"] = all(weight.requires_grad for weight in model.parameters())
    left["training"] = model.training and model.dropout.training
    left["any_training"] = model.training or model.dropout.training
    torch.set_grad_enabled(True)


def left_behind(call, left):
    """Claims that a call has not switched off gradients for whatever comes next."""
    yield Claim(
        f"whether autograd records after {call}", left["records"], True,
        "gradients stay switched off after the call, and the next training would fail: `with torch.no_grad():` switches "
        "them on again at its end",
        told="yes, as before", shown="no",
    )  # fmt: skip
    yield Claim(
        f"requires_grad of the parameters after {call}", left["trainable"], True,
        "the caller may want to train the model again: do not change requires_grad; `with torch.no_grad():` is enough",
        told="True, as before", shown="False",
    )  # fmt: skip


def number(value):
    """A number of any kind, including NumPy's, as a float; anything else unchanged."""
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else value


def told(values):
    """What an answer returned, in a form for the learner to read."""
    if values is None:
        return "nothing (None)"
    if isinstance(values, torch.Tensor) and values.numel() == 1:
        return str(values)
    if isinstance(values, list) and any(isinstance(value, torch.Tensor) for value in values):
        return f"a list of {len(values)}, the first {values[0]!r:.300}"
    if isinstance(values, list) and values and all(isinstance(value, float) for value in values):
        return "[" + ", ".join(f"{value:.4g}" for value in values) + "]"
    return values
