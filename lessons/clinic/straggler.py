"""The last rank needs longer for each of its steps, and everybody waits.

torchrun --nproc_per_node 2 lessons/clinic/straggler.py
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train(watch=None):
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if watch:
        watch(model, optimizer)
    begin = time.perf_counter()
    for _ in range(20):
        time.sleep(0.06 if rank == world_size - 1 else 0.02)  # "reads its batch"
        optimizer.zero_grad()
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()
    print(f"rank {rank}: {(time.perf_counter() - begin) / 20:.3f} s per step")
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
