"""A course on distributed training with PyTorch: real ranks, on any machine, from a
notebook.
"""

from pathlib import Path

__version__ = "0.1.0"

# `ddp-course start` writes it into each course folder that it makes
COURSE_FILE = ".ddp-course.json"


class UsageError(Exception):
    """The user's request cannot be carried out. The text is one line: what is wrong,
    and what to do about it.
    """


def project_folder():
    """The folder in which runs and data are kept: the nearest one, from the working
    folder upwards, that is a course folder or a checkout of the course.

    So a notebook in lessons/ uses the same folder as a program that is started at the
    top. Elsewhere: the working folder.
    """
    here = Path.cwd()
    return next(
        (
            folder
            for folder in (here, *here.parents)
            if (folder / COURSE_FILE).is_file() or is_checkout(folder)
        ),
        here,
    )


def is_checkout(folder):
    """Whether a folder is a checkout of the course: with `lessons/` and `ddp_course/` in
    it, and not made by `ddp-course start`.
    """
    parts = [folder / "lessons", folder / "ddp_course"]
    return all(part.is_dir() for part in parts) and not (folder / COURSE_FILE).is_file()
