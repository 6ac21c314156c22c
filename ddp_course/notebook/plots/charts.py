"""Charts of what was measured: lines, bars, and the cost of an all-reduce."""

from matplotlib.ticker import LogLocator, NullFormatter

from ddp_course.notebook.plots import axes
from ddp_course.notebook.plots.display import display_figure
from ddp_course.notebook.plots.style import (
    BLUE,
    CARD,
    INK,
    LINE,
    NOTE,
    ORANGE,
    styled,
)
from ddp_course.notebook.plots.words import count, first_to_last, listing, number


@styled
def losses(curves, title="Training loss", every_epoch=None):
    """Loss by step. curves: {label: losses}, drawn in order; every_epoch: steps between
    the marks of the epochs.
    """
    figure, axis = axes.chart(2.9)
    for place, (label, values) in enumerate(curves.items()):
        dashes, width = ["-", "--", ":", "-."][place % 4], 1.5 if place else 2.4
        steps = range(1, len(values) + 1)
        axis.plot(steps, values, label=label, linestyle=dashes, linewidth=width)
    ends = range(every_epoch, len(values), every_epoch) if every_epoch else []
    for step in ends:
        label = "end of an epoch" if step == every_epoch else None
        axis.axvline(step + 0.5, color=LINE, linewidth=1.2, zorder=0, label=label)
    axis.set(xlabel="step", ylabel="loss (nats)", title=title, ylim=(0, None))
    axes.whole_steps(axis)
    if len(curves) > 1 or ends:
        axis.legend()
    told = [
        f"{label}: {first_to_last(values)} in {count(len(values), 'step')}"
        for label, values in curves.items()
    ]
    display_figure(
        figure, f"{title}. Line chart of the loss (nats). {'; '.join(told)}."
    )


@styled
def curve(xs, lines, xlabel, ylabel, title, marks=None):
    """Lines over the same xs, {label: values}; marks: {label: (xs, values)}, drawn as
    points. Those with a line's label have its colour.
    """
    figure, axis = axes.chart(2.9)
    colors = {}
    for label, values in lines.items():
        [line] = axis.plot(xs, values, label=label, linewidth=1.2 if marks else 2.2)
        colors[label] = line.get_color()
    for place, (label, (places, values)) in enumerate((marks or {}).items()):
        shown = "_" + label if label in lines else label  # "_": not in the legend
        look = {"color": colors.get(label), "markersize": 5}
        if lines and place % 2 and label not in lines:  # seen where it covers another
            look |= {"fillstyle": "none", "markersize": 9}
        axis.plot(places, values, "o", label=shown, **look)
    if colors.keys() & (marks or {}).keys():
        axis.plot([], [], "o", label="measured", color=INK, markersize=5)
    axis.set(xlabel=xlabel, ylabel=ylabel, title=title)
    if all(float(x).is_integer() for x in xs):
        axes.whole_steps(axis)
    if len(lines) + len(marks or {}) > 1:
        axes.legend_beside(figure, axis)
    told = [f"{label}: {first_to_last(values)}" for label, values in lines.items()]
    for label, points in (marks or {}).items():
        pairs = (f"{number(y)} at {number(x)}" for x, y in zip(*points))
        of = f"{label}, measured" if label in lines else label
        told.append(f"{of}: {', '.join(pairs)}")
    kind = "Line chart" if lines else "Points"
    between = f"for {xlabel} {first_to_last(xs)}" if lines else f"by {xlabel}"
    display_figure(
        figure, f"{title}. {kind} of {ylabel}, {between}. {'; '.join(told)}."
    )


@styled
def bars(values, xlabel, title, unit=""):
    """Horizontal bars with their value written at the end. values: {label: number}."""
    figure, axis = axes.chart(0.75 + 0.36 * len(values))
    drawn = axis.barh(list(values), list(values.values()), color=BLUE, height=0.65)
    texts = [written(value) + unit for value in values.values()]
    axis.bar_label(drawn, texts, padding=4)
    longest, room = max(values.values()) or 1, 1.04 + 0.019 * max(map(len, texts))
    axes.rows_down(axis, list(values))
    axis.xaxis.set_major_formatter("{x:,.0f}" if longest >= 1000 else "{x:,.4g}")
    axis.locator_params(axis="x", nbins=5)  # numbers of six digits need room
    axis.set(xlabel=xlabel, title=title, xlim=(0, room * longest))
    told = [f"{label}: {number(value)}" for label, value in values.items()]
    display_figure(figure, f"{title}. Bar chart of {xlabel}. {'; '.join(told)}.")


def written(value):
    """A value as it is written beside its bar."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.3g}"


@styled
def stacked(rows, xlabel, title, unit=""):
    """Horizontal bars of parts, one after the other, and their sum at the end. rows:
    {label: {part: number}}.
    """
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    figure, axis = axes.chart(1.1 + 0.4 * len(rows))
    ends = [0] * len(rows)
    for part in parts:
        lengths = [row.get(part, 0) for row in rows.values()]
        axis.barh(list(rows), lengths, left=ends, height=0.62, label=part)
        ends = [end + length for end, length in zip(ends, lengths)]
    texts = [written(end) + unit for end in ends]
    for place, (end, text) in enumerate(zip(ends, texts)):
        axis.text(end + 0.01 * max(ends), place, text, va="center")
    axes.rows_down(axis, list(rows))
    room = 1.04 + 0.019 * max(map(len, texts))
    axis.set(xlabel=xlabel, title=title, xlim=(0, room * (max(ends) or 1)))
    axes.legend_below(figure, axis.get_legend_handles_labels()[0])
    told = [
        f"{label}: {number(end)} ({listing(f'{part} {number(row[part])}' for part in row)})"
        for (label, row), end in zip(rows.items(), ends)
    ]
    display_figure(figure, f"{title}. Stacked bars of {xlabel}. {'; '.join(told)}.")


@styled
def in_use(timelines, title, blocks=()):
    """Memory during a step, from its first operation to its last. timelines: {label:
    bytes per parameter, by operation}; blocks: of one timeline, [(operation, number)],
    where which block begins to compute.
    """
    figure, axis = axes.chart(3.1)
    for label, values in timelines.items():
        places = [100 * place / (len(values) - 1) for place in range(len(values))]
        axis.plot(places, values, label=label, linewidth=1.5)
    xlabel, ylabel = "operations of the step so far (%)", "bytes per parameter"
    axis.set(xlabel=xlabel, ylabel=ylabel, title=title, ylim=(0, None))
    if blocks:  # room for their numbers above the line
        axis.set_ylim(0, 1.15 * max(map(max, timelines.values())))
    if len(timelines) > 1:
        axes.legend_below(figure, axis.get_legend_handles_labels()[0])
    told = [
        f"{label}: between {number(min(values))} and {number(max(values))}"
        for label, values in timelines.items()
    ]
    if blocks:
        operations = len(next(iter(timelines.values()))) - 1
        told.append(mark_blocks(axis, blocks, operations))
        swatch = axes.swatch(CARD, "which block computes", edge=LINE)
        axes.legend_below(figure, [*axis.get_legend_handles_labels()[0], swatch])
    alt = f"{title}. Line chart of {ylabel} over one step. {'; '.join(told)}."
    display_figure(figure, alt)


def mark_blocks(axis, blocks, operations):
    """The number of each block over its part of the x axis, every other part shaded."""
    ends = [place for place, _ in blocks[1:]] + [operations]
    for turn, ((begin, block), end) in enumerate(zip(blocks, ends)):
        left, right = (100 * place / operations for place in (begin, end))
        if turn % 2 == 0:
            axis.axvspan(left, right, color=CARD, linewidth=0, zorder=0)
        place = ((left + right) / 2, 1.0)
        options = {"ha": "center", "va": "top", "color": NOTE, "size": 9.5}
        axis.text(*place, block, transform=axis.get_xaxis_transform(), **options)
    return f"blocks compute in the order {listing(str(block) for _, block in blocks)}"


@styled
def four_bits(levels, weights):
    """How many weights of a layer have which value, and the levels that 4 bits leave.
    Both in units of the largest weight of a block.
    """
    figure, axis = axes.chart(2.7)
    axis.hist(weights, bins=120, color=LINE)
    for level in levels:
        axis.axvline(level, color=ORANGE, linewidth=1.4)
    title = f"{len(levels)} values for all weights"
    xlabel = "weight / largest weight of its block"
    axis.set(xlabel=xlabel, ylabel="number of weights", title=title)
    axis.yaxis.set_major_formatter("{x:,.0f}")
    legend = [axes.swatch(LINE, "weights"), axes.mark(ORANGE, "values of 4 bits")]
    axes.legend_below(figure, legend)
    told = listing(f"{level:.2f}" for level in levels)
    display_figure(
        figure,
        f"{title}. Histogram of {number(len(weights))} weights, most of them near 0, "
        f"and lines at the values that 4 bits can stand for: {told}.",
    )


@styled
def cost_line(sizes, seconds, alpha, beta, fitted, of="message"):
    """Measured time by size with the line alpha + beta * bytes; filled points were
    fitted, open ones held out. of: what was timed.
    """
    figure, axis = axes.chart(3.3)
    ratio = sizes[-1] / sizes[0]
    xs = [sizes[0] * ratio ** (place / 60) for place in range(61)]
    line = [(alpha + beta * x) * 1e3 for x in xs]
    axis.plot(xs, line, color=INK, linewidth=1.2, label="α + β · bytes")
    pairs = [(size, 1e3 * time) for size, time in zip(sizes, seconds)]
    for style, label, points in (
        ("full", "measured, used for the fit", [p for p in pairs if p[0] in fitted]),
        ("none", "measured, held out", [p for p in pairs if p[0] not in fitted]),
    ):
        axis.plot(*zip(*points), "o", color=ORANGE, fillstyle=style, label=label)
    axis.set(xscale="log", yscale="log", title=f"What one {of} costs")
    axis.set(xlabel="bytes in the tensor (log scale)")
    axis.set(ylabel=f"ms of one {of} (log scale)")
    ticks_on_log_axes(axis)
    axis.legend()
    off = max(abs(alpha + beta * x - t) / t for x, t in zip(sizes, seconds))
    display_figure(
        figure,
        f"What one {of} costs. Chart with log axes: {len(sizes)} sizes from "
        f"{in_binary_units(sizes[0])} ({number(pairs[0][1])} ms) to "
        f"{in_binary_units(sizes[-1])} ({number(pairs[-1][1])} ms), and the line of α = "
        f"{number(1e3 * alpha)} ms and β = {number(1e9 * beta)} ms per million bytes, "
        f"which is at most {off:.0%} off.",
    )


def ticks_on_log_axes(axis):
    """Bytes as powers of 4, from KiB to GiB; milliseconds at 1, 2 and 5 of each decade,
    and at more if there is only one.
    """
    axis.xaxis.set_major_locator(LogLocator(base=4, numticks=20))
    axis.xaxis.set_major_formatter(lambda size, _: in_binary_units(size))
    low, high = axis.get_ylim()
    steps = (1, 2, 5) if high > 10 * low else (1, 1.5, 2, 3, 5, 7)
    axis.yaxis.set_major_locator(LogLocator(subs=steps, numticks=20))
    axis.yaxis.set_major_formatter("{x:g}")
    for each in (axis.xaxis, axis.yaxis):
        each.set_minor_formatter(NullFormatter())
        each.set_tick_params(which="minor", length=0)


def in_binary_units(size):
    """Bytes as 256 B, 4 KiB or 1 MiB."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.3g} B"
