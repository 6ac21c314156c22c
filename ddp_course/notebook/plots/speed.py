"""How fast something is: what hides behind what, ratios with their spread, predictions
beside measurements.
"""

from matplotlib.ticker import NullFormatter

from ddp_course.notebook.plots import axes
from ddp_course.notebook.plots.display import display_figure
from ddp_course.notebook.plots.style import (
    BLUE,
    FORWARD,
    INK,
    LINE,
    ORANGE,
    styled,
)
from ddp_course.notebook.plots.timelines import joined
from ddp_course.notebook.plots.words import listing, number

TIME_COLORS = {"computing": BLUE, "hidden": FORWARD, "exposed": ORANGE}


@styled
def exposed(steps, title):
    """What computes and what communicates in a training step, and which part of the
    communication is exposed. steps: {label: what `read_trace` returned}.
    """
    figure, panels = axes.charts([0.95] * len(steps))
    told, longest = [], max(spans["step"][1] for spans in steps.values())
    for axis, (label, spans) in zip(panels, steps.items()):
        lanes = in_lanes(**spans)
        for what, of in lanes.items():
            place = (0 if what == "computing" else 1) - 0.36, 0.72
            axis.broken_barh(
                joined(of), place, facecolors=TIME_COLORS[what], linewidth=0
            )
        axes.rows_down(axis, ["computes", "communicates"])
        axis.set(title=f"{title}: {label}", xlim=(0, longest))
        sums = {what: sum(length for _, length in of) for what, of in lanes.items()}
        parts = listing(f"{what} {number(sums[what])} ms" for what in TIME_COLORS)
        told.append(f"{label}: {parts}, in a step of {number(spans['step'][1])} ms")
    panels[-1].set_xlabel("time since the step began (ms)")
    names = ["computing", "communication, hidden", "communication, exposed"]
    legend = [
        axes.swatch(color, name) for color, name in zip(TIME_COLORS.values(), names)
    ]
    axes.legend_below(figure, legend)
    display_figure(figure, f"{title}. Timelines. {'; '.join(told)}.")


def in_lanes(communication, computing, step):
    """Spans (begin, length) of a step: computing, and communication in two parts."""
    computes = merged(computing, step)
    busy = merged(communication, step)
    bare = without(busy, computes)
    lanes = {"computing": computes, "exposed": bare, "hidden": without(busy, bare)}
    return {name: [(a, b - a) for a, b in spans] for name, spans in lanes.items()}


def merged(spans, step):
    """The union of spans (begin, end), inside a step: sorted, none touching another."""
    union = []
    for begin, end in sorted(spans):
        begin, end = max(begin, step[0]), min(end, step[1])
        if union and begin <= union[-1][1]:
            union[-1][1] = max(union[-1][1], end)
        elif begin < end:
            union.append([begin, end])
    return union


def without(spans, holes):
    """What is left of spans when holes are cut out; both as `merged` returns them."""
    left = []
    for begin, end in spans:
        for from_, to in holes:
            if from_ < end and to > begin:
                left.append((begin, from_))
                begin = max(begin, to)
        left.append((begin, end))
    return [(begin, end) for begin, end in left if end > begin]


@styled
def ratios(found, title, unit="times as fast"):
    """How many times as fast something is, with its interval. found: {label: (low,
    median, high)}; right of the line at 1 it is faster. unit: what is written below.
    """
    figure, axis = axes.chart(0.85 + 0.34 * len(found))
    for place, (low, middle, high) in enumerate(found.values()):
        color = BLUE if middle >= 1 else ORANGE
        axis.plot([low, high], [place, place], color=color, linewidth=3)
        axis.plot([middle], [place], "o", color=color, markersize=7)
        options = {"xytext": (8, 0), "textcoords": "offset points", "va": "center"}
        axis.annotate(f"{middle:.2f}", (max(high, middle), place), **options)
    axis.axvline(1, color=INK, linewidth=1.2, zorder=0)
    axes.rows_down(axis, list(found))
    highest = max(max(of) for of in found.values())
    lowest = min(min(of) for of in found.values())
    room = 0.14 * (max(highest, 1) - min(lowest, 1))
    limits = min(lowest, 1) - room / 2, max(highest, 1) + room
    axis.set(xlabel=unit, title=title, xlim=limits)
    told = [
        f"{label}: {number(middle)} ({number(low)} to {number(high)})"
        for label, (low, middle, high) in found.items()
    ]
    what = f"{unit.capitalize()}, median and interval"
    display_figure(figure, f"{title}. {what}. {'; '.join(told)}.")


@styled
def predictions(pairs, unit, title):
    """Predicted beside measured values. pairs: {label: [(predicted, measured)]}; on the
    line, a prediction is right. The axes are logarithmic where values differ twentyfold.
    """
    figure, axis = axes.chart(3.6, width=5.6)
    values = [value for of in pairs.values() for pair in of for value in pair]
    lowest, highest = 0, 1.08 * max(values)
    if 0 < 20 * min(values) < max(values):
        lowest, highest = min(values) / 1.2, 1.2 * max(values)
        logarithmic(axis)
    axis.plot([lowest, highest], [lowest, highest], color=LINE, linewidth=1.2, zorder=0)
    for marker, (label, of) in zip("osD^vP*X", pairs.items()):
        axis.plot(*zip(*of), marker, label=label, markersize=6)
    axis.set(xlabel=f"predicted ({unit})", ylabel=f"measured ({unit})", title=title)
    axis.set(xlim=(lowest, highest), ylim=(lowest, highest))
    axis.legend()
    told = [f"{label}: {pairs_in_words(of)}" for label, of in pairs.items()]
    display_figure(
        figure, f"{title}. Predicted and measured {unit}, in pairs. {'; '.join(told)}."
    )


def pairs_in_words(pairs, most=20):
    """All pairs (predicted, measured); or what they are like, if there are too many."""
    if len(pairs) <= most:
        return listing(f"{number(p)} and {number(m)}" for p, m in pairs)
    off = sorted(abs(p / m - 1) for p, m in pairs)[len(pairs) // 2]
    lowest, highest = min(m for _, m in pairs), max(m for _, m in pairs)
    between = f"measured between {number(lowest)} and {number(highest)}"
    return f"{len(pairs)} pairs, {between}, half of them less than {off:.0%} apart"


def logarithmic(axis):
    """Make both axes logarithmic, with plain numbers at the powers of ten."""
    axis.set(xscale="log", yscale="log")
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_formatter("{x:g}")
        each.set_minor_formatter(NullFormatter())


@styled
def roofline(points, bandwidth, peak, title):
    """Rates of operations under the roof, on logarithmic axes. points: {label:
    [(FLOPs per byte, FLOPs per second)]}; a label's points are joined. bandwidth: bytes
    per second; peak: FLOPs per second. After S. Williams et al., "Roofline", 2009.
    """
    figure, axis = axes.chart(3.9)
    ridge = peak / bandwidth
    places = [x for of in points.values() for x, _ in of] + [ridge]
    ends = [min(places) / 2, ridge, max(places) * 2]
    roof = [min(x * bandwidth, peak) / 1e9 for x in ends]
    name = f"the roof: {number(bandwidth / 1e9)} GB/s, {number(peak / 1e9)} GFLOP/s"
    axis.plot(ends, roof, color=INK, linewidth=2.2, label=name)
    for marker, (label, of) in zip("osD^vP*X", points.items()):
        rates = [rate / 1e9 for _, rate in of]
        look = {"marker": marker, "markersize": 7, "linewidth": 1.2, "label": label}
        axis.plot([x for x, _ in of], rates, linestyle="--", **look)
    logarithmic(axis)
    axis.set(xlabel="FLOPs per byte", ylabel="GFLOP/s", title=title)
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    told = [name] + [
        f"{label}: {listing(f'{number(y / 1e9)} at {number(x)}' for x, y in of)}"
        for label, of in points.items()
    ]
    kind = "Points under a roof: GFLOP/s by FLOPs per byte"
    display_figure(figure, f"{title}. {kind}. {'; '.join(told)}.")
