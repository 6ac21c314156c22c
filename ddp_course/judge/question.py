"""A question of an exercise: called with the learner's answer, it judges that on real
ranks, in bounded time, and shows a verdict in words.
"""

import functools
import json
import os
import random
import re
import secrets
import traceback
from contextlib import contextmanager
from pathlib import Path

import torch

from ddp_course.judge import progress
from ddp_course.judge.answer import MISSING, Answer, CannotBeSent, TooBusy
from ddp_course.judge.known_errors import (
    KNOWN_ERRORS,
    cause_of_waiting,
    where_they_were,
    without_our_frames,
)
from ddp_course.judge.verdict import (
    FAILED,
    GRADER_ERROR,
    NOT_ATTEMPTED,
    PASSED,
    RAISED,
    TIMED_OUT,
    Verdict,
    Wrong,
)
from ddp_course.ranks.launch import RankError, RankTimeout
from ddp_course.ranks.variables import SEED, VERDICT

MOST_TEXT = 10_000  # characters of a row that a grader keeps


TOO_BUSY = (
    "twice, a rank had not begun with your answer when its time was over: this machine is too "
    "busy. Close other programs, and check again"
)


class Question:
    """One question of an exercise: called with the learner's functions or classes, it
    checks them and shows the verdict.
    """

    latest = None  # the exercise whose questions were defined or called last: "03"

    def __init__(self, body, hints):
        self.body, self.hints = body, hints
        self.lesson = Question.latest = re.search(r"\bex(\d\d)", body.__module__)[1]
        self.name = body.__name__.removeprefix("check_")
        self.title = f"{self.lesson} {self.name}"
        functools.update_wrapper(self, body)

    def __call__(self, *objects, seed=None):
        Question.latest = self.lesson
        graded = os.environ.get(VERDICT)
        if graded:  # the verdict if the answer ends this process
            rows = {"where": "your code ended, or held up, the process that judges it"}
            Path(graded).write_text(json.dumps({"status": RAISED, "rows": rows}))
        verdict = self.judge(*objects, seed=seed)
        if graded:
            rows = {name: text[:MOST_TEXT] for name, text in verdict.rows.items()}
            Path(graded).write_text(
                json.dumps({"status": verdict.status, "rows": rows})
            )
        else:
            progress.record(verdict)
        verdict.show()

    def judge(self, *objects, seed=None):
        """The Verdict on these answers. seed: of the check's random choices; a failing
        verdict shows it.
        """
        if seed is None:
            seed = int(os.environ.get(SEED, secrets.randbelow(10**6)))
        answer = None
        try:
            answer = Answer(objects)
            with one_thread():
                picture = self.body(answer, random.Random(seed))
            return Verdict(self.title, PASSED, {}, picture=picture)
        except Wrong as wrong:
            status, rows = FAILED, wrong.rows
        except RankTimeout as late:
            status, rows = TIMED_OUT, {"where": where_they_were(str(late))}
            rows["likely cause"] = cause_of_waiting(rows["where"])
        except RankError as error:
            if (
                error.message.split("\n")[0] == "NotImplementedError"
            ):  # torch raises it, too, with a better message
                return Verdict(self.title, NOT_ATTEMPTED, {}, self.hints)
            missing = re.match(rf"NameError: ({MISSING} \w+)", error.message)
            where = missing[1] if missing else without_our_frames(str(error))
            status, rows = RAISED, {"where": where}
            for text, cause in KNOWN_ERRORS.items():
                if text in error.message:
                    rows["likely cause"] = cause
        except TooBusy:
            status, rows = GRADER_ERROR, {"where": TOO_BUSY}
        except CannotBeSent as error:
            status, rows = RAISED, {"where": str(error)}
        except Exception:
            status = GRADER_ERROR
            rows = {
                "where": traceback.format_exc(),
                "likely cause": "a mistake in the course, not yours",
            }
        if answer and answer.printed and status != GRADER_ERROR:
            rows["printed"] = "\n".join(
                line[:200] for line in answer.printed.splitlines()[-5:]
            )
        rows["to repeat"] = (
            f"checks.ex{self.lesson}.check_{self.name}(..., seed={seed})"
        )
        return Verdict(
            self.title, status, rows, () if status == GRADER_ERROR else self.hints
        )


@contextmanager
def one_thread():
    """Let torch compute with one thread here: with so little work, more threads only
    wait.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def question(*hints):
    """Make `check_x(answer, draw)` a Question. hints: of rising strength; the last
    nearly gives it away.

    answer: an Answer. draw: a random.Random, for shapes, seeds and numbers of ranks.
    The body raises Wrong, or returns: None, or a picture of what the answer did, for
    Verdict.
    """
    return lambda body: Question(body, hints)
