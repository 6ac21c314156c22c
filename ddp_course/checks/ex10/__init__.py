"""Exercise 10: a learning rate schedule, groups for weight decay, the cost of an update,
a stream of tokens divided among the ranks, pretraining within a budget, and an evaluation
in bits per byte.
"""

from ddp_course.checks.ex10.costs import check_predict_update
from ddp_course.checks.ex10.groups import check_parameter_groups
from ddp_course.checks.ex10.perplexity import check_bits_per_byte
from ddp_course.checks.ex10.pretraining import check_pretrain
from ddp_course.checks.ex10.schedule import check_learning_rate
from ddp_course.checks.ex10.stream import check_deal_out

__all__ = [  # in the order of the notebook
    "check_learning_rate",
    "check_parameter_groups",
    "check_predict_update",
    "check_deal_out",
    "check_pretrain",
    "check_bits_per_byte",
]
