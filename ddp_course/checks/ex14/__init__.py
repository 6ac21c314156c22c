"""Exercise 14: SLURM's variables, a meeting place for hosts, when a second machine pays,
and training that survives preemption.
"""

from ddp_course.checks.ex14.meeting import check_meeting_place
from ddp_course.checks.ex14.paying import check_second_machine
from ddp_course.checks.ex14.preemption import check_survive_preemption
from ddp_course.checks.ex14.variables import check_rank_variables

__all__ = [  # in the order of the notebook
    "check_rank_variables",
    "check_meeting_place",
    "check_second_machine",
    "check_survive_preemption",
]
