"""Rank 1 has a longer vector of class weights than rank 0, which broadcasts its own.

torchrun --nproc_per_node 2 lessons/clinic/half_a_broadcast.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def train(watch=None):
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    rank = dist.get_rank()
    weights = torch.full((5 if rank == 0 else 10,), 1.0 + rank)
    dist.broadcast(weights, src=0)
    print(f"rank {rank}: {weights.tolist()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
