"""A pipeline as an animation: micro-batches that travel through the stages."""

from ddp_course.notebook.plots.actions import (
    CHUNKS,
    COLORS,
    colors_of,
    has_chunks,
    has_foot,
    owners_of,
)
from ddp_course.notebook.plots.display import display_film
from ddp_course.notebook.plots.drawing import (
    WIDE,
    box,
    legend,
    line,
    middle_of,
    rectangle,
    text,
)
from ddp_course.notebook.plots.film import Film
from ddp_course.notebook.plots.style import CARD, INK, NOTE, PAPER, color_of
from ddp_course.notebook.plots.timelines import busy, end_of
from ddp_course.notebook.plots.words import number

SECONDS, MOVE = 14, 0.4  # of the longest step, and of a micro-batch between two stages
STAGE, STAGE_WIDE, KEPT, CHART = 64, 64, 138, 222  # where columns begin, in pixels
CHART_WIDE, ROW, HIGH = WIDE - CHART - 4, 44, 30


def pipeline_steps(schedules):
    """Micro-batches that travel through the stages of pipelines: an animation, and on
    paper who computes what when.

    schedules: {title: for each rank its spans}, see actions.py, all with one clock.
    """
    longest = max(map(end_of, schedules.values()))
    tops = [0]
    for ranks in schedules.values():
        tops.append(tops[-1] + ROW * len(ranks) + 36)
    film = Film(WIDE, tops[-1] + 52, beats=SECONDS, pause=3, seconds=1)
    for top, (title, ranks) in zip(tops, schedules.items()):
        film.show(text(4, top + 18, title, anchor="start", size=15))
        scaled = [in_film_time(spans, longest) for spans in ranks]
        owners = owners_of(ranks)
        for rank, spans in enumerate(scaled):
            y = top + 36 + ROW * rank
            draw_stage(film, rank, spans, y, len(ranks))
            draw_kept(film, spans, y)
        for rank, spans in enumerate(scaled):
            draw_moves(film, spans, top + 36 + ROW * rank, rank, owners)
        draw_curtain(film, top + 32, ROW * len(ranks))
    draw_legend(film, tops[-1], longest, schedules.values())
    told = "; ".join(f"{title}: {busy(ranks)}" for title, ranks in schedules.items())
    alt = f"Animation of micro-batches that travel through pipelines. {told}."
    display_film(film, film.stills([SECONDS + 1], 1, alt), alt)


def in_film_time(spans, longest):
    """Spans as (kind, stage, micro-batch, begin, end), in seconds of the film."""
    scale = SECONDS / longest
    return [
        (*action, begin * scale, (begin + length) * scale)
        for *action, begin, length in spans
    ]


def draw_stage(film, rank, spans, y, ranks):
    """What a rank computes: now, in its box, and over time, on the chart."""
    film.show(text(4, y + HIGH / 2, f"rank {rank}", anchor="start"))
    place = (STAGE, y, STAGE_WIDE, HIGH)
    film.show(rectangle(*place, CARD, color_of(rank), 2))
    film.show(text(*middle_of(place), "idle", CARD, NOTE))
    for kind, stage, micro_batch, begin, end in spans:
        color, name = COLORS[kind], str(micro_batch)
        now = box(2, 2, STAGE_WIDE - 4, HIGH - 4, color, name)
        left, right = (CHART + at * CHART_WIDE / SECONDS for at in (begin, end))
        label = name if right - left > 16 else ""
        later = box(left + 1, y, right - left - 1, HIGH, color, label)
        if has_foot(stage, ranks):
            now += rectangle(2, HIGH - 6, STAGE_WIDE - 4, 4, INK)
            later += rectangle(left + 1, y + HIGH - 4, right - left - 1, 4, INK)
        film.show(now, place[:2], begin, end)
        film.show(later)


def draw_moves(film, spans, y, rank, owners):
    """Micro-batches that go to the next stage, and their gradients that come back."""
    for kind, stage, micro_batch, _, end in spans:
        down = kind == "F"
        to = owners.get(stage + 1 if down else stage - 1)
        if kind == "W" or to in (None, rank):
            continue
        token = box(0, 0, 24, 22, COLORS[kind], str(micro_batch))
        token += rectangle(0, 0, 24, 22, "none", INK, 1.5)
        place = (STAGE + 4 if down else STAGE + STAGE_WIDE - 28), y + 4
        far = ROW * (to - rank)
        path = (0, 0), (0, far - HIGH if far > 0 else far + HIGH)  # ends before the row
        film.travel(token, place, end, end + MOVE, path)


def draw_kept(film, spans, y):
    """How many activations a rank keeps: of what has gone forward, and not yet back."""
    begin, kept, most = 0, 0, 0
    place = KEPT, y + HIGH / 2
    for kind, _, _, _, end in spans:
        film.show(text(0, 0, f"keeps {kept}", anchor="start"), place, begin, end)
        begin, kept = end, kept + {"F": 1, "I": 0}.get(kind, -1)
        most = max(most, kept)
    film.show(text(0, 0, f"at most {most}", anchor="start"), place, begin)


def draw_curtain(film, top, tall):
    """A curtain that opens a chart from left to right, as time goes on."""
    cover = rectangle(0, 0, CHART_WIDE + 10, tall, PAPER)
    curtain = cover + line([(0, 0), (0, tall)], INK, 1.5)
    film.travel(curtain, (CHART, top), 0, SECONDS, ((0, 0), (CHART_WIDE, 0)))


def draw_legend(film, bottom, longest, schedules):
    """How long the charts are, and what colours and words mean."""
    film.show(text(CHART, bottom + 8, "0", color=NOTE, anchor="start"))
    end = f"{number(longest)} slots"
    film.show(text(WIDE - 4, bottom + 8, end, color=NOTE, anchor="end"))
    film.show(legend(4, bottom + 34, colors_of(schedules)))
    words = CHUNKS if has_chunks(schedules) else "numbers: micro-batches"
    film.show(text(WIDE - 4, bottom + 34, words, color=NOTE, anchor="end"))
