"""Layouts that do not balance documents, and which of them an answer has made."""


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


def by_work(work):
    return sorted(range(len(work)), key=lambda k: work[k], reverse=True)


def sorted_and_cut(work, ranks):
    share, order = len(work) // ranks, by_work(work)
    return [order[rank * share : (rank + 1) * share] for rank in range(ranks)]


def sorted_zigzag(work, ranks):
    order = by_work(work)
    return None if len(work) % (2 * ranks) else [[order[k] for k in share] for share in zigzag(work, ranks)]


def to_the_least_busy(work, ranks):
    """In the order of the text, each piece to the rank that has least so far, and room."""
    shares, busy = [[] for _ in range(ranks)], [0] * ranks
    for k, pairs in enumerate(work):
        rank = min((r for r in range(ranks) if len(shares[r]) < len(work) // ranks), key=lambda r: busy[r])
        shares[rank].append(k)
        busy[rank] += pairs
    return shares


BETTER = "Deal out the pieces by their work, from the most to the least"
LAYOUTS = {
    "each rank has neighbouring pieces, as in the contiguous layout: ranks with early pieces of documents have little to do":
        contiguous,
    "this is the zigzag layout, which balances one document: with several, early pieces of the text are not those with "
    f"little work. {BETTER}": zigzag,
    "the pieces are dealt out in the order of the text, so one rank may get the last piece of each document. "
    f"{BETTER}": in_turn,
    "the pieces are dealt out to and fro in the order of the text, which says little about their work. "
    f"{BETTER}": to_and_fro,
    "the pieces are sorted by their work, but each rank gets neighbours in this order: deal them out, neighbours to "
    "different ranks": sorted_and_cut,
    "the pieces are sorted by their work, but each rank gets neighbours in this order, some with much work and some with "
    "little. These need not add up to the same: deal them out, neighbours to different ranks": sorted_zigzag,
    "each piece goes to the rank with the fewest pairs so far, but in the order of the text: a large piece may come last. "
    f"{BETTER}": to_the_least_busy,
}  # fmt: skip


def explained(cases, all_got):
    """The cause of a layout that is the same known one wherever that exists; or None."""
    for cause, layout in LAYOUTS.items():
        if all(same(layout, got, *case) for case, got in zip(cases, all_got)):
            return cause
    return None


def same(layout, got, lengths, ranks, piece):
    """Whether all ranks have pieces with the same work, in any order."""
    work = pairs_of_pieces(lengths, piece)
    known = layout(work, ranks)
    if not well_formed(got) or not all(0 <= k < len(work) for share in got for k in share):
        return False
    return not known or works(known, work) == works(got, work)


def works(layout, work):
    return sorted(sorted(work[k] for k in share) for share in layout)


def well_formed(got):
    return isinstance(got, list) and all(
        isinstance(share, list) and all(type(k) is int for k in share) for share in got
    )
