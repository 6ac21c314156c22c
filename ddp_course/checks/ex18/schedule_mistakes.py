"""The schedule of question 1 that is right, and those that people write instead."""

from functools import partial

from ddp_course.estimates.pipeline import Deadlock, play, slots


def slots_of(plan):
    try:
        return round(slots(play(plan)))
    except Deadlock:
        return None


def as_it_comes(limits, m, first="B"):
    """Each rank does in each slot what is possible; if both kinds are, the first.

    Backward first, it is as short as the shortest of all: for up to 4 ranks and 5
    micro-batches, every order of every rank was tried.
    """
    ranks, ends, slot = len(limits), {}, 0
    plan, free, done = [[] for _ in limits], [0] * ranks, [{"F": 0, "B": 0} for _ in limits]
    ready = lambda action: ends.get(action, slot + 1) <= slot  # noqa: E731
    while len(ends) < 2 * ranks * m:
        for rank, count in enumerate(done):
            f, b = count["F"], count["B"]
            can = {
                "B": ready(("F", rank, b)) and (rank == ranks - 1 or ready(("B", rank + 1, b))),
                "F": f < m and f - b < limits[rank] and (rank == 0 or ready(("F", rank - 1, f))),
            }
            if free[rank] > slot or not any(can.values()):
                continue
            kind = first if can[first] else "B" if can["B"] else "F"
            action = kind, rank, count[kind]
            count[kind] += 1
            plan[rank].append(action)
            ends[action] = free[rank] = slot + {"F": 1, "B": 2}[kind]
        slot += 1
    return plan


def ahead(limits, m):
    """1F1B, with as many forwards ahead as the limits of this and all earlier ranks allow."""
    plan = []
    for rank in range(len(limits)):
        first = min(*limits[: rank + 1], len(limits) - rank, m)
        actions = [("F", rank, i) for i in range(first)]
        for i in range(m):
            actions.append(("B", rank, i))
            actions += [("F", rank, first + i)] if first + i < m else []
        plan.append(actions)
    return plan


def in_groups(limits, m):
    """GPipe, with as many micro-batches at a time as every rank can keep."""
    numbers = [range(start, min(m, start + min(limits))) for start in range(0, m, min(limits))]
    return [
        [(kind, rank, i) for group in numbers for kind in "FB" for i in group] for rank in range(len(limits))
    ]  # fmt: skip


def one_by_one(limits, m):
    return in_groups([1] * len(limits), m)


LIMITS = {  # the limits that somebody takes for the right ones
    "this is what ranks keep that all have the limit of rank 0: limits[r] is that of rank r":
        lambda limits: [limits[0]] * len(limits),
    "this is what ranks keep if the limits are sorted, the largest first: limits[r] is that of rank r, and later ranks may "
    "have more room": lambda limits: sorted(limits, reverse=True),
    "this is what ranks keep if the limits are reversed: limits[r] is that of rank r": lambda limits: limits[::-1],
    "this is what ranks keep that all have the largest limit: limits[r] is that of rank r":
        lambda limits: [max(limits)] * len(limits),
}  # fmt: skip
MISTAKES = [
    (one_by_one, "one micro-batch goes through all ranks before the next begins: a rank can begin the next as soon as its "
     "own limit allows, even if the limit of another rank is 1"),
    (in_groups, "this is GPipe in groups: the ranks wait for a whole group to come back before the next one begins. After "
     "each backward there is room for a forward"),
    (ahead, "with a fixed number of forwards ahead, a rank waits for the next forward while a backward is ready, since the "
     "ranks before it have no room to send one: decide from slot to slot"),
    (lambda limits, m: as_it_comes([min(limits)] * len(limits), m), "this takes as long as if all ranks had the smallest of "
     "the limits: each rank has its own"),
    (partial(as_it_comes, first="F"), "if both are possible, a backward comes first: others wait for it, and it makes room"),
]  # fmt: skip
