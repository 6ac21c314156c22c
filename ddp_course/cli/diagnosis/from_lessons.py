"""The failures that the lessons reproduce, from the marks of their notebooks.

A mark is `failure` in a cell's metadata. On a code cell that shows an error it is what
the failure is called, or false if the failure has no page. On the texts around that cell
it is "how", above it, or "cause" or "fix", below. tests/test_notebooks.py says which
cells lack a mark.
"""

import ast
import json
import re
from typing import NamedTuple

FRAME = re.compile(r"  \S+, line \d+, in |  cell In\[")  # a line of a rank's traceback
ERROR = re.compile(r"[\w.]+(Error|Exception): ")  # the last line of a traceback
LONGEST = 100  # characters of an error in a title


class Failure(NamedTuple):
    """A failure that a lesson reproduces."""

    lesson: str  # "04"
    name: str  # what was done wrong
    title: str  # the error in a line
    error: str  # all that the cell has printed
    how: str  # how it comes about: the text above the cell, Markdown
    why: str  # why it happens, and what to do: the texts below it, Markdown
    code: str
    cell: int  # its place in the notebook

    @property
    def slug(self):
        """The name of its page: the failure's, which stays where error messages change."""
        words = re.findall(r"[a-z]+", self.name.lower())
        return "-".join([self.lesson, *words[:8]])

    @property
    def texts(self):
        """The lines that a search may be for, the error's own first."""
        lines = [line for line in self.error.splitlines() if not FRAME.match(line)]
        lines = [line.strip() for line in lines]
        lines = [line for line in lines if len(re.findall(r"[A-Za-z]{2,}", line)) > 4]
        return list(dict.fromkeys([self.title, *self.whole_title(lines), *lines]))

    @property
    def owned(self):
        """How many of its texts are the error's own."""
        return 1 + len(self.whole_title(self.texts[1:]))

    def whole_title(self, lines):
        """The line that the title is the beginning of, where the title is cut: [line]."""
        begin = self.title.removesuffix(" …")
        if begin == self.title:
            return []
        return [line for line in lines if begin in line][:1]


def failures_of(path):
    """The failures of a lesson's notebook that has been run, in order."""
    cells = cells_of(path)
    shown = [number for number, cell in enumerate(cells) if shows_a_failure(cell)]
    for begin, number, end in zip([0, *shown], shown, [*shown[1:], None]):
        if error := cells[number].printed.strip("\n"):
            yield Failure(
                path.name[:2],
                mark_of(cells[number]),
                title_in(error, expected(cells[number].source)),
                error,
                without_number(texts(cells[begin:number], "how")),
                texts(cells[number:end], "cause", "fix"),
                cells[number].source,
                number,
            )


class Cell(NamedTuple):
    """A cell of a notebook."""

    cell_type: str
    source: str
    metadata: dict
    printed: str  # all that it has printed


def cells_of(path):
    """The cells of a notebook. nbformat would take seconds to be imported."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [
        Cell(
            cell["cell_type"],
            "".join(cell["source"]),
            cell["metadata"],
            "".join("".join(out.get("text", "")) for out in cell.get("outputs", [])),
        )
        for cell in notebook["cells"]
    ]


def failures_in(folder):
    """The failures of all lessons in a folder, in order."""
    lessons = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    return [failure for path in lessons for failure in failures_of(path)]


def mark_of(cell):
    """The mark of a cell; None if it has none."""
    return cell.metadata.get("failure")


def shows_a_failure(cell):
    """Whether a cell is marked with the name of a failure."""
    return cell.cell_type == "code" and bool(mark_of(cell))


def texts(cells, *parts):
    """The texts that are marked as these parts of a failure, a part after the other,
    Markdown.
    """
    return "\n\n".join(
        cell.source for part in parts for cell in cells if mark_of(cell) == part
    )


def without_number(text):
    """A text without the number that its first, bold words have in the lesson's list."""
    return re.sub(r"^\*\*\d+\. ", "**", text)


def expected(source):
    """The patterns that a cell expects with `fails(...)`."""
    tree = ast.parse(re.sub(r"(?m)^[%!].*", "pass", source))
    return [
        pattern.value
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "fails"
        for pattern in call.args
    ]


def title_in(error, patterns):
    """The error in a line: the sentence that the lesson waits for, without C++ files."""
    lines = [line.strip() for line in error.splitlines() if not FRAME.match(line)]
    wanted = [
        line for pattern in patterns for line in lines if re.search(pattern, line)
    ]
    line = next((line for line in lines if line.startswith("what():")), None)
    if line is None or "SIGABRT" not in [*wanted, ""][0]:
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
