"""Diagrams of programs, ranks and machines: boxes and arrows."""

import textwrap

from ddp_course.notebook.plots.display import display_drawing
from ddp_course.notebook.plots.drawing import (
    WIDE,
    arrow,
    box,
    middle_of,
    rectangle,
    text,
)
from ddp_course.notebook.plots.style import (
    BLUE,
    CARD,
    FORWARD,
    GREY,
    INK,
    LINE,
    ORANGE,
    color_of,
)
from ddp_course.notebook.plots.words import count, listing, plain


def flow(steps):
    """A program as boxes with arrows between them, three or four in a row. steps: {what
    the box says: what is written under it}.
    """
    columns = min(len(steps), 3 if len(steps) <= 6 else 4)
    gap, tall = 34, 92
    wide = (WIDE - 4 - (columns - 1) * gap) / columns
    pieces = []
    for number, (label, note) in enumerate(steps.items()):
        row, column = divmod(number, columns)
        x, y = 2 + column * (wide + gap), 2 + row * (tall + gap)
        pieces.append(rectangle(x, y, wide, tall, CARD, BLUE, 1.5))
        middle, name = x + wide / 2, plain(label)
        pieces.append(text(middle, y + 20, name, CARD, size=15, weight=700))
        pieces.append(text(middle, y + 58, in_lines(note, wide - 16), CARD))
        if column:
            pieces.append(arrow((x - gap + 3, y + tall / 2), (x - 3, y + tall / 2)))
        elif row:
            between, last = y - gap / 2, 2 + (columns - 1) * (wide + gap) + wide / 2
            turns = (last, between), (middle, between)
            pieces.append(arrow((last, y - gap + 2), *turns, (middle, y - 3)))
    rows = -(-len(steps) // columns)
    told = [f"{plain(label)} ({plain(note)})" for label, note in steps.items()]
    alt = f"A program in {count(len(steps), 'step')}: {', then '.join(told)}."
    display_drawing(WIDE, rows * (tall + gap) - gap + 4, pieces, alt)


def in_lines(note, width, size=13):
    """A text with more line breaks, so that no line is longer than a width in pixels."""
    long = int(width / (0.61 * size))  # an average letter of DejaVu Sans, and some more
    lines = [part for line in note.split("\n") for part in textwrap.wrap(line, long)]
    return "\n".join(lines)


def data_parallel_step(ranks):
    """One data-parallel training step: forward and backward on each rank's part of the
    batch, then the mean of the gradients.
    """
    top, tall, step = 34, 42, 54
    work = {"part {} of\nthe batch": 70, "forward,\nbackward": 224}
    work |= {"gradients\nof its part": 378, "step": 706}
    pieces = [text(607, 16, "the ranks communicate only here")]
    for rank in range(ranks):
        y = top + rank * step
        pieces.append(text(4, y + tall / 2, f"rank {rank}", anchor="start"))
        for label, x in work.items():
            place = (x, y, 126 if x < 700 else 90, tall)
            pieces.append(box(*place, color_of(rank), label.format(rank)))
        for left in (196, 350, 504, 678):
            pieces.append(arrow((left + 3, y + tall / 2), (left + 25, y + tall / 2)))
    place = (532, top, 146, (ranks - 1) * step + tall)
    pieces.append(rectangle(*place, CARD, INK))
    pieces.append(text(*middle_of(place), "mean of all\ngradients", CARD))
    whose = "the only rank" if ranks == 1 else f"each of {ranks} ranks"
    alt = (
        f"One training step on {count(ranks, 'rank')}: {whose} takes its part of the "
        "batch, runs forward and backward, and has the gradients of its part; then the "
        "ranks communicate to get the mean of all gradients, and each makes its step."
    )
    display_drawing(WIDE, top + ranks * step - step + tall + 4, pieces, alt)


def machines(nodes, ranks_per_node):
    """The ranks of a job on its machines, with their rank, local rank and world size."""
    world, side = nodes * ranks_per_node, 126
    frame = ranks_per_node * (side + 10) + 10
    pieces, told = [], []
    for node in range(nodes):
        left = 2 + node * (frame + 24)
        pieces.append(text(left, 16, f"machine, node rank {node}", anchor="start"))
        pieces.append(rectangle(left, 34, frame, 112, CARD, LINE))
        ranks = range(node * ranks_per_node, (node + 1) * ranks_per_node)
        for local, rank in enumerate(ranks):
            content = f"rank {rank}\n\nlocal rank {local}\nworld size {world}"
            x = left + 10 + local * (side + 10)
            pieces.append(box(x, 44, side, 92, color_of(rank), content))
        numbers = [f"rank {rank} is local rank {n}" for n, rank in enumerate(ranks)]
        told.append(f"on node {node} {listing(numbers)}")
    size = f"{count(nodes, 'machine')} with {count(ranks_per_node, 'rank')} each"
    alt = f"{size}, a world of {world}: {'; '.join(told)}."
    display_drawing(nodes * (frame + 24) - 20, 148, pieces, alt)


def accumulation(ranks, micro_batches):
    """The micro-batches of one update, and when the ranks communicate: after each of
    them, and after the last one only.
    """
    ways = {"each backward averages its gradients": range(micro_batches)}
    ways["no_sync() for all but the last"] = [micro_batches - 1]
    tall, pieces = 36 * ranks + 44, []
    for number, (title, synced) in enumerate(ways.items()):
        top = number * tall
        pieces.append(text(4, top + 18, title, anchor="start", size=15))
        for rank in range(ranks):
            y = top + 51 + 36 * rank
            pieces.append(text(4, y, f"rank {rank}", anchor="start"))
        pieces += one_update(ranks, micro_batches, synced, top + 36)
    many = count(micro_batches, "micro-batch")
    talks = count(micro_batches, "all-reduce")
    alt = (
        f"One update of {many} on {count(ranks, 'rank')}, in two ways: with {talks}, "
        "one after each backward; and with 1 all-reduce, after the last backward, since "
        "the others run under no_sync()."
    )
    display_drawing(WIDE, 2 * tall + 4, pieces, alt)


def one_update(ranks, micro_batches, synced, top):
    """The boxes of one update from left to right. synced: the micro-batches after which
    there is an all-reduce.
    """
    x, tall = 66, 36 * ranks - 6
    sync, step = 50, 44
    wide = (WIDE - x - step - (sync + 4) * micro_batches) / micro_batches - 4
    for number in range(micro_batches):
        label = f"micro-batch {number}" if wide > 110 else str(number)
        for rank in range(ranks):
            place = (x, top + 36 * rank, wide, 30)
            yield box(*place, color_of(rank), label)
        x += wide + 4
        if number in synced:
            yield rectangle(x, top, sync, tall, CARD, INK)
            name = "all-\nreduce" if ranks > 1 else "–"
            yield text(x + sync / 2, top + tall / 2, name, CARD, size=12)
            x += sync + 4
    yield box(x, top, step, tall, INK, "step")


def item_weights(micro_batches):
    """The weight of each item of an update in the loss, as a share of a strip.

    micro_batches: how many items each of them has. Above, a mean of the micro-batches'
    means; below, the mean over all items.
    """
    many, total = len(micro_batches), sum(micro_batches)
    ways = {
        f"mean of {many} means": [many * items for items in micro_batches],
        f"mean of {total} items": [total] * many,
    }
    pieces, told = [], []
    for number, (title, parts) in enumerate(ways.items()):
        top = 100 * number
        pieces.append(text(4, top + 12, title, anchor="start", size=15))
        pieces += strip_of_items(micro_batches, parts, top + 28)
        of_each = [f"1/{part} in micro-batch {i}" for i, part in enumerate(parts)]
        told.append(f"in the {title}, an item weighs {listing(of_each)}")
    sizes = listing(count(items, "item") for items in micro_batches)
    alt = f"{count(many, 'micro-batch')} of {sizes}: {'; '.join(told)}."
    display_drawing(WIDE, 190, pieces, alt)


def strip_of_items(micro_batches, parts, top):
    """A strip with a box per item. parts: 2 where an item of that micro-batch is half of
    the strip, 3 where it is a third, and so on.
    """
    x = free = 2  # free: where the last name has ended
    for number, (items, part) in enumerate(zip(micro_batches, parts)):
        begin, color = x, [FORWARD, GREY][number % 2]
        for _ in range(items):
            wide = (WIDE - 4) / part
            yield rectangle(x, top, wide, 36, color, INK)
            if wide > 30:
                yield text(x + wide / 2, top + 18, f"1/{part}", color)
            x += wide
        half = 45  # of the width of a name
        middle = min((begin + x) / 2, WIDE - half)
        fits = middle - half >= free
        name = f"micro-batch {number}" if fits else str(number)
        yield text(middle if fits else (begin + x) / 2, top + 50, name)
        free = middle + half if fits else x


def adapter(inputs, outputs, r):
    """A weight matrix and, to scale, the two thin ones beside it."""
    scale = 190 / max(inputs, outputs)  # pixels per row or column
    tall, wide, thin = outputs * scale, inputs * scale, max(r * scale, 5)
    top, middle = 8, 8 + tall / 2
    b, a = 10 + wide + 120, 10 + wide + 120 + thin + 60
    frozen = f"W\n{outputs} × {inputs}\nfrozen"
    pieces = [
        rectangle(10, top, wide, tall, GREY, INK),
        text(10 + wide / 2, middle, frozen, GREY),
        text(10 + wide + 60, middle, "+  α/r ·", size=17),
        rectangle(b, top, thin, tall, ORANGE, INK),
        text(b + thin / 2, top + tall + 26, f"B\n{outputs} × {r}"),
        rectangle(a, middle - thin / 2, wide, thin, ORANGE, INK),
        text(a + wide / 2, middle + thin / 2 + 26, f"A\n{r} × {inputs}"),
    ]
    share = r * (inputs + outputs) / (inputs * outputs)
    alt = (
        f"The frozen matrix W, {outputs} × {inputs}, plus α/r times B, {outputs} × {r}, "
        f"times A, {r} × {inputs}, drawn to scale: B and A together have {share:.1%} of "
        "the numbers of W."
    )
    display_drawing(a + wide + 10, tall + 62, pieces, alt)
