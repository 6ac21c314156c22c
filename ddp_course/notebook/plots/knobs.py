"""Pictures with a slider: memory over the number of ranks, a pipeline over the number of
micro-batches, overlap over the size of buckets. In each, one quantity is the slider's,
and another one has a row or a panel for each of its values. A phone shows a whole
picture, so that no change is off its screen; so pictures are narrow enough to be legible
there.
"""

from ddp_course.estimates.memory import STAGES, states
from ddp_course.notebook.plots.actions import COLORS as ACTION_COLORS
from ddp_course.notebook.plots.actions import colors_of
from ddp_course.notebook.plots.drawing import (
    box,
    boxes,
    document,
    legend,
    line,
    rectangle,
    text,
)
from ddp_course.notebook.plots.knob import knob
from ddp_course.notebook.plots.speed import TIME_COLORS
from ddp_course.notebook.plots.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    NOTE,
    ORANGE,
    RED,
)
from ddp_course.notebook.plots.timelines import end_of
from ddp_course.notebook.plots.words import count, listing, number

WIDE = 510  # pixels
LEFT, BAR, HIGH, ROW = 100, 330, 26, 38

# ---- memory over the number of ranks ----

RANKS = tuple(2**power for power in range(11))
COLORS = {"weights": BLUE, "gradients": ORANGE, "optimizer": GREEN}


def memory_knob(parameters, precision="master", ranks=RANKS, at=8, gpu=80e9):
    """A slider over the number of ranks: what each rank keeps with DDP and ZeRO 1 to 3.

    parameters: how many; precision: one of estimates.memory.PRECISIONS; ranks: the
    slider's places; at: the one that it begins at; gpu: the bytes that a GPU has.
    The bytes are those of estimates.memory.states, without activations.
    """
    pictures = [(str(n), *memory_bars(parameters, precision, n, gpu)) for n in ranks]
    knob("number of ranks", pictures, ranks.index(at))


def memory_bars(parameters, precision, ranks, gpu):
    """The memory per rank, a bar for each stage: alternative text, and SVG in bytes."""
    kept = {stage: states(parameters, ranks, stage, precision) for stage in STAGES}
    most = max(gpu, sum(states(parameters, 1, 0, precision)))
    bottom, line = 30 + ROW * len(kept), LEFT + BAR * gpu / most
    title = f"Memory per rank, {count(ranks, 'rank')} (without activations)"
    pieces = [text(0, 12, title, anchor="start", weight=700)]
    for place, (stage, state) in enumerate(kept.items()):
        name = STAGES[stage].split(":")[0]
        pieces += bar(30 + ROW * place, name, state, most, line)
    pieces.append(rectangle(line, 26, 2, bottom - 26, RED))
    pieces.append(text(line, bottom + 8, f"a GPU's {number(gpu / 1e9)} GB", color=RED))
    pieces.append(legend(LEFT, bottom + 32, COLORS))
    told = [
        f"{STAGES[stage].split(':')[0]}: {number(sum(state) / 1e9)} GB ("
        + listing(
            f"{part} {number(size / 1e9)}" for part, size in state._asdict().items()
        )
        + f"), {'below' if sum(state) <= gpu else 'above'} the line"
        for stage, state in kept.items()
    ]
    limit = f"with a line at the {number(gpu / 1e9)} GB of a GPU"
    head = f"Memory per rank on {count(ranks, 'rank')}, without activations, {limit}"
    alt = f"{head}. {'; '.join(told)}."
    return alt, document(WIDE, bottom + 46, pieces, alt)


def bar(top, name, state, most, line):
    """The pieces of one bar. state: bytes by part; most: what the whole width is; line:
    the x of a line that its number is not to touch.
    """
    yield text(LEFT - 8, top + HIGH / 2, name, anchor="end")
    x = LEFT
    for part, size in state._asdict().items():
        long = BAR * size / most
        yield box(x, top, max(long, 0.5), HIGH, COLORS[part], "")
        x += long
    label = f"{number(sum(state) / 1e9)} GB"
    if x <= line < x + 12 + 8 * len(label):
        x = line
    yield text(x + 6, top + HIGH / 2, label, anchor="start", color=NOTE)


# ---- a pipeline over the number of micro-batches ----

STAGE_LEFT, STAGE_WIDE, STAGE_HIGH = 64, WIDE - 68, 16


def pipeline_knob(steps, at=4):
    """A slider over the number of micro-batches: which rank of a pipeline works when,
    and how much of the step is the bubble.

    steps: {micro-batches: {title: for each rank its spans, see actions.py}}; at: the
    number that it begins at. The longest step of a picture is as wide as the picture.
    """
    pictures = [(str(m), *pipeline_panels(m, of)) for m, of in steps.items()]
    knob("micro-batches", pictures, list(steps).index(at))


def pipeline_panels(micro_batches, pipelines):
    """A panel for each pipeline: alternative text, and SVG in bytes."""
    pieces, told, top = [], [], 0
    scale = STAGE_WIDE / max(map(end_of, pipelines.values()))
    for title, ranks in pipelines.items():
        work = sum(length for spans in ranks for *_, length in spans)
        idle, slots = 1 - work / (end_of(ranks) * len(ranks)), f"{end_of(ranks):g}"
        label = f"{title}: {slots} slots, bubble {idle:.0%}"
        told.append(f"{title}, {slots} slots, of which {idle:.0%} are the bubble")
        pieces.append(text(0, top + 10, label, anchor="start", weight=700))
        pieces += rank_rows(top + 24, ranks, scale)
        top += 24 + (STAGE_HIGH + 3) * len(ranks) + 18
    waits = {"a rank waits": GREY}
    colors = list((colors_of(pipelines.values()) | waits).items())
    for row in range(0, len(colors), 3):
        pieces.append(legend(STAGE_LEFT, top + 6, dict(colors[row : row + 3])))
        top += 22
    head = f"One step of {count(micro_batches, 'micro-batch')} through pipelines"
    alt = f"{head}: {'; '.join(told)}."
    return alt, document(WIDE, top - 2, pieces, alt)


def rank_rows(top, ranks, scale):
    """The pieces of one pipeline, a row for each rank. scale: pixels per slot."""
    found = {}
    for rank, spans in enumerate(ranks):
        y = top + (STAGE_HIGH + 3) * rank
        yield text(0, y + STAGE_HIGH / 2, f"rank {rank}", anchor="start", size=12)
        yield rectangle(STAGE_LEFT, y, end_of(ranks) * scale, STAGE_HIGH, GREY)
        for kind, *_, begin, length in spans:
            wide = length * scale
            place = STAGE_LEFT + begin * scale, y, wide - min(1, wide / 8), STAGE_HIGH
            found.setdefault(kind, []).append(place)
    for kind, places in found.items():
        yield boxes(places, ACTION_COLORS[kind])


# ---- overlap over the size of buckets ----

TIME_LEFT, TIME_WIDE = 96, WIDE - 100


def overlap_knob(planned, backward, at):
    """A slider over the size of buckets: when they travel, and what stays exposed.

    planned: {size: {link: what lesson16.transfers returned}}; backward: how long it
    takes; at: the size that it begins at. All times are in seconds.
    """
    ends = [end for of in planned.values() for spans in of.values() for _, end in spans]
    longest = max(backward, *ends)  # one scale for all places of the slider
    pictures = [
        (size, *overlap_panels(size, links, backward, longest))
        for size, links in planned.items()
    ]
    knob("bucket size", pictures, list(planned).index(at))


def overlap_panels(size, links, backward, longest):
    """A panel for each link: alternative text, and SVG in bytes."""
    pieces, told, top, scale = [], [], 0, TIME_WIDE / longest
    over = TIME_LEFT + backward * scale
    for link, spans in links.items():
        end = max(end for _, end in spans)
        exposed = f"{number(1e3 * max(0, end - backward))} ms exposed"
        label = f"{link}: {count(len(spans), 'bucket')}, {exposed}"
        told.append(label)
        pieces.append(text(0, top + 10, label, anchor="start", weight=700))
        for row, name in enumerate(("backward", "all_reduce")):
            y = top + 36 + 24 * row
            pieces.append(text(0, y, name, anchor="start"))
        place = TIME_LEFT, top + 26, backward * scale, 20
        pieces.append(rectangle(*place, TIME_COLORS["computing"]))
        for what, part in (("hidden", (0, backward)), ("exposed", (backward, longest))):
            found = list(within(spans, *part, top + 50, scale))
            if found:
                pieces.append(boxes(found, TIME_COLORS[what]))
        pieces.append(line([(over, top + 20), (over, top + 74)], INK, 1))
        top += 92
    pieces.append(text(TIME_LEFT, top + 2, "0 ms", color=NOTE, anchor="start"))
    last = f"{number(1e3 * longest)} ms"
    pieces.append(text(WIDE - 4, top + 2, last, color=NOTE, anchor="end"))
    pieces.append(legend(TIME_LEFT, top + 28, TIME_COLORS))
    head = f"Buckets of {size}, backward takes {number(1e3 * backward)} ms"
    alt = f"{head}. {'; '.join(told)}."
    return alt, document(WIDE, top + 42, pieces, alt)


def within(spans, first, last, y, scale):
    """The places of what of spans is between two times; a line apart from the next."""
    for begin, end in spans:
        begin, stop = max(begin, first), min(end, last)
        if begin < stop:
            wide = (stop - begin) * scale
            gap = min(1, wide / 8) if stop == end else 0
            yield TIME_LEFT + begin * scale, y, wide - gap, 20
