"""One sample in the data of rank 1 is broken.

torchrun --nproc_per_node 2 lessons/clinic/exception.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


def read(sample):
    return torch.tensor([float(number) for number in sample.split()])


@record  # writes the error to torchrun's error file
def train(watch=None):
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    rank = dist.get_rank()
    samples = ["1 2 3", "4 5 6", "7 8 9"]
    if rank == 1:
        samples[2] = "7 8 n/a"
    for step, sample in enumerate(samples, 1):
        dist.all_reduce(read(sample))
        print(f"rank {rank}: step {step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
