"""Exercise 08: what Trainer's settings lead to, uneven examples and their loss, and a
callback that stops all ranks at the same step.
"""

from ddp_course.checks.ex08.plan import check_plan
from ddp_course.checks.ex08.stop_together import check_stop_together
from ddp_course.checks.ex08.uneven import check_uneven

__all__ = ["check_plan", "check_uneven", "check_stop_together"]  # in the order of the notebook
