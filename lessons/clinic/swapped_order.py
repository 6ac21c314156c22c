"""The ranks call the same two collectives, in different orders.

torchrun --nproc_per_node 2 lessons/clinic/swapped_order.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def train(watch=None):
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    loss, threshold = torch.tensor([2.0, 1.0]), torch.tensor([0.5, 0.5])
    for step in range(1, 9):
        if step == 4 and dist.get_rank() == 1:  # "the threshold is due first"
            dist.broadcast(threshold, src=0)
            dist.all_reduce(loss)
        else:
            dist.all_reduce(loss)
            dist.broadcast(threshold, src=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
