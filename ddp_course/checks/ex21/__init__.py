"""Exercise 21: plans for three briefs, the messages of a pipeline, and the post-mortem of a
job that ran with faults.
"""

from ddp_course.checks.ex21.messages import check_pipeline_seconds
from ddp_course.checks.ex21.plans import check_plans
from ddp_course.checks.ex21.post import check_post_mortem

__all__ = [  # the questions in the order of the notebook
    "check_plans",
    "check_pipeline_seconds",
    "check_post_mortem",
]
