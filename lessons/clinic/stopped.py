"""Rank 1 is stopped, as by Ctrl-Z or by `kill -STOP`.

torchrun --nproc_per_node 2 lessons/clinic/stopped.py
"""

import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist


def train(watch=None):
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    rank = dist.get_rank()
    for step in range(1, 9):
        if (rank, step) == (1, 5):
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(4))
        print(f"rank {rank}: step {step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
