"""The ring all-reduce as an animation: pieces that travel round n ranks."""

import math

from ddp_course.notebook.plots import collectives
from ddp_course.notebook.plots.collectives import (
    CHUNK,
    HIGH,
    drawn,
    letters,
    owners_of,
)
from ddp_course.notebook.plots.display import display_film
from ddp_course.notebook.plots.drawing import arrow, grid, rectangle, text
from ddp_course.notebook.plots.film import Film
from ddp_course.notebook.plots.knob import knob
from ddp_course.notebook.plots.style import CARD, INK, NOTE, PAPER, color_of
from ddp_course.notebook.plots.words import count

CARD_HIGH = 66  # pixels
MOVE = 0.6  # the part of a step in which pieces travel


def ring(frames):
    """A ring all-reduce, step by step: an animation, and on paper all of its steps.

    frames: for each step, by rank, the marks (pieces, n * n) of what it holds, as
    lesson 02's marked_chunks makes them. What is new in a frame has come from the rank
    before.
    """
    n, steps = len(frames[0]), len(frames) - 1
    film, captions = staged(frames)
    alt = in_words(n, steps, captions)
    beats = [step + MOVE / 2 for step in range(1, steps + 1)] + [film.length - 0.01]
    still = film.stills(beats, 2 if film.width <= 480 else 1, alt)
    display_film(film, still, alt)


def ring_knob(frames):
    """A slider over the steps of a ring all-reduce: what each rank holds after each.

    frames: as for `ring`.
    """
    film, captions = staged(frames)
    pictures = []
    for step, (caption, frame) in enumerate(zip(captions, frames)):
        alt = f"A ring all-reduce, {caption}. The ranks hold: {collectives.in_words(frame)}."
        at_its_end = film.stills([step + 1 - 1e-6], 1, alt)
        pictures.append((str(step), alt, at_its_end))
    knob("step", pictures)


def staged(frames):
    """The film of a ring all-reduce, and the caption of each of its beats."""
    n, steps = len(frames[0]), len(frames) - 1
    width, height, middles = layout(n)
    film = Film(width, height, beats=steps + 1)
    film.show("".join(cards(n, middles)))
    moves = list(moves_of(frames))
    draw_pieces(film, frames, moves, middles)
    for move in moves:
        draw_move(film, frames, move, middles)
    captions = list(captions_of(frames, moves))
    for begin, (caption, end) in enumerate(zip(captions, [*range(1, steps + 2), None])):
        line = text(0, 0, caption, size=14, weight=700)
        film.show(line, (width / 2, 18), begin, end)
    film.show(text(width / 2, height - 14, letters(n), color=NOTE))
    return film, captions


def layout(n):
    """The size of the picture, and the middle of each rank's card on it, in pixels."""
    card = n * (CHUNK + 4) + 12
    if n == 1:
        around = [(0, 0)]
    elif n == 2:
        around = [(-1, 0), (1, 0)]
    else:
        angles = [2 * math.pi * rank / n for rank in range(n)]
        around = [(math.sin(angle), -math.cos(angle)) for angle in angles]
    across, down = (110, 60) if n == 2 else (50 + 0.62 * card, 55 + 20 * n)
    xs, ys = [across * x for x, _ in around], [down * y for _, y in around]
    width = max(400, max(xs) - min(xs) + card + 24)
    left, top = (width - max(xs) - min(xs)) / 2, 42 + CARD_HIGH / 2 - min(ys)
    middles = [(left + x, top + round(y, 3)) for x, y in zip(xs, ys)]
    return round(width), round(max(ys) + top + CARD_HIGH / 2 + 38), middles


def place_of(n, middle, piece):
    """The upper left corner of a piece on the card with this middle."""
    left = middle[0] - (n * (CHUNK + 4) - 4) / 2
    return left + piece * (CHUNK + 4), middle[1] - CARD_HIGH / 2 + 29


def cards(n, middles):
    """The ranks with places for n pieces, and the arrows between them."""
    wide = n * (CHUNK + 4) + 12
    for rank, (x, y) in enumerate(middles):
        left, top = x - wide / 2, y - CARD_HIGH / 2
        yield rectangle(left, top, wide, CARD_HIGH, CARD, color_of(rank), 2, 6)
        yield text(x, top + 15, f"rank {rank}", CARD, weight=700)
        yield grid(*place_of(n, (x, y), 0), n, 1, CHUNK, HIGH, 4)
        if n > 1:
            yield arrow(*ends_of_arrow(middles, rank, n))


def ends_of_arrow(middles, rank, n):
    """Where the arrow from a rank's card to the next one begins and ends."""
    (x, y), (to_x, to_y) = middles[rank], middles[(rank + 1) % n]
    if n == 2:  # there and back, one above the other
        y = to_y = y + (-14 if to_x > x else 14)
    half = (n * (CHUNK + 4) + 12) / 2 + 6, CARD_HIGH / 2 + 6
    dx, dy = to_x - x, to_y - y
    part = min(size / abs(d) for size, d in zip(half, (dx, dy)) if d)
    return (x + part * dx, y + part * dy), (to_x - part * dx, to_y - part * dy)


def moves_of(frames):
    """What comes with each step: (step, the rank that receives, the piece)."""
    for step in range(1, len(frames)):
        for rank, (before, after) in enumerate(zip(frames[step - 1], frames[step])):
            for piece, (old, new) in enumerate(zip(before.tolist(), after.tolist())):
                if old != new:
                    yield step, rank, piece


def draw_pieces(film, frames, moves, middles):
    """What each rank holds, piece by piece, until something else comes."""
    n, times = len(middles), {}
    for step, rank, piece in moves:
        times.setdefault((rank, piece), []).append(step)
    for rank, middle in enumerate(middles):
        for piece in range(n):
            place = place_of(n, middle, piece)
            steps = [0, *times.get((rank, piece), []), None]
            for step, until in zip(steps, steps[1:]):
                begin = step + MOVE if step else 0
                end = until + MOVE if until else None
                film.show(drawn(frames[step][rank][piece], n), place, begin, end)


def draw_move(film, frames, move, middles):
    """A piece that goes from one card to the next along the arrow, and what is new."""
    (step, rank, piece), n = move, len(middles)
    source = (rank - 1) % n
    start, goal = (place_of(n, middles[at], piece) for at in (source, rank))
    ends = ends_of_arrow(middles, source, n)
    on_arrow = [(x - CHUNK / 2 - start[0], y - HIGH / 2 - start[1]) for x, y in ends]
    path = ((0, 0), *on_arrow, (goal[0] - start[0], goal[1] - start[1]))
    edge = rectangle(0, 0, CHUNK, HIGH, "none", PAPER, 2)
    sent = drawn(frames[step - 1][source][piece], n) + edge
    film.travel(sent, start, step, step + MOVE, path)
    new = rectangle(0, 0, CHUNK, HIGH, "none", INK, 3)
    film.show(new, goal, step + MOVE, step + 1)


def captions_of(frames, moves):
    """What happens, for the beginning, each step and the end."""
    n, steps = len(frames[0]), len(frames) - 1
    pieces = count(n, "piece")
    yield f"start: each rank has {pieces} of its own"
    for step in range(1, steps + 1):
        grow = any(
            len(owners_of(frames[step - 1][(rank - 1) % n][piece], n)) < n
            for at, rank, piece in moves
            if at == step
        )
        what = "pieces are added up" if grow else "finished pieces are passed on"
        yield f"step {step} of {steps}: {what}"
    yield f"end: each rank has {'the sum' if n == 1 else f'all {n} sums'}"


def in_words(n, steps, captions):
    """What the animation shows."""
    head = f"Animation of a ring all-reduce on {count(n, 'rank')} in {count(steps, 'step')}"
    return f"{head}, each rank sending one of {n} pieces to the next: {'; '.join(captions)}."
