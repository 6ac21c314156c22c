"""Tensor parallelism as an animation: a block of a GPT whose matrices are cut."""

from ddp_course.notebook.plots.display import display_film
from ddp_course.notebook.plots.drawing import chunk, moved, rectangle, text
from ddp_course.notebook.plots.film import Film
from ddp_course.notebook.plots.style import CARD, GREY, LINE, NOTE, PAPER, color_of
from ddp_course.notebook.plots.words import count

WIDE, HIGH, MATRIX, STEP = 84, 30, 34, 48  # pixels: activations, matrices, a row
CARD_WIDE = MATRIX + WIDE + 34
LEFT, TOP = 128, 66
MOVE = 0.7  # when, in its beat, what is sent has arrived

# of a block, from above: (name, kind of activations, matrix before it or None)
ROWS = (
    ("x", "tokens", None),
    ("queries, keys,\nvalues", "columns", "columns"),
    ("attention", "columns", None),
    ("output layer", "part", "rows"),
    ("h = sum + x", "sum", None),
    ("MLP, inner\nnumbers", "columns", "columns"),
    ("MLP, second\nlayer", "part", "rows"),
    ("sum + h", "sum", None),
)
CAPTIONS = {
    "tokens": "each rank has all of x",
    "columns": "cut by columns: whole results, of some heads",
    "inner": "cut by columns again: some of the inner numbers",
    "attention": "attention: each head is on one rank",
    "part": "cut by rows: each rank has a part of a sum",
    "sum": "all_reduce: the sum, on all ranks",
    "own tokens": "each rank has some tokens of x",
    "gather": "all_gather: all tokens, on all ranks",
    "scatter": "reduce_scatter: the sum, of the rank's own tokens",
}


def tensor_parallel(ranks, sequence=False):
    """One block of a GPT, forward, on this many ranks: an animation, and on paper its
    last moment. A rectangle has a token per row; its columns are the width.

    sequence: between the layers that are cut, each rank has some of the tokens.
    """
    beats = list(beats_of(sequence))
    width = max(450, LEFT + ranks * (CARD_WIDE + 10))
    height = TOP + len(ROWS) * STEP + 34
    film = Film(width, height, len(beats))
    film.show("".join(cards(ranks)))
    for beat, (caption, row, action) in enumerate(beats):
        end = beat + 1 if beat + 1 < len(beats) else None
        heading = text(0, 0, caption, size=14, weight=700)
        film.show(heading, (width / 2, 14), beat, end)
        action(film, ranks, row, beat, sequence)
    legend = "wide boxes: a row per token; striped: the sum over the ranks"
    if sequence:
        legend = "a row per token; striped: the sum; one colour: gathered from there"
    film.show(text(width / 2, height - 10, legend, color=NOTE, size=12))
    alt = in_words(ranks, beats)
    display_film(film, film.stills([len(beats) - 0.1], 1, alt), alt)


def beats_of(sequence):
    """What happens, beat by beat: (caption, row, the function that draws it)."""
    for row, (name, kind, _) in enumerate(ROWS):
        if kind == "columns" and ROWS[row - 1][1] != "columns" and sequence:
            yield CAPTIONS["gather"], row - 1, gather
        if kind == "tokens":
            yield CAPTIONS["own tokens" if sequence else "tokens"], row, appear
        elif kind == "sum":
            yield CAPTIONS["scatter" if sequence else "sum"], row, reduce
        elif name == "attention":
            yield CAPTIONS["attention"], row, appear
        else:
            caption = "inner" if "inner" in name else kind
            yield CAPTIONS[caption], row, appear


# ---- places and pieces ----


def place_of(rank, row):
    """The corner of a rank's activations."""
    left = LEFT + rank * (CARD_WIDE + 10)
    return left + MATRIX + 24, TOP + row * STEP + 8


def cards(ranks):
    """The ranks with their parts of the matrices, and empty activations."""
    for row, (name, _, _) in enumerate(ROWS):
        y = TOP + row * STEP + 8 + HIGH / 2
        yield text(LEFT - 10, y, name, anchor="end", size=12)
    for rank in range(ranks):
        left = LEFT + rank * (CARD_WIDE + 10)
        tall = len(ROWS) * STEP + 30
        yield rectangle(left, TOP - 28, CARD_WIDE, tall, CARD, color_of(rank), 2, 6)
        yield text(left + CARD_WIDE / 2, TOP - 13, f"rank {rank}", CARD, weight=700)
        for row, (_, _, cut) in enumerate(ROWS):
            x, y = place_of(rank, row)
            yield rectangle(x, y, WIDE, HIGH, PAPER, LINE)
            if cut:
                yield moved(matrix(rank, ranks, cut), left + 10, y - 2)


def matrix(rank, ranks, cut):
    """A whole matrix in grey, of which the rank has columns or rows."""
    whole = rectangle(0, 0, MATRIX, MATRIX, GREY, LINE)
    part = MATRIX / ranks
    if cut == "columns":
        return whole + rectangle(rank * part, 0, part, MATRIX, color_of(rank))
    return whole + rectangle(0, rank * part, MATRIX, part, color_of(rank))


def columns(rank, ranks):
    """Some columns of the activations, for all tokens."""
    return rectangle(0, 0, WIDE / ranks, HIGH, color_of(rank)), (rank * WIDE / ranks, 0)


def tokens(rank, ranks):
    """Some tokens of the activations, all columns."""
    return rectangle(0, 0, WIDE, HIGH / ranks, color_of(rank)), (0, rank * HIGH / ranks)


def shown(film, piece, rank, row, begin, offset=(0, 0)):
    x, y = place_of(rank, row)
    film.show(piece, (x + offset[0], y + offset[1]), begin)


# ---- what happens ----


def appear(film, ranks, row, beat, sequence):
    """Each rank computes a row of the picture, without the others."""
    kind = ROWS[row][1]
    for rank in range(ranks):
        if kind == "columns":
            shown(film, *with_offset(columns(rank, ranks), rank, row, beat + 0.2))
        elif kind == "part":
            part = rectangle(0, 0, WIDE, HIGH, color_of(rank))
            label = text(
                WIDE / 2, HIGH / 2, "part", color_of(rank), weight=700, size=12
            )
            shown(film, part + label, rank, row, beat + 0.2)
        elif sequence:
            shown(film, *with_offset(tokens(rank, ranks), rank, row, beat))
        else:
            whole = chunk(WIDE, HIGH, [], "") + rectangle(0, 0, WIDE, HIGH, GREY, LINE)
            label = text(WIDE / 2, HIGH / 2, "all tokens", GREY, size=12)
            shown(film, whole + label, rank, row, beat)


def with_offset(piece, rank, row, begin):
    shape, offset = piece
    return shape, rank, row, begin, offset


def gather(film, ranks, row, beat, sequence):
    """Each rank's tokens travel to all others."""
    for source in range(ranks):
        shape, (dx, dy) = tokens(source, ranks)
        x, y = place_of(source, row)
        for goal in range(ranks):
            if goal != source:
                to_x, _ = place_of(goal, row)
                path = (0, 0), (to_x - x, 0)
                film.travel(
                    shape, (x + dx, y + dy), beat, film.length, path, beat + MOVE
                )


def reduce(film, ranks, row, beat, sequence):
    """Each rank's part travels to all others, or only its tokens to theirs."""
    for goal in range(ranks):
        to_x, to_y = place_of(goal, row)
        for source in range(ranks):
            x, y = place_of(source, row - 1)
            piece, (dx, dy) = rectangle(0, 0, WIDE, HIGH, color_of(source)), (0, 0)
            if sequence:
                piece = rectangle(0, 0, WIDE, HIGH / ranks, color_of(source))
                dy = goal * HIGH / ranks
            path = (0, 0), (to_x - x, to_y - y)
            film.travel(piece, (x + dx, y + dy), beat, beat + MOVE, path)
        high, dy = (HIGH / ranks, goal * HIGH / ranks) if sequence else (HIGH, 0)
        stripes = "".join(
            rectangle(number * WIDE / 8, 0, WIDE / 8, high, color_of(number % ranks))
            for number in range(8)
        )
        film.show(stripes, (to_x, to_y + dy), beat + MOVE)


def in_words(ranks, beats):
    """What the animation shows."""
    return (
        f"Animation of a GPT's block, forward, cut for {count(ranks, 'rank')}, in "
        f"{len(beats)} steps: {'; '.join(caption for caption, *_ in beats)}."
    )
