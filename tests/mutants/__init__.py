"""Answers to try the checks on: right ones that differ from ours, and wrong ones that people really give.

    @right("average_gradients")
    def divides_first(module): ...

    @wrong("average_gradients", "it is the sum over the ranks")
    def forgets_to_divide(module): ...

The last text is a pattern that the verdict must match: the cause, not only the verdict, has to be right. An answer of
several functions is a function without arguments, `several=True`, that returns them all. A status may be a pattern, too.
"""

import sys
from typing import NamedTuple


class Candidate(NamedTuple):
    lesson: str
    question: str
    name: str
    answers: tuple
    pattern: str | None  # None: a right answer
    status: str | None
    line: int  # of its file, where its text begins


CANDIDATES = []


def right(question, several=False):
    return wrong(question, None, None, several)


def wrong(question, pattern, status="failed", several=False):
    def register(answer):
        answers = answer() if several else (answer,)
        lesson = answer.__module__[-2:]
        CANDIDATES.append(Candidate(lesson, question, answer.__name__, answers, pattern, status, line))
        return answer

    line = line_of_module()
    return register


def line_of_module():
    """Where the module is that has called: at a decorator, or at a function that makes an answer."""
    frame = sys._getframe()
    while frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return frame.f_lineno
