"""Rank 0 saves a checkpoint, and its disk is full: /dev/full always is (Linux).

torchrun --nproc_per_node 2 lessons/clinic/full_disk.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


def save(model, path):
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()


@record
def train(watch=None):
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    save(torch.nn.Linear(500, 500), "/dev/full")
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
