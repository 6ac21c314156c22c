"""Counting the bytes that are in use, and those that ranks send."""

import time

import torch

# what a rank sends, in units of the tensor's bytes; 1 for all other communication
COSTS = {"allreduce": 2, "recv": 0}
ROOM = 1024  # bytes, for what is small: counters of steps, flags
SIZE = 4  # bytes of a number in fp32


def least_in_use(timeline, enough):
    """The bytes in use, after a short wait, because a gloo thread may still hold what
    it has just sent.
    """
    patience = time.monotonic() + 1
    while True:
        torch.empty(0)  # one more operation, for the timeline
        if timeline[-1] <= enough or time.monotonic() > patience:
            return timeline[-1]
        time.sleep(0.01)


def messages(log, ranks):
    """[name, bytes] of each communication in a Watch's log. Where a gather ends, the
    log has all ranks' parts; each rank gives one.
    """
    found = []
    for entry in log:
        ends_here = entry["name"] == "gather" and entry["bytes"]
        found.append([entry["name"], entry["whole"] // (ranks if ends_here else 1)])
    return found


def bytes_sent(sent):
    """Of communication as in messages(): an all_reduce sends everything twice."""
    return sum(COSTS.get(name, 1) * size for name, size in sent)
