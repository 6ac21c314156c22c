"""What question 4 claims of two steps of a pipeline on a rank."""

from functools import partial

import torch

from ddp_course.checks.claims import Claim
from ddp_course.checks.ex18.step_cases import described, micro_batches
from ddp_course.checks.ex18.step_simulated import Faults, combinations, simulated

SIZE = 8  # bytes of a number in float64
NAN = (
    "there are NaNs: the tensor of an irecv has its numbers only after wait(), and was used before that. Until then, "
    "anything may be in it; in this check it is NaN"
)
FOLLOW = (
    "is each micro-batch's gradient used once, by its own micro-batch, with its share of the samples? Follow it from the "
    "loss, rank by rank"
)


def is_nan(got):
    return isinstance(got, float | torch.Tensor) and bool(torch.as_tensor(got).isnan().any())


def claims(case, rank, of_ranks):
    last, before = len(of_ranks) - 1, None
    for step, words in enumerate(("", ", in the second step")):
        seen, call = of_ranks[rank][step], described(case) + words
        yield Claim(f"{call}: the parameters", seen["moved"], False, "change only the gradients", shown="changed")
        right = simulated(case, rank, step)
        yield from losses(case, rank, step, call, seen["loss"], right["loss"], last)
        for name in reversed([name for name in right if name != "loss"]):
            own, old = right[name], before[name] if before else 0
            yield Claim(
                f"{call}: the gradient of {name}", seen["gradients"].get(name), old + own,
                NAN if is_nan(seen["gradients"].get(name)) else FOLLOW,
                partial(mistakes, case, rank, step, name, own, old), scale=1e-3,
            )  # fmt: skip
        before = {name: own + (before[name] if before else 0) for name, own in right.items()}
        yield from traffic(case, rank, step, call, seen["sent"], last)


def works(case, rank, of_ranks):
    """What is claimed first of all ranks: with these faults, the numbers say little."""
    for step, words in enumerate(("", ", in the second step")):
        seen, call = of_ranks[rank][step], described(case) + words
        yield Claim(f"{call}: inputs and targets", seen["given"], False, "do not change them",
                    told="as they were", shown="changed")  # fmt: skip
        yield Claim(f"{call}: the lists of inputs and targets", seen["listed"], True,
                    "do not change them: the caller uses them again", told="as they were", shown="changed")  # fmt: skip
        yield Claim(
            f"{call}: tensors that changed before their isend was waited for", seen["changed"], 0,
            "isend only starts: it may read its tensor at any time until wait() has returned. Here the tensor was written "
            "to again before that, so the other rank may get the numbers of a later message: send each from its own memory",
        )  # fmt: skip
        yield Claim(
            f"{call}: isend or irecv without a wait()", seen["forgotten"], 0,
            "keep each work, and wait for it: for an irecv before its tensor is used, for an isend before the step returns",
        )  # fmt: skip


def losses(case, rank, step, call, got, right, last):
    if rank < last:
        yield Claim(
            f"{call}: what this rank returns", got, None, "only the last rank knows the loss: return None elsewhere"
        )
        return
    number, shares = case["number"], [Faults(share="mean"), Faults(share="sum")]

    def wrong():
        found = [(simulated(case, rank, step, faults)["loss"], faults.cause()) for faults in shares]
        return [
            (right, "some digits are lost: keep float64 for messages and loss"),
            *found,
            (right / number, "the loss was divided by the number of micro-batches once more"),
        ]

    yield Claim(
        f"{call}: the loss", got, right,
        NAN if is_nan(got) else "the loss is F.mse_loss of the whole batch: a mean over all its samples, of all "
        "micro-batches. Return a float or a tensor of one number", wrong,
    )  # fmt: skip


def mistakes(case, rank, step, name, own, old):
    total = old + own
    yield total, "some digits are lost: keep float64 for gradients and messages"
    if step:
        yield own, "the gradients that were there before are gone: a step adds to them, and the caller resets them"
    yield old + 0 * own, "this step has added nothing here: the gradient does not come to this rank, or is lost on it"
    yield None, "this rank has no gradient: is the received input a leaf that requires grad? Was backward called here?"
    for faults in combinations():
        value = simulated(case, rank, step, faults)[name]
        cause = faults.cause()
        yield value + old, cause
        if step:
            yield simulated(case, rank, 0, faults)[name] + value, cause
    yield old + case["number"] * own, "this is the gradient of the sum of the micro-batches' losses"
    for i in range(case["number"]):
        alone = simulated(case, rank, step, only=i)[name]
        cause = f"this is the gradient of micro-batch {i} alone: do the others add to it, or is it reset in the loop?"
        yield old + alone, cause
        yield alone, cause
    yield 2 * own + old, "each micro-batch counts twice here"


def traffic(case, rank, step, call, got, last):
    sizes = [x.numel() * SIZE for x in micro_batches(case, step)[0]]
    to = [r for r in (rank - 1, rank + 1) if 0 <= r <= last]
    yield Claim(
        f"{call}: what this rank sends", got, sorted(["send", r, size] for r in to for size in sizes),
        "for each micro-batch, its activations go to the next rank and their gradient to the previous one, each as one "
        "message, and nothing else travels: all ranks work at the same time only if micro-batches travel one by one",
        told=f"{len(sizes)} messages of {sizes[0]} bytes" + f", the last of {sizes[-1]}," * (sizes[0] != sizes[-1])
        + f" to each of the ranks {to}",
        shown="; ".join(f"{name} of {size} bytes" + f" to rank {r}" * (r >= 0) for name, r, size in got)[:200] or "nothing",
    )  # fmt: skip
