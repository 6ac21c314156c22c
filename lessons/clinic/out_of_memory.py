"""Rank 1 needs more memory than its machine has: here, than the system lets it have.

torchrun --nproc_per_node 2 lessons/clinic/out_of_memory.py
"""

import resource
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


def limit_memory(more):
    """Let this process allocate `more` bytes from now on (Linux)."""
    pages = int(open("/proc/self/statm").read().split()[0])
    size = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


@record
def train(watch=None):
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    limit_memory(2**28)
    longest = 200 if dist.get_rank() == 0 else 20_000  # rank 1 has met a long text
    for length in (100, 150, longest):
        scores = torch.ones(length, length)  # of attention: the square of the length
        dist.all_reduce(scores.mean())
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
