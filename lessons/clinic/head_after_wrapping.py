"""The model gets its new head after it has been wrapped.

torchrun --nproc_per_node 2 lessons/clinic/head_after_wrapping.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(watch=None):
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    torch.manual_seed(0)  # so the new head is the same on all ranks, at first
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    model.module.append(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if watch:
        watch(model, optimizer)
    torch.manual_seed(dist.get_rank())
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sub(1).pow(2).mean().backward()
        optimizer.step()
    weight = model.module[2].weight.sum().item()
    print(f"rank {dist.get_rank()}: the head's weights add up to {weight:.6f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
