"""What the ranks of a pipeline do, as all its pictures draw and name it.

Pictures take, for each rank, its spans: (kind, stage, micro-batch, begin, length), in
slots, as estimates.pipeline.play returns them.
"""

from ddp_course.notebook.plots.style import BACKWARD, FORWARD, RANK_COLORS

COLORS = {"F": FORWARD, "B": BACKWARD, "I": RANK_COLORS[4], "W": RANK_COLORS[2]}
NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradients",
}
CHUNKS = "with a foot: a rank's second stage"


def has_foot(stage, ranks):
    """Whether an action's box is drawn with a dark foot: its stage is not the first one
    of its rank.
    """
    return stage >= ranks


def colors_of(schedules):
    """{name: colour} of the kinds of action in some schedules, each its ranks' spans."""
    drawn = {span[0] for ranks in schedules for spans in ranks for span in spans}
    return {NAMES[kind]: COLORS[kind] for kind in COLORS if kind in drawn}


def has_chunks(schedules):
    """Whether a rank has several stages in one of these."""
    stages = [{span[1] for spans in ranks for span in spans} for ranks in schedules]
    return any(len(of) > len(ranks) for of, ranks in zip(stages, schedules))


def owners_of(ranks):
    """{stage: its rank}, of the spans of each rank."""
    return {span[1]: rank for rank, spans in enumerate(ranks) for span in spans}
