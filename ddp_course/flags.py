"""The types of the programs' flags: what a text must be, or one line says why not."""

import argparse
from pathlib import Path

MOST = 2**31 - 1  # what torch, numpy and the operating system all take


def whole(text, least=0):
    """The type of a flag that is a whole number, from 0 or from another one on."""
    if not text.isdecimal() or not least <= int(text) <= MOST:
        limits = f"a whole number from {least}"
        if text.isdecimal() and int(text) > MOST:
            limits += f" to {MOST}"
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {limits}")
    return int(text)


def count(text):
    """The type of a flag that counts something: a whole number from 1."""
    return whole(text, 1)


def number(text, most=1e38):
    """The type of a flag that is a number from 0 on, neither infinite nor NaN."""
    try:
        if 0 <= float(text) <= most:
            return float(text)
    except ValueError:
        pass
    limits = f"a number from 0 to {most:g}"
    raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {limits}")


def megabytes(text):
    """The type of a flag for the size of a buffer."""
    return number(text, 1e6)


def share(text):
    """The type of a flag that is a part of a whole, or a probability."""
    return number(text, 1)


def folder_path(text):
    """The type of a flag that names a folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("a folder needs a name; . is the current one")
    return Path(text)
