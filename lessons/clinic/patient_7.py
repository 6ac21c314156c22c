"""A sharded model trains for six steps, and its weights are written to a file.

torchrun --nproc_per_node 2 lessons/clinic/patient_7.py
"""

import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def save(model):
    whole = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = state_dict.get_model_state_dict(model, options=whole)
    with tempfile.TemporaryFile() as file:
        torch.save(weights, file)


def train(watch=None):
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()
    if dist.get_rank() == 0:
        save(model)
    dist.barrier()
    print(f"rank {dist.get_rank()}: saved", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
