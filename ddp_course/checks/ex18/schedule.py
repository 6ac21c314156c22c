"""Question 1: a schedule for ranks that can keep few activations."""

from ddp_course.checks.claims import hold
from ddp_course.checks.ex18.schedule_claims import claims
from ddp_course.checks.functions import as_plain
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question

SIMPLE = [  # limits, micro-batches
    ([3, 2, 1], 6),  # what 1F1B keeps
    ([3, 1, 2], 6),  # the same numbers in another order
    ([4, 3, 2, 1], 2),  # fewer micro-batches than ranks
    ([5], 3),
    ([9, 9, 9], 4),  # no limit, really
    ([1, 1, 1], 3),
    ([1, 2, 1], 4),  # the first rank has less than the second
    ([2, 2, 1], 4),
    ([3, 3, 2, 1], 6),
    ([4, 2, 4], 3),  # forward first is slower
]


def observe_plans(schedule, cases):
    seen = []
    for limits, m in cases:
        with trying(f"schedule({limits}, {m})"):
            seen.append(as_plain(schedule(list(limits), m)))
    return seen


@question(
    "A rank that has reached its limit must not do another forward before a backward. What does that do to the rank after "
    "it, which waits for that forward? Play your lists through with play(plan): where do ranks wait?",
    "No fixed number of forwards ahead is best for all limits. Let time pass instead, slot by slot: a rank that is free "
    "does a backward if one is ready; if not, a forward, if its input is there and its limit allows it; if not, it waits.",
    "ends = {} has the slot in which each action ends; an action is done if ends.get(action, math.inf) <= slot. For each "
    'slot and each free rank: ("B", rank, b) may begin if ("F", rank, b) and, unless the rank is the last, ("B", rank + 1, '
    'b) are done; ("F", rank, f) if f - b < limits[rank] and, unless the rank is the first, ("F", rank - 1, f) is done. b '
    "and f count what the rank has begun so far.",
)
def check_schedule(answer, draw):
    """Lists for 1 to 6 ranks with limits of all kinds: played through, they end, keep no
    more than the limits, and take as few slots as possible.
    """
    cases = list(SIMPLE)
    for _ in range(14):
        ranks = draw.randrange(2, 7)
        limits = [draw.randrange(1, ranks + 2) for _ in range(ranks)]
        cases.append((limits, draw.randrange(1, 13)))
    [seen] = answer.on_ranks(observe_plans, cases)
    for case, got in zip(cases, seen):
        hold(claims(*case, got))
