"""At its exit, rank 0 averages a metric over the ranks, and rank 1 does not.

torchrun --nproc_per_node 2 lessons/clinic/mean_at_exit.py
"""

import atexit
from datetime import timedelta

import torch
import torch.distributed as dist


def report():
    metric = torch.ones(1)
    dist.all_reduce(metric)
    print(f"the metric's mean: {metric.item() / dist.get_world_size()}", flush=True)


def train(watch=None):
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    rank = dist.get_rank()
    if rank == 0:
        atexit.register(report)
    for _ in range(6):
        dist.all_reduce(torch.ones(9))
    print(f"rank {rank}: done", flush=True)
    if rank > 0:  # rank 0 still needs the group
        dist.destroy_process_group()


if __name__ == "__main__":
    train()
