"""Exercise 18: a schedule for ranks with little memory, layers on stages that fit, the
gradient of a tied matrix, and bugs in a step.
"""

from ddp_course.checks.ex18.placing import check_balance
from ddp_course.checks.ex18.schedule import check_schedule
from ddp_course.checks.ex18.step import check_pipeline_step
from ddp_course.checks.ex18.tied import check_tied_gradients

__all__ = [  # the questions in the order of the notebook
    "check_schedule",
    "check_balance",
    "check_tied_gradients",
    "check_pipeline_step",
]
