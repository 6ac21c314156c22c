"""Exercise 06: what accumulation sends, where no_sync belongs, an update on weighted
items, a hook that weighs the ranks, and the bugs of a loop over epochs.
"""

from ddp_course.checks.ex06.epochs import check_train_epochs
from ddp_course.checks.ex06.hook import check_weighing_hook
from ddp_course.checks.ex06.no_sync import check_accumulate
from ddp_course.checks.ex06.traffic import check_traffic
from ddp_course.checks.ex06.window import check_window_step

__all__ = [  # in the order of the notebook
    "check_traffic",
    "check_accumulate",
    "check_window_step",
    "check_weighing_hook",
    "check_train_epochs",
]
