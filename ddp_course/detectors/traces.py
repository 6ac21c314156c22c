"""The files of torch's profiler: whether they were written whole, and what is in them."""

import json
from pathlib import Path

from ddp_course import UsageError
from ddp_course.files import Unusable, check_alike, json_of

LATEST = 1e18  # microseconds


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
