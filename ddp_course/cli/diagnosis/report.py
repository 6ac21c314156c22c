"""What `ddp-course diagnose` prints."""

import re
import shutil
import textwrap

from ddp_course import UsageError, folders
from ddp_course.cli.diagnosis.index import index, known
from ddp_course.cli.diagnosis.log import findings, lines_of

PAGES = 3  # at most
CLOSE = 0.4  # of the greatest weight, for all pages but the first
LENGTH = 420  # characters of a cause or a fix
UNKNOWN = (
    "No failure that the course knows fits this text. Look for the first error of the "
    "first rank that failed: lesson 15 says how."
)


def diagnosis(stream):
    """The pages that fit a log or an error, best first, as lines; [] if none does."""
    found = findings(lines_of(stream), index())
    least = CLOSE * max((each.weight for each in found), default=0)
    found = found[:1] + [each for each in found[1:] if each.weight >= least]
    blocks = [block(finding, known()[finding.failure]) for finding in found[:PAGES]]
    return [line for lines in blocks for line in [*lines, ""]]


def opened(path):
    """A file to read, binary. Raises UsageError if there is none."""
    try:
        return open(path, "rb")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def block(finding, failure):
    """What is printed of a page: its title, the line that decided, cause and fix."""
    lesson = folders.notebooks(folders.originals("lessons")).get(failure.lesson)
    place = f"lesson {int(failure.lesson)}" + (
        f", lessons/{lesson.name}" if lesson else ""
    )
    parts = {
        f"line {finding.number}:": visible(finding.line),
        "cause:": plain(failure.cause),
        "which:": plain(failure.which),
        "fix:": plain(failure.fix),
        "more:": f"failures/{failure.page}.html of the site; {place}",
        "try it:": failure.program,
    }
    lines = [visible(f"{failure.name}: {failure.title}", 200)]
    for name, text in parts.items():
        lines += wrapped(name, text) if text else []
    return lines


def wrapped(name, text):
    """A part with its name in front, as lines that fit the terminal."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    start = f"  {name:10} "
    return textwrap.wrap(
        text, max(width, 40), initial_indent=start, subsequent_indent=" " * len(start)
    )


def visible(text, length=300):
    """A text of the reader's without control characters, which could do anything to a
    terminal, and cut.
    """
    text = "".join(c if c.isprintable() else " " for c in text)
    return shortened(" ".join(text.split()), length)


def plain(markdown):
    """Markdown as a few lines of plain text, without code blocks, links and marks."""
    text = re.sub(r"(?s)```.*?```", "", markdown)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"<[a-z/][^>]*>|\*\*", "", text)
    return shortened(" ".join(text.split()), LENGTH)


def shortened(text, length):
    if len(text) <= length:
        return text
    return text[:length].rsplit(" ", 1)[0] + " …"
