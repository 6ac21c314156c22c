"""What a check claims, and how a claim that does not hold becomes a verdict.

A check yields Claims; the first that does not hold is told. What an answer gave is
compared with what each likely mistake would give: mistakes are data, pairs of a value and
its cause.
"""

import math
from typing import NamedTuple

import torch

from ddp_course.checks.differences import parted
from ddp_course.judge.verdict import Wrong


class Claim(NamedTuple):
    """`got` must agree with `expected`. Where it does not, the cause is that of the first
    of the mistakes that agrees with it, or else `otherwise`, a text, or a function that
    makes it when it is needed.

    what: what was tried, for the verdict. mistakes: pairs (what it gives, cause), or a
    function that makes them when they are needed. digits: to which numbers must agree.
    scale: how large numbers are, for digits of small ones. mistake_digits: to which a
    mistake must agree. told, shown: `expected` and `got` in words, where these say more.
    """

    what: str
    got: object
    expected: object
    otherwise: object
    mistakes: object = ()
    digits: float = 10
    told: object = None
    shown: object = None
    scale: float = 0.0
    mistake_digits: float = 5  # a mistake in 32 bits is the same mistake


class Between(NamedTuple):
    """In the place of an expected number: any number from low to high."""

    low: float = 0.0
    high: float = math.inf


class OneOf(NamedTuple):
    """In the place of an expected value: any of several."""

    values: list


def hold(claims, rank=...):
    """Raise Wrong for the first claim that does not hold. rank: '1 of 3', for its verdict."""
    for claim in claims:
        if not agree(claim.got, claim.expected, claim.digits, claim.scale):
            expected, got = in_words(claim)
            raise Wrong(claim.what, rank=rank, expected=expected, got=got, cause=cause_of(claim))


def on_every_rank(claims, of_ranks):
    """Hold what claims(rank, of_ranks) yields, for each rank. of_ranks: what each has
    observed. Rank 0 comes last: it is often right by accident.
    """
    n = len(of_ranks)
    for rank in reversed(range(n)):
        hold(claims(rank, of_ranks), f"{rank} of {n}")


def cause_of(claim):
    mistakes = claim.mistakes() if callable(claim.mistakes) else claim.mistakes
    digits = min(claim.digits, claim.mistake_digits)
    same = (cause for value, cause in mistakes if agree(claim.got, value, digits, claim.scale))
    return next(same, None) or (claim.otherwise() if callable(claim.otherwise) else claim.otherwise)


def agree(got, expected, digits=10, scale=0.0):
    """Whether two plain values are the same and of the same type.

    digits: to which numbers must agree, counted from the largest of a tensor, or from
    `scale` where that is larger. NaN agrees with nothing.
    """
    if isinstance(expected, torch.Tensor):
        return alike(got, expected, 10.0**-digits, scale)
    if isinstance(expected, Between):
        return is_number(got) and expected.low <= got <= expected.high
    if isinstance(expected, OneOf):
        return any(agree(got, value, digits, scale) for value in expected.values)
    if isinstance(expected, range):
        return type(got) is int and got in expected
    if isinstance(expected, list):
        fits = isinstance(got, list) and len(got) == len(expected)
        return fits and all(agree(*pair, digits, scale) for pair in zip(got, expected))
    if isinstance(expected, float):
        allowed = 10.0**-digits
        return is_number(got) and math.isclose(got, expected, rel_tol=allowed, abs_tol=allowed * scale)
    return type(got) is type(expected) and got == expected


def alike(got, expected, share, scale=0.0):
    """Whether `got` is a tensor of this shape, whose numbers are off by at most a share of
    the largest, or of `scale`.
    """
    if not comparable(got, expected):
        return False
    off = (got.double() - expected.double()).abs()
    return bool((off <= allowed(expected, share, scale)).all())


def comparable(got, expected):
    """Whether `got` is a tensor that can be compared number by number."""
    if not isinstance(got, torch.Tensor):
        return False
    kind = lambda tensor: (tensor.shape, tensor.layout, tensor.is_complex())
    return kind(got) == kind(expected)


def allowed(expected, share, scale=0.0):
    """By how much a number may be off."""
    largest = expected.abs().max().item() if expected.numel() else 0.0
    return share * max(largest, scale, 1e-30)


def is_number(value):
    return type(value) in (int, float)


def in_words(claim):
    """What was expected, and what came; of two tensors, the numbers from the first place
    at which they differ.
    """
    words = [claim.expected, claim.got]
    if isinstance(claim.expected, torch.Tensor) and comparable(claim.got, claim.expected):
        texts = parted(*words, rtol=0, atol=allowed(claim.expected, 10.0**-claim.digits, claim.scale))
        words = words if texts[0] == texts[1] else texts
    words = [given if own is None else own for given, own in zip(words, (claim.told, claim.shown))]
    return ["nothing (None)" if value is None else value for value in words]
