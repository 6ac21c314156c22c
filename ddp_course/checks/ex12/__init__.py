"""Exercise 12: what a rank keeps, an update of several micro-batches with FSDP, an
optimizer that averages and clips and of which each rank keeps a share, a layer that
gathers its weight to compute, a model that is trained on ranks of which none could hold
all of it, and an optimizer to repair.
"""

from ddp_course.checks.ex12.kept import check_kept_bytes
from ddp_course.checks.ex12.large import check_train_large
from ddp_course.checks.ex12.layer import check_gathered_linear
from ddp_course.checks.ex12.master import check_master_shards
from ddp_course.checks.ex12.optimizer import check_sharded_adamw
from ddp_course.checks.ex12.update import check_update_bytes

__all__ = [  # in the order of the notebook
    "check_kept_bytes",
    "check_update_bytes",
    "check_sharded_adamw",
    "check_gathered_linear",
    "check_train_large",
    "check_master_shards",
]
