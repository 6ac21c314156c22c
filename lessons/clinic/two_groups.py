"""Two process groups, and in step 4 rank 1 uses them in the other order.

torchrun --nproc_per_node 2 lessons/clinic/two_groups.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def loss_first(rank, step):
    return (rank, step) == (1, 4)  # it "writes its log line before the update"


def train(watch=None):
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    rank = dist.get_rank()
    limit = timedelta(seconds=5)  # a new group does not inherit it
    metrics = dist.new_group(timeout=limit, group_desc="metrics")
    for step in range(1, 9):
        gradients, loss = torch.ones(9), torch.ones(1)
        if loss_first(rank, step):
            dist.all_reduce(loss, group=metrics)
            dist.all_reduce(gradients)
        else:
            dist.all_reduce(gradients)
            dist.all_reduce(loss, group=metrics)
        print(f"rank {rank}: step {step}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
