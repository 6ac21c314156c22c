"""Rank 0 alone adds up the loss of all ranks, "for the log".

torchrun --nproc_per_node 2 lessons/clinic/rank_conditional.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def train(watch=None):
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    rank = dist.get_rank()
    for step in range(1, 7):
        gradient, loss = torch.ones(4), torch.tensor(1.0 / step)
        dist.all_reduce(gradient)
        if step == 6 and rank == 0:
            dist.all_reduce(loss)
            print(f"step {step}: loss {loss:.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
