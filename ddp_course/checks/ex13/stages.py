"""Question 4: layers that are placed on the stages of a pipeline."""

import operator
from itertools import combinations

from ddp_course.checks.claims import Between, Claim, hold
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question


def slowest(costs, sizes):
    """How long the slowest stage takes."""
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return max(sum(costs[end - size : end]) for size, end in zip(sizes, ends))


def best(costs, stages):
    """How long the slowest stage takes where layers are placed best: all placements are
    tried.
    """
    every = combinations(range(1, len(costs)), stages - 1)
    return min(slowest(costs, [b - a for a, b in zip((0, *cuts), (*cuts, len(costs)))]) for cuts in every)


def observe_places(place, cases):
    seen = []
    for costs, stages in cases:
        with trying(f"place({costs}, {stages})"):
            seen.append(whole_numbers(place(list(costs), stages)))
    return seen


def whole_numbers(answer):
    """A list of whole numbers of any kind, NumPy's, too, as ints; else the answer."""
    try:
        return [operator.index(number) for number in answer]
    except TypeError:
        return answer


@question(
    "Each micro-batch goes through all stages, so the slowest stage sets the pace, and all others wait for it. Make the "
    "slowest one as quick as possible; how many layers each has does not matter.",
    "Suppose that no stage may take longer than some limit. Then fill the first with layers until the next would be too "
    "much, go on with the second, and so on: either there are stages enough, or not. Try limits from below.",
    "for limit in sorted(the sums of all layers that follow one another): fill; the first limit at which `stages` stages "
    "are enough is the best. If fewer were needed, split one that has several layers.",
)
def check_place(answer, draw):
    """Layers of unequal cost on 1 to 5 stages, drawn at random: the slowest stage is as
    quick as it can be.
    """
    cases = [
        ([1, 1, 1, 1, 1, 1], 3),
        ([9, 1, 1, 1, 1, 1], 2),  # not in the middle
        ([2, 3, 2, 5, 5, 1, 5, 2], 3),  # filling up to the mean goes wrong
        ([1, 1, 1, 9], 4),
        ([3, 1, 2], 1),
        ([9, 1, 1], 3),  # the first layer alone is too much for small limits
        ([3, 7, 4, 17, 5], 4),  # fewer stages are enough for the best limit: which one is cut counts
        ([8, 5, 2, 13, 3], 3),  # the sum of squares is smaller in a slower one
        ([10, 11, 6, 8, 12], 2),
        ([7, 16, 3], 2),
        ([3, 16, 7], 2),  # the same layers in another order
        ([9, 4, 6, 2], 3),  # only the first layer alone has the sum that is the best limit
    ]
    for _ in range(12):
        costs = [draw.randrange(1, 20) for _ in range(draw.randrange(6, 12))]
        cases.append((costs, draw.randrange(2, 6)))
    [seen] = answer.on_ranks(observe_places, cases)
    for (costs, stages), got in zip(cases, seen):
        hold(claims(costs, stages, got))


# ---- what is claimed ----


def claims(costs, stages, got):
    """Claims that all layers are placed, and that the slowest stage is as quick as it can be."""
    least = best(costs, stages)

    def claim(found, expected, cause):
        told = f"{stages} numbers of layers, with which the slowest stage takes {least}"
        return Claim(f"place({costs}, {stages})", found, expected, cause, told=told, shown=str(got))

    whole = isinstance(got, list) and all(isinstance(size, int) for size in got)
    yield claim(whole, True, "return a list: how many layers each stage has, from the first to the last")
    yield claim(len(got), stages, f"these are {len(got)} stages, not {stages}")
    yield claim(min(got), Between(1), "a stage without a layer is a rank without work")
    layers = f"there are {len(costs)} layers, and each is on one stage: these are {sum(got)}"
    yield claim(sum(got), len(costs), layers)
    pace = f"the slowest stage takes {slowest(costs, got)} here, and sets the pace for all"
    alike = "; equally many layers are not equally much work" * (max(got) - min(got) <= 1)
    yield claim(slowest(costs, got), Between(0, least), pace + alike)
