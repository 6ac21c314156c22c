"""Exercise 03: average gradients after backward, during it, and in small buckets; what
travels; and the bugs of a program that trains by hand.
"""

from ddp_course.checks.ex03.after_backward import check_average_gradients
from ddp_course.checks.ex03.buckets import check_bucketed
from ddp_course.checks.ex03.by_hand import check_train_by_hand
from ddp_course.checks.ex03.during_backward import check_overlapped
from ddp_course.checks.ex03.traffic import check_traffic

__all__ = [  # in the order of the notebook
    "check_average_gradients",
    "check_overlapped",
    "check_bucketed",
    "check_traffic",
    "check_train_by_hand",
]
