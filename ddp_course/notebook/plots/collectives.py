"""What ranks hold before and after a collective."""

from ddp_course.notebook.plots.display import display_drawing
from ddp_course.notebook.plots.drawing import (
    WIDE,
    arrow,
    chunk,
    letter,
    moved,
    stripes_of,
    text,
)
from ddp_course.notebook.plots.style import NOTE
from ddp_course.notebook.plots.words import count

CHUNK, HIGH, GAP = 42, 28, 4  # pixels
LEFT, ARROW = 60, 44


def who_holds_what(panels, columns=2):
    """What each rank holds before and after a collective. panels: {name: (before,
    after)}, each a list by rank of marks.

    Marks are lesson 02's: (chunks, n * n), 1 where the chunk has a part of chunk i of
    rank r, at place n * r + i. A chunk is drawn as a box in the colours of the ranks
    that it comes from, and named: B2 is chunk 2 of rank 1, Σ2 the sum of all chunks 2.
    """
    n = len(next(iter(panels.values()))[0])
    room = (WIDE / columns - LEFT - ARROW - 20) / (2 * n) - GAP
    chunk_wide = max(26, min(CHUNK, room))
    wide, tall = LEFT + ARROW + 20 + 2 * n * (chunk_wide + GAP), n * (HIGH + GAP) + 48
    pieces = []
    for number, (name, (before, after)) in enumerate(panels.items()):
        row, column = divmod(number, columns)
        x, y = 4 + column * wide, row * tall
        pieces.append(text(x, y + 18, name, anchor="start", size=15))
        pieces.append(moved("".join(panel(before, after, chunk_wide)), x, y + 34))
    bottom = -(-len(panels) // columns) * tall
    note = text(4, bottom + 12, letters(n), color=NOTE, anchor="start")
    told = [
        f"{name}: before, {in_words(before)}; after, {in_words(after)}"
        for name, (before, after) in panels.items()
    ]
    of = count(len(panels), "operation")
    alt = f"What {count(n, 'rank')} hold before and after {of}. {'. '.join(told)}."
    display_drawing(max(columns * wide, 420), bottom + 28, [*pieces, note], alt)


def panel(before, after, chunk_wide):
    """The chunks of each rank, a row per rank, and an arrow from before to after."""
    n = len(before)
    right = LEFT + n * (chunk_wide + GAP) + ARROW
    for rank in range(n):
        y = rank * (HIGH + GAP)
        yield text(0, y + HIGH / 2, f"rank {rank}", anchor="start")
        for x, chunks in ((LEFT, before[rank]), (right, after[rank])):
            for column, marks in enumerate(chunks):
                piece = drawn(marks, n, chunk_wide)
                yield moved(piece, x + column * (chunk_wide + GAP), y)
        if not len(after[rank]):
            place = (right, y + HIGH / 2)
            yield text(*place, "undefined", color=NOTE, anchor="start")
    middle = (n * (HIGH + GAP) - GAP) / 2
    yield arrow((right - ARROW + 4, middle), (right - 8, middle))


def letters(n):
    """What the letters on chunks mean."""
    origins = [f"{letter(rank)} from rank {rank}" for rank in range(n)]
    return ", ".join(origins + ["Σ the sum"] * (n > 1))


def drawn(marks, n, wide=CHUNK):
    """A chunk as a box with its name; a sum that is not finished, as the letters of its
    ranks. marks: its n * n marks.
    """
    owners = owners_of(marks, n)
    if 1 < len(owners) < n:
        return stripes_of(wide, HIGH, owners, [letter(owner) for owner in owners])
    return chunk(wide, HIGH, owners, name_of(marks, n))


def owners_of(marks, n):
    """The ranks whose chunks are in this one."""
    return [place // n for place, mark in enumerate(marks.tolist()) if mark]


def name_of(marks, n):
    """B2 for chunk 2 of rank 1, A2+B2 for a sum, Σ2 for the sum of all ranks'."""
    places = [place for place, mark in enumerate(marks.tolist()) if mark]
    if n > 1 and [place // n for place in places] == list(range(n)):
        return f"Σ{places[0] % n}"
    return "+".join(f"{letter(place // n)}{place % n}" for place in places)


def in_words(holdings):
    """What each rank holds."""
    n = len(holdings)
    told = []
    for rank, chunks in enumerate(holdings):
        names = " ".join(name_of(marks, n) or "-" for marks in chunks)
        told.append(f"rank {rank} {names or 'undefined'}")
    return ", ".join(told)
