"""What question 2 claims of a placement."""

from functools import cache

from ddp_course.checks.claims import Between, Claim
from ddp_course.checks.ex18.placing_best import best, slowest_of, stages_of
from ddp_course.checks.ex18.placing_mistakes import FITS, OTHERS, fits, form_of, is_best, total

SMALL = 20  # layers: mistakes are tried on fewer


def all_claims(cases, seen):
    """Of all cases; a mistake is named only if it explains what was seen in all of them."""
    named = cache(lambda: explanation(cases, seen))
    for case, got in zip(cases, seen):
        yield from claims(*case, got, lambda text: lambda: named() or text)


def explanation(cases, seen):
    """The mistake that gives what was seen in all small cases, or None."""
    small = [(*case, got) for case, got in zip(cases, seen) if len(case[0]) < SMALL]
    if any(got != "ValueError" and (form_of(got, ranks) or sum(got) != len(layers)) for layers, ranks, _, got in small):
        return None
    for cause, own in FITS.items():
        if all(is_best(*given, own) for given in small):
            return cause
    return next((cause for cause, same in OTHERS.items() if all(same(*given) for given in small)), None)


def claims(layers, ranks, memory, got, cause):
    """cause: makes of a text the function that finds the likely cause."""
    shown = layers if len(layers) < 14 else f"{layers[:3]} and {len(layers) - 3} more"
    call = f"balance({shown}, {ranks}, {memory})"
    fastest, example = best(layers, ranks, memory)
    if example is None:
        few = len(layers) < ranks
        stages = [] if form_of(got, ranks) or sum(got) != len(layers) else stages_of(layers, got)
        wide = [r for r, stage in enumerate(stages) if not fits(stage, r, ranks, memory)]
        yield Claim(
            call, got, "ValueError", "there are fewer layers than ranks, and no stage may be empty" if few else cause(
                "no placement fits: say so with a ValueError" + "".join(f". {needs(layers, got, r)}" for r in wide[:1])),
        )  # fmt: skip
        return
    there = f"there is a placement, such as {example}: each stage of it fits, and none is empty"
    yield Claim(
        f"{call}: whether there is a placement", got == "ValueError", False,
        cause(there if len(layers) < 14 else "there is a placement"),
        told=f"one in which the slowest stage takes {fastest}", shown="a ValueError",
    )  # fmt: skip
    yield Claim(
        call, form_of(got, ranks), "", "return a list of whole numbers: how many layers each rank has, none of them 0",
        told=f"{ranks} whole numbers of layers, 1 or more", shown=got,
    )  # fmt: skip
    yield Claim(f"{call}: layers on all ranks together", sum(got), len(layers), "each layer has to be on one rank")
    stages = stages_of(layers, got)
    slowest = slowest_of(stages)
    for rank, stage in enumerate(stages):
        yield Claim(
            f"{call} gives {got}: memory of rank {rank}", total(stage, 1) + (ranks - rank) * total(stage, 2),
            Between(0, memory), cause(f"this stage does not fit. {needs(layers, got, rank)}"), told=f"at most {memory}",
        )  # fmt: skip
    where = [total(stage, 0) for stage in stages].index(slowest)
    yield Claim(
        f"{call} gives {got}: time of the slowest stage, that of rank {where}", slowest, Between(0, fastest),
        cause("there is a placement that fits and is faster" + f", such as {example}" * (len(layers) < 14)),
        told=f"at most {fastest}",
    )  # fmt: skip


def needs(layers, sizes, rank):
    stage = stages_of(layers, sizes)[rank]
    return (
        f"Rank {rank} has {total(stage, 1)} of weights, and {len(sizes) - rank} times {total(stage, 2)} of activations"
    )
