"""The ranks average their gradients, but each has begun with its own parameters.

torchrun --nproc_per_node 2 lessons/clinic/unequal_seeds.py
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def train(watch=None):
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    rank = dist.get_rank()
    torch.manual_seed(int(os.environ["RANK"]))  # "each rank has its own data"
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if watch:
        watch(model, optimizer)
    for _ in range(12):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).sub(1).pow(2).mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        optimizer.step()
    print(
        f"rank {rank}: loss {loss.item():.3f}, weight {model.weight[0, 0].item():.4f}"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
