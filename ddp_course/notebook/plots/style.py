"""The colours and the settings of all figures: dark ink on a white card, which reads
well on light and dark pages.
"""

import matplotlib

PAPER, INK, NOTE = "#ffffff", "#222222", "#595959"
CARD, GREY, LINE = "#f0f0f0", "#d9d9d9", "#8a8a8a"
RANK_COLORS = [
    "#1d63b8",  # blue
    "#b95a00",  # orange
    "#1f7a4a",  # green
    "#a8326d",  # magenta
    "#6b4fb8",  # purple
    "#7a5c1e",  # brown
    "#0d7a80",  # teal
    "#b93a2b",  # red
]
BLUE, ORANGE, GREEN, RED = (RANK_COLORS[place] for place in (0, 1, 2, 7))
FORWARD, BACKWARD = "#b9cde8", BLUE  # the two halves of a step, wherever they are drawn

# Each background that text is written on, and the colours of text that have a contrast
# of at least 4.5 : 1 on it. The first is the usual one.
TEXT_ON = {
    PAPER: (INK, NOTE, *RANK_COLORS),
    CARD: (INK, NOTE),
    GREY: (INK,),
    FORWARD: (INK,),
    INK: (PAPER,),
    **{color: (PAPER,) for color in RANK_COLORS},
}

# The first comes with matplotlib and most Linuxes, the second with Windows and macOS,
# and both are equally wide; others are narrower, so that texts keep their room.
FONTS = ["DejaVu Sans", "Verdana", "Arial", "sans-serif"]
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": LINE,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.prop_cycle": matplotlib.cycler(color=RANK_COLORS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.5,
    "figure.constrained_layout.h_pad": 0.08,  # inches
    "figure.constrained_layout.w_pad": 0.08,
    "font.family": "sans-serif",
    "font.sans-serif": FONTS,
    "font.size": 10.5,
    "grid.color": "#e8e8e8",
    "legend.fontsize": 10,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "path.simplify_threshold": 0.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "ddp_course",  # the same bytes each time
    "text.color": INK,
    "xtick.color": LINE,
    "xtick.labelcolor": NOTE,
    "xtick.labelsize": 10,
    "ytick.color": LINE,
    "ytick.labelcolor": NOTE,
    "ytick.labelsize": 10,
}
styled = matplotlib.rc_context(STYLE)  # the decorator of each function that draws


def color_of(rank):
    """The colour of a rank, in all figures."""
    return RANK_COLORS[rank % len(RANK_COLORS)]


def text_color(background, color=None):
    """The colour for text on a background.

    Raises KeyError and ValueError for pairs that are not in the table of legible ones.
    """
    allowed = TEXT_ON[background]
    return allowed[allowed.index(color or allowed[0])]
