"""Exercise 11: how large r may be, a LoRA layer and its merge, which parameters may
train, and a loss over answers only.
"""

from ddp_course.checks.ex11.answers import check_answer_loss
from ddp_course.checks.ex11.choice import check_train_only
from ddp_course.checks.ex11.layer import check_lora_layer
from ddp_course.checks.ex11.plan import check_plan

__all__ = [  # in the order of the notebook
    "check_plan",
    "check_lora_layer",
    "check_train_only",
    "check_answer_loss",
]
