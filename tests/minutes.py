"""How long a lesson takes to work through, by a rule: python tests/minutes.py

Reading takes a minute for 200 words, or for 8 lines of code, a cell's own and those that it
shows; a Predict takes one minute, and a Try it two. What is folded does not count, nor do
hidden cells and the sources at the end. Exercises come on top. A section for a second
reading is folded, too: JupyterLab shows its heading and one line, until it is opened.
"""

import functools
import re
from pathlib import Path

import nbformat

LESSONS = Path(__file__).resolve().parents[1] / "lessons"
FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)
MARKS = re.compile(r"<[^>]+>|\]\([^)]*\)|[|#*>`]")
HEADING = re.compile(r"(#+) ")
COLLAPSED = "jp-MarkdownHeadingCollapsed"
SAID = re.compile(r"\*\*Time\*\* \d+ minutes(, and \d+ for what is folded)?")


def minutes(path):
    """Those that a lesson's notebook takes, rounded up to a multiple of five."""
    return rounded(read_once(path))


def second_minutes(path):
    """Those that its folded sections take on top."""
    return rounded(read_later(path))


def read_once(path):
    return [cell for cell, folded in with_folds(path) if not folded]


def read_later(path):
    return [cell for cell, folded in with_folds(path) if folded]


@functools.cache
def with_folds(path):
    """The cells of a notebook, each with whether it is below a folded heading."""
    below = 0  # the level of that heading; 0 outside
    pairs = []
    for cell in nbformat.read(path, as_version=4).cells:
        heading = HEADING.match(cell.source) if cell.cell_type == "markdown" else None
        if heading and len(heading[1]) <= below:
            below = 0
        pairs.append((cell, below > 0))
        if cell.metadata.get(COLLAPSED) and not below:
            below = len(heading[1])
    return pairs


def rounded(cells):
    words = lines = predicts = tries = 0
    for cell in cells:
        if cell.cell_type == "markdown":
            if cell.source.startswith("## Sources"):
                break
            text = FOLDED.sub("", cell.source).partition("\n## Sources")[0]
            words += sum(map(has_letters, MARKS.sub(" ", text).split()))
            predicts += text.count("**Predict")
            tries += text.count("**Try it")
        elif not is_hidden(cell):
            lines += sum(map(has_letters, cell.source.splitlines()))
            lines += sum(map(has_letters, "\n".join(shown_sources(cell)).split("\n")))
    return 5 * -(-(words / 200 + lines / 8 + predicts + 2 * tries) // 5)


def is_hidden(cell):
    return cell.metadata.get("jupyter", {}).get("source_hidden", False)


def shown_sources(cell):
    """The texts of code that the cell displays: see ddp_course/notebook/sources.py."""
    displayed = (output.get("data", {}) for output in cell.outputs)
    return [
        data["text/plain"]
        for data in displayed
        if "ddp-code" in data.get("text/html", "")
    ]


def has_letters(text):
    return any(letter.isalnum() for letter in text)


def said(path):
    """The sentence about them in the lesson's first cell."""
    return SAID.search(nbformat.read(path, as_version=4).cells[0].source)[0]


def sentence(path):
    """What that cell is to say."""
    later = second_minutes(path)
    more = f", and {later:.0f} for what is folded" if later else ""
    return f"**Time** {minutes(path):.0f} minutes{more}"


if __name__ == "__main__":
    for path in sorted(LESSONS.glob("*.ipynb")):
        by_the_rule, there = sentence(path), said(path)
        wrong = "" if by_the_rule == there else f"  (said: {there})"
        print(f"{path.stem:25} {by_the_rule}{wrong}")
