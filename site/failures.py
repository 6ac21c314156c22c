"""The index of failures, from the cells in which a lesson's notebook expects one.

Such a cell has a block `with fails(pattern):`. Its stored output has the error, and the
text above it says how the failure comes about. The text right below it says why, and
what to do, in a paragraph that begins with **The fix:**.
"""

import ast
import re
import signal
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from course import read, title_of
from links import CODE, relinked
from notebook_pages import anchor_above, heading_above, plain

# bold words that begin a paragraph: numbered, or a sentence
NAME = re.compile(
    r"(?:\A|(?<=\n\n))\*\*(?!(?:Predict|Try it)\.|The fix:)"
    r"(?:(?P<number>\d+)\. [^*\n]+|[^*\n]+[.?])\*\*"
)
SECTION = re.compile(r"(?m)^#{1,4} .+$")
FIX = re.compile(r"(?m)^\*\*The fix:\*\*.*\n*")
FOLDED = re.compile(r"(?m)^<details>(?s:.*?)</details>\n*")
# a question or a task, to its end
ASIDE = re.compile(r"(?m)^(?:> \*\*Predict\.\*\*.*(?:\n>.*)*|\*\*Try it\.\*\*.*)\n*")
# what ends the text about one failure, beside another name
NEXT = re.compile(r"(?m)^(\*\*(Try it|Predict)|#{1,4} |> \*\*Predict)")
SENTENCE_END = re.compile(r"[.?!][)\"*]*\s+(?=[^a-z\s])|\n\s*\n")
FRAME = re.compile(r"  \S+, line \d+, in |  cell In\[")  # a line of a rank's traceback
ERROR = re.compile(r"[\w.]+(Error|Exception): ")  # the last line of a traceback
LONGEST = 100  # characters of an error in a title


class Failure(NamedTuple):
    """A failure that a lesson reproduces."""

    lesson: str  # "04"
    title: str  # the error in a line
    name: str  # what was done wrong, as the lesson calls it; maybe ""
    error: str  # all that the cell has printed
    before: str  # how it comes about: the text above the cell, Markdown, maybe ""
    after: str  # why, and what to do: the text below it, Markdown
    code: str
    section: str  # the heading that it is under, Markdown
    anchor: str  # of that heading, on the lesson's page

    @property
    def slug(self):
        """The name of its page: the lesson's words for it, which stay, where error
        messages change.
        """
        words = re.findall(
            r"[a-z]+", re.sub(r"0x\S+", "", (self.name or self.title).lower())
        )
        return "-".join([self.lesson, *words[:8]])

    @property
    def heading(self):
        """The title of its page, Markdown."""
        name = f" ({escaped(self.name)})" if self.name else ""
        return marked(self.title) + name


def failures_of(path):
    """The failures of a lesson's notebook that has been run, in order."""
    notebook = read(path)
    for number, cell in enumerate(notebook.cells):
        error = printed(cell) if is_failing(cell) else ""
        if error:
            yield Failure(
                path.name[:2],
                title_in(error, expected(cell.source)),
                name_above(notebook, number),
                error,
                text_above(notebook, number),
                text_below(notebook, number),
                cell.source,
                heading_above(notebook, number),
                anchor_above(notebook, number),
            )


def failures_in(course):
    """The failures of all lessons, in order."""
    lessons = course.notebooks("lessons").values()
    return told_apart([failure for path in lessons for failure in failures_of(path)])


def told_apart(failures):
    """The failures; one that has no name, and whose title is also another's, has its
    section's name.
    """
    times = Counter(failure.title for failure in failures)
    return [
        failure._replace(name=plain(failure.section))
        if times[failure.title] > 1 and not failure.name
        else failure
        for failure in failures
    ]


def is_failing(cell):
    """Whether a cell expects a failure."""
    return cell.cell_type == "code" and expected(cell.source) is not None


def parsed(source):
    """The syntax tree of a cell; an empty one if it is not Python."""
    try:
        return ast.parse(re.sub(r"(?m)^[%!].*", "pass", source))
    except SyntaxError:
        return ast.Module([], [])


def expected(source):
    """The patterns that a cell's `fails(...)` expects; None if it expects no failure."""
    for node in ast.walk(parsed(source)):
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
    sentence = re.split(r"(?<=[a-z)])\. (?=[A-Z])", without_addresses(line))[0]
    if len(sentence) > LONGEST:
        sentence = sentence[:LONGEST].rsplit(" ", 1)[0] + " …"
    return sentence


def without_addresses(line):
    """A line of an error without what is another in each run: addresses and ports."""
    line = re.sub(r"\b0x[0-9a-f]+", "0x…", line)
    return re.sub(r"(?<=\bport: )\d+|(?<=\]:)\d+", "…", line)


# ---- the texts around a cell ----


def texts_above(notebook, number):
    """The prose above a cell, the nearest first."""
    for cell in reversed(notebook.cells[:number]):
        if cell.cell_type == "markdown":
            yield cell.source


def without_fences(text):
    """Markdown with blanks for its blocks of code, so that all else is where it was."""
    return re.sub(r"(?s)```.*?```", lambda block: " " * len(block[0]), text)


def below_headings(text):
    """What comes after the last heading of a text."""
    ends = [found.end() for found in SECTION.finditer(without_fences(text))]
    return text[max(ends, default=0) :]


def last_name(text):
    """The last name below the last heading of a text, a match; None if it has none."""
    return ([*NAME.finditer(below_headings(text))] or [None])[-1]


def name_above(notebook, number):
    """What the lesson calls a failure; "" if it has no name.

    The name is in the nearest text above the cell. A numbered one stays until the next
    name or heading, so it may have a failing cell already.
    """
    name, nearest, failing = None, True, False
    for cell in reversed(notebook.cells[:number]):
        failing = failing or is_failing(cell)
        if cell.cell_type == "markdown":
            name = last_name(cell.source)
            if name or SECTION.search(without_fences(cell.source)):
                break
            nearest = False
    if name is None or not (nearest or failing and name["number"]):
        return ""
    return plain(re.sub(r"^\d+\. ", "", name[0].strip("*")).rstrip(".:"))


def text_above(notebook, number):
    """How a failure comes about: the nearest text above its cell, from the last name on,
    without questions and tasks; "" if that text is about something else.
    """
    text = below_headings(next(texts_above(notebook, number), ""))
    if name := last_name(text):
        text = ASIDE.sub("", text[name.start() :])
    else:
        text = FIX.split(text)[-1]  # up to there it is about the failure before
        parts = [part for part in ASIDE.split(text) if part.strip()]
        text = "".join(parts[-1:])
    return re.sub(r"^\*\*\d+\. (.+?)\*\*", r"**\1**", FOLDED.sub("", text).strip())


def text_below(notebook, number):
    """Why a failure happens, and what to do: the prose right below its cell, up to the
    next subject.
    """
    below = notebook.cells[number + 1 : number + 2]
    if not below or below[0].cell_type != "markdown":
        return ""
    text = below[0].source
    found = [each.finditer(without_fences(text)) for each in (NEXT, NAME)]
    end = min((each.start() for ends in found for each in ends), default=None)
    return without_lead(FOLDED.sub("", text[:end]).strip())


def without_lead(text):
    """A text without its last sentence, if that ends with ":" and so leads to a cell."""
    if not text.endswith(":"):
        return text
    ends = [found.end() for found in SENTENCE_END.finditer(text)]
    return text[: max(ends, default=0)].strip()


# ---- the pages ----


def with_names(failures):
    """Pairs of a page's name and its failure; a name that comes twice gets a number."""
    seen = {}
    for failure in failures:
        times = seen[failure.slug] = seen.get(failure.slug, 0) + 1
        yield f"{failure.slug}-{times}" if times > 1 else failure.slug, failure


def alike(pages):
    """For each page's name, the pages whose error is the same and has another cause, as
    the lesson calls it. Numbers may differ, and whether the rank that waits sends or
    receives.

    pages: pairs of a page's name and its failure, as with_names makes them.
    """
    groups = {}
    for slug, failure in pages:
        title = re.sub(r"\d+|\b(send|recv)\b", "…", failure.title)
        groups.setdefault(title, []).append((slug, failure))
    return {
        slug: [page for page in group if page[0] != slug and page[1].name]
        for group in groups.values()
        for slug, _ in group
    }


def page_of_failure(failure, course, others=()):
    """The page of a failure, Markdown. others: pairs of a page's name and its failure,
    for the same error with another cause.
    """
    lesson = course.notebooks("lessons")[failure.lesson]
    page, address = Path("failures/page.md"), f"../lessons/{lesson.name}"
    before, after = (
        relinked(text, course, lesson.parent, page)
        for text in (failure.before, failure.after)
    )
    about = f"{failure.title}: what it looks like, why it happens, and what to do."
    return f"""{described(about)}
# {failure.heading}

Reproduced in [lesson {title_of(read(lesson))}]({address}), section [{failure.section}]({address}#{failure.anchor}).

{other_causes(others)}

## What it looks like

{fenced(failure.error, "text")}

## Why, and what to do

{after}

## The lesson's cell

It uses names that earlier cells of the lesson define or import: [open the lesson]({address}#{failure.anchor}) to run it.
{about_the_frame(failure)}

{before}

{fenced(failure.code, "python")}

{programs(failure.code, course)}
"""


def other_causes(others):
    """A line with links to the other causes of an error, Markdown; "" if there are none."""
    links = [
        f"[{escaped(failure.name)}]({slug}.md) (lesson {int(failure.lesson)})"
        for slug, failure in others
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
    nodes = list(ast.walk(parsed(code)))
    if not any(getattr(node, "id", "") == "treat" for node in nodes):
        return []
    constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return [known[name] for name in dict.fromkeys(constants) if name in known]


def index(failures, course):
    """The page that lists all failures, and leads to their pages, Markdown."""
    lines = [f"{described(ABOUT)}\n{INTRODUCTION}"]
    entries = []
    lesson = None
    for slug, failure in with_names(failures):
        if failure.lesson != lesson:
            lesson = failure.lesson
            path = course.notebooks("lessons")[lesson]
            lines.append(f"\n## {title_of(read(path))}\n")
        about = escaped(failure.name) or failure.section
        lines.append(f"- [{marked(failure.title)}](failures/{slug}.md)\\\n  {about}")
        entry = failure.name or failure.title.replace("`", "")
        entries.append(f"{entry} <failures/{slug}>")
    toctree = "\n".join(["```{toctree}", ":hidden:", "", *entries, "```"])
    return "\n".join([*lines, "", toctree, ""])


ABOUT = """Error messages of distributed PyTorch training, each reproduced: what it looks like, why it happens, and
what to do."""
INTRODUCTION = """# Error messages

Each failure that the lessons reproduce, with its real error text. To find yours, paste a line of it into the
search. Many mistakes raise no error at all: for those see [which lesson you need](choose.md).
"""


def write(course, folder):
    """Write the index and a page for each failure into the site's sources."""
    failures = failures_in(course)
    pages = list(with_names(failures))
    others = alike(pages)
    (folder / "failures").mkdir(exist_ok=True)
    for slug, failure in pages:
        (folder / "failures" / f"{slug}.md").write_text(
            page_of_failure(failure, course, others[slug])
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


def marked(text):
    """A line of an error as Markdown: what it has between backticks is code."""
    return "".join(
        part if CODE.fullmatch(part) else escaped(part.replace("`", ""))
        for part in re.split(CODE, text)
    )


def described(about):
    """What comes before the title of a page: what it is about, for search engines."""
    text = quoted(" ".join(about.split()))
    return f"---\nmyst:\n  html_meta:\n    description: {text}\n---"


def quoted(text):
    """A text as a YAML string."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
