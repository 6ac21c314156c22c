"""Question 2: pieces of a text of several documents for ranks that work equally long."""

from ddp_course.checks.claims import hold
from ddp_course.checks.ex19.layout_cases import SIMPLE, drawn, short
from ddp_course.checks.ex19.layout_claims import claims
from ddp_course.checks.ex19.layout_mistakes import explained
from ddp_course.checks.functions import as_plain
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.launch import RankTimeout

SECONDS = 8
TOO_LONG = (
    "go through the tokens once. For 131,072 tokens, a mask of tokens x tokens is too large, and a loop over pairs of "
    "tokens, or one that adds up a document's tokens again for each piece, takes too long"
)


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
    part = next(n for n in range(1, len(lengths) + 1) if lengths == lengths[:n] * (len(lengths) // n))
    if 2 * part < len(lengths):
        return f"layout({lengths[:part]} * {len(lengths) // part}, {ranks}, {piece})"
    shown = lengths if len(lengths) < 27 else f"[{', '.join(map(str, lengths[:3]))}, ...]"
    return f"layout({shown}, {ranks}, {piece})"


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
    cases += [short(draw, draw.randrange(2, 4), draw.choice([4, 5, 8])) for _ in range(8)]
    large = drawn(draw, 16, 64, 2048)
    [seen] = answer.on_ranks(observe_layouts, cases, timeout=SECONDS)
    cause = explained(cases, [one["got"] for one in seen])
    for case, one in zip(cases, seen):
        hold(claims(described(*case), *case, one, cause))
    try:
        [[one]] = answer.on_ranks(observe_layouts, [large], timeout=SECONDS)
    except RankTimeout:
        raise Wrong(described(*large), expected="a layout", got=f"none after {SECONDS} s", cause=TOO_LONG) from None
    hold(claims(described(*large), *large, one, cause))
