"""What the lessons ask their readers to try: that it works as they say, see tries/."""

import re

import nbformat
import pytest
from conftest import COURSE, THOROUGH
from tries import (
    main,
    notebook_of,
    problems,
    run,
    source_of,
    sources_of,
    tries_of,
    unannounced,
)

NUMBERS = sorted(
    path.name[:2] for path in (COURSE / "lessons").glob("[0-9][0-9]_*.ipynb")
)
each_lesson = pytest.mark.parametrize("number", NUMBERS)


@each_lesson
def test_each_try_it_has_its_steps_and_they_fit_the_cells(number):
    notebook = notebook_of(number)
    asked = {
        cell.id
        for cell in notebook.cells
        if cell.cell_type == "markdown" and "**Try it.**" in cell.source
    }
    tries, not_here = tries_of(number)
    assert tries.keys() | not_here.keys() == asked
    assert not tries.keys() & not_here.keys() and all(not_here.values())
    for of, steps in tries.items():
        assert steps, of
        for step in steps:
            source_of(step, sources_of(notebook))
    assert unannounced(notebook, tries) == []


if THOROUGH:  # a lesson and what it asks to try take minutes

    @each_lesson
    def test_what_it_asks_to_try_works_as_it_says(number):
        tries, _ = tries_of(number)
        assert list(problems(notebook_of(number), tries)) == []


# ---- that a Try it which does not work is noticed ----

QUIET = "**Try it.** Divide by another number."
LOUD = "**Try it.** Divide by zero. What does the error say?"
BACK = "**Try it.** Divide by another number. Then set it back."
BY_ZERO = "/ 2", "/ 0"
TRIED = [  # text, step, what is told
    (BACK, run("mean", ("/ 2", "/ 4"), says="the mean is 1.0"), None),
    (QUIET, run("mean", ("/ 2", "/ 4")), "after-1 fails (the last Try it was text-1"),
    (LOUD, run("mean", BY_ZERO, fails="ZeroDivisionError: division by zero"), None),
    (QUIET, run("mean", BY_ZERO), "mean fails: ZeroDivisionError"),
    (LOUD, run("mean", ("/ 2", "- 2"), fails="Zero"), "does not fail with 'Zero'"),
    (BACK, run("mean", ("/ 2", "/ 4"), says="is 2"), "does not print 'is 2'"),
]


def lesson():
    """A notebook with these texts; the cell after each needs what the first has made."""
    of = nbformat.v4
    made = of.new_notebook()
    code = "mean = (1 + 3) / 2\nprint('the mean is', mean)"
    made.cells.append(of.new_code_cell(code, id="mean"))
    for number, (text, _, _) in enumerate(TRIED):
        made.cells += [
            of.new_markdown_cell(text, id=f"text-{number}"),
            of.new_code_cell("assert mean == 2", id=f"after-{number}"),
            of.new_code_cell("mean = 2"),
        ]
    return made


def test_what_does_not_work_as_the_text_says_is_told_and_changes_are_undone(tmp_path):
    tries = {f"text-{number}": [step] for number, (_, step, _) in enumerate(TRIED)}
    told = list(problems(lesson(), tries, folder=tmp_path))
    wanted = [told for _, _, told in TRIED if told]
    assert len(told) == len(wanted)
    for line, part in zip(told, wanted):
        assert part in line


@pytest.mark.parametrize(
    "text, missed",
    [
        (QUIET, True),
        (f"{LOUD}\n\nThe next cell fails.", False),
        (f"{QUIET}\n\nThe next cell fails.", True),
        ("**Try it.** Divide by zero, without the assertion.", True),
        (f"{QUIET}\n\n<details><summary>Zero</summary>It fails.</details>", False),
    ],
)
def test_a_failure_that_the_text_does_not_announce_is_noticed(text, missed):
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_markdown_cell(text, id="text")]
    tries = {"text": [run("mean", BY_ZERO, fails="ZeroDivisionError")]}
    assert unannounced(notebook, tries) == ["text"] * missed


@pytest.mark.parametrize("arguments", [["99"], [], ["04", "nowhere"]])
def test_what_it_cannot_run_gives_a_line_and_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "tries: error: " in capsys.readouterr().err


def test_a_change_that_does_not_fit_its_cell_is_refused():
    with pytest.raises(ValueError, match=re.escape("'/ 3' is there 0 times, not once")):
        source_of(run("mean", ("/ 3", "/ 4")), sources_of(lesson()))
