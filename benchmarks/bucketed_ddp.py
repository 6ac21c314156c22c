"""How long a training step takes with lesson 03's BucketedDDP, against torch's
DistributedDataParallel.

python benchmarks/bucketed_ddp.py
"""

import statistics

import torch
import torch.distributed as dist
from claims import claim, report, seconds
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_course.lesson03 import BucketedDDP
from ddp_course.models.convnets import MLP, ConvNet
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import launch

MODELS = {
    "ConvNet": ConvNet,
    "MLP of 40 layers": lambda: MLP(width=64, depth=40),
    "MLP of 5 wide layers": lambda: MLP(width=1024, depth=5),
}


def training_step(model, finish):
    """A function that takes one step on a batch of 64.

    The learning rate is so small that the numbers stay as they are. A model that has
    learnt the batch by heart has gradients so small that they are denormal, and
    computes with them several times more slowly.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    images, labels = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))

    def step():
        optimizer.zero_grad()
        F.nll_loss(model(images), labels).backward()
        finish()
        optimizer.step()

    return step


def time_steps(name, rounds):
    """The median seconds of (torch's step, ours), taken in turn, in the same
    processes.
    """
    with process_group():
        theirs = DistributedDataParallel(MODELS[name]())
        ours = BucketedDDP(MODELS[name]())
        steps = [
            training_step(theirs, finish=lambda: None),
            training_step(ours, ours.finish_gradient_synchronization),
        ]
        times = [[], []]
        for _ in range(rounds):
            for step, times_of_one in zip(steps, times):
                dist.barrier()
                times_of_one.append(seconds(step))
        return [statistics.median(times_of_one[5:]) for times_of_one in times]


def main():
    claims, medians = [], {}
    for name in MODELS:
        theirs, ours = launch(time_steps, name, 60, timeout=120)[0]
        claims.append(
            claim(
                f"a step of BucketedDDP against torch's DDP, {name}, times as long",
                ours / theirs,
                at_most=1.25,
            )
        )
        medians[name] = {"torch": theirs, "BucketedDDP": ours}
    report(claims, median_seconds=medians)


if __name__ == "__main__":
    main()
