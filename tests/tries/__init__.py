"""What the lessons ask their readers to try, as steps that are run: `make tries LESSON=04`.

tries/lesson04.py has, for each cell of text with a "Try it", the steps that a reader takes:

    TRIES = {
        "98bf8781": [run("a192cd1f", ("range(8)", "range(9)"), says="rank 0 .* 9")],
    }

The steps are put below that text, into a copy of the notebook, and the whole is run. Where
the text says to set a change back, each changed cell is run again as it was; else the cells
of the lesson that come after it have to run with the change, as they do for a reader. An
error is allowed only where `fails` says so, and then the text has to announce it.
"""

import argparse
import copy
import importlib
import re
from pathlib import Path
from typing import NamedTuple

import nbformat
from nbclient import NotebookClient

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
# "without the assertion" says that a reader takes it out, not that it fails
ANNOUNCED = re.compile(
    r"fail|error|refuse|raises|which assertion|what happens|what if|Does it still"
    r"|what does (it|the message|the program|\w+) say|stops with",
    re.I,
)
SET_BACK = re.compile(r"\bback\b|as (it|they) (was|were)\b")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Step(NamedTuple):
    """A cell that is run, with changes [(old, new)], or new code. What it must print, and
    the error with which it must end, are regular expressions; fails None: it ends well.
    """

    cell: str | None
    changes: tuple
    code: str
    says: str | None
    fails: str | None


def run(cell, *changes, says=None, fails=None):
    """Run a cell of the lesson, by its id, with parts of it replaced. In each pair
    (old, new), old is in the cell exactly once.
    """
    return Step(cell, changes, "", says, fails)


def new(code, says=None, fails=None):
    """Run code in a new cell."""
    return Step(None, (), code, says, fails)


def tries_of(number):
    """(steps by the id of the text, reasons by the id of a text that is not run here)."""
    found = importlib.import_module(f"tries.lesson{number}")
    return found.TRIES, getattr(found, "NOT_HERE", {})


def notebook_of(number):
    [path] = LESSONS.glob(f"{number}_*.ipynb")
    return nbformat.read(path, as_version=4)


def sources_of(notebook):
    """{id: source} of the cells with code."""
    return {cell.id: cell.source for cell in notebook.cells if cell.cell_type == "code"}


def changed(source, changes):
    """A cell's source with its changes. Raises ValueError where one does not fit."""
    for old, by in changes:
        if source.count(old) != 1:
            raise ValueError(f"{old!r} is there {source.count(old)} times, not once")
        source = source.replace(old, by)
    return source


def source_of(step, sources):
    return changed(sources[step.cell], step.changes) if step.cell else step.code


def with_tries(notebook, tries, only=()):
    """A copy of a notebook with steps below their texts, and {index of a cell: (id of the
    text, step)}. only: ids of texts, and the copy ends after the last of these.
    """
    sources = sources_of(notebook)
    cells, steps, end = [], {}, None
    for cell in notebook.cells:
        cells.append(copy.deepcopy(cell))
        if cell.id not in tries or (only and cell.id not in only):
            continue
        to_undo = {}
        for number, step in enumerate(tries[cell.id]):
            steps[len(cells)] = cell.id, step
            name = f"try-{cell.id}-{number}"
            code = nbformat.v4.new_code_cell(source_of(step, sources), id=name[:64])
            cells.append(code)
            if step.changes and SET_BACK.search(tried_in(cell.source)):
                to_undo[step.cell] = sources[step.cell]
        for number, source in enumerate(to_undo.values()):
            name = f"back-{cell.id}-{number}"
            cells.append(nbformat.v4.new_code_cell(source, id=name[:64]))
        end = len(cells)
    fresh = copy.deepcopy(notebook)
    fresh.cells = cells[: end if only else None]
    return fresh, steps


def tried_in(text):
    """The paragraphs with a Try it, each with what is folded below it."""
    found = re.findall(
        r"(?ms)^\*\*Try it.*?(?:$|\Z)(?:\s*<details>.*?</details>)?", text
    )
    return "\n".join(found)


def unannounced(notebook, tries):
    """The ids of the texts that do not say that what they ask to try fails."""
    texts = {cell.id: tried_in(cell.source) for cell in notebook.cells}
    return [
        of
        for of, steps in tries.items()
        if any(step.fails for step in steps) and not ANNOUNCED.search(texts[of])
    ]


def problems(notebook, tries, only=(), folder=LESSONS, timeout=600):
    """Run a notebook with what its texts ask to try; yield a line for each thing that is
    not as the steps say, and for each of its own cells that fails on the way.
    """
    fresh, steps = with_tries(notebook, tries, only)
    client = NotebookClient(
        fresh, timeout=timeout, allow_errors=True, kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        extra_arguments=["--IPKernelApp.log_level=40"], shutdown_kernel="graceful",
    )  # fmt: skip
    client.execute()
    tried = ""
    for index, cell in enumerate(fresh.cells):
        if cell.cell_type != "code":
            continue
        printed, error = seen(cell)
        if index not in steps:
            if error:
                yield f"cell {cell.id} fails{tried}: {error.strip().splitlines()[-1]}"
            continue
        of, step = steps[index]
        tried = f" (the last Try it was {of}: does its text say to set it back?)"
        place = f"Try it {of}, {step.cell or 'a new cell'}"
        if error and not step.fails:
            yield f"{place} fails: {error.strip()[-800:]}"
        elif step.fails and not re.search(step.fails, error):
            yield f"{place} does not fail with {step.fails!r}, but: {(error or printed)[-800:]}"
        if step.says and not re.search(step.says, printed + error):
            yield f"{place} does not print {step.says!r}, but: {(printed + error)[-1500:]}"


def seen(cell):
    """(what a cell has printed and drawn, as text; its error, "" if there is none)."""
    printed, error = "", ""
    for output in cell.outputs:
        if output.output_type == "error":
            error = f"{output.ename}: {output.evalue}"
        elif output.output_type == "stream":
            printed += output.text
        else:
            for kind in ("text/plain", "text/markdown"):
                printed += output.data.get(kind, "") + "\n"
    return COLOURS.sub("", printed), COLOURS.sub("", error)


def main(arguments):
    """Run the Try its of one lesson, or those of a few texts; return the exit code."""
    numbers = sorted(
        path.stem[-2:] for path in Path(__file__).parent.glob("lesson*.py")
    )
    parser = argparse.ArgumentParser("tries", description=main.__doc__)
    parser.add_argument("lesson", choices=numbers, metavar="NN", help="such as 04")
    parser.add_argument(
        "only", nargs="*", metavar="ID", help="of a text: only that one"
    )
    args = parser.parse_args(arguments)
    tries, _ = tries_of(args.lesson)
    if unknown := sorted(set(args.only) - set(tries)):
        parser.error(f"lesson {args.lesson} has no Try it in {', '.join(unknown)}")
    found = list(problems(notebook_of(args.lesson), tries, args.only))
    print("\n".join(found) or f"all {len(args.only or tries)} are as they should be")
    return int(bool(found))
