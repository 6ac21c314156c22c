"""What two ranks do in `launch_and_torchrun.py`, the same code under either
launcher.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_course.models.convnets import ConvNet


def all_reduce():
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def ddp_step():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(ConvNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    F.nll_loss(model(torch.randn(8, 1, 28, 28)), torch.randint(10, (8,))).backward()
    optimizer.step()
    dist.destroy_process_group()


def one_raises():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("planted")
    dist.all_reduce(torch.ones(1))  # waits for rank 1, which never arrives


if __name__ == "__main__":
    {"all_reduce": all_reduce, "ddp_step": ddp_step}[sys.argv[1]]()
