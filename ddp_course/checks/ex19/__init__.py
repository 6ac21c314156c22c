"""Exercise 19: blocks of attention merged, a layout that balances documents, a rank's part
of a batch, what a ring and an all-to-all send, and bugs in training on a shared text.
"""

from ddp_course.checks.ex19.batch import check_own_batch
from ddp_course.checks.ex19.cheaper import check_bytes_sent
from ddp_course.checks.ex19.layout import check_layout
from ddp_course.checks.ex19.merging import check_merge
from ddp_course.checks.ex19.shared import check_train_shared

__all__ = [  # the questions in the order of the notebook
    "check_merge",
    "check_layout",
    "check_own_batch",
    "check_bytes_sent",
    "check_train_shared",
]
