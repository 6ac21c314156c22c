"""The exercises: made from the solutions, failing where there is a gap and nowhere
else, and the learner's commands.
"""

import ast
import importlib
import io
import json
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import torch
from conftest import COURSE, THOROUGH, python
from torch import nn

from ddp_course import UsageError, checks
from ddp_course.cli import command, exercises
from ddp_course.cli.grading import handed_in
from ddp_course.judge import progress
from ddp_course.judge.verdict import Verdict
from ddp_course.models.gpt import GPT
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import launch

NUMBERS = sorted(exercises.notebooks("solutions"))
each_exercise = pytest.mark.parametrize("number", NUMBERS)


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A copy of the course's folder in which a learner may write."""
    (tmp_path / "ddp_course").symlink_to(COURSE / "ddp_course")
    for folder in ("lessons", "exercises", "solutions"):
        shutil.copytree(COURSE / folder, tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ddp_course(*arguments):
    """The command, in this process: a fresh one would import torch for each."""
    output, errors, code = io.StringIO(), io.StringIO(), 0
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(output),
        redirect_stderr(errors),
    ):
        patch.setattr(sys, "argv", ["ddp-course", *arguments])
        try:
            command.main()
        except SystemExit as end:
            code = end.code or 0
    return SimpleNamespace(
        returncode=code, stdout=output.getvalue(), stderr=errors.getvalue()
    )


def solve(folder, number):
    """Put our answers into an exercise notebook, as a learner who saves has it:
    answers, and no outputs.
    """
    path = exercises.notebooks("exercises")[number]
    notebook = exercises.read(path)
    ours = {task.name: task.cell.source for task in solution_tasks(number)}
    for task in exercises.tasks(notebook):
        task.cell.source = exercises.answer_of(ours[task.name])
    nbformat.write(notebook, folder / "exercises" / path.name)


def mine(number):
    """The path of the learner's exercise, in the folder that the test is in."""
    [path] = Path("exercises").absolute().glob(f"{number}_exercise_*.ipynb")
    return path


def solution_tasks(number):
    return exercises.tasks(exercises.read(exercises.notebooks("solutions")[number]))


# ---- made from the solutions ----


def test_each_exercise_belongs_to_a_lesson():
    lessons = {path.name for path in (COURSE / "lessons").glob("*.ipynb")}
    for kind in ("solution", "exercise"):
        names = {path.name for path in exercises.notebooks(f"{kind}s").values()}
        assert len(names) == len(NUMBERS) and not names & lessons
        assert {name.replace(f"_{kind}_", "_", 1) for name in names} <= lessons


@each_exercise
def test_an_exercise_is_what_its_solution_gives(number):
    solution = exercises.read(exercises.notebooks("solutions")[number])
    ours = exercises.released(solution)
    stored = exercises.notebooks("exercises")[number].read_text()
    assert stored == nbformat.writes(ours) + "\n"
    assert "BEGIN SOLUTION" not in stored and "### GIVEN" not in stored
    for cell in [*solution.cells, *ours.cells]:
        if cell.cell_type == "code":  # as wide as a cell is on a laptop
            for line in cell.source.splitlines():
                assert len(line) <= 88, line


@each_exercise
def test_cells_have_stable_ids_and_links_lead_somewhere(number):
    path = exercises.notebooks("solutions")[number]
    notebook = exercises.read(path)
    for task in exercises.tasks(notebook):
        name = task.name.replace("_", "-")
        assert (task.cell.id, task.check.id) == (
            f"ex{number}-{name}",
            f"ex{number}-{name}-check",
        )
        assert exercises.question(number, task).name == task.name
    prose = "\n".join(
        cell.source for cell in notebook.cells if cell.cell_type == "markdown"
    )
    lesson = path.name.replace("_solution_", "_")
    assert f"(../lessons/{lesson})" in prose and f"hint {number}" in prose


@each_exercise
def test_the_solutions_outputs_are_of_a_real_run_in_which_all_passed(number):
    cells = [
        cell
        for cell in exercises.read(exercises.notebooks("solutions")[number]).cells
        if cell.cell_type == "code"
    ]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for task in solution_tasks(number):
        [output] = task.check.outputs
        assert output.data["text/plain"] == f"{number} {task.name}: passed"
    checked = [task.check.id for task in solution_tasks(number)]
    for cell in cells:  # or the exercise would have lost it
        assert (
            not cell.outputs or cell.id in checked or exercises.tagged(cell, "question")
        ), cell.source


def test_a_cell_that_shows_a_question_keeps_its_output_which_is_todays():
    shown = []
    for number, path in exercises.notebooks("exercises").items():
        for cell in exercises.read(path).cells:
            assert exercises.tagged(cell, "question") == bool(cell.get("outputs"))
            shown += [(number, cell)] if cell.get("outputs") else []
    assert shown
    for number, cell in shown:
        importlib.import_module(f"ddp_course.checks.ex{number}")
        today = eval(cell.source, {"checks": checks})
        [output] = cell.outputs
        assert output.data["text/plain"] == str(today).rstrip("\n")


def nbval(path, *options):
    options = [
        "--nbval-current-env",
        "--nbval-cell-timeout=600",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        *options,
    ]
    return python("-m", "pytest", "--nbval", *options, path, timeout=600)


@each_exercise
def test_unsolved_each_question_says_so_and_no_cell_but_its_check_needs_it(number):
    """What a kernel would show, in a tenth of the time; the next test asks one."""
    released = exercises.read(exercises.notebooks("exercises")[number])
    given = {
        task.name: "### GIVEN" in task.cell.source for task in solution_tasks(number)
    }
    tasks = exercises.tasks(released)
    for task in tasks:
        verdict = exercises.question(number, task).judge(
            *exercises.answers(task, exercises.Written(task.cell.source))
        )
        assert verdict.status == ("failed" if given[task.name] else "not attempted"), (
            str(verdict)
        )
    gaps = {name for task in tasks for name in task.names}
    touched = [task.cell.id for task in tasks] + [task.check.id for task in tasks]
    for cell in released.cells:
        if cell.cell_type == "code" and cell.id not in touched:
            code = "\n".join(
                line for line in cell.source.splitlines() if not line.startswith("%")
            )
            assert not gaps & {
                node.id
                for node in ast.walk(ast.parse(code))
                if isinstance(node, ast.Name)
            }


def half_solved(course, number):
    """Solve an exercise but for its last question; return its path, and the places of
    the checks among the code cells.
    """
    solve(course, number)
    [path] = (course / "exercises").glob(f"{number}_*")
    notebook = exercises.read(path)
    exercises.tasks(notebook)[-1].cell.source = exercises.cleared(
        solution_tasks(number)[-1].cell.source
    )
    nbformat.write(notebook, path)
    checks = [task.check.id for task in exercises.tasks(notebook)]
    code = [cell.id for cell in notebook.cells if cell.cell_type == "code"]
    return path, [code.index(check) for check in checks]


@pytest.mark.parametrize("strictly", [True, False])
def test_under_nbval_the_questions_fail_that_have_not_passed_and_no_others(
    strictly, course
):
    path, checks = half_solved(course, "03")
    option = [] if strictly else ["--nbval-lax"]
    done = nbval(path, *option)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert len(failed) == 1 and f"Cell {checks[-1]} " in failed[0], done.stdout[-3000:]


def test_under_papermill_a_question_that_has_not_passed_fails(course):
    path, checks = half_solved(course, "03")
    done = python("-m", "papermill", "--no-progress-bar", path, course / "out.ipynb")
    last = solution_tasks("03")[-1].name
    assert done.returncode == 1 and f"NotPassed: 03 {last}" in done.stderr
    assert f'"In [{checks[-1] + 1}]"' in done.stderr


@each_exercise
def test_our_answers_pass(number):
    """As text, as a learner's do. A kernel runs one of the notebooks below, and `make
    bench` has all graded.
    """
    for task in solution_tasks(number):
        verdict = exercises.question(number, task).judge(
            *exercises.answers(task, exercises.Written(task.cell.source))
        )
        assert verdict.status == "passed", str(verdict)


@pytest.mark.parametrize("number", NUMBERS if THOROUGH else ["04"])
def test_solved_it_passes_strictly(number, course):
    path = course / "solutions" / exercises.notebooks("solutions")[number].name
    done = nbval(path)
    assert done.returncode == 0, done.stdout[-3000:]


def test_what_an_exercises_first_cell_starts_the_ranks_with_is_known_without_running_it():
    named = {
        number: exercises.preloads(path)
        for number, path in exercises.notebooks("exercises").items()
    }
    assert named.pop("07") == ["accelerate", "datasets", "deepspeed"]
    assert named.pop("08") == ["transformers.trainer", "datasets", "deepspeed"]
    assert named.pop("13") == ["deepspeed", "torch._inductor.compile_fx"]
    sharding = "torch.distributed.checkpoint.state_dict"
    assert named.pop("12") == ["torch._dynamo", sharding]
    assert not any(named.values())


def test_a_notebook_without_questions_is_an_error(course):
    empty = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell("Nothing here")]
    )
    with pytest.raises(UsageError, match="no question"):
        exercises.released(empty)
    shutil.rmtree(course / "solutions")
    done = python("-m", "ddp_course.cli.exercises", cwd=course)
    assert "no solutions/NN_solution_topic.ipynb" in done.stderr


@pytest.mark.parametrize(
    "cell",
    [
        "x = 1",
        "### BEGIN SOLUTION\nx = 1",
        "x = 1\n### END SOLUTION",
        "### GIVEN\nx = 1",
    ],
)
def test_markers_that_do_not_match_are_an_error(cell):
    with pytest.raises(ValueError):
        exercises.cleared(cell)


def test_a_region_becomes_its_task_and_a_stub_or_what_is_given():
    cell = "def f(x):\n    ### BEGIN SOLUTION: double it\n    y = x\n    return 2 * y\n    ### END SOLUTION\n"
    stub = "def f(x):\n    # double it (about 2 lines)\n    raise NotImplementedError"
    assert exercises.cleared(cell) == stub
    long = cell.replace("double it", "double\n    ### it")
    assert exercises.cleared(long) == stub
    assert exercises.answer_of(long) == exercises.answer_of(cell)
    cell = "def f(x):\n    ### BEGIN SOLUTION\n    return 2 * x\n    ### GIVEN\n    # return 3 * x\n    ### END SOLUTION"
    assert exercises.cleared(cell) == "def f(x):\n    return 3 * x"
    assert exercises.answer_of(cell) == "def f(x):\n    return 2 * x"


# ---- the learner's commands ----


def test_a_learner_checks_is_told_what_is_next_and_sees_the_solution_in_the_end(course):
    assert (
        "Next: average_gradients in exercises/03" not in ddp_course().stdout
        or NUMBERS[0] == "03"
    )
    done = ddp_course("check", "3")
    assert done.returncode == 1 and done.stdout.count("not attempted") == len(
        solution_tasks("03")
    )
    refused = ddp_course("solution", "03")
    assert refused.returncode == 2 and refused.stderr.startswith(
        "ddp-course: not yet passed: average_gradients"
    )

    solve(course, "03")
    done = ddp_course("check", "03")
    assert done.returncode == 0, done.stdout
    assert [line for line in done.stdout.splitlines() if line] == [
        f"03 {task.name}: passed" for task in solution_tasks("03")
    ]
    assert (
        f"{len(solution_tasks('03'))} of {len(solution_tasks('03'))}"
        in ddp_course("progress").stdout
    )
    shown = ddp_course("solution", "03")
    assert (
        shown.returncode == 0
        and "parameter.grad /= dist.get_world_size()" in shown.stdout
    )
    assert "### BEGIN" not in shown.stdout


def test_untouched_no_question_is_attempted_not_even_where_code_is_given(course):
    tasks = [(number, task) for number in NUMBERS for task in solution_tasks(number)]
    assert any("### GIVEN" in task.cell.source for _, task in tasks)
    done = ddp_course("check")
    assert done.returncode == 1 and done.stdout.splitlines() == [
        f"{number} {task.name}: not attempted" for number, task in tasks
    ]
    assert not (course / "runs" / "progress.json").exists()


def test_other_notebooks_in_the_exercises_folder_disturb_nothing(course):
    (course / "exercises" / "99_notes.ipynb").write_text("{")
    (course / "exercises" / "03_averaging_gradients.ipynb").write_text("{")
    done = ddp_course("progress")
    assert done.returncode == 0 and "99" not in done.stdout
    assert ddp_course("check", "99").stderr.startswith(
        "ddp-course: there is no exercise 99"
    )
    assert "damaged" not in ddp_course("check", "03").stderr


def test_hints_grow_stronger_and_the_last_one_says_so(course):
    texts = [ddp_course("hint", "03").stdout for _ in range(4)]
    for text, said in zip(texts, ("1 of 3: ", "2 of 3: ", "3 of 3 (the last one): ")):
        assert text.startswith(f"03 average_gradients, hint {said}")
    assert "hint 3 of 3 again (there are no more): " in texts[3]
    for name in (["3"], ["bucket"], ["BUCKETED"]):
        assert "03 bucketed, hint " in ddp_course("hint", "3", *name).stdout


def test_a_question_that_has_passed_shows_its_solution_alone(course):
    progress.record(Verdict("03 overlapped", "passed", {}))
    shown = ddp_course("solution", "3", "over")
    assert shown.returncode == 0 and shown.stdout.count("# overlapped") == 1
    assert "class Overlapped" in shown.stdout and "class Bucketed" not in shown.stdout
    refused = ddp_course("solution", "3", "3")
    assert refused.returncode == 2 and "not yet passed: bucketed; " in refused.stderr


def test_reset_brings_back_the_exercise_and_keeps_a_backup(course):
    path = mine("03")
    original = path.read_text()
    changed = original.replace("raise NotImplementedError", "pass")
    path.write_text(changed)
    assert ddp_course("reset", "03").returncode == 0
    assert path.read_text() == original
    [backup] = (course / "runs" / "backups").iterdir()
    assert backup.read_text() == changed
    path.unlink()
    assert ddp_course("reset", "3").returncode == 0 and path.read_text() == original


@pytest.mark.parametrize(
    "arguments, line",
    [
        (["check", "77"], "there is no exercise 77: choose one of"),
        (
            ["hint", "03", "buckets"],
            "exercise 03 has no question buckets: choose one of average_gradients",
        ),
        (["solution", "x"], "there is no exercise 0x"),
        (["reset", "77"], "there is no exercise 77"),
        (["grade", "nowhere"], "there is nothing at nowhere"),
        (["grade", "ddp_course"], "ddp_course is a link: give the folder"),
    ],
)
def test_what_cannot_be_done_gives_one_line(arguments, line, course):
    done = ddp_course(*arguments)
    assert done.returncode == 2 and done.stderr.startswith(f"ddp-course: {line}"), (
        done.stderr
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"cells": 3}',
        "[]",
        '{"nbformat": 4, "cells": [{"cell_type": "code"}]}',
    ],
)
def test_a_damaged_notebook_or_progress_file_gives_one_line(text, course):
    mine("03").write_text(text)
    done = ddp_course("check", "03")
    assert (
        done.returncode == 2
        and "is damaged: ddp-course reset 03 brings a fresh one" in done.stderr
    )
    assert done.stderr.count("\n") == 1
    if text != "{}":
        (course / "runs").mkdir(exist_ok=True)
        (course / "runs" / "progress.json").write_text(text or "x")
        done = ddp_course("progress")
        assert done.returncode == 2 and "is damaged: delete it" in done.stderr


def test_a_check_of_all_tells_of_a_damaged_notebook_and_goes_on(course, monkeypatch):
    chosen = {number: mine(number) for number in ("03", "04")}
    monkeypatch.setattr(exercises, "learners", lambda _: chosen)
    mine("03").write_text("{")
    done = ddp_course("check")
    assert done.returncode == 2 and all(
        f"04 {task.name}: " in done.stdout for task in solution_tasks("04")
    )
    assert done.stderr.startswith("ddp-course: ") and done.stderr.count("\n") == 1
    assert "is damaged: ddp-course reset 03 brings a fresh one" in done.stderr


@pytest.mark.parametrize(
    "text, line",
    [
        ("{", "is not a notebook"),
        ('{\n<<<<<<< HEAD\n"a": 1\n=======\n', "has the marks of a merge conflict"),
    ],
)
def test_only_an_exercise_of_ones_own_is_said_to_need_a_reset(text, line, course):
    path = course / "03_theirs.ipynb"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        exercises.read(path)
    assert str(error.value) == f"{path} {line}"
    path = mine("03")
    path.write_text(text)
    with pytest.raises(UsageError, match="ddp-course reset 03 brings a fresh one"):
        exercises.read(path)


def stored_without_ids(path, minor, in_metadata):
    """Take the cells' ids out of a stored notebook, or put them into the metadata."""
    notebook = json.loads(path.read_text())
    notebook["nbformat_minor"] = minor
    for cell in notebook["cells"]:
        name = cell.pop("id")
        if in_metadata:
            cell["metadata"]["id"] = name
    path.write_text(json.dumps(notebook))


def written_in(path):
    """What a notebook has for the questions of exercise 03: {question: source}."""
    given = solution_tasks("03")
    found = exercises.answer_cells(handed_in.read(path), given)
    names = {task.cell.id: task.name for task in given}
    return {names[key]: written.cell for key, written in found.items()}


@pytest.mark.parametrize("minor", [4, 5])
@pytest.mark.parametrize("in_metadata", [False, True])
def test_answers_are_found_in_notebooks_without_cell_ids(minor, in_metadata, course):
    solve(course, "03")
    path = mine("03")
    expected = written_in(path)
    assert list(expected) == [task.name for task in solution_tasks("03")]
    stored_without_ids(path, minor, in_metadata)
    assert written_in(path) == expected
    notebook = json.loads(path.read_text())
    notebook["cells"] = [
        cell
        for cell in notebook["cells"]
        if "".join(cell["source"]) != expected["overlapped"]
    ]
    path.write_text(json.dumps(notebook))
    assert set(written_in(path)) == set(expected) - {"overlapped"}


def edited(path, change):
    """Change a stored notebook's list of cells."""
    notebook = json.loads(path.read_text())
    change(notebook["cells"])
    path.write_text(json.dumps(notebook))


def verdict_on(path, name):
    """The verdict of `ddp-course check` on a question of exercise 03."""
    [task] = [task for task in solution_tasks("03") if task.name == name]
    written = exercises.answer_cells(handed_in.read(path), solution_tasks("03"))
    check = exercises.question("03", task)
    return check.judge(*exercises.answers(task, written[task.cell.id]))


def index_of(cells, name):
    return [cell.get("id") for cell in cells].index(name)


def test_what_a_learner_spreads_over_several_cells_counts_as_in_the_notebook(course):
    solve(course, "03")

    def spread(cells):
        place = index_of(cells, "ex03-average-gradients")
        answer = "".join(cells[place]["source"])
        renamed = answer.replace("def average_gradients(", "def mine(")
        cells[place]["source"] = "def average_gradients(module):\n    mine(module)"
        new = {"cell_type": "code", "metadata": {}, "outputs": []}
        cells.insert(place + 1, new | {"source": renamed, "id": "x"})
        cells.insert(place, new | {"source": "unfinished = (", "id": "y"})

    edited(mine("03"), spread)
    assert str(verdict_on(mine("03"), "average_gradients")) == (
        "03 average_gradients: passed"
    )


def test_of_two_cells_with_one_id_the_later_one_counts_as_in_the_notebook(course):
    stub = json.loads(mine("03").read_text())["cells"]
    solve(course, "03")

    def doubled(cells):
        place = index_of(cells, "ex03-average-gradients")
        cells.insert(place, stub[index_of(stub, "ex03-average-gradients")])

    edited(mine("03"), doubled)
    assert verdict_on(mine("03"), "average_gradients").status == "passed"


def test_an_answer_in_a_new_cell_in_place_of_the_given_one_is_found(course):
    solve(course, "03")

    def replaced(cells):
        cells[index_of(cells, "ex03-overlapped")]["id"] = "another"
        del cells[index_of(cells, "another")]["metadata"]["tags"]

    edited(mine("03"), replaced)
    assert "class Overlapped" in written_in(mine("03"))["overlapped"]


def test_a_byte_order_mark_and_cells_without_metadata_do_no_harm(course):
    solve(course, "03")
    path = mine("03")
    expected = written_in(path)

    def without_metadata(cells):
        for cell in cells:
            del cell["metadata"]

    edited(path, without_metadata)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert written_in(path) == expected


def test_a_check_finds_answers_without_cell_ids(course):
    stored_without_ids(mine("03"), minor=4, in_metadata=False)
    done = ddp_course("check", "03")
    assert done.returncode == 1 and "its cell is not in" not in done.stdout


def test_progress_with_impossible_hints_or_a_folder_in_its_place(course):
    path = course / "runs" / "progress.json"
    path.parent.mkdir(exist_ok=True)
    entry = '{"03 bucketed": {"status": "failed", "passed": false, "hints": %s}}'
    path.write_text(entry % "-3")
    assert "hint 1 of 3" in ddp_course("hint", "03", "bucketed").stdout
    path.write_text(entry % "1e999")
    done = ddp_course("progress")
    assert (
        done.returncode == 2
        and "is damaged: delete it" in done.stderr
        and done.stderr.count("\n") == 1
    )
    path.unlink()
    path.mkdir()
    done = ddp_course("progress")
    assert (
        done.returncode == 2
        and "is damaged: delete it" in done.stderr
        and done.stderr.count("\n") == 1
    )


def test_reset_overwrites_nothing_that_it_cannot_keep(course):
    path = mine("03")
    path.write_text("mine")
    (course / "runs").mkdir(exist_ok=True)
    (course / "runs" / "backups").write_text("a file in the way")
    done = ddp_course("reset", "03")
    assert done.returncode == 2 and done.stderr.startswith(
        "ddp-course: cannot keep yours in "
    )
    assert done.stderr.endswith(": File exists\n") and done.stderr.count("\n") == 1
    assert path.read_text() == "mine"


def test_what_has_passed_stays_passed(course):
    progress.record(Verdict("03 bucketed", "passed", {}))
    progress.record(Verdict("03 bucketed", "failed", {}))
    stored = json.loads((course / "runs" / "progress.json").read_text())
    assert stored == {"03 bucketed": {"status": "failed", "passed": True, "hints": 0}}


RECORD_FORTY = """
import sys
from ddp_course.judge import progress
from ddp_course.judge.verdict import Verdict

for number in range(40):
    progress.record(Verdict(f"{sys.argv[1]} {number}", "passed", {}))
"""


def test_two_processes_that_record_at_once_lose_no_verdict(course):
    command = [sys.executable, "-c", RECORD_FORTY]
    both = [subprocess.Popen([*command, name], cwd=course) for name in ("one", "other")]
    assert [process.wait(60) for process in both] == [0, 0]
    assert len(progress.load()) == 80


# ---- programs with bugs, whose loss falls all the same, as their texts say ----


def given_code(number, name):
    """The names that a question's cell defines, as it is given."""
    tasks = exercises.tasks(exercises.read(exercises.notebooks("exercises")[number]))
    [task] = [task for task in tasks if task.name == name]
    lines = task.preamble.split("\n")
    code = "\n".join(line for line in lines if not line.startswith("%"))
    return f"{code}\n{task.cell.source}"


def losses_of_blocks(code):
    names = {}
    exec(code, names)
    with process_group() as (rank, _):
        torch.manual_seed(0)
        network = GPT(vocabulary=16, context=8, layers=2, heads=4, width=16)
        tokens, targets = torch.randint(16, (2, 4, 8))
        parts = [names["TensorParallelBlock"](b, None) for b in network.blocks]
        network.blocks = nn.ModuleList(parts)
        optimizer, losses = torch.optim.SGD(network.parameters(), lr=0.1), []
        for _ in range(20):
            optimizer.zero_grad()
            losses.append(network(tokens, targets))
            losses[-1].backward()
            optimizer.step()
        return [loss.item() for loss in losses]


def losses_of_a_pipeline(code):
    names = {}
    exec(code, names)
    with process_group() as (rank, ranks):
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(ranks)]
        stage, losses = stages[rank].double(), []
        batch = [part.chunk(4) for part in torch.randn(2, 16, 8).double()]
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            losses.append(names["pipeline_step"](stage, *batch))
            optimizer.step()
        return losses


def losses_of_a_shared_text(code):
    names = {}
    exec(code, names)
    with process_group():
        torch.manual_seed(0)
        network = nn.Module()
        network.embedding = nn.Embedding(16, 8)
        for name, outputs in {"query": 8, "key": 8, "value": 8, "output": 16}.items():
            setattr(network, name, nn.Linear(8, outputs))
        text, targets = torch.randint(16, (2, 24))
        return names["train_shared"](network.double(), text, targets, 20, 0.1)


@pytest.mark.parametrize(
    "number, name, losses_of",
    [
        ("17", "tensor_parallel_block", losses_of_blocks),
        ("18", "pipeline_step", losses_of_a_pipeline),
        ("19", "train_shared", losses_of_a_shared_text),
    ],
    ids=["blocks", "pipeline", "shared text"],
)
def test_the_loss_of_a_program_with_bugs_falls_as_its_text_says(
    number, name, losses_of
):
    *_, losses = launch(losses_of, given_code(number, name), nproc=2)
    assert losses[-1] < losses[0] - 0.02
