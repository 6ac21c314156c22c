"""How much faster a window of 8 micro-batches is if the ranks average once instead of
after each.

python benchmarks/no_sync.py
"""

import statistics
from contextlib import nullcontext

import torch
import torch.distributed as dist
from claims import claim, report, seconds
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_course.models.convnets import MLP
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import launch

MICRO_BATCHES = 8


def window(model, images, labels, no_sync):
    for number in range(1, MICRO_BATCHES + 1):
        with model.no_sync() if no_sync and number < MICRO_BATCHES else nullcontext():
            F.nll_loss(model(images), labels).backward()


def time_windows(rounds):
    """The median seconds of a window, {no_sync: seconds}, both in turn in the same
    processes.
    """
    with process_group():
        model = DistributedDataParallel(MLP(), gradient_as_bucket_view=True)
        batch = torch.randn(16, 1, 28, 28), torch.randint(10, (16,))
        times = {True: [], False: []}
        for _ in range(rounds):
            for no_sync, of_one in times.items():
                dist.barrier()
                of_one.append(seconds(window, model, *batch, no_sync))
        return {
            no_sync: statistics.median(of_one[3:]) for no_sync, of_one in times.items()
        }


def main():
    medians = launch(time_windows, 30, timeout=120)[0]
    figure = f"a window of {MICRO_BATCHES} micro-batches with no_sync, MLP on 2 ranks, times as fast"
    report(
        [claim(figure, medians[False] / medians[True], at_least=1.5)],
        median_seconds=medians,
    )


if __name__ == "__main__":
    main()
