"""What question 1 claims of a learner's test."""

from ddp_course.checks.claims import Claim
from ddp_course.checks.ex20.averaging_codes import RIGHT, WRONG, is_wrong

OF_SIZE = ("copies, by ranks", "twice")  # on some meshes, the first of them is right
OF_COPIES = ("copies", "twice", "negative", "eighth digit")  # copies agree, and all have the same wrong gradients
APART = ("first rank", "all but the last rank")
FLOAT64 = "torch.float64"
PASSES, FAILS = "no error on any rank", "an AssertionError on some rank"


def described(rows):
    numbers = "" if sum(rows, []) == list(range(len(rows) * len(rows[0]))) else f", numbered {rows}"
    return f"a mesh of {len(rows)} data x {len(rows[0])} expert ranks{numbers}"


def claims(rows, of_ranks):
    """of_ranks: of each rank, {kind of code: what the test did}."""
    words = described(rows)
    given = [call for seen in of_ranks for one in seen.values() for call in one["given"]]
    dtypes = sorted({name for call in given for name in call["dtypes"]})
    yield Claim(
        f"{words}: the dtype of the gradients", dtypes or [FLOAT64], [FLOAT64],
        "parameters and gradients are in float64: in float32, 9 digits cannot be right",
    )  # fmt: skip
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
            asserted = any(seen[kind]["name"] == "AssertionError" for seen in of_ranks)
            why = NOT_ASSERTED if raised[kind] else why_accepted(raised, of_ranks, kind, how)
            if all(call["zeros"] for call in given) and given:
                why = ZEROS
            yield Claim(
                f"{words}: wrong code, which {fault}", FAILS if asserted else PASSES, FAILS, why, shown=told(of_ranks, kind),
            )  # fmt: skip


NOT_ASSERTED = "another error has another meaning: raise an AssertionError, as assert and torch.testing.assert_close do"
ZEROS = "all gradients that the test gives are 0, and so is each sum of them: take other numbers, such as torch.randn"


def told(of_ranks, kind):
    """On which ranks the test has raised what."""
    ranks = [rank for rank, seen in enumerate(of_ranks) if seen[kind]["raised"]]
    if not ranks:
        return PASSES
    return f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {of_ranks[ranks[0]][kind]['text']}"


def why_rejected(rows, raised, kind):
    """The fault that the test takes for right, if there is one."""
    rejected = {right for right in RIGHT if raised[right]}
    taken = [wrong for wrong in WRONG if is_wrong(wrong, rows) and raised.get(wrong) is False]
    if kind in WRONG:
        return "on this mesh, its gradients are the right ones: compute what to expect from the mesh"
    if rejected == set(RIGHT) and taken:
        likely = next((wrong for wrong in ("row by row", "own") if wrong in taken), taken[0])
        fault, how = WRONG[likely]
        return f"the test passes for code that {fault}. It seems to expect this result; but {how}"
    if rejected == set(RIGHT):
        every = "the test fails for every code, right or wrong: " if all(raised.values()) else ""
        return every + (
            'what the test expects is not the mean over all tokens of all ranks: experts are added up along "data", dense '
            "parameters over all ranks, and both are divided by the tokens of all ranks"
        )
    if rejected == REPLACE:
        return (
            "average may replace parameter.grad by a new tensor: read the gradient from the parameter, after the call"
        )
    if rejected == set(RIGHT) - REPLACE:
        return (
            "average may change the gradients in place. Here right code passes only if it makes new tensors, so what the "
            "test expects is computed from tensors that average has changed: clone them before the call"
        )
    if "in order" not in rejected:
        return (
            "a sum in another order differs in the last digits, and here the test passes for the sum in the order of the "
            "ranks: compare to 9 digits, and not bit for bit"
        )
    return "the test passes for other right code. A sum may be in another order, and parameter.grad may be a new tensor"


REPLACE = {"new", "gathered", "in order"}


def why_accepted(raised, of_ranks, kind, how):
    if any(seen[kind].get("false") for seen in of_ranks):
        return "the test returned False: it has to raise an AssertionError, as assert and torch.testing.assert_close do"
    if not any(raised.values()):
        return f"the test passes for every code, right or wrong. Of this fault: {how}"
    if not any(raised.get(wrong) for wrong in OF_COPIES) and any(raised.get(wrong) for wrong in APART):
        return (
            "the test passes for several kinds of wrong code, and fails where copies of a parameter differ. So it "
            "seems to compare copies with each other only: compare with numbers that you know"
        )
    if kind == "float32" and raised.get("eighth digit"):
        return (
            "the tolerance is small enough, but these gradients are the same in float32, such as small whole numbers: take "
            "numbers with more digits, such as those of torch.randn in float64"
        )
    if all(raised.get(kind) is False for kind in OF_SIZE) and raised.get("negative"):
        return "the size of a gradient counts: compare numbers, and not directions, of which Adam makes the same update"
    return how
