"""The messages that ranks exchange, round by round."""

from ddp_course.notebook.plots.display import display_drawing
from ddp_course.notebook.plots.drawing import WIDE, arrow, line, rectangle, text
from ddp_course.notebook.plots.style import CARD, LINE, NOTE, color_of
from ddp_course.notebook.plots.words import count, listing, number

ROW, LEFT = 36, 66  # pixels


def messages(messages, ranks):
    """The messages that ranks exchange, as arrows from row to row, a column per round.

    messages: a list of {"round": from 1, "source": rank, "target": rank, "bytes": int}.
    """
    sizes = sorted({message["bytes"] for message in messages})
    labelled = len(sizes) > 1 and len(messages) <= 16
    lane = 76 if labelled else 21
    lanes = {name: in_lanes(of_round) for name, of_round in by_round(messages).items()}
    widths = {name: max(70, lane * len(of) + 20) for name, of in lanes.items()}
    lines = in_lines(widths, WIDE - LEFT)
    tall, pieces = ROW * (ranks - 1) + 74, []
    for place, names in enumerate(lines):
        x, top = LEFT, place * tall + 48
        for rank in range(ranks):
            pieces.append(text(4, top + ROW * rank, f"rank {rank}", anchor="start"))
        for name in names:
            area = (x, top, widths[name] - 6)
            pieces += a_round(area, f"round {name}", ranks)
            pieces += arrows(area, lanes[name], lane, labelled)
            x += widths[name]
    note = f"{count(len(messages), 'message')}{of_bytes(sizes)}"
    bottom = len(lines) * tall + 10
    pieces.append(text(4, bottom, note, color=NOTE, anchor="start"))
    display_drawing(WIDE, bottom + 14, pieces, in_words(messages, ranks, note))


def a_round(area, label, ranks):
    """A column with its heading and a line for each rank. area: left, top, width."""
    x, top, width = area
    yield rectangle(x, top - 18, width, ROW * (ranks - 1) + 36, CARD)
    yield text(x + width / 2, top - 31, label)
    for rank in range(ranks):
        y = top + ROW * rank
        yield line([(x + 5, y), (x + width - 5, y)], LINE, 1)


def arrows(area, lanes, lane, labelled):
    """An arrow for each message, in the colour of the rank that sends it."""
    x, top, width = area
    first = x + (width - lane * (len(lanes) - 1)) / 2 - (30 if labelled else 0)
    for place, of_lane in enumerate(lanes):
        at = first + lane * place
        for message in of_lane:
            color = color_of(message["source"])
            begin, end = (top + ROW * message[side] for side in ("source", "target"))
            short = 3 if end > begin else -3
            yield f'<circle cx="{at:g}" cy="{begin:g}" r="3.5" fill="{color}"/>'
            yield arrow((at, begin), (at, end - short), color=color, thick=2)
            if labelled:
                beside = begin + (ROW if end > begin else -ROW) / 2  # between two lines
                size = f"{message['bytes']:,} B"
                yield text(at + 7, beside, size, CARD, size=12, anchor="start")


def by_round(messages):
    """{round: its messages}, in order."""
    rounds = {}
    for message in sorted(messages, key=lambda message: message["round"]):
        rounds.setdefault(message["round"], []).append(message)
    return rounds


def in_lanes(messages):
    """The messages of a round side by side: those of one lane share no row between."""
    lanes = []
    for message in sorted(messages, key=lambda m: (rows(m)[1] - rows(m)[0], rows(m))):
        low, high = rows(message)
        free = [
            lane
            for lane in lanes
            if all(low >= rows(other)[1] or high <= rows(other)[0] for other in lane)
        ]
        if free:
            free[0].append(message)
        else:
            lanes.append([message])
    return lanes


def rows(message):
    """The rows between which an arrow runs, the upper one first."""
    return sorted((message["source"], message["target"]))


def in_lines(widths, room):
    """The rounds broken into lines that have room on the page. widths: {round: width}."""
    lines, used = [[]], 0
    for name, width in widths.items():
        if lines[-1] and used + width > room:
            lines.append([])
            used = 0
        lines[-1].append(name)
        used += width
    return lines


def of_bytes(sizes):
    """How large messages are. sizes: in order."""
    if len(sizes) <= 1:
        return "".join(f" of {count(size, 'byte')} each" for size in sizes)
    return f" of {sizes[0]:,} to {sizes[-1]:,} bytes"


def in_words(messages, ranks, note):
    """Which rank sends to which, round by round."""
    told = [
        f"round {name}: "
        + listing(f"rank {m['source']} to rank {m['target']}" for m in of_round)
        for name, of_round in by_round(messages).items()
    ]
    total = number(sum(message["bytes"] for message in messages))
    head = f"{note} between {count(ranks, 'rank')}, {total} bytes in all"
    return f"{'. '.join([head, '; '.join(told)] if told else [head])}."
