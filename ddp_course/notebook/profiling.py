"""The timeline of a training step, from torch's profiler."""

import json
import os
import time
from pathlib import Path

import torch.distributed as dist

from ddp_course.detectors.traces import record_trace


def record(step):
    """Run `step()`, one training step, under torch's profiler; return what ran when.

    Returns {"forward", "backward", "all_reduce", "optimizer": [(begin, length), ...]}
    in milliseconds from the start. all_reduce runs in its own threads, so its times may
    be inside those of backward: this is the overlap.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    # otherwise the profiler's library reports each start and stop
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with record_function("the step"):
            clock = time.perf_counter()
            step()
    spans = sorted(
        (event.time_range.start / 1e3, event.time_range.end / 1e3, event.name)
        for event in profiler.events()
    )
    [begin] = [start for start, _, name in spans if name == "the step"]

    def of(*prefixes):
        return [
            (start - begin, end - start)
            for start, end, name in spans
            if name.startswith(prefixes)
        ]

    backward = of("autograd::engine::evaluate_function")
    return {
        "forward": [(0.0, backward[0][0])],
        "backward": backward,
        "all_reduce": of("gloo:all_reduce", "nccl:all_reduce")
        + on_the_pretend_network(clock),
        "optimizer": of("Optimizer.step"),
    }


def on_the_pretend_network(clock):
    """The spans of its all-reduces since the clock, which the profiler does not see."""
    spans = getattr(dist.group.WORLD, "spans", [])
    return [
        (1e3 * (begin - clock), 1e3 * (end - begin))
        for begin, end in spans
        if begin >= clock
    ]


def without_waiting(rows):
    """A recording of a step that waits for each all-reduce, with those waits cut out."""
    cut = {"all_reduce": rows["all_reduce"]}
    for row in rows.keys() - cut.keys():
        spans = rows[row]
        for wait, seconds in rows["all_reduce"]:
            sides = [(begin, min(begin + length, wait)) for begin, length in spans]
            sides += [
                (max(begin, wait + seconds), begin + length) for begin, length in spans
            ]
            spans = [(begin, end - begin) for begin, end in sides if end > begin]
        cut[row] = spans
    return {row: sorted(cut[row]) for row in rows}


def trace(step, path):
    """Record a step as `record_trace` does, and add the transfers of the pretend
    network, which the profiler does not see.
    """
    spans = getattr(dist.group.WORLD, "spans", [])
    before = len(spans)
    record_trace(step, path)
    recorded = json.loads(Path(path).read_text())
    # the trace counts microseconds from its base, in nanoseconds of the clock on the wall
    shift = time.time_ns() - time.perf_counter_ns() - recorded["baseTimeNanoseconds"]
    for begin, end in spans[before:]:
        event = {"ph": "X", "cat": "transfer", "name": "pretend:all_reduce"}
        event |= {"pid": os.getpid(), "tid": "the pretend network"}
        event |= {"ts": begin * 1e6 + shift / 1e3, "dur": (end - begin) * 1e6}
        recorded["traceEvents"].append(event)
    Path(path).write_text(json.dumps(recorded))
