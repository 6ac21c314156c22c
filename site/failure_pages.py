"""The pages of all failures, and the index that lists them: here those that the lessons
reproduce. failure_programs.py has the others.
"""

import json
import re
import signal
from pathlib import Path

import failure_programs
from course import read, title_of
from links import relinked
from markup import OUT_OF_THE_LIST, described, error_line, escaped, fenced
from notebook_pages import anchor_above, heading_above

from ddp_course.cli.diagnosis import from_lessons, from_programs, matching
from ddp_course.cli.diagnosis.index import general, known, texts_of_all

HERE = Path(__file__).parent


def page_of_failure(failure, course, others=""):
    """The page of a failure, Markdown. others: a line about those with the same error."""
    lesson = course.notebooks("lessons")[failure.lesson]
    notebook = read(lesson)
    section = heading_above(notebook, failure.cell)
    anchor = anchor_above(notebook, failure.cell)
    page, address = Path("failures/page.md"), f"../lessons/{lesson.name}"
    how, why = (
        relinked(text, course, lesson.parent, page)
        for text in (failure.how, failure.why)
    )
    about = f"{failure.title}: what it looks like, why it happens, and what to do."
    return f"""{described(about, OUT_OF_THE_LIST)}
# {heading_of(failure)}

Reproduced in [lesson {title_of(notebook)}]({address}), section [{section}]({address}#{anchor}).

{others}

## What it looks like

{fenced(failure.error, "text")}

## Why, and what to do

{why}

## The lesson's cell

It uses names that earlier cells of the lesson define or import: [open the lesson]({address}#{anchor}) to run it.
{about_the_frame(failure)}

{how}

{fenced(failure.code, "python")}

{programs(failure.code, course)}
"""


def heading_of(failure):
    """The title of a failure's page, Markdown: the error, and what was done wrong."""
    return f"{error_line(failure.title)} ({escaped(failure.name)})"


def alike(failure, failures):
    """The other failures that end in the same error, by the beginning of its line. Numbers
    may differ, and whether the rank that waits sends or receives.
    """

    def kind(failure):
        title = re.sub(r"\d+|\b(send|recv)\b", "…", failure.title)
        return re.sub(r"^(\w+\.)+(?=\w+Error)", "", title)[:70]

    return [
        other
        for other in failures
        if kind(other) == kind(failure) and other.slug != failure.slug
    ]


def other_causes(others):
    """A line with links to the other causes of an error, Markdown; "" if there are none."""
    links = [
        f"[{escaped(failure.name)}]({failure.slug}.md) (lesson {int(failure.lesson)})"
        for failure in others
    ]
    return f"Other causes of this error: {' · '.join(links)}" if links else ""


def about_the_frame(failure):
    """What the course adds to an error, and what a job shows without it, Markdown."""
    raised = re.search(r"(?m)^rank \d+ of \d+ raised", failure.error)
    killed = re.search(r"was killed by (SIG\w+)", failure.error)
    launch = "[`launch`](../reference.md#launch) starts the ranks, and"
    says, yours = "", "only the error itself appears."
    if raised:
        says = f"{launch} prints `{raised[0]}` before the error. "
    if killed:
        says = f"{launch} reports the signal. "
        code = -signal.Signals[killed[1]]
        yours = f"torchrun's table has `exitcode : {code}` for {killed[1]}."
    if "fresh_kernel(" in failure.code and "TimeoutError" in failure.error:
        yours = "there is no time limit, and the cell does not end."
    return f"{says}[`fails`](../reference.md#fails) expects the error. In your job, {yours}"


def programs(code, course):
    """The programs that a cell gives to lesson 15's `treat`, Markdown; "" if none."""
    return "\n\n".join(
        f"`treat` runs `train()` of `{path.relative_to(course.root).as_posix()}` on each rank:\n\n"
        f"{fenced(path.read_text().strip(), 'python')}"
        for path in patients(code, course)
    )


def patients(code, course):
    """The programs that a cell gives to lesson 15's `treat`, in order."""
    known = {path.stem: path for path in course.root.glob("lessons/clinic/*.py")}
    words = re.findall(r'"(\w+)"', code) if re.search(r"\btreat\b", code) else []
    return [known[word] for word in dict.fromkeys(words) if word in known]


def index(failures, course):
    """The page that lists all failures, and leads to their pages, Markdown."""
    lines = [f"{described(ABOUT)}\n{INTRODUCTION}"]
    for lesson, path in course.notebooks("lessons").items():
        own = [failure for failure in failures if failure.lesson == lesson]
        lines += [f"\n## {title_of(read(path))}\n"] if own else []
        for failure in own:
            title = error_line(failure.title)
            lines.append(f"- [{title}](failures/{failure.slug}.md)\\")
            lines.append(f"  {escaped(failure.name)}")
    return "\n".join([*lines, ""])


ALL = "\n[All error messages](../failures.md)\n"
ABOUT = """Error messages of distributed PyTorch training, each reproduced: what it looks like, why it happens, and
what to do."""
INTRODUCTION = """# Error messages

Failures of distributed training, each with its error text, its cause and its fix. To find yours, paste a line of it
into the search. On a machine without a browser, `ddp-course diagnose LOG` does the same with a whole log. Many
mistakes raise no error at all: for those see [which lesson you need](choose.md).
"""


def write(course, folder):
    """Write the index and a page for each failure into the site's sources, and the
    search's own copy of the index.
    """
    lessons = course.root / "lessons"
    shown = from_lessons.failures_in(lessons)
    programs = from_programs.failures_in(lessons / "failures")
    failures = [*shown, *programs]
    (folder / "failures").mkdir(exist_ok=True)
    for failure in failures:
        make = page_of_failure if failure in shown else failure_programs.page_of_program
        page = make(failure, course, other_causes(alike(failure, failures)))
        (folder / "failures" / f"{failure.slug}.md").write_text(page + ALL)
    (folder / "failures.md").write_text(index(failures, course))
    (folder / "search.js").write_text(searching())


def searching():
    """search.js, and what it needs to know of the failures."""
    pages = [failure.page for failure in known()]
    data = matching.exported(texts_of_all(), pages, general())
    return f"const Failures = {json.dumps(data)};\n{(HERE / 'search.js').read_text()}"
