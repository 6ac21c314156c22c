"""What question 2 claims of a layout, and the layouts that do not balance documents."""

from ddp_course.checks.claims import Between, Claim


def pairs_of_pieces(lengths, piece):
    """Pairs of a query and a key of its document, for the queries of each piece."""
    seen = [position + 1 for length in lengths for position in range(length)]
    return [sum(seen[begin : begin + piece]) for begin in range(0, len(seen), piece)]


def contiguous(work, ranks):
    share = len(work) // ranks
    return [list(range(rank * share, (rank + 1) * share)) for rank in range(ranks)]


def zigzag(work, ranks):
    half = len(work) // (2 * ranks)
    if len(work) % (2 * ranks):
        return None
    parts = [list(range(begin, begin + half)) for begin in range(0, len(work), half)]
    return [parts[rank] + parts[-1 - rank] for rank in range(ranks)]


def in_turn(work, ranks):
    return [list(range(rank, len(work), ranks)) for rank in range(ranks)]


def to_and_fro(work, ranks):
    turns = [*range(ranks), *reversed(range(ranks))]
    return [[k for k in range(len(work)) if turns[k % (2 * ranks)] == rank] for rank in range(ranks)]


BETTER = "deal out the pieces by their work, from the most to the least"
LAYOUTS = {
    "each rank has neighbouring pieces, as in the contiguous layout: ranks with early pieces of documents have little to do":
        contiguous,
    "this is the zigzag layout, which balances one document: with several, early pieces of the text are not those with "
    f"little work. {BETTER}": zigzag,
    "the pieces are dealt out in the order of the text, so one rank may get the last piece of each document. "
    f"{BETTER}": in_turn,
    "the pieces are dealt out to and fro in the order of the text, which says little about their work. "
    f"{BETTER}": to_and_fro,
}  # fmt: skip


def explained(cases, all_got):
    """The cause of a layout that is the same known one wherever that exists; or None."""
    for cause, layout in LAYOUTS.items():
        pairs = [(layout(pairs_of_pieces(case[0], case[2]), case[1]), got) for case, got in zip(cases, all_got)]
        if all(well_formed(got) and as_sets(got) == as_sets(value) for value, got in pairs if value):
            return cause
    return None


def as_sets(layout):
    return [sorted(share) for share in layout]


def well_formed(got):
    return isinstance(got, list) and all(
        isinstance(share, list) and all(type(k) is int for k in share) for share in got
    )


def claims(call, lengths, ranks, piece, seen, cause):
    work, got = pairs_of_pieces(lengths, piece), seen["got"]
    lists = well_formed(got) and len(got) == ranks
    yield Claim(
        call, lists, True, "return a list for each rank, with the numbers of its pieces",
        told=f"{ranks} list{'s' * (ranks > 1)} of whole numbers", shown=got,
    )  # fmt: skip
    if ranks * piece <= 24:
        call += f" gives {got}"
    given = sorted(k for share in got for k in share)
    tokens = piece > 1 and given == list(range(len(work) * piece))
    yield Claim(
        f"{call}: the pieces of all ranks together", given, list(range(len(work))),
        "these are the numbers of tokens: return those of pieces; piece k has the tokens from k * piece on" if tokens else
        f"each of the {len(work)} pieces has to be on one rank: 0, 1, ... up to the number of tokens / piece - 1",
        told=f"0 to {len(work) - 1}, each once",
        shown=missing_and_double(given, len(work)),
    )  # fmt: skip
    yield Claim(
        f"{call}: pieces per rank", [len(share) for share in got], [len(work) // ranks] * ranks,
        "all ranks need the same number of tokens: a rank that has its share of the pieces gets no more of them, however "
        "little it has to do",
    )  # fmt: skip
    pairs = [sum(work[k] for k in share) for share in got]
    most = sum(work) // ranks + max(work)
    yield Claim(
        f"{call}: pairs of the busiest rank", max(pairs), Between(0, most), cause or f"the work of a piece is the sum of "
        f"(position in its document + 1) over its tokens: is it the same in your code? {BETTER}",
        told=f"at most the mean, {sum(work) / ranks:.0f}, and the largest piece, {max(work)}",
        shown=f"{max(pairs)}, of {pairs}",
    )  # fmt: skip
    yield Claim(
        f"{call}: whether the list of lengths has changed",
        seen["changed"],
        False,
        "leave the list as it is: copy it first",
    )


def missing_and_double(given, number):
    missing = sorted(set(range(number)) - set(given))
    double = sorted({k for k in given if given.count(k) > 1}) if len(given) < 3000 else []
    strange = sorted(set(given) - set(range(number)))
    found = {"missing": missing, "more than once": double, "no pieces": strange}
    return ", ".join(f"{words}: {', '.join(map(str, some[:5]))}" for words, some in found.items() if some)
