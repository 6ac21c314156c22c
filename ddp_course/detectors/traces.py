"""A step under torch's profiler: its trace, whether that was written whole, and where
the time went.
"""

import itertools
import json
import os
from pathlib import Path

import torch
from torch.profiler import profile, record_function

from ddp_course import UsageError
from ddp_course.files import Unusable, check_alike, json_of

STEP = "the step"  # the range in a trace that holds the whole step
TRANSFERS = ("gloo:", "nccl", "pretend:")  # what moves data
# what may only wait; the third are DTensor's collectives
STARTS = ("autograd::engine", "c10d::", "_c10d_functional::", "record_param_comms")
LATEST = 1e18  # microseconds


def record_trace(step, path):
    """Run `step()`, one training step, under torch's profiler; write its trace.

    The file is for https://ui.perfetto.dev, and for `read_trace`. Raises UsageError if
    it cannot be written.
    """
    # otherwise the profiler's library reports each start and stop
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # what earlier steps have queued is not this step's
    with profile() as profiler, record_function(STEP):
        step()
    profiler.export_chrome_trace(str(path))
    if not is_whole(path):
        raise UsageError(f"cannot write a whole trace to {path}: is the disk full?")


def read_trace(path):
    """The spans of one step: {"communication", "computing": [(begin, end), ...]} and
    {"step": (begin, end)}, in milliseconds from the step's begin.

    On a GPU, its kernels compute; without one, torch's operators do.
    """
    events = events_of(path, STEP)
    [whole] = [e for e in events if (e["name"], e["cat"]) == (STEP, "user_annotation")]
    device = "kernel" if any(e["cat"] == "kernel" for e in events) else "cpu_op"
    spans, waits = {"communication": [], "computing": []}, waits_in(events, whole["ts"])
    for event in events:
        begin = (event["ts"] - whole["ts"]) / 1e3
        span = begin, begin + event["dur"] / 1e3
        moves_data = event["name"].startswith(TRANSFERS)
        if moves_data and (device == "cpu_op" or event["cat"] == "kernel"):
            spans["communication"].append(span)
        elif event["cat"] == device and not event["name"].startswith(STARTS):
            spans["computing"] += outside(span, waits.get(str(event.get("tid")), []))
    ends = [end for of in spans.values() for _, end in of] if device == "kernel" else []
    return spans | {"step": (0.0, max([whole["dur"] / 1e3, *ends]))}


def waits_in(events, start):
    """Where each thread waits for a collective of DTensor's: {thread: [(begin, end), ...]}
    in milliseconds, in order. It may be inside an operator that needs the result.
    """
    waits = {}
    for event in sorted(events, key=lambda event: event["ts"]):
        if event["name"] == "_c10d_functional::wait_tensor":
            begin = (event["ts"] - start) / 1e3
            span = begin, begin + event["dur"] / 1e3
            waits.setdefault(str(event.get("tid")), []).append(span)
    return waits


def outside(span, waits):
    """The parts of a span that are in none of these spans, which are in order."""
    (begin, end), parts = span, []
    for wait, over in waits:
        if begin < over and wait < end:
            parts += [(begin, wait)] if begin < wait else []
            begin = over
    return [*parts, (begin, end)] if begin < end else parts


def time_use(communication, computing, step):
    """How long a step computes, exposes or hides its communication, and is idle.

    All are spans (begin, end), in any order; they may overlap, and be one inside the
    other. computing + exposed + idle is the length of the step.
    """
    edges = [(edge, 0, 0) for edge in step]
    for kind, spans in enumerate((communication, computing)):
        for begin, end in spans:
            begin, end = max(begin, step[0]), min(end, step[1])
            if begin < end:
                edges += [(begin, kind, 1), (end, kind, -1)]
    edges.sort()
    running, spent = [0, 0], {}  # spent: {(communicates, computes): time}
    for (begin, kind, change), (end, *_) in itertools.pairwise(edges):
        running[kind] += change
        state = running[0] > 0, running[1] > 0
        spent[state] = spent.get(state, 0.0) + end - begin
    hidden = spent.get((True, True), 0.0)
    return {
        "computing": spent.get((False, True), 0.0) + hidden,
        "exposed": spent.get((True, False), 0.0),
        "idle": spent.get((False, False), 0.0),
        "hidden": hidden,  # a part of computing
    }


def is_whole(path):
    """Whether a trace was written to its end. The profiler says nothing where the disk is
    full: it leaves a part of the file, or none. What is not whole is deleted.
    """
    path = Path(path)
    try:
        json.loads(path.read_bytes())
        return True
    except (OSError, ValueError):
        for torn in (path, path.with_name(f"{path.name}.tmp")):
            torn.unlink(missing_ok=True)
        return False


def events_of(path, step):
    """The events of a trace that have a begin and a duration. step: the name of the range
    that holds the step. Raises UsageError if the file is no trace of one step.
    """
    try:
        events = [one for one in json_of(path)["traceEvents"] if one.get("ph") == "X"]
        for event in events:
            check_alike([event["name"], event["cat"]], ["", ""], "an event")
            check_alike([event["ts"], event["dur"]], [0.0, 0.0], "an event's time")
            if abs(event["ts"]) > LATEST or not 0 <= event["dur"] <= LATEST:
                raise Unusable("an event's time is impossible")
        kinds = [event["cat"] for event in events if event["name"] == step]
        if kinds.count("user_annotation") != 1:
            raise Unusable("it holds no step, or several")
        return events
    except (Unusable, KeyError, TypeError, AttributeError) as error:
        reason = Unusable.because(error)
        raise UsageError(f"{path} is no trace of one step: {reason}") from None
