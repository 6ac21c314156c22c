"""A pipeline as an animation: micro-batches that travel through the stages."""

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
from ddp_course.notebook.plots.style import (
    BACKWARD,
    CARD,
    FORWARD,
    INK,
    NOTE,
    PAPER,
    color_of,
)
from ddp_course.notebook.plots.timelines import busy, end_of
from ddp_course.notebook.plots.words import number

SECONDS, MOVE = 14, 0.4  # of the longest step, and of a micro-batch between two stages
STAGE, STAGE_WIDE, KEPT, CHART = 64, 64, 138, 222  # where columns begin, in pixels
CHART_WIDE, ROW, HIGH = WIDE - CHART - 4, 44, 30
COLORS = {"forward": FORWARD, "backward": BACKWARD}


def pipeline_steps(schedules):
    """Micro-batches that travel through the stages of pipelines: an animation, and on
    paper who computes what when.

    schedules: {title: for each stage its [(kind, micro-batch, begin, seconds)]}, as for
    `pipelines`. All run on one clock.
    """
    longest = max(map(end_of, schedules.values()))
    tops = [0]
    for stages in schedules.values():
        tops.append(tops[-1] + ROW * len(stages) + 36)
    film = Film(WIDE, tops[-1] + 52, beats=SECONDS, pause=3, seconds=1)
    for top, (title, stages) in zip(tops, schedules.items()):
        film.show(text(4, top + 18, title, anchor="start", size=15))
        for rank, spans in enumerate(stages):
            spans = in_film_time(spans, longest)
            y = top + 36 + ROW * rank
            draw_stage(film, rank, spans, y)
            draw_kept(film, spans, y)
        for rank, spans in enumerate(stages):
            spans = in_film_time(spans, longest)
            draw_moves(film, spans, top + 36 + ROW * rank, rank, len(stages))
        draw_curtain(film, top + 32, ROW * len(stages))
    draw_legend(film, tops[-1], longest)
    told = "; ".join(f"{title}: {busy(stages)}" for title, stages in schedules.items())
    alt = f"Animation of micro-batches that travel through pipelines. {told}."
    display_film(film, film.stills([SECONDS + 1], 1, alt), alt)


def in_film_time(spans, longest):
    """Spans as (kind, micro-batch, begin, end), in seconds of the film."""
    scale = SECONDS / longest
    return [
        (kind, micro_batch, begin * scale, (begin + seconds) * scale)
        for kind, micro_batch, begin, seconds in spans
    ]


def draw_stage(film, rank, spans, y):
    """What a stage computes: now, in its box, and over time, on the chart."""
    film.show(text(4, y + HIGH / 2, f"rank {rank}", anchor="start"))
    place = (STAGE, y, STAGE_WIDE, HIGH)
    film.show(rectangle(*place, CARD, color_of(rank), 2))
    film.show(text(*middle_of(place), "idle", CARD, NOTE))
    for kind, micro_batch, begin, end in spans:
        now = box(2, 2, STAGE_WIDE - 4, HIGH - 4, COLORS[kind], str(micro_batch))
        film.show(now, place[:2], begin, end)
        left, right = (CHART + at * CHART_WIDE / SECONDS for at in (begin, end))
        label = str(micro_batch) if right - left > 16 else ""
        film.show(box(left + 1, y, right - left - 1, HIGH, COLORS[kind], label))


def draw_moves(film, spans, y, rank, stages):
    """Micro-batches that go to the next stage, and their gradients that come back."""
    for kind, micro_batch, _, end in spans:
        down = kind == "forward"
        if (down and rank == stages - 1) or (not down and rank == 0):
            continue
        token = box(0, 0, 24, 22, COLORS[kind], str(micro_batch))
        token += rectangle(0, 0, 24, 22, "none", INK, 1.5)
        place = (STAGE + 4 if down else STAGE + STAGE_WIDE - 28), y + 4
        path = (0, 0), (0, ROW - HIGH if down else HIGH - ROW)  # ends between stages
        film.travel(token, place, end, end + MOVE, path)


def draw_kept(film, spans, y):
    """How many micro-batches have gone forward through a stage, and not yet back."""
    begin, kept, most = 0, 0, 0
    place = KEPT, y + HIGH / 2
    for kind, _, _, end in spans:
        film.show(text(0, 0, f"keeps {kept}", anchor="start"), place, begin, end)
        begin, kept = end, kept + (1 if kind == "forward" else -1)
        most = max(most, kept)
    film.show(text(0, 0, f"at most {most}", anchor="start"), place, begin)


def draw_curtain(film, top, tall):
    """A curtain that opens a chart from left to right, as time goes on."""
    cover = rectangle(0, 0, CHART_WIDE + 10, tall, PAPER)
    curtain = cover + line([(0, 0), (0, tall)], INK, 1.5)
    film.travel(curtain, (CHART, top), 0, SECONDS, ((0, 0), (CHART_WIDE, 0)))


def draw_legend(film, bottom, longest):
    """How long the charts are, and what colours and words mean."""
    film.show(text(CHART, bottom + 8, "0 ms", color=NOTE, anchor="start"))
    end = f"{number(1e3 * longest)} ms"
    film.show(text(WIDE - 4, bottom + 8, end, color=NOTE, anchor="end"))
    film.show(legend(4, bottom + 34, COLORS))
    words = "numbers: micro-batches; keeps: gone forward, not yet back"
    film.show(text(WIDE - 4, bottom + 34, words, color=NOTE, anchor="end"))
