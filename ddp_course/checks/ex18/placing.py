"""Question 2: layers on stages, as fast as possible, where each stage has to fit."""

from ddp_course.checks.claims import hold
from ddp_course.checks.ex18.placing_best import best, filled, of_small_squares, slowest_of, smallest_memory, stages_of
from ddp_course.checks.ex18.placing_claims import all_claims
from ddp_course.checks.functions import as_plain
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question

ALIKE = (1, 1, 1)
SIMPLE = [  # layers, ranks, memory
    ([ALIKE] * 6, 3, 100),
    ([(4, 1, 1), *[ALIKE] * 7, (6, 1, 1)], 4, 100),
    ([(2, 3, 1), (5, 2, 2)], 1, 9),
    ([ALIKE] * 4, 4, 100),
    ([ALIKE] * 8, 2, 15),  # 4 layers keep 12 on rank 0, 5 keep 15
    ([ALIKE] * 9, 3, 11),  # 2 layers on rank 0, 3 on rank 1: the last one has to take 4
    ([(2, 3, 1), (5, 2, 2)], 1, 7),  # they hold 8
    ([(2, 3, 1), (5, 2, 2)], 1, 4),  # even without the activations, 5
    ([ALIKE] * 3, 4, 100),
    ([ALIKE] * 4 + [(4, 1, 1)], 2, 100),  # not if times are rounded
    ([(0, 1, 1)] * 4, 2, 100),  # takes no time at all
    ([(1, 1, 0), (1, 1, 0), (1, 1, 5), (1, 0, 0)], 3, 6),  # the third layer fits on the last rank only
    ([(1_000_001, 1, 1)] * 2, 2, 100),  # no time is too long, and all of them can be tried
    ([(0, 1, 1), (0, 0, 0)], 1, 7),  # the last layer costs nothing
    ([(1, 1, 0)] * 2, 2, 0),  # no memory at all
    ([(1, 2**30 + 1, 0), (1, 2**30, 0)], 1, 2**31),  # one byte too many
    ([(6, 0, 5), (19, 0, 4), (11, 3, 4), (13, 6, 0)], 3, 47),  # the sum of squares is smaller in a slower one
]


def observe_places(balance, cases):
    seen = []
    for layers, ranks, memory in cases:
        with trying(f"balance({layers if len(layers) < 20 else '...'}, {ranks}, {memory})"):
            try:
                seen.append(as_plain(balance(list(layers), ranks, memory)))
            except ValueError:
                seen.append("ValueError")
    return seen


def drawn(draw, layers, ranks):
    """Layers whose memory is so small that it matters for most of them."""
    costs = [(draw.randrange(1, 20), draw.randrange(1, 9), draw.randrange(6)) for _ in range(layers)]
    smallest = smallest_memory(costs, ranks)
    more = [smallest // 10] if layers > 20 else [-1, 0, 1, smallest // 10, smallest // 4]
    return costs, ranks, smallest + draw.choice(more)


def drawn_against(draw, mistake):
    """Layers of which another way to place them gives no placement, or a slower one."""
    while True:
        layers = draw.randrange(4, 9)
        case = drawn(draw, layers, draw.randrange(2, min(layers, 5)))
        fastest, sizes = best(*case)
        if sizes is not None:
            other = mistake(*case)
            if other is None or slowest_of(stages_of(case[0], other)) > fastest:
                return case


@question(
    "Two things count: how long the slowest stage takes, and whether each stage fits. The first stages keep the activations "
    "of most micro-batches, so they have to be smaller than the last ones. There are too many placements to try them all.",
    "Ask for each number of layers j: how fast can the slowest of the first r stages be, if they have exactly the first j "
    "layers? The answer for r + 1 stages follows from the answers for r: its last stage begins at some layer i. This is "
    "dynamic programming.",
    "fastest[j] = min over i < j of max(before[i], time of layers i to j - 1), for those i with which weights + (ranks - "
    "rank) * activations <= memory; once for each rank. Begin with before = [0, inf, inf, ...]; keep the best i for each "
    "rank and j, and go back from the last layer. Sums from the first layer on (itertools.accumulate) give the sum of any "
    "layers by one subtraction. inf at the end: raise ValueError.",
)
def check_balance(answer, draw):
    """Small and large models, drawn at random: the stages fit, and the slowest one is as
    fast as possible.
    """
    cases = list(SIMPLE)
    for _ in range(16):
        layers = draw.randrange(4, 14)
        cases.append(drawn(draw, layers, draw.randrange(2, min(layers, 6) + 1)))
    cases += [drawn_against(draw, mistake) for mistake in (filled, of_small_squares)]
    cases.append(drawn(draw, 200, 16))
    [seen] = answer.on_ranks(observe_places, cases, timeout=16)
    hold(all_claims(cases, seen))
