"""Exercise 08: what Trainer's settings lead to, uneven examples and their loss, a callback
that stops all ranks at the same step, and a script to port.
"""

from ddp_course.checks.ex08.plan import check_plan
from ddp_course.checks.ex08.port import check_script
from ddp_course.checks.ex08.stop_together import check_stop_together
from ddp_course.checks.ex08.uneven import check_uneven

__all__ = ["check_plan", "check_uneven", "check_stop_together", "check_script"]  # in the order of the notebook
