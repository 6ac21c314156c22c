"""Exercise 10: a learning rate schedule, groups for weight decay, the cost of an update,
and a stream of tokens divided among the ranks.
"""

from ddp_course.checks.ex10.costs import check_predict_update
from ddp_course.checks.ex10.groups import check_parameter_groups
from ddp_course.checks.ex10.schedule import check_learning_rate
from ddp_course.checks.ex10.stream import check_deal_out

__all__ = [  # in the order of the notebook
    "check_learning_rate",
    "check_parameter_groups",
    "check_predict_update",
    "check_deal_out",
]
