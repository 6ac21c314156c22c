"""What question 1 claims of a schedule, and the schedules that people write instead."""

from collections import Counter
from functools import partial

from ddp_course.checks.claims import Between, Claim
from ddp_course.estimates.pipeline import Deadlock, kept_at_most, play, slots

FORM = "a list of actions for each rank"


def claims(limits, m, got):
    ranks, call = len(limits), f"schedule({limits}, {m})"
    yield Claim(
        call, form_of(got, ranks), FORM, 'return a list of ranks; each is a list of actions such as ("F", rank, 0)',
        told=f"{ranks} lists of actions (kind, stage, micro-batch)", shown=got,
    )  # fmt: skip
    plan = [[tuple(action) for action in actions] for actions in got]
    for rank, actions in enumerate(plan):
        wanted = Counter((kind, rank, i) for kind in "FB" for i in range(m))
        yield Claim(
            f"{call}: actions of rank {rank}", Counter(actions), wanted, partial(why_not, Counter(actions), wanted),
            told=f"F and B of micro-batches 0 to {m - 1} in stage {rank}, each once", shown=actions,
        )  # fmt: skip
    yield Claim(
        f"{call}, played through", end_of(plan), "it ends",
        "a rank that has reached its limit needs a backward before its next forward: so a later rank must not wait for that "
        "forward before it does its first backward" if any(a < b for a, b in zip(limits, limits[1:])) else
        "put each action after those that it needs: a forward after that of the rank before, a backward after its own "
        "forward and the backward of the rank after",
    )  # fmt: skip
    for rank, actions in enumerate(plan):
        yield Claim(
            f"{call}: activations that rank {rank} keeps", kept_at_most(actions), Between(0, limits[rank]),
            "a forward adds an activation and a backward removes one: at the limit, a backward has to come first",
            told=f"at most {limits[rank]}",
        )  # fmt: skip
    best = slots_of(as_it_comes(limits, m))
    yield Claim(
        f"{call}: slots", slots_of(plan), Between(0, best),
        "somewhere a rank waits, or does a forward, although a backward is ready, or waits although a forward is possible",
        lambda: [(slots_of(make(limits, m)), cause) for make, cause in MISTAKES], told=f"at most {best}",
    )  # fmt: skip


def form_of(got, ranks):
    if not isinstance(got, list) or len(got) != ranks or not all(isinstance(actions, list) for actions in got):
        return type(got).__name__
    for action in (action for actions in got for action in actions):
        if not isinstance(action, list) or [type(part) for part in action] != [str, int, int]:
            return "no action"
    return FORM


def why_not(actions, wanted):
    if missing := wanted - actions:
        return f"{min(missing)} is missing"
    action = min(actions - wanted)
    return f"{action} is there {actions[action]} times" if action in wanted else f"{action} is no action of this rank"


def end_of(plan):
    try:
        play(plan)
    except Deadlock as problem:
        return str(problem)
    return "it ends"


def slots_of(plan):
    try:
        return round(slots(play(plan)))
    except Deadlock:
        return None


# ---- the schedule that is right, and others ----


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


MISTAKES = [
    (one_by_one, "one micro-batch goes through all ranks before the next begins: begin the next as soon as a limit allows"),
    (in_groups, "this is GPipe in groups: the ranks wait for a whole group to come back before the next one begins. After "
     "each backward there is room for a forward"),
    (ahead, "with a fixed number of forwards ahead, a rank waits for the next forward while a backward is ready, since the "
     "ranks before it have no room to send one: decide from slot to slot"),
    (partial(as_it_comes, first="F"), "if both are possible, a backward comes first: others wait for it, and it makes room"),
]  # fmt: skip
