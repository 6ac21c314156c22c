"""Exercise 04: a sampler, an exact evaluation, one program turned into DDP, and three
programs to repair.
"""

from ddp_course.checks.ex04.bugs import (
    check_find_the_bug_1,
    check_find_the_bug_2,
    check_find_the_bug_3,
)
from ddp_course.checks.ex04.evaluation import check_evaluate
from ddp_course.checks.ex04.sampler import check_sharded_sampler
from ddp_course.checks.ex04.whole_program import check_train

__all__ = [  # in the order of the notebook
    "check_sharded_sampler",
    "check_evaluate",
    "check_train",
    "check_find_the_bug_1",
    "check_find_the_bug_2",
    "check_find_the_bug_3",
]
