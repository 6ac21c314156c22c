"""Exercise 11: how large r may be, a LoRA layer and its merge, which parameters may
train, a loss over answers only, teaching a model to answer, and fine-tuning on ranks to
repair.
"""

from ddp_course.checks.ex11.answers import check_answer_loss
from ddp_course.checks.ex11.choice import check_train_only
from ddp_course.checks.ex11.layer import check_lora_layer
from ddp_course.checks.ex11.plan import check_plan
from ddp_course.checks.ex11.teaching import check_teach
from ddp_course.checks.ex11.tuning import check_fine_tune

__all__ = [  # in the order of the notebook
    "check_plan",
    "check_lora_layer",
    "check_train_only",
    "check_answer_loss",
    "check_teach",
    "check_fine_tune",
]
