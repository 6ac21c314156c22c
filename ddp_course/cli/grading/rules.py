"""How a grading is done: its limits, the points, and whether answers are shut in."""

import math
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ddp_course import UsageError
from ddp_course.cli import exercises
from ddp_course.cli.grading import handed_in
from ddp_course.files import Unusable, json_of
from ddp_course.judge import sandbox


@dataclass(frozen=True)
class Rules:
    """How a grading is done.

    seed: of the checks' random choices, the same for everybody; weights: the points of
    questions that give more or less than one, {"03 bucketed": 3}; seconds: the most for
    one question, all told; patience: a factor for the checks' own time limits; memory:
    GB for one answer's ranks together; sandboxed: whether answers are shut in; hidden:
    folders that no answer may see there; workers: how many answers are graded at once.
    """

    seed: int = 0
    weights: dict = field(default_factory=dict)
    seconds: int = 300
    patience: float = 1.0
    memory: float = 4.0
    sandboxed: bool = True
    hidden: tuple = ()
    workers: int = max(1, min(4, (os.cpu_count() or 1) // 2))


def workers_that_fit(workers, memory):
    """How many answers may be graded at once, of `workers`: what they may use together, and
    a gigabyte each for their judges, stays below this machine's memory. memory: GB for
    one answer.
    """
    return max(
        1, min(workers, int((machine_memory() - sandbox.SPARE) / 1e9 / (memory + 1)))
    )


def machine_memory():
    """Bytes of memory that this machine has, or the container in which this runs."""
    limits = [psutil.virtual_memory().total]
    with suppress(OSError, ValueError):  # "max" is no number
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits)


def must_be_shut_in(path, without_a_sandbox):
    """Whether answers under this path are shut in. Raises UsageError if they must be,
    and cannot, and if there is nothing to grade.
    """
    handed_in.submissions(path)
    if without_a_sandbox:
        return False
    problem = sandbox.why_not()
    if problem and not handed_in.is_own(path):
        raise UsageError(
            f"other people's answers run in a sandbox, but {problem}. "
            "--without-a-sandbox runs them with your rights"
        )
    return not problem


def new_seed():
    return secrets.randbelow(10**6)


def weights_in(file):
    """The weights in a JSON file, {"03 bucketed": 3}. Raises UsageError."""
    known = {
        f"{number} {task.name}"
        for number in exercises.notebooks("solutions")
        for task in exercises.questions_of(number)
    }
    try:
        weights = json_of(file)
        numbers = [0 <= weight < math.inf for weight in weights.values()]
    except (Unusable, TypeError, AttributeError):
        numbers = [False]
    if not all(numbers):
        raise UsageError(f'{file} is no JSON file such as {{"03 bucketed": 3}}')
    if unknown := set(weights) - known:
        raise UsageError(f"{file}: there is no question {min(unknown)}")
    return weights
