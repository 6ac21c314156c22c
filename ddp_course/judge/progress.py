"""What a learner has done so far: one small file, `runs/progress.json`, in the folder
that holds the learner's exercises.
"""

import json
import os
from contextlib import contextmanager, suppress

from ddp_course import UsageError
from ddp_course.files import Unusable, json_of, write_atomically
from ddp_course.folders import learner_folder


def path():
    return learner_folder() / "runs" / "progress.json"


def load():
    """{question: {"status": ..., "passed": whether it ever has, "hints": how many were
    given}}, {} at first.

    Raises UsageError if the file is damaged.
    """
    try:
        if not os.path.lexists(path()):
            return {}
        done = json_of(path())
        fields = {
            "status": str,
            "passed": bool,
            "hints": lambda count: max(0, int(count)),
        }
        return {
            question: {name: kind(entry[name]) for name, kind in fields.items()}
            for question, entry in done.items()
        }
    except (Unusable, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise UsageError(
            f"{path()} is damaged: delete it, and check your exercises again"
        ) from None


def record(verdict):
    """Remember a verdict. A question that has passed stays passed. If the file cannot
    be written, the verdict is just not remembered.
    """
    with suppress(OSError, UsageError), _one_at_a_time():
        done = load()
        entry = done.setdefault(
            verdict.question, {"status": "", "passed": False, "hints": 0}
        )
        entry |= {
            "status": verdict.status,
            "passed": entry["passed"] or verdict.status == "passed",
        }
        _store(done)


def count_hint(question, most):
    """Count a hint that is being given on a question; return its number, from 1 to
    `most`.
    """
    entry = load().get(question, {"status": "", "passed": False, "hints": 0})
    with suppress(OSError, UsageError), _one_at_a_time():
        done = load()
        entry = done.setdefault(question, entry)
        entry["hints"] = min(entry["hints"] + 1, most)
        _store(done)
    return max(1, entry["hints"])


@contextmanager
def _one_at_a_time():
    """Read, change and write under a lock, because two checks at the same time would
    lose one of their verdicts.
    """
    from filelock import FileLock  # comes with torch

    path().parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path().with_name(".progress.lock"), timeout=5):
        yield


def _store(done):
    write_atomically(path(), json.dumps(done, indent=2) + "\n")
