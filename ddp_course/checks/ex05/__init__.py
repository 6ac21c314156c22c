"""Exercise 05: what SyncBatchNorm sends, weighted statistics over all ranks, forward and
backward, the conversion of a network, and a program to repair.
"""

from ddp_course.checks.ex05.backward import check_input_gradient
from ddp_course.checks.ex05.conversion import check_convert
from ddp_course.checks.ex05.forward import check_normalize
from ddp_course.checks.ex05.traffic import check_traffic
from ddp_course.checks.ex05.tuning import check_fine_tune

__all__ = [  # in the order of the notebook
    "check_traffic",
    "check_normalize",
    "check_input_gradient",
    "check_convert",
    "check_fine_tune",
]
