"""Whether two tensors in fp32 agree, and where they differ, so that a verdict shows
numbers that look different.
"""

import torch

SHOWN = 4  # numbers


def near(some, other, tolerance=1e-5):
    """Whether `some` is a tensor of this shape with these numbers, as far as fp32 goes."""
    if not isinstance(some, torch.Tensor) or some.shape != other.shape:
        return False
    allowed = tolerance * (1 + other.detach().abs().max())
    return bool(((some.double() - other.double()).abs() <= allowed).all())


def parted(expected, got, rtol=1e-6, atol=1e-9):
    """Two texts for a verdict: the numbers from the first place at which they differ.

    Where shapes differ, the two as they are.
    """
    if not isinstance(got, torch.Tensor) or got.shape != expected.shape:
        return expected, got
    alike = torch.isclose(got.detach().double(), expected.detach().double(), rtol=rtol, atol=atol).flatten()
    if alike.all():
        return expected, got
    first = int((~alike).nonzero()[0])
    return _numbers(expected, first), _numbers(got, first)


def _numbers(tensor, first):
    """Some numbers, precise enough to tell those apart that differ at all."""
    flat = tensor.detach().flatten().tolist()
    numbers = ", ".join(f"{number:.7g}" for number in flat[first : first + SHOWN])
    more = ", ..." if len(flat) > first + SHOWN else ""
    place = f"from number {first}: " if first else ""
    return f"{place}{numbers}{more} (shape {tuple(tensor.shape)})"
