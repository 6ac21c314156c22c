"""Exercise 01: normalise, train for an epoch with little memory, predict a run, measure
the accuracy of each digit, and find the bugs of a training; all in one process.
"""

from ddp_course.checks.ex01.accuracy import check_accuracy_by_digit
from ddp_course.checks.ex01.choosing import check_train_and_choose
from ddp_course.checks.ex01.normalize import check_normalize
from ddp_course.checks.ex01.prediction import check_predict_run
from ddp_course.checks.ex01.training import check_train_one_epoch

__all__ = [  # in the order of the notebook
    "check_normalize",
    "check_train_one_epoch",
    "check_predict_run",
    "check_accuracy_by_digit",
    "check_train_and_choose",
]
