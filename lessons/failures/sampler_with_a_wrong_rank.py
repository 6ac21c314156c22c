"""A sampler for fewer ranks than there are

Run:    python lessons/failures/sampler_with_a_wrong_rank.py
Text:   ValueError: Invalid rank 5, rank should be in the interval [0, 3]
Text:   assert len(indices) == self.total_size AssertionError
Text:   Invalid rank 5, rank should be
Cause:  DistributedSampler got a rank that is not below `num_replicas`: the number of GPUs per machine
        was given for all ranks, `local_rank` was confused with the rank, or the machine's number was
        multiplied by a wrong number of GPUs.
Fix:    Leave both arguments out: inside a process group, `DistributedSampler(dataset)` asks it for
        the rank and the world size. Otherwise `num_replicas=WORLD_SIZE, rank=RANK`, as torchrun sets
        them.
Lesson: 4
Source: https://github.com/pytorch/pytorch/issues/196090
Source: https://github.com/pytorch/pytorch/issues/45324
"""

from torch.utils.data import DistributedSampler

DistributedSampler(range(100), num_replicas=4, rank=5)
