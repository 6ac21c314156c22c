"""What question 2 claims of a layout."""

from ddp_course.checks.claims import Between, Claim
from ddp_course.checks.ex19.layout_mistakes import pairs_of_pieces, well_formed

BY_WORK = (
    "deal out the pieces by their work, from the most to the least, neighbours in this order to different ranks. The work "
    "of a piece is the sum of (position in its document + 1) over all its tokens: is it the same in your code?"
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
        f"{call}: pairs of the busiest rank", max(pairs), Between(0, most), cause or BY_WORK,
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
