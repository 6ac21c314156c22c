"""Exercise 14: a job file, a meeting place for hosts, when a second machine pays, an
all-reduce that shares the network between machines, and training that survives preemption.
"""

from ddp_course.checks.ex14.hierarchy import check_all_reduce
from ddp_course.checks.ex14.job_file import check_job_file
from ddp_course.checks.ex14.meeting import check_meeting_place
from ddp_course.checks.ex14.paying import check_second_machine
from ddp_course.checks.ex14.preemption import check_survive_preemption

__all__ = [  # in the order of the notebook
    "check_job_file",
    "check_meeting_place",
    "check_second_machine",
    "check_all_reduce",
    "check_survive_preemption",
]
