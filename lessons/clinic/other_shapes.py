"""A rank whose last batch is smaller sends fewer predictions.

torchrun --nproc_per_node 2 lessons/clinic/other_shapes.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def train(watch=None):
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(1, 6):
        samples = 4 if (rank, step) == (1, 5) else 8
        predictions = torch.full((samples,), float(rank))
        gathered = [torch.empty(samples) for _ in range(world_size)]
        dist.all_gather(gathered, predictions)
    print(f"rank {rank}: {torch.cat(gathered).tolist()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
