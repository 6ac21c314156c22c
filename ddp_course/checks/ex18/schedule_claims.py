"""What question 1 claims of a schedule."""

from collections import Counter
from functools import partial

from ddp_course.checks.claims import Between, Claim
from ddp_course.checks.ex18.schedule_mistakes import LIMITS, MISTAKES, as_it_comes, slots_of
from ddp_course.estimates.pipeline import Deadlock, kept_at_most, play

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
            f"{call}: actions of rank {rank}", Counter(actions), wanted, partial(why_not, rank, Counter(actions), wanted),
            told=f"F and B of micro-batches 0 to {m - 1} in stage {rank}, each once", shown=actions,
        )  # fmt: skip
    yield Claim(
        f"{call}, played through", end_of(plan), "it ends",
        "a rank that has reached its limit needs a backward before its next forward: so a later rank must not wait for that "
        "forward before it does its first backward" if any(a < b for a, b in zip(limits, limits[1:])) else
        "put each action after those that it needs: a forward after that of the rank before, a backward after its own "
        "forward and the backward of the rank after",
    )  # fmt: skip
    kept = [kept_at_most(actions) for actions in plan]
    for rank in range(ranks):
        yield Claim(
            f"{call}: activations that rank {rank} keeps", kept[rank], Between(0, limits[rank]),
            partial(why_many, limits, m, kept), told=f"at most {limits[rank]}",
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


def why_not(rank, actions, wanted):
    for action in actions - wanted:
        if action not in wanted:
            own = f": each action of rank {rank} is (kind, {rank}, micro-batch)" * (action[1] != rank)
            return f"{action} is no action of this rank{own}"
    if missing := wanted - actions:
        return f"{min(missing)} is missing"
    action = min(actions - wanted)
    return f"{action} is there {actions[action]} times"


def why_many(limits, m, kept):
    """The limits with which each rank keeps just what it keeps here."""
    for cause, others in LIMITS.items():
        if others(limits) != limits and kept == [kept_at_most(actions) for actions in as_it_comes(others(limits), m)]:
            return cause
    return "a forward adds an activation and a backward removes one: at the limit, a backward has to come first"


def end_of(plan):
    try:
        play(plan)
    except Deadlock as problem:
        return str(problem)
    return "it ends"
