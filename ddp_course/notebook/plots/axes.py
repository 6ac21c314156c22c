"""The parts of charts: matplotlib's figures and axes, boxes on them, and legends."""

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from ddp_course.notebook.plots.style import color_of, text_color

WIDE = 8.4  # inches, 806 pixels


def chart(height, width=7):
    """A figure with one pair of axes, of this many inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def charts(heights, extra=0.6):
    """A figure with axes one above the other on one x axis, heights in inches.

    extra: room for what is written below.
    """
    size = (WIDE, sum(heights) + extra)
    figure = Figure(figsize=size, layout="constrained")
    options = {"sharex": True, "squeeze": False, "height_ratios": heights}
    return figure, list(figure.subplots(len(heights), 1, **options).flat)


def box(axis, x, y, width, height, color, text="", edge=None, **options):
    """A rectangle with its upper left corner at (x, y), and a text in its middle."""
    frame = {"edgecolor": edge, "linewidth": 1.2} if edge else {"linewidth": 0}
    axis.add_patch(
        Rectangle((x, y), width, height, facecolor=color, clip_on=False, **frame)
    )
    if text:
        place, style = (x + width / 2, y + height / 2), {"color": text_color(color)}
        axis.text(*place, text, ha="center", va="center", **style, **options)


def swatch(color, label, edge=None):
    """A square for a legend."""
    return Rectangle(
        (0, 0), 1, 1, facecolor=color, edgecolor=edge or color, label=label
    )


def mark(color, label, **options):
    """A line or a mark for a legend."""
    return Line2D([], [], color=color, label=label, **options)


def rank_swatches(ranks):
    """The colours of the ranks, for a legend."""
    return [swatch(color_of(rank), f"rank {rank}") for rank in range(ranks)]


def legend_beside(figure, axis):
    """A legend among the lines where there is room for it, else below."""
    legend = axis.legend()
    figure.draw_without_rendering()  # now places are known
    box = legend.get_window_extent()
    paths = [
        line.get_transform().transform_path(line.get_path()) for line in axis.lines
    ]
    if any(path.intersects_bbox(box, filled=False) for path in paths):
        legend.remove()
        legend_below(figure, axis.get_legend_handles_labels()[0])


def legend_below(figure, handles):
    """A legend under everything else, in one row, or in two if that would be too long."""
    options = {"handlelength": 1.2, "columnspacing": 1.4, "borderaxespad": 0.2}
    letters = sum(len(handle.get_label()) + 6 for handle in handles)
    columns = len(handles) if letters < 100 else -(-len(handles) // 2)
    place = {"loc": "outside lower left", "ncols": columns}
    figure.legend(handles=handles, **place, **options)


def whole_steps(axis):
    """Numbers on the x axis at whole steps only."""
    axis.xaxis.get_major_locator().set_params(integer=True)


def rows_down(axis, labels):
    """A label for each row of the y axis, the first one on top, without grid lines."""
    axis.set_yticks(range(len(labels)), labels)
    axis.set_ylim(len(labels) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="y", visible=False)
