"""Question 2: pieces of a text of several documents for ranks that work equally long."""

from ddp_course.checks.claims import hold
from ddp_course.checks.ex19.layout_claims import claims, explained
from ddp_course.checks.functions import as_plain
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question

SIMPLE = [  # lengths, ranks, piece
    ([32], 2, 2),
    ([20, 20, 8], 2, 2),
    ([12] * 10, 3, 4),  # in the text's order, a rank always has the last piece of a document
    ([*[12], *[1] * 12] * 6, 3, 4),  # to and fro, too
    ([1] * 24, 3, 2),
    ([7, 9, 11, 5], 1, 4),
    ([*[3] * 24, 72], 4, 3),
    ([100, *[4] * 15], 4, 5),
    ([9, 1, 14, 23, 2, 31], 4, 4),  # documents end within pieces
    ([64, *[1] * 64], 4, 1),
    ([5, 11], 2, 8),  # a piece per rank
    ([40, 8] * 5, 2, 8),
]


def observe_layouts(layout, cases):
    seen = []
    for lengths, ranks, piece in cases:
        given = list(lengths)
        with trying(described(lengths, ranks, piece)):
            got = as_plain(layout(given, ranks, piece))
        got = as_plain([*got]) if isinstance(got, dict | range) else got
        seen.append({"got": as_plain(got), "changed": given != lengths})
    return seen


def described(lengths, ranks, piece):
    shown = lengths if len(lengths) < 27 else f"[{', '.join(map(str, lengths[:3]))}, ...]"
    return f"layout({shown}, {ranks}, {piece})"


def drawn(draw, ranks, piece, pieces):
    """A text of so many pieces, cut into documents of very different lengths."""
    tokens = pieces * piece
    number = draw.randrange(2, min(12, tokens))
    cuts = sorted(draw.sample(range(1, tokens), number - 1))
    if draw.random() < 0.5:  # many short ones at the beginning
        cuts = sorted({*cuts, *range(2, tokens // 3, draw.randrange(2, 5))})
    ends = [0, *cuts, tokens]
    return [b - a for a, b in zip(ends, ends[1:])], ranks, piece


@question(
    "How many pairs does a token add, in a document that began some tokens ago? How many does a piece add, one in which "
    "a document ends and another begins? These numbers are what is to be balanced. The place of a piece in the text says "
    "little about them.",
    "Make a list with the pairs of each piece: the sum of (position in its document + 1) over its tokens. Then give out the "
    "pieces from the most work to the least, so that small pieces come last and fill the gaps. All ranks need the same "
    "number of pieces.",
    "positions = [p for length in lengths for p in range(length)]; work = [sum(positions[i : i + piece]) + piece for i in "
    "range(0, len(positions), piece)]; order = sorted(range(len(work)), key=lambda k: -work[k]). Each piece of this order "
    "goes to the rank with the fewest pairs so far, among those that have fewer than len(work) // ranks pieces.",
)
def check_layout(answer, draw):
    """Texts of all kinds: each piece once, as many per rank, and no rank with much more
    than the mean number of pairs.
    """
    cases = list(SIMPLE)
    for _ in range(14):
        ranks = draw.randrange(2, 7)
        cases.append(drawn(draw, ranks, draw.randrange(1, 9), ranks * draw.randrange(3, 12)))
    cases.append(drawn(draw, 16, 64, 2048))
    [seen] = answer.on_ranks(observe_layouts, cases, timeout=8)
    cause = explained(cases, [one["got"] for one in seen])
    for case, one in zip(cases, seen):
        hold(claims(described(*case), *case, one, cause))
