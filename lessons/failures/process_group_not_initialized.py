"""A collective without a process group

Run:    python lessons/failures/process_group_not_initialized.py
Text:   ValueError: Default process group has not been initialized, please make sure to call
        init_process_group.
Text:   RuntimeError: Default process group has not been initialized, please make sure to call
        init_process_group.
Text:   AssertionError: Default process group is not initialized
Cause:  Something distributed was called in a process that has no process group: a collective, DDP,
        a DistributedSampler without `num_replicas`, or SyncBatchNorm in training. Often the program
        was written for a launcher and is started with `python`, on one GPU.
Which:  After `dist.destroy_process_group()` the text is the same: then something still communicates
        at the end, such as a logger or a `__del__`.
Fix:    Call `dist.init_process_group(...)` first, and start the program with torchrun, also for one
        GPU: `torchrun --nproc_per_node 1 train.py`. To train without a launcher, replace
        SyncBatchNorm by BatchNorm and ask `dist.is_initialized()` before each collective.
Lesson: 2
Source: https://github.com/open-mmlab/mmsegmentation/issues/901
Source: https://github.com/zcablii/LSKNet/issues/54
"""

import torch
import torch.distributed as dist

dist.all_reduce(torch.ones(1))
