"""A contrastive loss against the embeddings of all ranks, which all_gather brings.

torchrun --nproc_per_node 2 lessons/clinic/cut_gradient.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(watch=None):
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    torch.manual_seed(0)
    model = nn.Module()
    model.encoder = DistributedDataParallel(nn.Linear(8, 4))
    model.scale = nn.Parameter(torch.ones(()))  # outside of the wrapper
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if watch:
        watch(model, optimizer)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(12):
        mine = model.encoder(torch.randn(4, 8))
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)  # plain numbers: no gradient flows back
        loss = (model.scale * mine @ torch.cat(parts).T).logsumexp(dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(
        f"rank {dist.get_rank()}: scale {model.scale.item():.4f}, "
        f"a gradient flows back through all_gather: {parts[0].requires_grad}"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
