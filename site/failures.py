"""The index of failures, from the cells in which a lesson's notebook expects one.

Such a cell has a block `with fails(pattern):`. Its stored output has the error, the text
above it says how the failure comes about, and the text below it says what to do.
"""

import ast
import re
from typing import NamedTuple

from course import read, title_of
from links import relinked
from notebook_pages import heading_above, plain

NUMBERED = re.compile(r"(?m)^\*\*(?:\d+\. )?(?P<name>[^*\n]+?)[.:]?\*\*")
SECTION = re.compile(r"(?m)^#{1,4} (?P<name>.+)$")
# a question or a task, to its end
ASIDE = re.compile(r"(?m)^(> \*\*Predict\.\*\*(.*\n?)(>.*\n?)*|\*\*Try it\.\*\*.*\n?)")
# what ends the text about one failure
NEXT = re.compile(r"(?m)^(\*\*\d+\.|\*\*(Try it|Predict)|#{1,4} |> \*\*Predict)")
FRAME = re.compile(r"  \S+, line \d+, in |  cell In\[")  # a line of a rank's traceback
ERROR = re.compile(r"[\w.]+(Error|Exception): ")  # the last line of a traceback
LONGEST = 100  # characters of an error in a title


class Failure(NamedTuple):
    """A failure that a lesson reproduces."""

    lesson: str  # "04"
    title: str  # the error in a line
    name: str  # what was done wrong, as the lesson calls it; maybe ""
    error: str  # all that the cell has printed
    before: str  # the text above the cell, Markdown
    after: str  # the text below it, Markdown, maybe ""
    code: str
    section: str  # the heading that it is under

    @property
    def slug(self):
        """The name of its page: the lesson's words for it, which stay, where error
        messages change.
        """
        words = re.findall(
            r"[a-z]+", re.sub(r"0x\w+", "", (self.name or self.title).lower())
        )
        return "-".join([self.lesson, *words[:8]])


def failures_of(path):
    """The failures of a lesson's notebook that has been run, in order."""
    notebook = read(path)
    for number, cell in enumerate(notebook.cells):
        patterns = expected(cell.source) if cell.cell_type == "code" else None
        error = printed(cell) if patterns is not None else ""
        if error:
            before, after = text_above(notebook, number), text_below(notebook, number)
            yield Failure(
                path.name[:2],
                title_in(error, patterns),
                name_above(notebook, number),
                error,
                before,
                after,
                cell.source,
                heading_above(notebook, number),
            )


def expected(source):
    """The patterns that a cell's `fails(...)` expects; None if it expects no failure."""
    try:
        tree = ast.parse(re.sub(r"(?m)^[%!].*", "pass", source))
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.With):
            for item in node.items:
                call = item.context_expr
                if (
                    isinstance(call, ast.Call)
                    and getattr(call.func, "id", "") == "fails"
                ):
                    return [
                        arg.value for arg in call.args if isinstance(arg, ast.Constant)
                    ]
    return None


def printed(cell):
    """All that a cell has printed."""
    return "".join(output.get("text", "") for output in cell.outputs).strip("\n")


def title_in(error, patterns):
    """The error in a line: the sentence that the lesson waits for, without C++ files."""
    lines = [line.strip() for line in error.splitlines() if not FRAME.match(line)]
    wanted = [
        line for pattern in patterns for line in lines if re.search(pattern, line)
    ]
    line = next((line for line in lines if line.startswith("what():")), None)
    if line is None or "SIGABRT" not in wanted[0]:
        line = [*filter(ERROR.match, wanted), *wanted, *lines][0]
    line = (
        re.sub(r"\[(enforce fail at )?/\S+\] ?", "", line)
        .removeprefix("what():")
        .strip()
    )
    line = re.sub(r"^(?:\w+\.)+(?=\w+(Error|Exception))", "", line)
    sentence = re.split(r"(?<=[a-z)])\. (?=[A-Z])", line)[0]
    if len(sentence) > LONGEST:
        sentence = sentence[:LONGEST].rsplit(" ", 1)[0] + " …"
    return sentence


def texts_above(notebook, number):
    """The prose above a cell, the nearest first."""
    for cell in reversed(notebook.cells[:number]):
        if cell.cell_type == "markdown":
            yield cell.source


def name_above(notebook, number):
    """What the lesson calls a failure: the bold words above it, unless a heading is
    nearer; "" if it has no name.
    """
    for text in texts_above(notebook, number):
        found = [*NUMBERED.finditer(text), *SECTION.finditer(text)]
        found = [name for name in found if name["name"] not in ("Predict", "Try it")]
        if found:
            last = max(found, key=lambda name: name.start())
            return plain(last["name"]) if last[0].startswith("*") else ""
    return ""


def text_above(notebook, number):
    """How a failure comes about: the prose above its cell, from the last name, question
    or task on.
    """
    text = next(texts_above(notebook, number), "")
    starts = [found.end() for found in SECTION.finditer(text)]
    starts += [
        found.start() for found in NUMBERED.finditer(text) if found[0][2].isdigit()
    ]
    starts += [found.end() for found in ASIDE.finditer(text)]
    starts = [start for start in starts if text[start:].strip()]
    text = text[max(starts, default=0) :].strip()
    return re.sub(r"^\*\*\d+\. (.+?)\*\*", r"**\1**", text)


def text_below(notebook, number):
    """What to do: the prose below a failure's cell, up to the next subject."""
    for cell in notebook.cells[number + 1 :][:1]:
        if cell.cell_type == "markdown":
            end = NEXT.search(cell.source)
            text = cell.source[: end.start() if end else None].strip()
            return f"{text} see the lesson." if text.endswith(":") else text
    return ""


# ---- the pages ----


def with_names(failures):
    """Pairs of a page's name and its failure; a name that comes twice gets a number."""
    seen = {}
    for failure in failures:
        times = seen[failure.slug] = seen.get(failure.slug, 0) + 1
        yield f"{failure.slug}-{times}" if times > 1 else failure.slug, failure


def page_of_failure(failure, course):
    """The page of a failure, Markdown."""
    from pathlib import Path

    lesson = course.notebooks("lessons")[failure.lesson]
    page = Path("failures/page.md")

    def moved(text):
        return relinked(text, course, lesson.parent, page)

    below = f"## What to do\n\n{moved(failure.after)}\n" if failure.after else ""
    head = "Why" if failure.after else "Why, and what to do"
    name = f" ({escaped(failure.name)})" if failure.name else ""
    about = f"{failure.title}: what it looks like, why it comes, and what to do."
    return f"""---
myst:
  html_meta:
    description: {quoted(about)}
---
# {escaped(failure.title)}{name}

Reproduced in [lesson {title_of(read(lesson))}](../lessons/{lesson.name}), section "{escaped(failure.section)}".

## What it looks like

{fenced(failure.error, "text")}

## {head}

{moved(failure.before)}

{fenced(failure.code, "python")}

{below}"""


def index(failures, course):
    """The page that lists all failures, and leads to their pages, Markdown."""
    lines = [INTRODUCTION]
    entries = []
    lesson = None
    for slug, failure in with_names(failures):
        if failure.lesson != lesson:
            lesson = failure.lesson
            path = course.notebooks("lessons")[lesson]
            lines.append(f"\n## {title_of(read(path))}\n")
        about = failure.name or failure.section
        lines.append(f"- [{escaped(failure.title)}](failures/{slug}.md)\\\n  {about}")
        entries.append(f"{failure.name or failure.title} <failures/{slug}>")
    toctree = "\n".join(["```{toctree}", ":hidden:", "", *entries, "```"])
    return "\n".join([*lines, "", toctree, ""])


INTRODUCTION = """# Error messages

Each failure that the lessons reproduce, with its real error text. To find yours, paste a line of it into the
search, without the numbers and addresses in it. Many mistakes raise no error at all: for those see
[which lesson you need](choose.md).
"""


def write(course, folder):
    """Write the index and a page for each failure into the site's sources."""
    lessons = course.notebooks("lessons").values()
    failures = [failure for path in lessons for failure in failures_of(path)]
    (folder / "failures").mkdir(exist_ok=True)
    for slug, failure in with_names(failures):
        (folder / "failures" / f"{slug}.md").write_text(
            page_of_failure(failure, course)
        )
    (folder / "failures.md").write_text(index(failures, course))


def fenced(text, language=""):
    """A block of code, Markdown, behind a fence that the text does not have."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"


def escaped(text):
    """Plain text as Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>#$|~^])", r"\\\1", text)


def quoted(text):
    """A text as a YAML string."""
    return '"' + plain(text).replace("\\", "\\\\").replace('"', '\\"') + '"'
