"""A source that is not in the group

Run:    torchrun --nproc_per_node 2 lessons/failures/rank_not_in_the_group.py
Text:   ValueError: Global rank 0 is not part of group
        <torch.distributed.distributed_c10d.ProcessGroup object at 0x7f7d4bfb0e70>
Text:   ValueError: Group rank 4 is not part of group
        <torch.distributed.distributed_c10d.ProcessGroup object at 0x7f7d4bfb0e70>
Text:   RuntimeError: The global rank 0 is not part of the group
        <torch._C._distributed_c10d.ProcessGroupGloo object at 0x7f705c494230>
Cause:  `src` and `dst` are ranks of the whole job, also where `group` is a part of it. `src=0` means
        rank 0 of the job, and that is in one of the groups only. So the program works on one machine,
        or with one data-parallel group, and fails on the next.
Fix:    `group_src=0` (and `group_dst`) counts within the group; in torch before 2.6,
        `src=dist.get_global_rank(group, 0)`. For a mesh: `group=mesh.get_group("tensor")`.
Lesson: 17
Source: https://github.com/pytorch/pytorch/issues/74602
Source: https://github.com/meta-pytorch/torchrec/pull/4601
Source: https://github.com/OpenPipe/ART/pull/920
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
groups = [dist.new_group([rank]) for rank in range(2)]
own = groups[dist.get_rank()]
dist.broadcast(torch.ones(1), src=0, group=own)
