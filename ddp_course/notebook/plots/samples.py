"""Pictures of data: images, which rank sees which sample, and what a batch has."""

import numpy
from matplotlib.figure import Figure

from ddp_course.notebook.plots import axes
from ddp_course.notebook.plots.display import display_figure
from ddp_course.notebook.plots.style import (
    CARD,
    INK,
    LINE,
    PAPER,
    RED,
    color_of,
    styled,
)
from ddp_course.notebook.plots.words import count, listing, number


@styled
def images(pictures, titles, columns=10, wrong=()):
    """Grey images, uint8 or float (n, 28, 28), in a grid, a title above each; those with
    an index in `wrong` in red.
    """
    rows = -(-len(pictures) // columns)
    figure = Figure(figsize=(0.84 * columns, 1.02 * rows), layout="constrained")
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in places:
        axis.axis("off")
    for index, (axis, picture, title) in enumerate(zip(places, pictures, titles)):
        axis.imshow(numpy.asarray(picture), cmap="gray_r", interpolation="none")
        color = RED if index in wrong else INK
        axis.set_title(title, fontsize=9.5, loc="center", pad=2, color=color)
    red = sum(index in wrong for index in range(len(pictures)))
    marked = f", {red} of them in red" if red else ""
    told = "; ".join(str(title) for title in titles)
    many = count(len(pictures), "image")
    display_figure(figure, f"{many} with their titles{marked}: {told}.")


@styled
def sample_map(owners, title):
    """Which rank sees which sample. owners: by row (say, epoch), by sample, the list of
    ranks that see it (often one).
    """
    figure, axis = axes.chart(1.15 + 0.36 * len(owners), width=axes.WIDE)
    samples = max(map(len, owners.values()))
    axes.rows_down(axis, list(owners))
    for y, row in enumerate(owners.values()):
        for x, ranks in enumerate(row):
            if not ranks:
                axes.box(axis, x, y - 0.38, 0.9, 0.76, PAPER, edge=LINE)
            width = 0.9 / max(len(ranks), 1)
            for place, rank in enumerate(ranks):
                stripe = (x + place * width, y - 0.38, width, 0.76)
                axes.box(axis, *stripe, color_of(rank), str(rank), size=10)
    axis.set(xlim=(-0.1, samples), xlabel="sample", title=title)
    axis.set_xticks([sample + 0.45 for sample in range(samples)], range(samples))
    axis.tick_params(axis="x", length=0)
    axis.grid(visible=False)
    seen_by = {rank for row in owners.values() for ranks in row for rank in ranks}
    legend = axes.rank_swatches(max(seen_by, default=0) + 1)
    if any(not ranks for row in owners.values() for ranks in row):
        legend.append(axes.swatch(PAPER, "no rank", edge=LINE))
    axes.legend_below(figure, legend)
    told = [f"{label}: {samples_of(row)}" for label, row in owners.items()]
    display_figure(figure, f"{title}. Which rank sees which sample. {'; '.join(told)}.")


def samples_of(row):
    """Which samples each rank sees, in words."""
    seen_by = sorted({rank for ranks in row for rank in ranks})
    told = [
        f"rank {rank} sees "
        + ", ".join(str(sample) for sample, ranks in enumerate(row) if rank in ranks)
        for rank in seen_by
    ]
    unseen = ", ".join(str(sample) for sample, ranks in enumerate(row) if not ranks)
    return listing(told + ([f"no rank sees {unseen}"] if unseen else []))


@styled
def batch_statistics(seen, truth, title):
    """Mean and standard deviation of one feature, batch by batch. seen: {who: [(mean,
    deviation), ...]}; truth: the same of all data. The last of `seen` is drawn in
    ink.
    """
    figure, axis = axes.chart(3.1, width=axes.WIDE)
    mean, deviation = truth
    axis.axhspan(mean - deviation, mean + deviation, color=CARD, zorder=0)
    axis.axhline(mean, color=LINE, linewidth=1.2, linestyle="--")
    for place, (who, pairs) in enumerate(seen.items()):
        color = INK if place == len(seen) - 1 else color_of(place)
        shift = 0.18 * (place - (len(seen) - 1) / 2)
        batches = [batch + shift for batch in range(1, len(pairs) + 1)]
        means, deviations = zip(*pairs)
        options = {"fmt": "o", "markersize": 4, "elinewidth": 1.5}
        axis.errorbar(batches, means, deviations, color=color, label=who, **options)
    axis.set(xlabel="batch", ylabel="mean ± deviation", title=title)
    axis.set_xticks(range(1, len(pairs) + 1))
    axis.grid(axis="x", visible=False)
    all_data = axes.mark(LINE, "all data: mean", linestyle="--")
    band = axes.swatch(CARD, "± deviation", edge=LINE)
    axes.legend_below(figure, [*axis.get_legend_handles_labels()[0], all_data, band])
    told = [f"{who} between {spread(pairs)}" for who, pairs in seen.items()]
    display_figure(
        figure,
        f"{title}. Means of {count(len(pairs), 'batch')}: {listing(told)}; all data have "
        f"mean {number(mean)} and deviation {number(deviation)}.",
    )


def spread(pairs):
    """Between which means batches are."""
    means = [mean for mean, _ in pairs]
    return f"{number(min(means))} and {number(max(means))}"
