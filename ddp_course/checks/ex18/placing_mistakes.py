"""What people take for a stage that fits, or for the best placement, in question 2."""

import math

from ddp_course.checks.ex18.placing_best import filled, of_small_squares, placed, slowest_of, stages_of


def times(number):
    """Whether a stage fits, if a rank kept activations of `number(rank, ranks)` micro-batches."""
    return lambda stage, rank, ranks, memory: total(stage, 1) + number(rank, ranks) * total(stage, 2) <= memory


def total(stage, part):
    return sum(layer[part] for layer in stage)


fits = times(lambda rank, ranks: ranks - rank)  # as it is
FITS = {  # cause: what somebody takes for a stage that fits
    "the memory plays no part here: weights + (ranks - rank) * activations have to fit on each rank":
        lambda stage, rank, ranks, memory: True,
    "each rank keeps one micro-batch here: in 1F1B, rank 0 keeps as many as there are ranks": times(lambda rank, ranks: 1),
    "the activations play no part here": times(lambda rank, ranks: 0),
    "each rank keeps one micro-batch less here: ranks - rank, and not ranks - 1 - rank":
        times(lambda rank, ranks: ranks - 1 - rank),
    "the first rank keeps the most, and the last one the least: ranks - rank, and not rank + 1":
        times(lambda rank, ranks: rank + 1),
    "all ranks keep as many micro-batches as the first one here: rank r keeps only ranks - r":
        times(lambda rank, ranks: ranks),
    "this is one micro-batch too many: rank r keeps ranks - r": times(lambda rank, ranks: ranks - rank + 1),
    "the last rank keeps no activations here: it keeps those of one micro-batch":
        times(lambda rank, ranks: ranks - rank if rank < ranks - 1 else 0),
    "the memory of the last rank plays no part here":
        lambda stage, rank, ranks, memory: rank == ranks - 1 or fits(stage, rank, ranks, memory),
    "only the memory of rank 0 counts here: each stage has to fit":
        lambda stage, rank, ranks, memory: rank > 0 or fits(stage, rank, ranks, memory),
    "a stage that needs exactly `memory` fits: <=, not <":
        lambda stage, rank, ranks, memory: fits(stage, rank, ranks, memory - 1),
    "weights and activations are swapped here: a layer is (time, weights, activations)":
        lambda stage, rank, ranks, memory: fits([(t, a, w) for t, w, a in stage], rank, ranks, memory),
    "the weights count once, not once per micro-batch":
        lambda stage, rank, ranks, memory: (ranks - rank) * (total(stage, 1) + total(stage, 2)) <= memory,
    "the activations of all layers of a stage add up: here, only the largest counts":
        lambda stage, rank, ranks, memory:
            total(stage, 1) + (ranks - rank) * max(activations for *_, activations in stage) <= memory,
    "the activations of all layers of a stage add up: here, only those of its first layer count":
        lambda stage, rank, ranks, memory: total(stage, 1) + (ranks - rank) * stage[0][2] <= memory,
}  # fmt: skip


def form_of(got, ranks):
    if not isinstance(got, list) or any(type(size) is not int for size in got):
        return "no list of whole numbers"
    return "" if len(got) == ranks and min(got) >= 1 else "not a stage for each rank"


def is_best(layers, ranks, memory, got, fits=fits):
    """Whether what somebody gave is right, if a stage fitted where fits() is true."""

    def cost(rank, i, j):
        return total(layers[i:j], 0) if fits(layers[i:j], rank, ranks, memory) else math.inf

    time, sizes = placed(len(layers), ranks, cost, grows=False)
    if got == "ValueError" or sizes is None:
        return got == "ValueError" and sizes is None
    stages = stages_of(layers, got)
    return slowest_of(stages) == time and all(fits(stage, r, ranks, memory) for r, stage in enumerate(stages))


def like(function):
    """Whether what somebody gave is as fast as what this function gives."""

    def same(layers, ranks, memory, got):
        sizes = function(layers, ranks, memory)
        if got == "ValueError" or sizes is None:
            return got == "ValueError" and sizes is None
        return slowest_of(stages_of(layers, got)) == slowest_of(stages_of(layers, sizes))

    return same


def needs_rank_0(layers, ranks, memory, got):
    if all(fits([layer], 0, ranks, memory) for layer in layers):
        return is_best(layers, ranks, memory, got)
    return got == "ValueError"


def fastest_or_nothing(layers, ranks, memory, got):
    if got == "ValueError":
        return True
    stages = enumerate(stages_of(layers, got))
    return is_best(layers, ranks, memory, got, lambda *_: True) and all(
        fits(stage, r, ranks, memory) for r, stage in stages
    )


OTHERS = {  # cause: whether what somebody gave is what it would give
    "the numbers are in reverse order: that of rank 0 comes first":
        lambda layers, ranks, memory, got: is_best(layers, ranks, memory, got if got == "ValueError" else got[::-1]),
    "a layer that does not fit on rank 0 may fit on a later rank, which keeps fewer micro-batches": needs_rank_0,
    "each rank takes as many layers as it can here, from the left. A layer that fits only on a later rank then finds that "
    "too many ranks are used up before it: leave more layers to those in between": like(filled),
    "the sum of the squared times is the smallest here: only the slowest stage counts": like(of_small_squares),
    "you give a placement only where the fastest of all fits: look for the fastest one among those that fit":
        fastest_or_nothing,
}  # fmt: skip
