"""The five patients of question 1. What is wrong with them is drawn from a name.

This file shows how each cause looks in the code, but not which of them are drawn.
"""

import os
import random
import signal
import time
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

RANKS, STEPS, LIMIT = 3, 20, 4  # LIMIT: of the process group, in seconds
PATIENTS = "ABCDE"
CAUSES = {
    "nan": "from this step on, NaN is in the numbers of this rank first",
    "drift": "after this step, the parameters of this rank are others",
    "straggler": "from this step on, this rank is slow",
    "out of data": "this rank has no batch for this step, and leaves the loop",
    "another collective": "in this step, this rank calls a collective that others do not",
    "stuck": "in this step, this rank waits for something, outside of any collective",
    "killed": "in this step, this rank is killed",
}


class Truth(NamedTuple):
    """What is wrong with a patient."""

    rank: int  # 0 to RANKS - 1
    step: int  # counted from 1
    cause: str


def truths(name):
    """What is wrong with the five patients of a person, {letter: Truth}."""
    draw = random.Random(f"exercise 15 {' '.join(name.lower().split())}")
    causes = draw.sample(sorted(CAUSES), len(PATIENTS))
    return {
        letter: Truth(draw.randrange(RANKS), draw.randint(3, STEPS - 4), cause)
        for letter, cause in zip(PATIENTS, causes)
    }


def train_with(truth, watch=None):
    """Train on all ranks together: one all_reduce per step, and no other collective."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if watch:
        watch(model, optimizer)
    for step in range(1, STEPS + 1):
        inputs = torch.randn(world_size, 4, 8)[rank]
        guilty = rank == truth.rank and step >= truth.step
        if guilty and truth.cause == "out of data":
            break
        time.sleep(0.01)
        if guilty:
            before_the_step(truth, step, inputs)
        optimizer.zero_grad()
        model(inputs).pow(2).mean().backward()
        average_gradients(model, world_size)
        if guilty and (step, "drift") == (truth.step, truth.cause):
            model[2].bias.grad += 1e-3
        optimizer.step()
    after_the_training()


def average_gradients(model, world_size):
    flat = torch.cat([value.grad.flatten() for value in model.parameters()])
    dist.all_reduce(flat)
    parts = flat.div(world_size).split([value.numel() for value in model.parameters()])
    for value, part in zip(model.parameters(), parts):
        value.grad = part.view_as(value)


def before_the_step(truth, step, inputs):
    """What the guilty rank does in the first step of its fault, or in all from then on."""
    if truth.cause == "straggler":
        time.sleep(0.1)
    if step > truth.step:
        return
    if truth.cause == "nan":
        inputs[1, 3] = torch.nan
    elif truth.cause == "another collective":
        dist.barrier()
    elif truth.cause == "stuck":
        time.sleep(3600)
    elif truth.cause == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


def after_the_training():
    dist.barrier()
    dist.destroy_process_group()
