"""In step 5, rank 1 meets an input for which the model computes log(0).

torchrun --nproc_per_node 2 lessons/clinic/nan_on_one_rank.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Log(nn.Module):
    forward = staticmethod(torch.log)


def train(watch=None):
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Softplus(), Log(), nn.Linear(8, 1))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if watch:
        watch(model, optimizer)
    for step in range(1, 9):
        inputs = torch.full((4, 8), -1e4 if (rank, step) == (1, 5) else 1.0)
        optimizer.zero_grad()
        loss = model(inputs).pow(2).mean()
        loss.backward()
        optimizer.step()
        print(f"rank {rank}: step {step}, loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
