"""Questions whose answer is a function of plain values: it is tried on many cases, and what
it gives is compared with what the right function gives, and each likely mistake.
"""

import random
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch

from ddp_course.checks.claims import agree
from ddp_course.judge.answer import trying
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.environment import process_group

DIGITS = 6  # to which floats must agree


def check_function(answer, draw, name, cases, right, mistakes, otherwise, place=0, scale=lambda case: 0, digits=DIGITS):
    """Raise Wrong unless the answer's function gives what `right` gives in all cases.

    cases: tuples or dicts of arguments. mistakes: {cause: function}; told is the first
    that gives what the answer gave, in all cases for which it gives anything. otherwise:
    a cause, or a function of a case and of what the answer gave. place: of the function
    among the answer's objects. scale: of a case, how large its numbers are; a float may
    be wrong by a millionth of that, or of itself. digits: or by less.
    """
    seed = draw.randrange(10**6)
    [seen] = answer.on_ranks(results_of, place, name, cases, seed)
    for case, got in zip(cases, seen):
        expected = as_plain(called(right, case))
        if agree(got, expected, digits, scale(case)):
            continue
        if got is None:
            cause = "the function ends without a return statement"
        else:
            causes = (
                cause for cause, mistake in mistakes.items() if explains(mistake, right, cases, seen, scale, digits)
            )
            last = otherwise(case, got) if callable(otherwise) else otherwise
            cause = next(causes, last)
        words = [as_told(value) for value in (expected, got)]
        if words[0] == words[1]:
            words = [as_told(value, digits=9) for value in (expected, got)]
        raise Wrong(call_of(name, case), expected=words[0], got=words[1], cause=cause)


def results_of(*functions_and_rest):
    """What a function gives for each case, tried in a random order, as plain values.

    The arguments: the answer's functions; the place of the one among them, its name, the
    cases, and a seed.
    """
    *functions, place, name, cases, seed = functions_and_rest
    order, results = list(range(len(cases))), [None] * len(cases)
    random.Random(seed).shuffle(order)
    with process_group():  # an answer that asks for its rank gets one
        for number in order:
            with trying(call_of(name, cases[number])):
                results[number] = as_plain(called(functions[place], cases[number]))
    return results


def called(function, case):
    return function(**case) if isinstance(case, dict) else function(*case)


def call_of(name, case):
    """A call as a learner would write it."""
    if isinstance(case, tuple):
        return f"{name}{case}"
    given = (f"{key}={value if isinstance(value, int) else as_told(value, 3)}" for key, value in case.items())
    return f"{name}({', '.join(given)})"


def as_plain(value):
    """Numbers of NumPy and of tensors as those of Python, and arrays of them as lists;
    fractions as floats; a tuple's items as well.
    """
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    if isinstance(value, Fraction | Decimal):
        return float(value)
    return value.tolist() if isinstance(value, np.generic | np.ndarray | torch.Tensor) else value


def explains(mistake, right, cases, seen, scale, digits=DIGITS):
    """Whether a mistake gives what was seen, wherever it gives anything, and is one."""
    differs = False
    for case, got in zip(cases, seen):
        with suppress(ZeroDivisionError, ValueError):
            value = as_plain(called(mistake, case))
            if not agree(got, value, digits, scale(case)):
                return False
            true = as_plain(called(right, case))
            differs = differs or not agree(true, value, digits, scale(case))
    return differs


def as_told(value, digits=4):
    """A plain value for a verdict, with so many digits of a float."""
    if value is None:
        return "nothing (None)"
    if isinstance(value, list):
        return f"({', '.join(as_told(item, digits) for item in value)})"
    if type(value) in (int, float) and value % 1 == 0 and 10**digits <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if isinstance(value, float) else repr(value)
