"""What an answer does with the micro-batches, with the model, and with what it was given."""

import itertools

import torch

from ddp_course.checks.claims import Claim


def follow(model):
    """A list that gets an entry for each later forward and backward of the network in a
    DDP model.

    what: 'forward' or 'backward'; size: of the batch; kept: whether a forward keeps its
    activations for a backward; alone: whether this was inside no_sync.
    """
    events = []

    def forward(network, inputs, output):
        def happens(what):
            alone = not model.require_backward_grad_sync
            events.append({"what": what, "size": len(output), "kept": output.requires_grad, "alone": alone})

        happens("forward")
        if output.requires_grad:
            output.register_hook(lambda gradient: happens("backward"))

    model.module.register_forward_hook(forward)
    return events


def only(what, events):
    return [event for event in events if event["what"] == what]


def one_by_one(call, window, events):
    """Claims that a rank never had several micro-batches in memory; all micro-batches of
    the window have items.
    """
    expected = "forward and backward of one micro-batch, then of the next"
    sizes, largest = [event["size"] for event in only("forward", events)], max(len(inputs) for inputs, *_ in window)
    yield Claim(
        call, max(sizes, default=0), range(largest + 1), "micro-batches were joined, which takes too much memory: process "
        "them one by one", told=expected,
        shown=f"a forward of {max(sizes, default=0)} at once, but the largest micro-batch has {largest}",
    )  # fmt: skip
    most = most_in_memory(events)
    which = "all" if most == len(sizes) else str(most)
    yield Claim(
        call, most, range(2), f"a forward keeps its activations until its backward, so here the activations of {which} "
        "micro-batches are in memory: call backward for each micro-batch before the forward of the next",
        told=expected, shown=f"{most} forwards, and only then backward",
    )  # fmt: skip


def most_in_memory(events):
    """Of how many micro-batches the activations were in memory at the same time."""
    steps = [1 if event["what"] == "forward" else -1 for event in events if event["kept"]]
    return max(itertools.accumulate(steps), default=0)


def copies_of(window):
    return [[tensor.clone() for tensor in batch] for batch in window]


def changed(window, before, model):
    """What an answer has changed and not put back, in words.

    before: `copies_of` the window.
    """
    pairs = [pair for batches in zip(window, before) for pair in zip(*batches)]
    found = {
        "the micro-batches": not all(torch.equal(*pair) for pair in pairs),
        "whether gradients are recorded": not torch.is_grad_enabled(),
        "the mode of the model": not all(part.training for part in model.modules()),
        "model.require_backward_grad_sync": not model.require_backward_grad_sync,
    }
    return [text for text, is_changed in found.items() if is_changed]


CAUSES_OF_CHANGE = {
    "the micro-batches": "they belong to the caller, who may use them again in the next epoch: masked_fill_, "
    "clamp_ and assignments to labels[...] write into the given tensors",
    "whether gradients are recorded": "this setting belongs to the whole program: change it for a block at most, as "
    "`with torch.no_grad():` does",
    "the mode of the model": "the model was in training mode and must be so afterwards",
    "model.require_backward_grad_sync": "no_sync has to end before the function returns: otherwise later backward "
    "passes send nothing",
}  # fmt: skip


def unchanged(call, texts):
    """Claims that nothing of what `changed` tells has happened."""
    for text, cause in CAUSES_OF_CHANGE.items():
        yield Claim(f"{text}, after {call}", text in texts, False, cause, told="as before the call", shown="changed")


def joined(tensors):
    """Their values as one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])
