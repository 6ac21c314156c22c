"""A rank that keeps the others waiting."""

import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist


class StragglerDetector:
    """Names a rank that keeps the others waiting.

    A rank's own time begins where a step ends, and ends with its last gradient; then it
    waits in backward() for the others. A straggler is slow in all steps: the fastest of
    its last `every` steps takes at least `factor` times the median of the other ranks',
    and a millisecond more, and it waits less than half as long as the rank that waits
    most. Waiting before the last gradient, as with BatchNorm's buffers in DDP, is a
    rank's own time: a straggler may be missed. If most of the others are slow, all are.
    report: is called with a line about the slowest rank. group: a gloo group of ranks
    with the same work: a pipeline's stage, or a mesh's data dimension, where all tensor
    ranks of a slow replica are named.
    """

    def __init__(self, model, optimizer, report, every=9, factor=1.5, timeout=60,
                 group=None):  # fmt: skip
        self.report, self.every, self.factor = report, every, factor
        # of its own: collectives in one group are not confused with those in another
        self.group = group or dist.new_group(None, timedelta(seconds=timeout), "gloo")
        self.ranks = dist.get_process_group_ranks(self.group)
        self.device = next(model.parameters()).device
        self.step, self.begin, self.ready, self.times = 0, None, None, []
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.gradient_is_there)
        optimizer.register_step_pre_hook(self.before_step)
        optimizer.register_step_post_hook(self.after_step)

    def gradient_is_there(self, parameter):
        self.ready = moment(self.device)

    def before_step(self, *_):
        warm = self.begin is not None  # the first step is longer
        if warm and self.ready is not None:  # a step without gradients has no time
            self.times.append((self.begin, self.ready, moment(self.device)))

    def after_step(self, *_):
        self.step += 1
        if len(self.times) == self.every:
            own = [seconds(begin, ready) for begin, ready, _ in self.times]
            waits = median(seconds(ready, end) for _, ready, end in self.times)
            self.times = []
            of_ranks = [None] * len(self.ranks)
            dist.all_gather_object(of_ranks, (own, waits), self.group)
            if line := slowest(of_ranks, self.factor, self.ranks):
                self.report(f"straggler in step {self.step}: {line}")
        self.begin, self.ready = moment(self.device), None


def slowest(rows, factor, names=None):
    """A line about the straggler among the ranks, or None.

    rows: for each rank its own time in each step, and how long it waits. names: what
    the ranks are called.
    """
    best, waits = zip(*((min(own), waits) for own, waits in rows))
    rank = best.index(max(best))
    others = [
        taken for other, (own, _) in enumerate(rows) if other != rank for taken in own
    ]
    if not others or waits[rank] > max(waits) / 2:
        return None
    if best[rank] < max(factor * median(others), median(others) + 1e-3):
        return None
    name = names[rank] if names else rank
    line = f"rank {name} needs {best[rank]:.3f} s and waits {waits[rank]:.3f} s"
    return f"{line}, the others need {median(others):.3f} s"


def moment(device):
    """Now: on a GPU an event on its stream, elsewhere the seconds on a clock that stops
    while other programs have the CPU.
    """
    if device.type != "cuda":
        return time.perf_counter() - waited_for_the_cpu()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def waited_for_the_cpu():
    """How long this thread has been ready to run without a CPU, in seconds.

    As Linux counts it, see its documentation of schedstat; 0 on other systems.
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def seconds(begin, end):
    """The seconds between two moments."""
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
