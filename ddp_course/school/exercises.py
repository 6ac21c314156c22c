"""Exercise notebooks: made from solutions, divided into questions, assembled for
grading.

`solutions/03_solution_ddp.ipynb` becomes `exercises/03_exercise_ddp.ipynb`. A solution
notebook holds, for each question, a cell tagged `solution` with the answer
between `### BEGIN SOLUTION: task` and `### END SOLUTION` (nbgrader's markers), and
after it a check cell tagged `nbval-check-output`, which is one call:
`checks.ex03.check_average_gradients(average_gradients)`.

python -m ddp_course.school.exercises
"""

import ast
import importlib
import os
import re
import textwrap
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_course import UsageError, project_folder
from ddp_course.school import folders

BEGIN, GIVEN, END = "### BEGIN SOLUTION", "### GIVEN", "### END SOLUTION"


@dataclass(frozen=True)
class Task:
    """One question in a notebook. name: 'average_gradients'; names: what the check is
    given; cell, check: the two cells;
    preamble: the code that the notebook gives before it."""

    name: str
    names: list
    cell: "nbformat.NotebookNode"  # noqa: F821
    check: "nbformat.NotebookNode"  # noqa: F821
    preamble: str


def notebooks(kind="exercises"):
    """The course's own `exercises` or `solutions`, {"01": path}."""
    return folders.notebooks(folders.originals(kind))


def learners(number=None):
    """The learner's exercise notebooks, {"03": path}: of one number, or all. Raises
    UsageError where there is none.
    """
    here = folders.learner_folder() / "exercises"
    names = {key: exercise_name(path) for key, path in notebooks("solutions").items()}
    found = {key: here / name for key, name in names.items() if (here / name).exists()}
    if number is None and not found:
        raise UsageError(f"there are no exercises here: {folders.MAKE_ONE}")
    if number is None:
        return found
    return {number.zfill(2): folders.find(found, number, "exercise")}


def exercise_name(solution):
    """The name of the exercise that is made from a solution notebook, by its path."""
    return solution.name.replace("_solution_", "_exercise_", 1)


def questions_of(number):
    """The Tasks of an exercise, as the course gives them."""
    return tasks(read(folders.find(notebooks("solutions"), number, "exercise")))


def read(path):
    """A notebook. Raises UsageError, in one line, if the file is missing or is not a
    notebook.
    """
    import nbformat  # takes a second, and most commands do not need it

    try:
        with warnings.catch_warnings(
            action="ignore"
        ):  # about cells without an id, which we do not need
            notebook = nbformat.read(path, as_version=4)
            nbformat.validate(notebook)
        return notebook
    except FileNotFoundError:
        raise UsageError(f"there is no notebook {path}") from None
    except (
        Exception
    ):  # nbformat raises many kinds of errors for a file that is not a notebook
        raise UsageError(damage(Path(path))) from None


def damage(path):
    """The error for a file that is not a notebook: the learner's own exercise can be
    reset, a submission cannot.
    """
    own = path.resolve().parent == (folders.learner_folder() / "exercises").resolve()
    if in_conflict(path):
        problem = "has the marks of a merge conflict"
    else:
        problem = "is damaged" if own else "is not a notebook"
    return f"{path} {problem}" + (
        f": ddp-course reset {path.name[:2]} brings a fresh one" if own else ""
    )


def in_conflict(path):
    """Whether git has left the marks of a merge conflict in a file."""
    with suppress(OSError):
        return any(
            line.startswith("<<<<<<<")
            for line in path.read_text("utf-8", errors="replace").splitlines()
        )
    return False


def preloads(path):
    """The modules that a notebook's ranks start with, from its first cell:
    start_server("accelerate").
    """
    with suppress(OSError):
        text = path.read_text("utf-8", errors="replace")
        calls = re.findall(r"start_server\(([^)]*)\)", text)
        return [name for call in calls for name in re.findall(r"[\w.]{2,}", call)]
    return []


def write(path, notebook):
    """Write a notebook atomically."""
    write_text(path, as_text(notebook))


def as_text(notebook):
    """A notebook as the text of its file."""
    import nbformat

    return nbformat.writes(nbformat.from_dict(notebook)) + "\n"


def write_text(path, text):
    """Write a text file, atomically. Raises UsageError if that fails."""
    write_bytes(path, text.encode())


def write_bytes(path, content):
    """Write a file, atomically. Raises UsageError if that fails."""
    temporary = Path(path).with_name(f".{Path(path).name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def tagged(cell, tag):
    return tag in cell.metadata.get("tags", [])


def tasks(notebook):
    """The Tasks of a solution or exercise notebook, in order. Raises UsageError if
    there is none, or only half of one.
    """
    found, given, waiting = [], [], None
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        if tagged(cell, "solution"):
            if waiting:
                raise UsageError(
                    f"the solution cell {waiting.id} has no check after it"
                )
            waiting = cell
        elif tagged(cell, "nbval-check-output"):
            if not waiting:
                raise UsageError(f"the check {cell.id} has no solution cell before it")
            call = ast.parse(cell.source).body[0].value
            name = call.func.attr.removeprefix("check_")
            names = [ast.unparse(argument) for argument in call.args]
            found.append(Task(name, names, waiting, cell, "\n".join(given)))
            waiting = None
        else:
            given.append(cell.source)
    if waiting or not found:
        raise UsageError(
            f"the solution cell {waiting.id} has no check"
            if waiting
            else "no question in the notebook"
        )
    return found


def cleared(source):
    """A solution cell as the learner gets it: each answer becomes its task and a stub,
    or what stands under ### GIVEN.

    Raises ValueError where markers do not match, or where there are none.
    """
    lines, region = [], None
    for line in source.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        if BEGIN in line:
            if region is not None:
                raise ValueError(f"{BEGIN} within {BEGIN}")
            region, task, given = [], line.split(BEGIN)[1].strip(": "), None
        elif region is None:
            if END in line or GIVEN in line:
                raise ValueError(f"{line.strip()} without {BEGIN}")
            lines.append(line)
        elif END in line:
            if given is not None:
                lines += (
                    textwrap.dedent("\n".join(given)).join(["", ""]).splitlines()
                    if not indent
                    else given
                )
            else:
                count = sum(bool(text.strip()) for text in region)
                about = f"about {count} lines" if count > 1 else "one line"
                wrapped = textwrap.wrap(f"{task} ({about})", 90 - len(indent))
                lines += [f"{indent}# {text}" for text in wrapped] + [
                    f"{indent}raise NotImplementedError"
                ]
            region = None
        elif GIVEN in line:
            given = []
        elif given is not None:
            given.append(line.replace("# ", "", 1))
        else:
            region.append(line)
    if region is not None:
        raise ValueError(f"{BEGIN} without {END}")
    if lines == source.splitlines():
        raise ValueError(f"no {BEGIN} in the cell")
    return "\n".join(lines)


def answer_of(source):
    """A solution cell without its markers, and without what stands under ### GIVEN."""
    kept, given = [], False
    for line in source.splitlines():
        given = (given or GIVEN in line) and END not in line
        if not given and not any(marker in line for marker in (BEGIN, END)):
            kept.append(line)
    return "\n".join(kept)


def released(solution):
    """The exercise notebook of a solution notebook: answers cleared, nothing
    executed.
    """
    import nbformat

    exercise = nbformat.reads(nbformat.writes(solution), as_version=4)
    tasks(
        exercise
    )  # raises an error for incomplete questions, and for notebooks without any
    for cell in exercise.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            if tagged(cell, "solution"):
                cell.source = cleared(cell.source)
    return exercise


def untouched(task, answer):
    """Whether a learner's cell is still the exercise's own."""
    return answer.strip() == cleared(task.cell.source).strip()


def answer_cells(notebook, tasks):
    """What a notebook holds in the cells of these Tasks: {id of the Task's cell:
    source}.

    A cell is known by its id, or by the `id` in its metadata, where some tools keep it.
    Older formats have no ids, and reading them may add new ones: where no cell is
    known, those tagged `solution` are taken in order, if none is missing.
    """
    wanted, found = [task.cell.id for task in tasks], {}
    known = [(cell.get("id"), cell.source) for cell in notebook.cells]
    known += [(cell.metadata.get("id"), cell.source) for cell in notebook.cells]
    for name, source in known:
        if name in wanted:
            found.setdefault(name, source)
    in_order = [
        cell.source
        for cell in notebook.cells
        if cell.cell_type == "code" and tagged(cell, "solution")
    ]
    if not found and len(in_order) == len(wanted):
        return dict(zip(wanted, in_order))
    return found


def answers(task, cell):
    """The learner's cell as text for the ranks to run, which is passed to a check. See
    `judge.Source`.
    """
    from ddp_course.school.judge import Source

    return [Source(name, task.preamble, cell) for name in task.names]


def question(number, task):
    """The Question in `ddp_course/checks/exNN.py` that a Task is checked by."""
    module = importlib.import_module(f"ddp_course.checks.ex{number}")
    return getattr(module, f"check_{task.name}")


def main():
    """Make the exercises of a checkout from its solutions."""
    here = project_folder()
    sources = folders.notebooks(here / "solutions")
    if not sources:
        raise UsageError(f"no solutions/NN_solution_topic.ipynb in {here}")
    (here / "exercises").mkdir(exist_ok=True)
    for path in sources.values():
        name = exercise_name(path)
        write(here / "exercises" / name, released(read(path)))
        print(f"exercises/{name}")


if __name__ == "__main__":
    main()
