"""Questions that predict what a rank sends: how many all-reduces, and how many bytes."""

import operator

from ddp_course.checks.claims import Claim


def as_prediction(returned):
    """What an answer returned: two whole numbers, those of NumPy and torch, too, or None;
    and in words.
    """
    try:
        numbers = [operator.index(number) for number in returned]
    except TypeError:
        numbers = []
    return {"numbers": numbers if len(numbers) == 2 else None, "text": repr(returned)[:200]}


def as_measured(call, prediction, measured, mistakes, otherwise):
    """Claims that a prediction has the all-reduces and bytes that were measured.

    otherwise: the causes of a wrong number of all-reduces, and of wrong bytes alone.
    """
    got = prediction["numbers"]
    yield Claim(
        call, got is None, False, "return the number of all-reduces and the number of bytes, in this order",
        told="two whole numbers", shown=prediction["text"],
    )  # fmt: skip
    yield Claim(
        call, got, measured, otherwise[got[0] == measured[0]], mistakes,
        told="{}, {} bytes (measured on two ranks)".format(*measured), shown="{}, {} bytes".format(*got),
    )  # fmt: skip
