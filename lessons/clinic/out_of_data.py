"""The last rank has one batch less than the others.

torchrun --nproc_per_node 2 lessons/clinic/out_of_data.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train(watch=None):
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if watch:
        watch(model, optimizer)
    batches = torch.randn(6 if rank == world_size - 1 else 7, 4, 8)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
    print(f"rank {rank}: trained")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
