"""Exercise 02: rank arithmetic; a broadcast and a ring reduce-scatter, both built from
send and receive alone; the size from which the ring is faster than the tree; and the bugs
of a program that counts classes.
"""

from ddp_course.checks.ex02.broadcast import check_broadcast
from ddp_course.checks.ex02.classes import check_count_classes
from ddp_course.checks.ex02.crossover import check_crossover
from ddp_course.checks.ex02.rank_arithmetic import check_rank_arithmetic
from ddp_course.checks.ex02.ring import check_ring_reduce_scatter

__all__ = [  # in the order of the notebook
    "check_rank_arithmetic",
    "check_broadcast",
    "check_ring_reduce_scatter",
    "check_crossover",
    "check_count_classes",
]
