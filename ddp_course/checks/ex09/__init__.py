"""Exercise 09: the newest good checkpoint, a plan for checkpoints, the rest of an
epoch, writing a file atomically, and a run of several jobs.
"""

from ddp_course.checks.ex09.choosing import check_newest_good
from ddp_course.checks.ex09.jobs import check_train_job
from ddp_course.checks.ex09.planning import check_plan_checkpoints
from ddp_course.checks.ex09.position import check_rest_of_epoch
from ddp_course.checks.ex09.saving import check_save_whole

__all__ = [  # in the order of the notebook
    "check_newest_good",
    "check_plan_checkpoints",
    "check_rest_of_epoch",
    "check_save_whole",
    "check_train_job",
]
