"""Exercise 20: a test of which group averages what, tokens that travel to experts and
back, and a capacity of the whole batch.
"""

from ddp_course.checks.ex20.averaging import check_test_averaging
from ddp_course.checks.ex20.capacity import check_keep
from ddp_course.checks.ex20.travel import check_there_and_back

__all__ = [  # the questions in the order of the notebook
    "check_test_averaging",
    "check_there_and_back",
    "check_keep",
]
