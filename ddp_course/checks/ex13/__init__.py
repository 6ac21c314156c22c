"""Exercise 13: configurations that are repaired, checkpoints whose bytes are predicted,
a training loop that is ported to DeepSpeed, and layers that are placed on stages.
"""

from ddp_course.checks.ex13.checkpoints import check_checkpoint_bytes
from ddp_course.checks.ex13.configurations import RANKS, broken, check_repair, listing
from ddp_course.checks.ex13.engine import check_train
from ddp_course.checks.ex13.stages import check_place

__all__ = [  # the questions in the order of the notebook
    "check_repair",
    "check_checkpoint_bytes",
    "check_train",
    "check_place",
    "RANKS",
    "broken",
    "listing",
]
