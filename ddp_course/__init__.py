"""A course on distributed training with PyTorch: real ranks, on any machine, from a
notebook.
"""

from pathlib import Path

__version__ = "0.1.0"


class UsageError(Exception):
    """What a person asked for cannot be done. The text is one line: what is wrong, and
    what to do about it.
    """


def project_folder():
    """The course's folder: the nearest one, from the working folder upwards, with
    `lessons/` and `ddp_course/` in it.

    Runs and data lie there, whether a lesson is started at the top or from a notebook.
    Elsewhere: the working folder.
    """
    here = Path.cwd()
    return next(
        (
            folder
            for folder in (here, *here.parents)
            if (folder / "lessons").is_dir() and (folder / "ddp_course").is_dir()
        ),
        here,
    )
