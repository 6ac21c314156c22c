"""The best placement of layers on stages, and those that mistakes of question 2 find."""

import math
from itertools import accumulate


def best(layers, ranks, memory):
    """How long the slowest stage takes where layers are placed best, and how many layers
    each rank then has; (inf, None) if no placement fits.
    """
    held, times = memory_of(layers, ranks), sums(layers)[0]
    return placed(
        len(layers), ranks, lambda rank, i, j: times[j] - times[i] if held(rank, i, j) <= memory else math.inf
    )


def smallest_memory(layers, ranks):
    """The smallest with which there is a placement."""
    return placed(len(layers), ranks, memory_of(layers, ranks))[0]


def memory_of(layers, ranks):
    """A function: what a rank with the layers from i to j - 1 holds."""
    _, weights, activations = sums(layers)
    return lambda rank, i, j: weights[j] - weights[i] + (ranks - rank) * (activations[j] - activations[i])


def sums(layers):
    """The sums of times, weights and activations of the first 0, 1, 2, ... layers."""
    return [list(accumulate(of, initial=0)) for of in zip(*layers)]


def placed(layers, ranks, cost, join=max, grows=True):
    """The placement of so many layers whose costs, joined, are smallest: (that cost, sizes).

    cost: of a rank with the layers from i to j - 1. grows: whether more layers never cost less.
    """
    before, cuts = [0] + [math.inf] * layers, []
    for rank in range(ranks):
        after, cut = [math.inf] * (layers + 1), [0] * (layers + 1)
        for j in range(rank + 1, layers + 1):
            for i in range(j - 1, rank - 1, -1):
                own = cost(rank, i, j)
                if own >= after[j] and grows:
                    break
                if join(before[i], own) < after[j]:
                    after[j], cut[j] = join(before[i], own), i
        before = after
        cuts.append(cut)
    if math.isinf(before[-1]):
        return math.inf, None
    sizes, end = [], layers
    for cut in reversed(cuts):
        sizes.insert(0, end - cut[end])
        end = cut[end]
    return before[-1], sizes


def filled(layers, ranks, memory):
    """Each rank takes as many layers as it can, from the left, within the smallest limit
    of the time for which that ends well: the sizes; None if there is no such limit.
    """
    times = sums(layers)[0]
    for limit in sorted({later - time for i, time in enumerate(times) for later in times[i + 1 :]}):
        sizes, start = [], 0
        for rank in range(ranks):
            end = start
            time = held = 0
            while end < len(layers) - (ranks - 1 - rank):
                own, weights, activations = layers[end]
                time, held = time + own, held + weights + (ranks - rank) * activations
                if time > limit or held > memory:
                    break
                end += 1
            sizes.append(end - start)
            start = end
        if min(sizes) > 0 and start == len(layers):
            return sizes
    return None


def of_small_squares(layers, ranks, memory):
    """The sizes with which the sum of the stages' squared times is smallest; or None."""
    held, times = memory_of(layers, ranks), sums(layers)[0]
    cost = lambda rank, i, j: (times[j] - times[i]) ** 2 if held(rank, i, j) <= memory else math.inf  # noqa: E731
    return placed(len(layers), ranks, cost, join=lambda one, other: one + other)[1]


def stages_of(layers, sizes):
    return [layers[end - size : end] for size, end in zip(sizes, accumulate(sizes))]


def slowest_of(stages):
    return max(sum(time for time, *_ in stage) for stage in stages)
