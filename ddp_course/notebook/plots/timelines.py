"""What happened when: a training step, a pipeline, attempts at a run, replica groups."""

from ddp_course.notebook.plots import axes
from ddp_course.notebook.plots.actions import (
    CHUNKS,
    COLORS,
    colors_of,
    has_chunks,
    has_foot,
)
from ddp_course.notebook.plots.display import display_figure
from ddp_course.notebook.plots.style import (
    BACKWARD,
    BLUE,
    FORWARD,
    GREEN,
    GREY,
    INK,
    LINE,
    ORANGE,
    PAPER,
    RED,
    styled,
)
from ddp_course.notebook.plots.words import count, listing, number

STEP_COLORS = {
    "forward": FORWARD,
    "backward": BACKWARD,
    "optimizer": GREEN,
    "all_reduce": ORANGE,
}


@styled
def step_timelines(recordings):
    """What one training step does when. recordings: {label: what profiling.record
    returned}, on one time axis.
    """
    figure, lanes = axes.charts([0.95] * len(recordings))
    for axis, (label, rows) in zip(lanes, recordings.items()):
        for row, spans in rows.items():
            lane = 1 if row == "all_reduce" else 0
            place, color = (lane - 0.36, 0.72), STEP_COLORS[row]
            axis.broken_barh(joined(spans), place, facecolors=color, linewidth=0)
        axis.set_title(label)
        axes.rows_down(axis, ["computes", "all_reduce"])
    lanes[-1].set_xlabel("time since the step began (ms)")
    drawn = {
        row for rows in recordings.values() for row, spans in rows.items() if spans
    }
    legend = [axes.swatch(STEP_COLORS[row], row) for row in STEP_COLORS if row in drawn]
    axes.legend_below(figure, legend)
    told = [f"{label}: {in_words(rows)}" for label, rows in recordings.items()]
    display_figure(figure, f"One training step in time. {'; '.join(told)}.")


def joined(spans, gap=0.02):
    """Spans (begin, length) in order, those joined that are hardly a line apart (ms)."""
    ends = []
    for begin, length in sorted(spans):
        if ends and begin - ends[-1][1] < gap:
            ends[-1][1] = max(ends[-1][1], begin + length)
        else:
            ends.append([begin, begin + length])
    return [(begin, end - begin) for begin, end in ends]


def in_words(rows):
    """What a recording holds: which kind of work runs from when to when."""
    spans = {row: of for row, of in rows.items() if of}
    told = [
        f"{row} {number(of[0][0])} to {number(max(a + b for a, b in of))} ms"
        for row, of in spans.items()
    ]
    return ", ".join(told)


@styled
def pipelines(schedules):
    """Which rank computes which micro-batch, and when. schedules: {title: for each rank
    its spans}, see actions.py.
    """
    every = schedules.values()
    figure, panels = axes.charts([0.5 + 0.34 * len(ranks) for ranks in every])
    for axis, (title, ranks) in zip(panels, schedules.items()):
        axes.rows_down(axis, [f"rank {rank}" for rank in range(len(ranks))])
        for rank, spans in enumerate(ranks):
            for kind, stage, micro_batch, begin, length in spans:
                place, color = (axis, begin, rank - 0.4, length, 0.8), COLORS[kind]
                wide = length > len(str(micro_batch)) * max(map(end_of, every)) / 75
                name = str(micro_batch) if wide else ""
                axes.box(*place, color, name, edge=PAPER, size=9)
                if has_foot(stage, len(ranks)):
                    axes.box(axis, begin, rank + 0.28, length, 0.12, INK, edge=PAPER)
        axis.set(title=title, xlim=(0, max(map(end_of, every))))
    panels[-1].set_xlabel("slots: a forward of a whole rank takes 1")
    legend = [axes.swatch(color, name) for name, color in colors_of(every).items()]
    words = ["numbers: micro-batches", *([CHUNKS] if has_chunks(every) else [])]
    axes.legend_below(figure, [*legend, *(axes.mark(PAPER, word) for word in words)])
    told = [f"{title}: {busy(ranks)}" for title, ranks in schedules.items()]
    display_figure(figure, f"Pipelines in time. {'; '.join(told)}.")


def end_of(ranks):
    """When the last rank has finished."""
    return max(begin + length for spans in ranks for *_, begin, length in spans)


def busy(ranks):
    """What a pipeline does, in words: its length, and how long each rank computes."""
    end = end_of(ranks)
    shares = [sum(length for *_, length in spans) / end for spans in ranks]
    n = len({span[2] for span in ranks[0]})
    takes = "takes" if n == 1 else "take"
    told = listing(f"rank {rank} {share:.0%}" for rank, share in enumerate(shares))
    return (
        f"{count(n, 'micro-batch')} through {count(len(ranks), 'rank')} {takes} "
        f"{end:g} slots, of which the ranks compute: {told}"
    )


@styled
def attempts(rows, save_every, title):
    """The updates of each attempt at a run, and which of them an earlier attempt had
    done already.

    rows: a list of the numbers of the updates, from 1, for each attempt. All but the
    last were killed.
    """
    last = max(max(row, default=0) for row in rows)
    figure, axis = axes.chart(1.15 + 0.42 * len(rows), width=axes.WIDE)
    done, redone = set(), []
    axes.rows_down(axis, [f"attempt {place + 1}" for place in range(len(rows))])
    for y, row in enumerate(rows):
        redone.append(len(done & set(row)))
        for step in row:
            color = GREY if step in done else BLUE
            axes.box(axis, step - 0.43, y - 0.3, 0.86, 0.6, color, edge=BLUE)
        done |= set(row)
        if y < len(rows) - 1:
            place = (max(row, default=0) + 0.9, y)
            axis.plot(*place, "x", color=RED, markersize=9, markeredgewidth=2.5)
    for step in range(save_every, last + 1, save_every):
        axis.axvline(step + 0.5, color=GREEN, linewidth=1.4, linestyle=":", zorder=0)
    axis.grid(False)
    axis.set(xlim=(0.3, last + 1.3), xlabel="update", title=title)
    axes.whole_steps(axis)
    axes.legend_below(figure, attempts_legend())
    told = [
        f"attempt {place + 1} does {count(len(row), 'update')}, {again} of them redone"
        for place, (row, again) in enumerate(zip(rows, redone))
    ]
    saved = f"Checkpoints every {save_every} updates"
    display_figure(figure, f"{title}. {saved}: {listing(told)}.")


def attempts_legend():
    cross = {"marker": "x", "linestyle": "", "markeredgewidth": 2.5}
    return [
        axes.swatch(BLUE, "done"),
        axes.swatch(GREY, "redone", edge=BLUE),
        axes.mark(RED, "killed", **cross),
        axes.mark(GREEN, "checkpoint", linestyle=":"),
    ]


@styled
def replica_groups(groups, title):
    """Which replica group did which round when, and when one was off.

    groups: for each group a dict with its `rounds`, dicts of round (its number), groups
    (how many took part), committed (False if its steps were taken back), begin,
    computed and end; `off`, pairs (begin, end); `received`, the times at which it got
    its state from another group. Times are in seconds.
    """
    figure, axis = axes.chart(1.5 + 0.62 * len(groups), width=axes.WIDE)
    axes.rows_down(axis, [f"group {number}" for number in range(len(groups))])
    end = max(row["end"] for group in groups for row in group["rounds"])
    for y, group in enumerate(groups):
        for row in group["rounds"]:
            draw_round(axis, y, row, room=0.02 * end)
        for off, on in group["off"]:
            later = [row["begin"] for row in group["rounds"] if row["begin"] > on]
            again = min(later, default=end)
            axis.plot([off, again], [y, y], color=LINE, linewidth=1.4, linestyle=":")
            axis.plot(off, y, "x", color=RED, markersize=9, markeredgewidth=2.5)
            axis.plot(on, y, "|", color=RED, markersize=9, markeredgewidth=2.5)
        top = [y - 0.42] * len(group["received"])
        axis.plot(group["received"], top, "v", color=GREEN, markersize=8)
    axis.set(xlim=(-0.01 * end, 1.02 * end), title=title)
    axis.set_xlabel("time since the first round began (s)")
    lost = any(not row["committed"] for group in groups for row in group["rounds"])
    axes.legend_below(figure, groups_legend(lost))
    told = [f"group {number} {rounds_of(group)}" for number, group in enumerate(groups)]
    display_figure(figure, f"{title}. {'; '.join(told)}.")


def draw_round(axis, y, row, room):
    """The inner steps of a round, with its number if there is room for it, and the wait
    for the other groups and their average.
    """
    begin, computed, end = row["begin"], row["computed"], row["end"]
    color = {1: GREY}.get(row["groups"], FORWARD) if row["committed"] else PAPER
    place = (axis, begin, y - 0.32, computed - begin, 0.64)
    name = str(row["round"]) if row["committed"] and computed - begin > room else ""
    axes.box(*place, color, name, edge=PAPER if row["committed"] else RED, size=9)
    axes.box(axis, computed, y - 0.32, end - computed, 0.64, ORANGE)


def rounds_of(group):
    """What a replica group did, in words."""
    rounds = [row for row in group["rounds"] if row["committed"]]
    alone = sum(row["groups"] == 1 for row in rounds)
    told = [f"does {count(len(rounds), 'round')}, {alone} of them alone"]
    if lost := len(group["rounds"]) - len(rounds):
        told.append(f"loses {count(lost, 'round')}")
    told += [f"is off from {number(a)} to {number(b)} s" for a, b in group["off"]]
    told += [f"receives its state at {number(time)} s" for time in group["received"]]
    return listing(told)


def groups_legend(lost):
    cross = {"marker": "x", "linestyle": "", "markeredgewidth": 2.5}
    return [
        axes.swatch(FORWARD, "a round's steps"),
        axes.swatch(GREY, "alone"),
        *([axes.swatch(PAPER, "lost", edge=RED)] if lost else []),
        axes.swatch(ORANGE, "average"),
        axes.mark(RED, "power off", **cross),
        axes.mark(RED, "on", **cross | {"marker": "|"}),
        axes.mark(GREEN, "state received", marker="v", linestyle=""),
    ]
