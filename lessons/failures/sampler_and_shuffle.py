"""A sampler and shuffle=True

Run:    python lessons/failures/sampler_and_shuffle.py
Text:   ValueError: sampler option is mutually exclusive with shuffle
Cause:  A DataLoader with a sampler takes its order from the sampler, so `shuffle=True` would
        contradict it. It happens when a DistributedSampler is added to a loader that shuffled.
Fix:    Remove `shuffle=True` from the DataLoader; DistributedSampler shuffles by itself if you call
        `sampler.set_epoch(epoch)`. Do not drop a WeightedRandomSampler to make room for it: the
        classes would lose their balance without an error. Draw the weighted indices with a
        generator that has the same seed on all ranks, and give each rank every n-th of them.
Lesson: 4
Source: https://github.com/pytorch/pytorch/issues/23430
Source: https://github.com/Lightning-AI/pytorch-lightning/issues/10946
"""

import torch
from torch.utils.data import DataLoader, DistributedSampler

samples = torch.arange(10)
sampler = DistributedSampler(samples, num_replicas=2, rank=0)
DataLoader(samples, batch_size=2, sampler=sampler, shuffle=True)
