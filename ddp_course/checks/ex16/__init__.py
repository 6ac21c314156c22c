"""Exercise 16: three slow programs, a judge of timings, a bucket size and an accumulation
for a network, and an analyser that tells waiting from sending.
"""

from ddp_course.checks.ex16.analyse import check_analyse
from ddp_course.checks.ex16.choose import check_choose
from ddp_course.checks.ex16.compare import check_compare
from ddp_course.checks.ex16.evaluate import check_evaluate
from ddp_course.checks.ex16.pixels import check_pixels
from ddp_course.checks.ex16.update import check_update

__all__ = [  # in the order of the notebook
    "check_update",
    "check_pixels",
    "check_evaluate",
    "check_compare",
    "check_choose",
    "check_analyse",
]
