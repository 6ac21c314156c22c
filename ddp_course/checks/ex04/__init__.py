"""Exercise 04: a prediction, a sampler, an exact evaluation, a program for torchrun, and
three programs to repair.
"""

from ddp_course.checks.ex04.bugs import check_find_the_bug_1, check_find_the_bug_2, check_find_the_bug_3
from ddp_course.checks.ex04.evaluation import check_evaluate
from ddp_course.checks.ex04.prediction import check_epoch_plan
from ddp_course.checks.ex04.program import check_program
from ddp_course.checks.ex04.sampler import check_sharded_sampler

__all__ = [  # in the order of the notebook
    "check_epoch_plan",
    "check_sharded_sampler",
    "check_evaluate",
    "check_program",
    "check_find_the_bug_1",
    "check_find_the_bug_2",
    "check_find_the_bug_3",
]
