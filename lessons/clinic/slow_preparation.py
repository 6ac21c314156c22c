"""Rank 0 prepares the data while the others wait for it, longer than they may.

torchrun --nproc_per_node 2 lessons/clinic/slow_preparation.py
"""

import time
from datetime import timedelta

import torch.distributed as dist


def prepare_the_data():
    time.sleep(60)  # "tokenises the corpus"


def train(watch=None):
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    if dist.get_rank() == 0:
        prepare_the_data()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
