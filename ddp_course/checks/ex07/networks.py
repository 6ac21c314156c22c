"""What the answers are given, and must leave as it is."""

import torch

from ddp_course.checks.claims import Claim

# Accelerate is imported on the ranks only, so that the judging process need not wait
# for it. The fork server imports it for the ranks, with those of its dependencies that
# are installed.
PRELOADED = ["accelerate", "datasets", "deepspeed"]


def changed(data, original):
    """Which of the caller's tensors an answer has changed."""
    now = {"samples": data.inputs, "labels": data.labels}
    before = {"samples": original.inputs, "labels": original.labels}
    return [name for name in now if not torch.equal(now[name], before[name])]


def inputs_unchanged(checked, names):
    """Claims that an answer has not changed the tensors that the caller gave it."""
    for name in names:
        yield Claim(f"{name} after {checked}", "changed", "unchanged", f"{name} belongs to the caller, who may use it "
                    "again: work on a copy", told="as before", shown="other numbers")  # fmt: skip


def in_words(returned):
    return "None" if returned is None else f"a {type(returned).__name__}"
