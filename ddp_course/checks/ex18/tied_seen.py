"""What question 3 looks at after an update: gradients, and what square() returned."""

import torch

from ddp_course.checks.functions import as_plain


def gradients_of(matrices):
    return {name: None if matrix.grad is None else matrix.grad.clone() for name, matrix in matrices.items()}


def share_memory(gradients):
    """Whether two parameters have one gradient: each step that changes it would change it twice."""
    places = [gradient.data_ptr() for gradient in gradients if gradient is not None]
    return len(set(places)) < len(places)


def alike(gradients, others):
    pairs = zip(gradients.values(), others.values())
    return all(other is None if one is None else torch.equal(one, other) for one, other in pairs)


def number_in(square):
    """A number, or the one number of a tensor, as a float; anything else as a text."""
    plain = as_plain(square)
    while isinstance(plain, list) and len(plain) == 1:
        [plain] = plain
    return float(plain) if type(plain) in (int, float) else f"{square!r:.60}"
