"""Exercise 08: what Trainer's settings lead to, uneven examples and their loss, a callback
that stops all ranks at the same step, a script to port, and a subclass of Trainer to repair.
"""

from ddp_course.checks.ex08.plan import check_plan
from ddp_course.checks.ex08.port import check_script
from ddp_course.checks.ex08.stop_together import check_stop_together
from ddp_course.checks.ex08.uneven import check_uneven
from ddp_course.checks.ex08.weighted import check_weighted_trainer

__all__ = [  # in the order of the notebook
    "check_plan",
    "check_uneven",
    "check_stop_together",
    "check_script",
    "check_weighted_trainer",
]
