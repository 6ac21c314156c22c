"""Exercise 17: a loss from columns of the logits, the gradients that need a sum, random
states of replicated and sharded regions, bugs in a block, and one norm of all gradients.
"""

from ddp_course.checks.ex17.block import check_tensor_parallel_block
from ddp_course.checks.ex17.clipping import check_clip_gradients
from ddp_course.checks.ex17.dropout import check_dropout_states
from ddp_course.checks.ex17.gradients import check_sum_gradients
from ddp_course.checks.ex17.loss import check_vocabulary_parallel_loss
from ddp_course.checks.ex17.model import listing

__all__ = [  # the questions in the order of the notebook
    "check_vocabulary_parallel_loss",
    "check_sum_gradients",
    "check_dropout_states",
    "check_tensor_parallel_block",
    "check_clip_gradients",
    "listing",
]
