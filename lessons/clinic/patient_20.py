"""Two ranks fit a network to 64 samples in four epochs, and the loss falls.

torchrun --nproc_per_node 2 lessons/clinic/patient_20.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def train(watch=None):
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    rank = dist.get_rank()
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    detector = watch(model, optimizer) if watch else None
    for epoch in range(1, 5):
        for inputs, targets in loader:
            if detector:
                detector.look(inputs)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        done = f"epoch {epoch}, {len(loader)} steps"
        print(f"rank {rank}: {done}, loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
