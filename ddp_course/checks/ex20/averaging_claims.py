"""What question 1 claims of a learner's test."""

from ddp_course.checks.claims import Claim
from ddp_course.checks.ex20.averaging_codes import RIGHT, WRONG, is_wrong

OF_SIZE = ("copies, by ranks", "twice")  # on some meshes, the first of them is right
PASSES, FAILS = "no error on any rank", "an AssertionError on some rank"


def described(rows):
    numbers = "" if sum(rows, []) == list(range(len(rows) * len(rows[0]))) else f", numbered {rows}"
    return f"a mesh of {len(rows)} data x {len(rows[0])} expert ranks{numbers}"


def claims(rows, of_ranks):
    """of_ranks: of each rank, {kind of code: what the test did}."""
    words = described(rows)
    raised = {kind: any(seen[kind]["raised"] for seen in of_ranks) for kind in of_ranks[0]}
    for kind in [*RIGHT, *WRONG]:
        if kind not in raised or is_wrong(kind, rows):
            continue
        text = RIGHT.get(kind) or f"{WRONG[kind][0]} (on this mesh, that is right)"
        yield Claim(
            f"{words}: right code, which {text}", FAILS if raised[kind] else PASSES, PASSES,
            lambda kind=kind: why_rejected(rows, raised, kind), shown=told(of_ranks, kind),
        )  # fmt: skip
    for kind, (fault, how) in WRONG.items():
        if kind in raised and is_wrong(kind, rows):
            yield Claim(
                f"{words}: wrong code, which {fault}", FAILS if raised[kind] else PASSES, FAILS,
                why_accepted(raised, of_ranks, kind, how),
            )  # fmt: skip


def told(of_ranks, kind):
    """On which ranks the test has raised what."""
    ranks = [rank for rank, seen in enumerate(of_ranks) if seen[kind]["raised"]]
    if not ranks:
        return PASSES
    return f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {of_ranks[ranks[0]][kind]['text']}"


def why_rejected(rows, raised, kind):
    """The fault that the test takes for right, if there is one."""
    if all(raised[right] for right in RIGHT):
        taken = [wrong for wrong in WRONG if is_wrong(wrong, rows) and raised.get(wrong) is False]
        if taken:
            fault, how = WRONG[taken[0]]
            return f"the test passes for code that {fault}. It seems to expect this result; but {how}"
        return (
            'what the test expects is not the mean over all tokens of all ranks: experts are added up along "data", dense '
            "parameters over all ranks, and both are divided by the tokens of all ranks. Or it compares bit for bit: a sum "
            "in another order differs in the last digits"
        )
    if kind in WRONG:
        return "on this mesh, its gradients are the right ones: compute what to expect from the mesh"
    if raised["new"] and raised["gathered"]:
        return (
            "average may replace parameter.grad by a new tensor: read the gradient from the parameter, after the call"
        )
    return "a sum in another order differs in the last digits: compare to 9 digits, and not bit for bit"


def why_accepted(raised, of_ranks, kind, how):
    if any(seen[kind].get("false") for seen in of_ranks):
        return "the test returned False: it has to raise an AssertionError, as assert and torch.testing.assert_close do"
    if not any(raised.values()):
        return f"the test passes for every code, right or wrong. Of this fault: {how}"
    if all(raised.get(kind) is False for kind in OF_SIZE):
        return "the size of a gradient counts: compare numbers, and not directions, of which Adam makes the same update"
    return how
