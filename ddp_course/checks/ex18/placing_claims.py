"""What question 2 claims of a placement, and what people take for what a rank keeps."""

import math
from itertools import accumulate

from ddp_course.checks.claims import Between, Claim

KEPT = {  # of how many micro-batches somebody thinks that a rank keeps activations
    "the memory plays no part here: weights + (ranks - rank) * activations have to fit on each rank":
        lambda rank, ranks: None,
    "each rank keeps one micro-batch here: in 1F1B, rank 0 keeps as many as there are ranks":
        lambda rank, ranks: 1,
    "the activations play no part here": lambda rank, ranks: 0,
    "the last rank keeps one micro-batch, not none: ranks - rank, and not ranks - 1 - rank":
        lambda rank, ranks: ranks - 1 - rank,
    "the first rank keeps the most, and the last one the least: ranks - rank, and not rank + 1":
        lambda rank, ranks: rank + 1,
    "all ranks keep as many micro-batches as the first one here: rank r keeps only ranks - r": lambda rank, ranks: ranks,
    "this is one micro-batch too many: rank r keeps ranks - r": lambda rank, ranks: ranks - rank + 1,
}  # fmt: skip


def truly_kept(rank, ranks):
    return ranks - rank


def sums(layers):
    """The sums of times, weights and activations of the first 0, 1, 2, ... layers."""
    return [list(accumulate(of, initial=0)) for of in zip(*layers)]


def best(layers, ranks, memory, kept=truly_kept):
    """How long the slowest stage takes where layers are placed best; None if no placement
    fits. kept: of how many micro-batches a rank keeps activations; None: all fits.
    """
    held, times = memory_of(layers, ranks, kept), sums(layers)[0]
    time = least_of_the_largest(
        len(layers), ranks, lambda rank, i, j: times[j] - times[i] if held(rank, i, j) <= memory else math.inf
    )
    return None if math.isinf(time) else time


def smallest_memory(layers, ranks):
    """The smallest with which there is a placement."""
    return least_of_the_largest(len(layers), ranks, memory_of(layers, ranks))


def memory_of(layers, ranks, kept=truly_kept):
    """A function: what a rank with the layers from i to j - 1 holds."""
    _, weights, activations = sums(layers)

    def held(rank, i, j):
        number = kept(rank, ranks)
        return 0 if number is None else weights[j] - weights[i] + number * (activations[j] - activations[i])

    return held


def least_of_the_largest(layers, ranks, cost):
    """The largest cost of a stage, where layers are placed so that it is smallest.

    cost: of a rank with the layers from i to j - 1; it grows with their number.
    """
    before = [0] + [math.inf] * layers
    for rank in range(ranks):
        after = [math.inf] * (layers + 1)
        for j in range(rank + 1, layers + 1):
            for i in range(j - 1, rank - 1, -1):
                own = cost(rank, i, j)
                if own >= after[j]:
                    break
                after[j] = min(after[j], max(before[i], own))
        before = after
    return before[-1]


def claims(layers, ranks, memory, got, fastest):
    shown = layers if len(layers) < 14 else f"{layers[:3]} and {len(layers) - 3} more"
    call = f"balance({shown}, {ranks}, {memory})"
    if fastest is None:
        few = len(layers) < ranks
        yield Claim(
            call, got, "ValueError", "there are fewer layers than ranks, and no stage may be empty" if few else
            "no placement fits: say so with a ValueError, and look at the weights and activations of each stage",
            lambda: [] if few or form_of(got, ranks) else [(got, cause) for cause in
                     explained(layers, ranks, memory, slowest_of(stages_of(layers, got)))],
        )  # fmt: skip
        return
    yield Claim(
        f"{call}: whether there is a placement", got == "ValueError", False, lambda: too_strict(layers, ranks, memory),
        told=f"one in which the slowest stage takes {fastest}", shown="a ValueError",
    )  # fmt: skip
    yield Claim(
        call, form_of(got, ranks), "", "return a list of whole numbers: how many layers each rank has, none of them 0",
        told=f"{ranks} whole numbers of layers, 1 or more", shown=got,
    )  # fmt: skip
    yield Claim(f"{call}: layers on all ranks together", sum(got), len(layers), "each layer has to be on one rank")
    stages = stages_of(layers, got)
    slowest = slowest_of(stages)
    wrong = lambda: explained(layers, ranks, memory, slowest)  # noqa: E731
    for rank, stage in enumerate(stages):
        held = sum(weights + (ranks - rank) * activations for _, weights, activations in stage)
        yield Claim(
            f"{call} gives {got}: memory of rank {rank}", held, Between(0, memory),
            f"the stage does not fit: its weights, and {ranks - rank} times its activations",
            lambda held=held: [(held, cause) for cause in wrong()], told=f"at most {memory}",
        )  # fmt: skip
    yield Claim(
        f"{call} gives {got}: time of the slowest stage", slowest, Between(0, fastest),
        "there is a placement that fits and is faster: neither an equal number of layers nor filling the stages up to the "
        "mean always finds it", lambda: [(slowest, cause) for cause in wrong()], told=f"at most {fastest}",
    )  # fmt: skip


def stages_of(layers, sizes):
    return [layers[end - size : end] for size, end in zip(sizes, accumulate(sizes))]


def slowest_of(stages):
    return max(sum(time for time, *_ in stage) for stage in stages)


def form_of(got, ranks):
    if not isinstance(got, list) or any(type(size) is not int for size in got):
        return "no list of whole numbers"
    return "" if len(got) == ranks and min(got) >= 1 else "not a stage for each rank"


def explained(layers, ranks, memory, slowest):
    """The mistakes with which a placement of this time is the best one."""
    return [cause for cause, kept in KEPT.items() if best(layers, ranks, memory, kept) == slowest]


def too_strict(layers, ranks, memory):
    causes = [cause for cause, kept in KEPT.items() if best(layers, ranks, memory, kept) is None]
    return causes[0] if causes else "there is a placement: each stage of it fits, and none is empty"
