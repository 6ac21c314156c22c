"""What an answer does with the micro-batches, with the model, and with what it was given."""

import torch

from ddp_course.judge.verdict import Wrong


def follow(model):
    """A list that gets an entry for each later forward and backward of the network in a
    DDP model.

    what: 'forward' or 'backward'; size: of the batch; alone: whether this was inside
    no_sync.
    """
    events = []

    def forward(network, inputs, output):
        def happens(what):
            alone = not model.require_backward_grad_sync
            events.append({"what": what, "size": len(output), "alone": alone})

        happens("forward")
        if output.requires_grad:
            output.register_hook(lambda gradient: happens("backward"))

    model.module.register_forward_hook(forward)
    return events


def only(what, events):
    return [event for event in events if event["what"] == what]


def judge_memory(checked, where, window, events):
    """Raise Wrong if a rank had several micro-batches in memory at once; all
    micro-batches of the window have items.
    """
    expected = "forward and backward of one micro-batch, then of the next"
    forwards, largest = (only("forward", events), max(len(inputs) for inputs, _ in window))
    for event in forwards:
        if event["size"] > largest:
            cause = "micro-batches were joined, which takes too much memory: process them one by one"
            got = f"a forward of {event['size']} at once, but the largest micro-batch has {largest}"
            raise Wrong(checked, rank=where, expected=expected, got=got, cause=cause)
    if len(forwards) > 1 and events[: len(forwards)] == forwards:
        cause = (
            "a forward keeps its activations until its backward, so here the activations of all micro-batches are "
            "in memory: call "
        )
        cause += "backward for each micro-batch before the forward of the next"
        got = f"{len(forwards)} forwards, and only then backward"
        raise Wrong(checked, rank=where, expected=expected, got=got, cause=cause)


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


def judge_changes(checked, where, texts):
    for text in texts:
        raise Wrong(f"{text}, after {checked}", rank=where, expected="as before the call", got="changed",
                    cause=CAUSES_OF_CHANGE[text])  # fmt: skip


def joined(tensors):
    """Their values as one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def agree(got, expected, tolerance=1e-5):
    """Whether two tensors are equal up to the rounding of a factor in 32 bits."""
    return got.shape == expected.shape and (got - expected).norm() <= tolerance * expected.norm()


def the_likely(looks, got, otherwise):
    """The first cause that has a value like `got`. looks: pairs of values, a list, and
    their cause.
    """
    return next((cause for values, cause in looks if any(agree(got, value) for value in values)), otherwise)
