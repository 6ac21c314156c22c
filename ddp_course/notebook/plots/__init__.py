"""The course's figures, in one style: images with an alternative text, and animations
that play without a kernel.
"""

from ddp_course.notebook.plots.charts import (
    bars,
    cost_line,
    curve,
    four_bits,
    in_use,
    losses,
    stacked,
)
from ddp_course.notebook.plots.collectives import who_holds_what
from ddp_course.notebook.plots.diagrams import (
    accumulation,
    adapter,
    data_parallel_step,
    flow,
    item_weights,
    machines,
)
from ddp_course.notebook.plots.exchange import messages
from ddp_course.notebook.plots.experts_film import experts
from ddp_course.notebook.plots.fsdp_film import fsdp
from ddp_course.notebook.plots.knobs import memory_knob, overlap_knob, pipeline_knob
from ddp_course.notebook.plots.pipeline_film import pipeline_steps
from ddp_course.notebook.plots.planner_page import planner
from ddp_course.notebook.plots.ring_attention_film import ring_attention
from ddp_course.notebook.plots.ring_film import ring, ring_knob
from ddp_course.notebook.plots.samples import batch_statistics, images, sample_map
from ddp_course.notebook.plots.speed import exposed, predictions, ratios, roofline
from ddp_course.notebook.plots.tensor_film import tensor_parallel
from ddp_course.notebook.plots.timelines import (
    attempts,
    pipelines,
    replica_groups,
    step_timelines,
)

__all__ = [
    "accumulation",
    "adapter",
    "attempts",
    "bars",
    "batch_statistics",
    "cost_line",
    "curve",
    "data_parallel_step",
    "experts",
    "exposed",
    "flow",
    "four_bits",
    "fsdp",
    "images",
    "in_use",
    "item_weights",
    "losses",
    "machines",
    "memory_knob",
    "messages",
    "overlap_knob",
    "pipeline_knob",
    "pipeline_steps",
    "pipelines",
    "planner",
    "predictions",
    "ratios",
    "replica_groups",
    "ring",
    "ring_attention",
    "ring_knob",
    "roofline",
    "sample_map",
    "stacked",
    "step_timelines",
    "tensor_parallel",
    "who_holds_what",
]
