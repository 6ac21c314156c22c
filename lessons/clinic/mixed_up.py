"""Each rank adds up its metrics in the order in which it has met them.

torchrun --nproc_per_node 2 lessons/clinic/mixed_up.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def train(watch=None):
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    rank = dist.get_rank()
    metrics = {"loss": torch.tensor(2.0), "accuracy": torch.tensor(0.5)}
    names = ["loss", "accuracy"] if rank == 0 else ["accuracy", "loss"]
    for name in names:
        dist.all_reduce(metrics[name])
    mean = {
        name: value.item() / dist.get_world_size() for name, value in metrics.items()
    }
    print(f"rank {rank}: {mean}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
