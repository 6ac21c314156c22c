"""Exercise 21: plans for three briefs, the messages of a pipeline, the post-mortem of a job
that ran with faults, and a small run of one's own on two machines.
"""

from ddp_course.checks.ex21.messages import check_pipeline_seconds
from ddp_course.checks.ex21.plans import check_plans
from ddp_course.checks.ex21.post import check_post_mortem
from ddp_course.checks.ex21.small import check_small_run
from ddp_course.checks.ex21.two_machines import small_run

__all__ = [  # the questions in the order of the notebook
    "check_plans",
    "check_pipeline_seconds",
    "check_post_mortem",
    "check_small_run",
    "small_run",
]
