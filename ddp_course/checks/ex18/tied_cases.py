"""The gradients with which question 3 tries an answer."""

import torch

WIDTH = 3


def shape_of(case):
    return case["rows"], WIDTH


def gradient(case, step, rank, name):
    """What a rank's backward leaves in its copy of the matrix: "embedding" or "head"."""
    seed = ((case["seed"] * 2 + step) * 8 + rank) * 2 + (name == "head")
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape_of(case), generator=generator, dtype=torch.float64)


def own_gradients(case, step):
    """{(rank, name): the gradient}, of all copies."""
    ends = [(rank, name) for pair in case["ends"] for rank, name in zip(pair, ("embedding", "head"))]
    return {end: gradient(case, step, *end) for end in ends}


def described(case):
    words = f"the first and last stages on ranks {' and '.join(f'({a}, {b})' for a, b in case['ends'])}"
    both = any(a == b for a, b in case["ends"])
    return words + (", as one parameter" if both and case["one"] else ", as two parameters" if both else "")
