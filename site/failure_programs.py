"""The pages of the failures that no lesson shows: each from its program, see
ddp_course/cli/diagnosis/from_programs.py.
"""

from course import read, title_of
from markup import OUT_OF_THE_LIST, described, error_line, escaped, fenced


def page_of_program(failure, course, others=""):
    """The page of a failure, Markdown. others: a line about those with the same error."""
    lesson = course.notebooks("lessons")[failure.lesson]
    about = f"{failure.title}: why it happens, and what to do."
    which = f"**Is it this one?** {failure.which}" if failure.which else ""
    return f"""{described(about, OUT_OF_THE_LIST)}
# {error_line(failure.title)} ({escaped(failure.name)})

[Lesson {title_of(read(lesson))}](../lessons/{lesson.name}) is about this.

{others}

## What it looks like

{fenced(failure.output.strip() or chr(10).join(failure.texts), "text")}

## Why, and what to do

{failure.cause}

{which}

**The fix:** {failure.fix}

{program(failure) if failure.runs else quoted(failure)}

People have met it in {sources(failure)}.
"""


def program(failure):
    """The program that shows the error, Markdown."""
    return f"""## The program

It is in the course's folder, and shows the error above:

{fenced(failure.run, "bash")}

{fenced(failure.code, "python")}"""


def quoted(failure):
    """Where the text is from if no program shows it, Markdown."""
    reason = failure.run.partition(":")[2].strip()
    return f"""## Not run here

The text is quoted from what others have met. The course does not produce it: {reason}."""


def sources(failure):
    """Links to where people have met it, Markdown."""
    names = [address.partition("github.com/")[2] for address in failure.sources]
    return ", ".join(
        f"[{escaped(name or address)}]({address})"
        for name, address in zip(names, failure.sources)
    )
