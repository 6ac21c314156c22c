"""What question 6 claims of a rank that has fine-tuned."""

import torch

from ddp_course.checks.claims import Between, Claim
from ddp_course.checks.ex11.tuning_cases import EPOCHS, STEPS, adapters_of, base_of, best_epoch, combinations, trained
from ddp_course.checks.recording import waited

DIGITS, OF_LOSSES = 4, 1.7  # fp32; and merged weights are rounded to bf16
NAMES = ["A of layer 0", "B of layer 0", "A of layer 1", "B of layer 1"]
CAUSES = {
    "start": "this rank has trained another A than the others: the base is the same on all ranks, but each has drawn A for "
    "itself. All ranks start with the adapters of rank 0",
    "sum": "the gradients were summed over the ranks: their mean is needed",
    "small": "the gradients were divided by the number of ranks twice",
    "own": "each rank has trained with its own gradients only: their mean over the ranks is needed",
    "kept": "the gradients of earlier steps are still in .grad: set them to None or zero after each step",
}
DRIFT = (
    "this weight has been rounded. In bf16, adding a number and subtracting it again does not give the old weight back, so "
    "each epoch trains on another base: keep a copy of the weight and restore it, or evaluate without merging"
)
ROUNDED = (
    "the base was another one in training: merging has rounded the weights, and they were not restored before the next "
    "epoch"
)
STEP = (
    "all ranks start with the adapters of rank 0, and each step is one of plain SGD, with the mean of the ranks' gradients: "
    "compare them with those of one process, step by step"
)
DIVERGED = (
    "training has diverged, because its steps are too long. Were gradients summed over the ranks, where their mean is "
    "needed, or are those of earlier steps still in .grad?"
)
LOSSES = {
    "own": "this is the loss on this rank's own held-out samples, so each rank may choose another epoch: sum the errors, "
    "and the numbers of samples, over all ranks",
    "means": "this is the mean of the ranks' means. Ranks have different numbers of held-out samples: sum the errors over "
    "all ranks, and divide by the number of all",
    "sum": "this is the sum of the ranks' means: sum the errors over all ranks, and divide by the number of all",
    "base": "this is the loss of the base, without adapters",
    "twice": "the adapters count twice here: they are merged into the weight and added as well",
}


def claims(case, right, rank, of_ranks):
    mine, call = of_ranks[rank], described(case)
    yield waited(call, mine)
    yield from frozen(case, call, mine)
    yield from learnt(case, right, rank, call, mine["adapters"])
    yield from evaluated(right.losses, rank, call, mine["losses"])
    yield from chosen(right, rank, call, mine["best"])
    yield from traffic(case, call, mine["bytes"])


def described(case):
    return (
        f"fine_tune on {case['n']} ranks, {EPOCHS} epochs of {STEPS} batches, with {case['held out']} held-out samples"
    )


def frozen(case, call, mine):
    """The base is as it was, bit for bit, and nothing is merged."""
    for layer, (got, base) in enumerate(zip(mine["weights"], base_of(case))):
        what = f"{call}: weight of layer {layer}"
        yield Claim(
            what, str(got.dtype), "torch.bfloat16", "the base stays in bf16: in another type it takes more memory"
        )
        near = got.shape == base.shape and (got.double() - base.double()).abs().max() < 0.1
        A, B = (value.double() for value in mine["adapters"][2 * layer : 2 * layer + 2])
        merged = near_to(got, base.double() + case["scale"] * B @ A)
        cause = "the base is frozen: it must be the same afterwards, bit for bit"
        if merged:
            cause = "the adapters are still merged into this weight: the base must be as it was, bit for bit"
        elif near:
            cause = DRIFT
        yield Claim(
            what, torch.equal(got, base), True, cause, told="the weight of the base, bit for bit",
            shown="the same numbers" if torch.equal(got, base) else f"{int((got != base).sum()):,} other numbers",
        )  # fmt: skip
    for layer, seen in enumerate(mine["in training"]):
        what = f"{call}: weight of layer {layer} in the training steps"
        types = sorted({*seen["types"]} - {"torch.bfloat16"})
        yield Claim(what, types, [], "the base stays in bf16 in training, too: in another type it takes more memory",
                    told="torch.bfloat16", shown=", ".join(types))  # fmt: skip
        yield Claim(what, seen["others"], 0, ROUNDED, told="the weight of the base, bit for bit",
                    shown=f"{seen['others']:,} other numbers")  # fmt: skip
    yield Claim(f"{call}: layer.merged afterwards", mine["merged"], [False, False],
                "the weights are those of the base again, so `merged` has to be False: otherwise the adapters have no "
                "effect")  # fmt: skip


def near_to(got, expected):
    return got.shape == expected.shape and bool(((got.double() - expected).abs() < 0.02).all())


def learnt(case, right, rank, call, got):
    """The adapters in the network are those after the last epoch."""
    best = right.epochs[best_epoch(right.losses["whole"])]
    begin = adapters_of(case, rank)
    for place, expected in enumerate(right.epochs[-1]):

        def mistakes(place=place):
            for faults in combinations():
                yield trained(case, rank, faults)[-1][place], cause_of(faults)
            yield begin[place], "it has not been trained"
            yield best[place], "the network keeps the adapters of the last epoch; those of the best one are returned"

        yield Claim(
            f"{call}: {NAMES[place]} in the network", got[place], expected,
            DIVERGED if diverged(got[place], expected) else STEP,
            mistakes, DIGITS, mistake_digits=3.3,
        )  # fmt: skip


def diverged(got, expected):
    """Whether numbers are very large, or none; their digits then say little."""
    return not (got.abs() < 10 * expected.abs().max()).all()


def cause_of(faults):
    if faults.start:
        return CAUSES["start"]
    return CAUSES.get(faults.gradient, ROUNDED)


def evaluated(losses, rank, call, got):
    kind = f"a list of {EPOCHS} losses"
    is_list = isinstance(got, list) and len(got) == EPOCHS
    yield Claim(f"{call}: the losses that it returns", is_list, True,
                "return two lists: the best epoch's adapters, and the held-out loss after each epoch",
                told=kind, shown="something else")  # fmt: skip
    looks = [(losses["own"][rank], LOSSES["own"]), *((losses[name], LOSSES[name]) for name in list(LOSSES)[1:])]
    yield Claim(
        f"{call}: held-out losses", got, losses["whole"], "after each epoch, take the mean of the squared errors over the "
        "held-out samples of all ranks, with the adapters of that epoch", looks, OF_LOSSES, mistake_digits=1.4,
        told=in_digits(losses["whole"]), shown=in_digits(got),
    )  # fmt: skip


def in_digits(losses):
    return ", ".join(f"{value:.3f}" for value in losses)


def chosen(right, rank, call, got):
    """The returned adapters are those of the epoch with the lowest loss."""
    epochs, losses = right.epochs, right.losses
    best = best_epoch(losses["whole"])
    yield Claim(f"{call}: what it returns first", isinstance(got, list) and len(got) == len(NAMES), True,
                "return the best epoch's adapters as a list of tensors: A and B of each layer, in order",
                told=f"a list of {len(NAMES)} tensors", shown="something else")  # fmt: skip
    why = {
        EPOCHS
        - 1: "these are the adapters of the last epoch, not of the best one. Training goes on in the same tensors, "
        "so keep a clone",
        last_fall(
            losses["whole"]
        ): "these are the adapters of an epoch that is better than the one before it. The best one "
        "is better than all others",
        best_epoch(losses["own"][rank]): "these are the adapters of the epoch that is the best one on this rank's own "
        "held-out samples",
    }
    for place, name in enumerate(NAMES):
        looks = [
            (epochs[epoch][place], why.get(epoch, f"these are the adapters after epoch {epoch}, whose held-out loss is not "
                                           "the lowest"))
            for epoch in range(EPOCHS)
        ]  # fmt: skip
        yield Claim(
            f"{call}: {name} that it returns", got[place], epochs[best][place],
            f"return A and B as they were after epoch {best} (the first is 0), which has the lowest held-out loss", looks,
            DIGITS,
        )  # fmt: skip


def last_fall(losses):
    """The last epoch whose loss is below that of the one before it, or the first."""
    return max([0, *(epoch for epoch in range(1, EPOCHS) if losses[epoch] < losses[epoch - 1])])


def traffic(case, call, sent):
    """A step sends the adapters' gradients once; the start may send the whole network."""
    adapters = sum(value.nbytes for value in adapters_of(case, 0))
    start = 2 * (adapters + sum(weight.nbytes for weight in base_of(case)))
    most = start + EPOCHS * STEPS * (adapters + 64) + EPOCHS * 256
    yield Claim(
        f"{call}: bytes that a rank sends", sent, Between(0, most),
        "a step has to send each gradient of an adapter once, and an evaluation two numbers: neither weights nor samples "
        "need to travel after the start",
        told=f"at most {most:,}: the network at the start, in each step the adapters' gradients once",
    )  # fmt: skip
