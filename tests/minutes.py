"""How long a lesson takes to work through, by a rule: python tests/minutes.py

Reading takes a minute for 200 words, or for 8 lines of code, a cell's own and those that it
shows; a Predict takes one minute, and a Try it two. What is folded does not count, nor are
hidden cells and the sources at the end. Exercises come on top.
"""

import re
from pathlib import Path

import nbformat

LESSONS = Path(__file__).resolve().parents[1] / "lessons"
FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)
MARKS = re.compile(r"<[^>]+>|\]\([^)]*\)|[|#*>`]")
SAID = re.compile(r"\*\*Time\*\* (\d+) minutes")


def minutes(path):
    """Those that a lesson's notebook takes, rounded up to a multiple of five."""
    words = lines = predicts = tries = 0
    for cell in nbformat.read(path, as_version=4).cells:
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
    """The minutes that the lesson's first cell says."""
    return int(SAID.search(nbformat.read(path, as_version=4).cells[0].source)[1])


if __name__ == "__main__":
    for path in sorted(LESSONS.glob("*.ipynb")):
        print(f"{path.stem:25} {minutes(path):4.0f} by the rule, {said(path):4} said")
