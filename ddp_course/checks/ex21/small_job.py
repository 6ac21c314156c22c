"""What each rank does in the small run of question 4: data parallel training by hand, with
a checkpoint every few steps and a page of metrics. torchrun starts it on each machine.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.checkpoints.resumable import write
from ddp_course.checks.ex21.job import descend, own_gradient
from ddp_course.checks.ex21.planted import PACE, PER_MACHINE, SLOW, planted
from ddp_course.files import tensors_of
from ddp_course.ranks.environment import process_group

PATIENCE = 4  # seconds that a rank waits for the others in a collective


def train(folder, name, attempt, executions):
    """Train from the latest checkpoint on, for at most so many executions of a step."""
    run = planted(name)
    with process_group(timeout=PATIENCE) as (rank, _):
        machine = rank // PER_MACHINE
        torch.manual_seed(0)
        model, done = nn.Linear(8, 1), 0
        if (folder / "checkpoint.pt").exists():
            saved = tensors_of(folder / "checkpoint.pt")
            model.load_state_dict(saved["model"])
            done = saved["step"]
        dist.barrier()
        with open(folder / f"page-{rank}.jsonl", "a") as page:
            for step in range(done + 1, done + 1 + executions):
                if attempt == 0 and (machine, step) == run.lost:
                    (folder / f"silent-{machine}-{rank}").touch()  # the power will be cut now
                    time.sleep(600)
                row = a_step(run, model, rank, attempt, step)
                print(json.dumps(row), file=page, flush=True)
                if row["mean_norm"] is None:
                    return
                if step % run.every == 0:
                    if rank == 0:
                        write(folder / "checkpoint.pt", {"model": model.state_dict(), "step": step})
                    dist.barrier()


def a_step(run, model, rank, attempt, step):
    """One row of a page. Where no mean comes, because a machine is lost, its norm is None."""
    start = time.perf_counter()
    loss, gradient = own_gradient(model, step, rank)
    if (attempt, rank, step) == run.nan:
        gradient[3] = torch.nan
    when, who, first, last = run.slow
    slow = attempt == when and rank == who and first <= step <= last
    time.sleep(SLOW if slow else PACE)
    norm, computed = gradient.norm().item(), time.perf_counter()
    try:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
        mean = gradient.norm().item()
    except RuntimeError:  # gloo: the others do not answer
        mean = None
    row = {"attempt": attempt, "step": step, "compute": computed - start, "wait": time.perf_counter() - computed}
    if mean is not None and gradient.isfinite().all():  # else the update is left out, on all ranks
        descend(model, gradient)
    return row | {"loss": loss, "norm": norm, "mean_norm": mean}


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
