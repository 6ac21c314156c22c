"""Exercise 15: the diagnosis of five patients without names, and a desync detector that
names the first step, the odd rank and the tensor.
"""

from ddp_course.checks.ex15.desync import check_agreement
from ddp_course.checks.ex15.diagnosing import check_diagnoses
from ddp_course.checks.ex15.examining import examine
from ddp_course.checks.ex15.patients import CAUSES

__all__ = [  # in the order of the notebook
    "CAUSES",
    "examine",
    "check_diagnoses",
    "check_agreement",
]
