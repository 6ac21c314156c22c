"""hash() of texts as separate processes have it: Python draws a salt for each of them."""

import builtins
from contextlib import contextmanager


@contextmanager
def salted_hash(salt):
    """Let hash() of texts and bytes differ from one salt to another; gives a list of those
    that were hashed.

    Ranks that are forked from one process, as here, would agree, and under torchrun they
    do not.
    """
    original, texts = builtins.hash, []

    def of(value):
        if isinstance(value, str | bytes | memoryview):
            texts.append(value)
            return original((salt, original(value)))
        if isinstance(value, tuple):
            return original(tuple(of(item) for item in value))
        return original(value)

    builtins.hash = of
    try:
        yield texts
    finally:
        builtins.hash = original
