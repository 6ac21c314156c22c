"""Ring attention as an animation: which pairs of tokens each rank computes in each step."""

from ddp_course.notebook.plots.display import display_film
from ddp_course.notebook.plots.drawing import boxes, rectangle, text
from ddp_course.notebook.plots.film import Film
from ddp_course.notebook.plots.style import CARD, LINE, NOTE, color_of
from ddp_course.notebook.plots.words import count, listing

CELL, LEFT, TOP = 17, 74, 84  # pixels: a pair of tokens; where the pairs begin
CARD_WIDE, CARD_HIGH, GAP = 246, 50, 10
BEATS = 2  # of a step: each rank computes, then the keys travel


def ring_attention(places, title="Ring attention, causal"):
    """Pairs of a query and a key, and who computes them in which step: an animation,
    and on paper its steps.

    places: for each rank, the positions of its tokens in the text.
    """
    places = [[int(place) for place in own] for own in places]
    ranks, tokens = len(places), sum(map(len, places))
    pairs = [[pairs_of(own, places[rank - step]) for step in range(ranks)]
             for rank, own in enumerate(places)]  # fmt: skip
    width = LEFT + tokens * CELL + 34 + CARD_WIDE
    height = TOP + max(tokens * CELL, ranks * (CARD_HIGH + GAP)) + 30
    film = Film(width, height, BEATS * ranks, seconds=1)
    film.show("".join(paper(places, title)))
    for step in range(ranks):
        begin, end = span_of(step, ranks)
        work = [len(of_rank[step]) for of_rank in pairs]
        heading = f"step {step + 1}: at most {count(max(work), 'pair')}"
        film.show(
            text(0, 0, heading, weight=700), (width - CARD_WIDE / 2, 46), begin, end
        )
        for rank, of_rank in enumerate(pairs):
            cells = [(LEFT + key * CELL + 1, TOP + query * CELL + 1, CELL - 2, CELL - 2)
                     for query, key in of_rank[step]]  # fmt: skip
            if cells:
                film.show(boxes(cells, color_of(rank)), begin=begin + 0.15)
            draw_step(film, rank, step, work[rank], ranks, width - CARD_WIDE)
    most = [max(len(of_rank[step]) for of_rank in pairs) for step in range(ranks)]
    alt = in_words(title, ranks, most)
    beats = [BEATS * step + 0.5 for step in range(ranks)]
    display_film(film, film.stills(beats, 1, alt), alt)


def pairs_of(queries, keys):
    """The pairs that a causal mask allows, [(query, key)]."""
    return [(query, key) for query in queries for key in keys if key <= query]


def paper(places, title):
    """The empty pairs, whose tokens have the colours of their ranks, and the ranks."""
    owner = {place: rank for rank, own in enumerate(places) for place in own}
    tokens, high = len(owner), len(owner) * CELL
    yield text(0, 12, title, anchor="start", size=15)
    yield text(LEFT + high / 2, 46, "keys", color=NOTE)
    yield text(LEFT - 22, TOP + high / 2, "queries", anchor="end", color=NOTE)
    for token in range(tokens):
        color, at = color_of(owner[token]), token * CELL
        yield rectangle(LEFT + at + 1, TOP - 16, CELL - 2, 10, color)
        yield rectangle(LEFT - 16, TOP + at + 1, 10, CELL - 2, color)
        allowed = (token + 1) * CELL
        yield rectangle(LEFT, TOP + at, allowed, CELL, CARD, LINE, 0.5)
    left = LEFT + high + 34
    for rank in range(len(places)):
        top = TOP + rank * (CARD_HIGH + GAP)
        yield rectangle(left, top, CARD_WIDE, CARD_HIGH, CARD, color_of(rank), 2, 6)
        yield text(
            left + 10, top + 16, f"rank {rank}", CARD, anchor="start", weight=700
        )
        yield text(left + 10, top + 36, "keys of", CARD, anchor="start", size=12)


def draw_step(film, rank, step, work, ranks, left):
    """The keys that a rank has in a step, and how many pairs it computes with them."""
    top, (begin, end) = TOP + rank * (CARD_HIGH + GAP), span_of(step, ranks)
    owner = (rank - step) % ranks
    name = text(31, 10, f"rank {owner}", color_of(owner), weight=700, size=12)
    keys, place = rectangle(0, 0, 62, 20, color_of(owner)) + name, (left + 62, top + 26)
    if end is None:
        film.show(keys, place, begin)
    else:
        film.show(keys, place, begin, begin + 1)
        to = (rank + 1) % ranks
        path = (0, 0), (0, (to - rank) * (CARD_HIGH + GAP))
        film.travel(keys, place, begin + 1, end, path)
    label = text(0, 0, count(work, "pair"), CARD, anchor="end")
    film.show(label, (left + CARD_WIDE - 10, top + 36), begin, end)


def span_of(step, ranks):
    """When a step begins and ends, in beats; the last one has no end."""
    return BEATS * step, BEATS * (step + 1) if step + 1 < ranks else None


def in_words(title, ranks, most):
    """What the animation shows."""
    return (
        f"Animation: {title}, on {count(ranks, 'rank')}. Keys travel from rank to rank. "
        f"The busiest rank computes {listing([str(number) for number in most])} pairs of "
        f"tokens in the {count(ranks, 'step')}."
    )
