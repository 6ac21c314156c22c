"""Exercise notebooks: made from solutions, divided into questions, assembled for
grading.

`solutions/03_solution_ddp.ipynb` becomes `exercises/03_exercise_ddp.ipynb`. A solution
notebook holds, for each question, a cell tagged `solution` with the answer
between `### BEGIN SOLUTION: task` and `### END SOLUTION` (nbgrader's markers; a long
task goes on in lines that begin with `###`), and after it a check cell tagged
`nbval-check-output`, which is one call:
`checks.ex03.check_average_gradients(average_gradients)`. In the exercise, nbval compares
no outputs (`nbval-ignore-output`), and the check cell is tagged `check`: a question that
has not passed fails by an error. Only a cell tagged `question` keeps its output, because
it shows a part of the question.

python -m ddp_course.cli.exercises
"""

import ast
import importlib
import re
import textwrap
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_course import UsageError, folders, project_folder
from ddp_course.files import write_atomically

COMPARED, NOT_COMPARED, CHECK = "nbval-check-output", "nbval-ignore-output", "check"
BEGIN, GIVEN, END = "### BEGIN SOLUTION", "### GIVEN", "### END SOLUTION"
LONG_TASK = re.compile(rf"{BEGIN}.*(\n *### (?!GIVEN|END).*)+")


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
        quoted = r'\\?"([\w.]+)\\?"'  # the notebook is JSON
        return [name for call in calls for name in re.findall(quoted, call)]
    return []


def write(path, notebook):
    """Write a notebook atomically."""
    write_atomically(path, as_text(notebook))


def as_text(notebook):
    """A notebook as the text of its file."""
    import nbformat

    return nbformat.writes(nbformat.from_dict(notebook)) + "\n"


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
        elif tagged(cell, COMPARED) or tagged(cell, CHECK):
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


def with_short_tasks(source):
    """A solution cell in which each task is on the line of its ### BEGIN SOLUTION."""
    return LONG_TASK.sub(lambda task: re.sub(r"\n *###", "", task[0]), source)


def cleared(source):
    """A solution cell as the learner gets it: each answer becomes its task and a stub,
    or what stands under ### GIVEN.

    Raises ValueError where markers do not match, or where there are none.
    """
    source = with_short_tasks(source)
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
                wrapped = textwrap.wrap(f"{task} ({about})", 86 - len(indent))
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
    for line in with_short_tasks(source).splitlines():
        given = (given or GIVEN in line) and END not in line
        if not given and not any(marker in line for marker in (BEGIN, END)):
            kept.append(line)
    return "\n".join(kept)


def compare_no_output(cell):
    """Let nbval compare no output of this cell: in an exercise, only errors count, and
    a question that has not passed is one.
    """
    tags = [CHECK if tag == COMPARED else tag for tag in cell.metadata.get("tags", [])]
    cell.metadata["tags"] = [*tags, NOT_COMPARED]


def released(solution):
    """The exercise notebook of a solution notebook: answers cleared, and no outputs but
    those of the cells tagged `question`.
    """
    import nbformat

    exercise = nbformat.reads(nbformat.writes(solution), as_version=4)
    tasks(
        exercise
    )  # raises an error for incomplete questions, and for notebooks without any
    for cell in exercise.cells:
        if cell.cell_type == "code":
            cell.execution_count = None
            if not tagged(cell, "question"):
                cell.outputs = []
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = None
            compare_no_output(cell)
            if tagged(cell, "solution"):
                cell.source = cleared(cell.source)
    return exercise


@dataclass(frozen=True)
class Written:
    """What a learner wrote for a question. cell: the source of the answer's cell;
    before, after: of their other code cells, before it, and between it and the check.
    """

    cell: str
    before: tuple = ()
    after: tuple = ()


def untouched(task, written):
    """Whether a learner's cell is still the exercise's own, and no other cell has the
    answer.
    """
    elsewhere = "\n".join([*written.before, *written.after])
    return written.cell.strip() == cleared(task.cell.source).strip() and not any(
        re.search(rf"\b(def|class)\s+{name}\b|(?m:^{name}\s*=)", elsewhere)
        for name in task.names
    )


def answer_cells(cells, tasks):
    """What a learner wrote for these Tasks: {id of the Task's cell: Written}.

    cells: of the learner's notebook, see handed_in.cells_of. A cell is known by its id,
    or by the `id` in its metadata, where some tools keep it. Older formats have no ids:
    if no cell is known, those tagged `solution` are taken in order, if none is missing.
    A cell that replaces a deleted one is known by its place before the check.
    """
    code = [cell for cell in cells if cell.cell_type == "code"]
    places = {task.cell.id: place_of(task, code) for task in tasks}
    if set(places.values()) == {None}:
        in_order = [i for i, cell in enumerate(code) if tagged(cell, "solution")]
        if len(in_order) == len(tasks):
            places = dict(zip(places, in_order))
    given = given_by(tasks)
    found, own = {}, [not is_given(cell, tasks, given) for cell in code]
    for task in tasks:
        place, check = places[task.cell.id], check_of(task, code)
        if place is None and check and own[check - 1]:
            place = check - 1
        if place is None:
            continue
        before = [i for i in range(place) if own[i]]
        after = [i for i in range(place + 1, check or 0) if own[i]]
        around = [tuple(code[i].source for i in part) for part in (before, after)]
        found[task.cell.id] = Written(code[place].source, *around)
    return found


def given_by(tasks):
    """The sources of the checks and of the stubs of these Tasks."""
    own = [task.check.source for task in tasks]
    own += [cleared(task.cell.source) for task in tasks]
    return {source.strip() for source in own}


def is_given(cell, tasks, given):
    """Whether a learner's cell is one of the exercise's own, unchanged. given: see
    given_by.
    """
    text = cell.source.strip()
    return text in given or any(text in task.preamble for task in tasks)


def known_as(cell, name):
    return name in (cell.get("id"), cell.metadata.get("id"))


def place_of(task, code):
    """The index of a Task's answer among the code cells, or None."""
    known = (i for i, cell in enumerate(code) if known_as(cell, task.cell.id))
    return next(known, None)


def check_of(task, code):
    """The index of a Task's check among the code cells, or None."""
    source = task.check.source.strip()
    same = (
        i
        for i, cell in enumerate(code)
        if known_as(cell, task.check.id) or cell.source.strip() == source
    )
    return next(same, None)


def answers(task, written):
    """What a learner wrote as text for the ranks to run, which is passed to a check.
    See `judge.Source`.
    """
    from ddp_course.judge.answer import Source

    around = (written.before, written.after)
    return [Source(name, task.preamble, written.cell, *around) for name in task.names]


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
