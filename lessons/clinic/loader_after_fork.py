"""A thread holds a lock while DataLoader forks a worker, which needs that lock.

torchrun --nproc_per_node 2 lessons/clinic/loader_after_fork.py
"""

import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

cache = threading.Lock()


def refresh_the_cache():
    with cache:
        time.sleep(3)


def collate(indices):
    with cache:  # its copy in the worker is locked, and the thread was not copied
        return torch.tensor(indices)


def train(watch=None):
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    if dist.get_rank() == 1:
        threading.Thread(target=refresh_the_cache).start()
        time.sleep(0.1)
    fork = {"num_workers": 1, "multiprocessing_context": "fork"}
    for batch in DataLoader(range(8), batch_size=4, collate_fn=collate, **fork):
        dist.all_reduce(batch)
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
