"""Every failure that the course knows, as `ddp-course diagnose` and the site's search
use it.
"""

import re
from functools import cache
from typing import NamedTuple

from ddp_course import folders
from ddp_course.cli.diagnosis import from_lessons, from_programs
from ddp_course.cli.diagnosis.matching import Index

# The pages about what launchers say after any failure.
GENERAL = {"only-torchruns-table", "srun-task-exited"}
FIX = re.compile(r"\*\*(The )?[Ff]ix[^*]*\*\* *")


class Known(NamedTuple):
    """A failure, and where it is explained."""

    page: str  # of the site: failures/PAGE.html
    title: str  # the error in a line
    name: str  # what was done wrong
    texts: list  # the lines that a search may be for, the title first
    owned: int  # so many of them are its own; the others come beside them
    cause: str  # Markdown, as the others
    which: str  # how to see that it is this one, among others with the same text
    fix: str
    lesson: str  # "04"
    program: str  # the path of one that shows it, or ""


@cache
def known():
    """All failures. Where a line fits several equally well, the first one comes first:
    those with a page that tells apart what lessons show one by one.
    """
    lessons = folders.originals("lessons")
    programs = from_programs.failures_in(lessons / "failures")
    return [of_program(failure) for failure in programs] + [
        of_lesson(failure) for failure in from_lessons.failures_in(lessons)
    ]


def texts_of_all():
    """The texts of all failures, and how many are their own, as the matcher takes them."""
    return [(failure.texts, failure.owned) for failure in known()]


def general():
    """The places of the general pages among all failures."""
    return {n for n, failure in enumerate(known()) if failure.page in GENERAL}


@cache
def index():
    """The texts of all failures, ready to be searched."""
    return Index(texts_of_all(), general())


def of_program(failure):
    return Known(
        failure.slug,
        failure.title,
        failure.name,
        failure.texts,
        len(failure.texts),
        failure.cause,
        failure.which,
        failure.fix,
        failure.lesson,
        f"lessons/failures/{failure.stem}.py" if failure.runs else "",
    )


def of_lesson(failure):
    cause, fix = cause_and_fix(failure.why)
    return Known(
        failure.slug,
        failure.title,
        failure.name,
        failure.texts,
        failure.owned,
        cause,
        "",
        fix,
        failure.lesson,
        "",
    )


def cause_and_fix(text):
    """What a lesson says below a failure, divided before the bold words `The fix:`."""
    found = FIX.search(text)
    if not found:
        return text.strip(), ""
    return text[: found.start()].strip(), text[found.end() :].strip()
