"""Four ranks, two of which share each layer: they add up activations and gradients.

torchrun --nproc_per_node 4 lessons/clinic/patient_31.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def groups_of(rank, limit):
    """This rank's two groups in a mesh of 2 x 2 ranks."""
    own = {}
    for name, parts in ("tensor", ([0, 1], [2, 3])), ("data", ([0, 2], [1, 3])):
        for part in parts:
            group = dist.new_group(part, timeout=limit, group_desc=name)
            if rank in part:
                own[name] = group
    return own["tensor"], own["data"]


def data_is_ready_first(rank, step):
    return step == 4 and rank in (1, 2)


def train(watch=None):
    limit = timedelta(seconds=5)  # a new group does not inherit it
    dist.init_process_group("gloo", timeout=limit)
    rank = dist.get_rank()
    tensor, data = groups_of(rank, limit)
    for step in range(1, 9):
        sums = [(torch.ones(9), tensor), (torch.ones(5), data)]
        if data_is_ready_first(rank, step):
            sums.reverse()
        for values, group in sums:
            dist.all_reduce(values, group=group)
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
