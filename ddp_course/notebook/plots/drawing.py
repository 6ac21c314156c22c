"""The parts of diagrams and animations: pieces of SVG, measured in pixels."""

import html

from ddp_course.notebook.plots.style import (
    FONTS,
    INK,
    LINE,
    NOTE,
    PAPER,
    color_of,
    text_color,
)

WIDE, MARGIN = 800, 8  # JupyterLab has room for so many, with its side bar, at 1280


def document(width, height, body, alt):
    """A whole SVG on a white ground that says what it shows, bytes. body: its pieces."""
    wide, tall = width + 2 * MARGIN, height + 2 * MARGIN
    size = f'width="{wide:g}" height="{tall:g}"'
    view = f'viewBox="{-MARGIN} {-MARGIN} {wide:g} {tall:g}"'
    font = f'font-family="{", ".join(FONTS)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} {font}>'
    ground = rectangle(-MARGIN, -MARGIN, wide, tall, PAPER)
    return titled(f"{head}{ground}{''.join(body)}</svg>", alt).encode()


def titled(svg, alt):
    """An SVG with a title, and marked as one image."""
    head, rest = svg.split(">", 1)
    text = html.escape(alt)
    return f'{head} role="img" aria-label="{text}"><title>{text}</title>{rest}'


def rectangle(x, y, width, height, color, edge=None, thick=1, corner=0):
    """A box with its upper left corner at (x, y)."""
    frame = f' stroke="{edge}" stroke-width="{thick:g}"' if edge else ""
    rounded = f' rx="{corner:g}"' if corner else ""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        f'{rounded} fill="{color}"{frame}/>'
    )


def boxes(places, color):
    """Many boxes of one colour in one piece. places: [(x, y, width, height)]."""
    path = "".join(f"M{x:.4g} {y:g}h{w:.3g}v{h:g}h-{w:.3g}z" for x, y, w, h in places)
    return f'<path d="{path}" fill="{color}"/>'


def grid(x, y, columns, rows, width, height, gap):
    """Empty places in columns and rows."""
    places = [
        f"M{x + column * (width + gap):g} {y + row * (height + gap):g}"
        f"h{width}v{height}h-{width}z"
        for row in range(rows)
        for column in range(columns)
    ]
    return f'<path d="{"".join(places)}" fill="none" stroke="{LINE}"/>'


def text(x, y, content, on=PAPER, color=None, size=13, anchor="middle", weight=400):
    """Text around (x, y), its lines one under the other, on a background colour.

    anchor: what x is, middle, start or end.
    """
    style = f'fill="{text_color(on, color)}" font-size="{size}" text-anchor="{anchor}"'
    if weight != 400:
        style += f' font-weight="{weight}"'
    lines = content.split("\n")
    top = y - 0.64 * size * (len(lines) - 1) + 0.36 * size
    return "".join(
        f'<text x="{x:g}" y="{top + 1.28 * size * number:g}" {style}>'
        f"{html.escape(line)}</text>"
        for number, line in enumerate(lines)
    )


def box(x, y, width, height, color, content, **options):
    """A rectangle with a text in its middle."""
    middle = x + width / 2, y + height / 2
    written = text(*middle, content, color, **options) if content else ""
    return rectangle(x, y, width, height, color) + written


def chunk(width, height, ranks, label):
    """A box in the colours of the ranks that it comes from, and its label."""
    if not ranks:
        return rectangle(0, 0, width, height, "none", LINE)
    if len(ranks) == 1:
        return box(0, 0, width, height, color_of(ranks[0]), label, weight=700)
    stripes = stripes_of(width, height, ranks, [""] * len(ranks))
    edge = rectangle(0, 0, width, height, "none", LINE)
    room = 8.6 * len(label) + 6  # a ground of its own: none is legible on all stripes
    return (
        stripes + edge + box((width - room) / 2, height / 2 - 8, room, 16, PAPER, label)
    )


def stripes_of(width, height, ranks, names):
    """A box with a stripe for each rank, and a name on each."""
    stripe = width / len(ranks)
    return "".join(
        box(number * stripe, 0, stripe, height, color_of(rank), name, weight=700)
        for number, (rank, name) in enumerate(zip(ranks, names))
    )


def letter(rank):
    """A for rank 0, B for rank 1, and so on."""
    return chr(ord("A") + rank)


def middle_of(place):
    """The middle of a rectangle."""
    x, y, width, height = place
    return x + width / 2, y + height / 2


def moved(piece, x, y):
    """A piece at another place."""
    return f'<g transform="translate({x:g} {y:g})">{piece}</g>'


def line(points, color=INK, thick=1.5):
    """A line through points."""
    path = "L".join(f"{x:.4g} {y:.4g}" for x, y in points)
    return f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="{thick:g}"/>'


def arrow(*points, color=INK, thick=1.5):
    """A line through points, with the tip of its head at the last one."""
    (x, y), (to_x, to_y) = points[-2:]
    long = ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5
    dx, dy = (to_x - x) / long, (to_y - y) / long
    neck = to_x - 9 * dx, to_y - 9 * dy
    sides = [(neck[0] - 4 * dy * side, neck[1] + 4 * dx * side) for side in (1, -1)]
    tip = " ".join(f"{px:.4g},{py:.4g}" for px, py in [(to_x, to_y), *sides])
    head = f'<polygon points="{tip}" fill="{color}"/>'
    return line([*points[:-1], neck], color, thick) + head


def legend(x, y, entries):
    """Squares with labels, in a row from x. entries: {label: colour}."""
    parts = []
    for label, color in entries.items():
        parts.append(rectangle(x, y - 7, 14, 14, color, NOTE))
        parts.append(text(x + 20, y, label, anchor="start"))
        x += 42 + 8.2 * len(label)
    return "".join(parts)
