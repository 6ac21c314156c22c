"""What an answer does to a network's gradients, and what it sends meanwhile; and the
claims that each such answer has to meet.
"""

from contextlib import contextmanager

import torch

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import Claim, alike
from ddp_course.checks.training import gradients_of, state
from ddp_course.checks.works import noting_works


@contextmanager
def recording(network):
    """A dict of what the block did to a network, filled when the block ends.

    `log`, that of a Watch, and `works`, the NotedWorks, grow meanwhile; they stay on the
    rank.
    """
    before = state(network)
    views = {
        name: parameter.grad.view(-1) for name, parameter in network.named_parameters() if parameter.grad is not None
    }
    with CheckedWatch() as watch, noting_works() as works:
        yield (record := {"log": watch.log, "works": works})
    after = gradients_of(network)
    record |= {
        "gradients": after,
        "moved": changed(before, network.state_dict()),
        "replaced": changed(views, {name: flat(after[name]) for name in views}),
        "sent": [entry["name"].removesuffix("_coalesced") for entry in watch.log],
        "bytes": sum(entry["bytes"] for entry in watch.log),
        "forgotten": sum(not work.waited for work in works),
    }


def flat(gradient):
    return gradient if gradient is None else gradient.view(-1)


def changed(before, after):
    """The names whose tensors are not the same any more, bit for bit."""
    names = (name for name, value in before.items() if after[name] is not None)
    return [name for name in names if not torch.equal(before[name], after[name])]


def wraps(call, record):
    return Claim(
        call, record["module"], True, "keep the network: self.module = module, in __init__",
        told="the wrapped network as .module", shown="no such attribute",
    )  # fmt: skip


def unmoved(call, record):
    """The claim that no parameter and no buffer has changed."""
    return Claim(
        f"{', '.join(record['moved'][:1]) or 'the parameters'} after {call}", record["moved"], [],
        "only the gradients should be averaged, so an answer must change only parameter.grad: the optimizer changes the "
        "parameters",
        told="unchanged", shown="changed",
    )  # fmt: skip


def waited(call, record):
    return Claim(
        f"{call}: all-reduces without a wait()", record["forgotten"], 0,
        "each all_reduce(..., async_op=True) only starts the operation: the sums may be incomplete until work.wait() has "
        "returned, so keep all works, and wait for each",
    )  # fmt: skip


def in_place(call, record):
    return Claim(
        f"gradients after {call}, seen through views that were made before", record["replaced"], [],
        "parameter.grad is now another tensor: change the given one in place, with /=, div_ or copy_",
        told="the mean, in the memory of the gradient", shown="the old numbers",
    )  # fmt: skip


def started_alike(call, record, start, buffers=("scale",)):
    """Claims that a rank starts with the parameters, and the buffers, of rank 0."""
    for name in sorted(start, key=lambda name: name in buffers):
        kind = "buffer" if name in buffers else "parameter"
        yield Claim(
            f"{kind} {name} after {call}, with a different one on each rank before", record["start"][name], start[name],
            f"the ranks must start from the same parameters and buffers: broadcast every {kind} from rank 0",
        )  # fmt: skip


def mean_gradient(what, got, own, rank, digits=10, more=()):
    """The claim that `got` is the mean of the ranks' own gradients.

    own: that of each rank, in 64 bits, or None for a frozen parameter. more: mistakes
    beside the usual ones.
    """
    if own[0] is None:
        frozen = "this parameter is frozen and has no gradient: leave it out"
        return Claim(what, got, None, frozen, told="no gradient (None)")
    n, total = len(own), sum(own)

    def mistakes():
        return [
            *more,
            (total, "it is the sum over the ranks: divide by the number of ranks, once"),
            (total / n**2, "it was divided by the number of ranks twice"),
            (own[rank], "it is still this rank's own gradient: nothing was averaged, or the mean was not copied back"),
            (own[rank] / n, "it was divided, but not summed over the ranks"),
            (own[0], "it is rank 0's gradient: a broadcast is not a mean"),
            (0 * total, "it is zero"),
        ]  # fmt: skip

    otherwise = (
        "did each rank send each gradient exactly once, complete, divide it once, wait for it, and copy it back to its own "
        "parameter?"
    )  # fmt: skip
    if not isinstance(got, torch.Tensor) or got.shape != total.shape:
        otherwise = "a gradient has the shape of its parameter"
    elif alike(got, total / n, 0.01):
        otherwise = "the numbers have lost digits on their way: keep the precision of the gradients"
    return Claim(what, got, total / n, otherwise, mistakes, digits)
