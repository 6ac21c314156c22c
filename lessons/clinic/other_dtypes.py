"""Rank 1 counts in int32, rank 0 in float32, and the counts are added up.

torchrun --nproc_per_node 2 lessons/clinic/other_dtypes.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def train(watch=None):
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    rank = dist.get_rank()
    dtype = torch.float32 if rank == 0 else torch.int32
    counts = torch.tensor([90, 100], dtype=dtype)  # correct, seen
    dist.all_reduce(counts)
    print(f"rank {rank}: {counts.tolist()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
