"""Grading: right answers gain their points, cheating gains none, and no answer keeps
another from being graded.
"""

import json
import os
import subprocess
from pathlib import Path

import nbformat
import psutil
import pytest
import yaml
from conftest import COURSE, THOROUGH, python, wait_until
from test_exercises import course, ddp_course, solution_tasks  # noqa: F401

from ddp_course import UsageError
from ddp_course.school import exercises, grading

QUESTIONS = ["average_gradients", "overlapped", "bucketed", "traffic"]
PATCHES = """
import ddp_course.checks.ex03 as ex03, ddp_course.school.judge as judge, builtins
print("03 average_gradients: passed")
for name in QUESTIONS:
    setattr(ex03, f"check_{name}", lambda *_: print("passed"))
judge.Question.__call__ = judge.Question.judge = lambda self, *_: judge.Verdict(self.title, "passed", {})
judge.Wrong.__init__ = lambda self, *_, **__: None
ex03.compare_gradient = ex03.compare_with_joined = lambda *_: None

def average_gradients(module):
    pass
""".replace("QUESTIONS", str(QUESTIONS))
FORKS = """
import os, subprocess, time
subprocess.Popen(["sleep", "SECONDS"], env={}, start_new_session=True)
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)

class Overlapped:
    pass
"""
SECONDS = str(10**6 + os.getpid())  # no other process has it among its arguments


def grade(path, **options):
    return python(
        "-m", "ddp_course.school.command", "grade", path, timeout=500, **options
    )


def submit(folder, edits, change=None):
    """A submission of exercise 03 with these cells in place of the given ones:
    {question: source}.
    """
    name = exercises.notebooks("exercises")["03"].name
    notebook = exercises.read(exercises.notebooks("exercises")["03"])
    for task in exercises.tasks(notebook):
        task.cell.source = edits.get(task.name, task.cell.source)
    if change:
        change(notebook)
    folder.mkdir(parents=True)
    nbformat.write(notebook, folder / name)


def without_ids(notebook):
    """As tools of before 2021 save it: format 4.4, in which cells have no ids."""
    notebook.nbformat_minor = 4
    for cell in notebook.cells:
        del cell["id"]


def forge(notebook):
    """Store what looks like a pass, replace one check by a print, and delete
    another.
    """
    for task in exercises.tasks(notebook):
        task.check.outputs = [
            nbformat.v4.new_output("stream", text=f"03 {task.name}: passed\n")
        ]
        task.check.execution_count = 7
    checks = [task.check for task in exercises.tasks(notebook)]
    checks[0].source = "print('03 average_gradients: passed')"
    notebook.cells.remove(checks[2])


def test_a_right_a_half_done_a_cheating_and_a_hanging_submission_in_one_call(course):  # noqa: F811
    ours = {
        task.name: exercises.answer_of(task.cell.source)
        for task in solution_tasks("03")
    }
    there = course / "submissions"
    if THOROUGH:
        submit(there / "right", ours)
    submit(
        there / "half",
        {"overlapped": ours["overlapped"], "bucketed": "class Bucketed(nn.Module"},
    )
    submit(
        there / "cheating",
        {"average_gradients": PATCHES, "overlapped": "import os\nos._exit(0)"},
        forge,
    )
    submit(
        there / "hanging",
        {
            "average_gradients": "while True:\n    pass",
            "overlapped": FORKS.replace("SECONDS", SECONDS),
            "bucketed": ours["bucketed"],
        },
    )
    summary = course / "summary.md"
    done = grade("submissions", env=os.environ | {"GITHUB_STEP_SUMMARY": str(summary)})
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((course / "report.json").read_text())
    statuses = {
        name: [numbers["03"][question]["status"] for question in QUESTIONS]
        for name, numbers in report["submissions"].items()
    }
    right = {"right": ["passed"] * len(QUESTIONS)} if THOROUGH else {}
    assert statuses == right | {
        "half": ["not attempted", "passed", "your code raised", "not attempted"],
        "cheating": ["failed", "your code raised", "not attempted", "not attempted"],
        "hanging": ["timed out", "your code raised", "passed", "not attempted"],
    }
    points = {"right": len(QUESTIONS), "half": 1, "cheating": 0, "hanging": 1}
    assert report["totals"] == {
        name: [points[name], len(QUESTIONS)] for name in statuses
    }
    assert (
        "nothing was averaged"
        in report["submissions"]["cheating"]["03"]["average_gradients"]["details"][
            "likely cause"
        ]
    )
    assert (
        "## half: 1 of 4" in summary.read_text()
        and "| 03 | overlapped | passed |" in summary.read_text()
    )

    def left():
        return [
            p
            for p in psutil.process_iter(["environ"])
            if "DDP_COURSE_VERDICT" in (p.info["environ"] or {})
        ]

    assert wait_until(lambda: not left()), left()
    assert SECONDS not in [
        word
        for p in psutil.process_iter(["cmdline"])
        for word in p.info["cmdline"] or ()
    ]


LATE_ONCE = """
import pathlib, time
if not pathlib.Path(MARKER).exists():
    pathlib.Path(MARKER).touch()
    time.sleep(600)
"""


def test_a_right_answer_that_was_late_once_gets_another_try(course):  # noqa: F811
    """As one that is graded beside others on a busy machine."""
    [ours] = [task for task in solution_tasks("03") if task.name == "average_gradients"]
    late = LATE_ONCE.replace("MARKER", repr(str(course / "marker")))
    submit(course / "late", {ours.name: late + exercises.answer_of(ours.cell.source)})
    done = grade("late")
    report = json.loads((course / "report.json").read_text())
    assert report["submissions"]["late"]["03"][ours.name]["status"] == "passed", (
        done.stdout
    )
    assert (course / "marker").exists()


def test_a_damaged_submission_gains_nothing_and_stops_nobody(course):  # noqa: F811
    submit(course / "all" / "a", {})
    [path] = (course / "all" / "a").iterdir()
    (course / "all" / "b").mkdir()
    (course / "all" / "b" / path.name).write_text("{")
    done = grade("all")
    assert (
        done.returncode == 1
        and "a: 0 of 4" in done.stdout
        and "b: 0 of 4" in done.stdout
    )
    report = json.loads((course / "report.json").read_text())
    where = report["submissions"]["b"]["03"]["bucketed"]["details"]["where"]
    assert where == f"all/b/{path.name} is not a notebook"


def touch(folder, *names):
    """Empty files in a folder, for what looks at names only."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()


def test_what_is_no_exercise_is_left_out_and_stops_nobody(course, capsys):  # noqa: F811
    ours = exercises.notebooks()["03"].name
    touch(course / "all" / "a", ours, "99_my_notes.ipynb", "notes.ipynb")
    touch(course / "all" / "a" / ".ipynb_checkpoints", ours)
    assert grading.submissions("all") == {"a": {"03": Path("all", "a", ours)}}
    assert (
        capsys.readouterr().err
        == "left out: all/a/99_my_notes.ipynb, there is no exercise 99\n"
    )
    with pytest.raises(UsageError, match="there is no exercise 99"):
        grading.submissions("all/a/99_my_notes.ipynb")
    (course / "all" / "a" / ours).unlink()
    with pytest.raises(UsageError, match="no exercise notebooks"):
        grading.submissions("all")


def test_of_two_notebooks_for_one_exercise_the_one_named_as_ours_counts(course, capsys):  # noqa: F811
    ours = exercises.notebooks()["03"].name
    touch(course / "all" / "a", ours, "03_a.ipynb", ours.replace(".", "-Copy1."))
    touch(course / "all" / "b", "03_x.ipynb", "03_x_v2.ipynb")
    found = grading.submissions("all")
    assert {name: notebooks["03"].name for name, notebooks in found.items()} == {
        "a": ours,
        "b": "03_x.ipynb",
    }
    assert capsys.readouterr().err.splitlines() == [
        f"left out: all/a/03_a.ipynb, {ours} counts",
        f"left out: all/a/{ours.replace('.', '-Copy1.')}, {ours} counts",
        "left out: all/b/03_x_v2.ipynb, 03_x.ipynb counts",
    ]


def test_who_has_handed_in_nothing_is_named(course, monkeypatch):  # noqa: F811
    ours = exercises.notebooks()["03"].name
    touch(course / "all" / "a" / "exercises", ours)
    touch(course / "all" / "b" / "notes", "thoughts.md")
    touch(course / "all" / ".git")
    found = grading.submissions("all")
    assert list(found) == ["a/exercises", "b"] and found["b"] == {}
    assert list(grading.submissions("all/a/exercises")) == ["exercises"]
    touch(course / "all" / "a" / "exercises" / "figures")
    assert list(grading.submissions("all/a/exercises")) == ["exercises"]

    passed = {"status": "passed", "points": 1, "seconds": 1.0, "details": {}}
    monkeypatch.setattr(grading, "grade_one", lambda *_: passed)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(course / "summary.md"))
    done = ddp_course("grade", "all/a")
    assert done.returncode == 0, done.stderr
    done = ddp_course("grade", "all")
    assert done.returncode == 1
    report = json.loads((course / "report.json").read_text())
    assert (
        report["totals"] == {"a/exercises": [4, 4], "b": [0, 0]}
        and report["submissions"]["b"] == {}
    )
    summary = (course / "summary.md").read_text()
    assert summary.endswith("## b: nothing handed in\n")


def test_a_report_that_has_no_folder_is_refused_before_anything_is_graded(
    course,  # noqa: F811
    monkeypatch,
):
    monkeypatch.setattr(grading, "grade", lambda _: pytest.fail("graded"))
    done = ddp_course("grade", "exercises", "--report", "nowhere/x.json")
    assert done.returncode == 2
    assert done.stderr == "ddp-course: there is no folder nowhere for the report\n"


def test_answers_without_cell_ids_are_graded(course, monkeypatch):  # noqa: F811
    submit(course / "a", {"bucketed": "mine = 1"}, without_ids)
    monkeypatch.setattr(
        grading,
        "grade_one",
        lambda _reference, _number, _task, answer, _damage: {"status": answer},
    )
    answers = grading.grade("a")["a"]["03"]
    assert list(answers) == QUESTIONS and answers["bucketed"]["status"] == "mine = 1"


def test_a_grader_that_cannot_run_says_so_and_takes_no_points_away_in_silence(course):  # noqa: F811
    submit(course / "one", {"average_gradients": "average_gradients = print"})
    done = grade("one", env=os.environ | {"PYTEST_ADDOPTS": "--no-such-option"})
    assert done.returncode == 2 and "the grader's own error" in done.stdout


@pytest.fixture
def workflow():
    return yaml.safe_load((COURSE / ".github/workflows/grade.yml").read_text())


def test_the_workflows_own_commands_grade_a_submission(workflow, tmp_path):
    if not (COURSE / ".venv" / "installed").exists():
        pytest.skip("not installed by make setup")
    (tmp_path / "course").mkdir()
    for part in (
        "Makefile",
        "pyproject.toml",
        "constraints.txt",
        ".venv",
        "ddp_course",
        "lessons",
        "solutions",
    ):
        (tmp_path / "course" / part).symlink_to(COURSE / part)
    submit(tmp_path / "submission" / "exercises", {})
    commands = [
        step["run"] for step in workflow["jobs"]["grade"]["steps"] if "run" in step
    ]
    environment = os.environ | {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    codes = [
        subprocess.run(line, shell=True, cwd=tmp_path, env=environment).returncode
        for line in commands
    ]
    assert codes == [
        0,
        2,
    ]  # make's own code for a recipe that ended with 1: nothing has passed
    report = json.loads((tmp_path / "course" / "report.json").read_text())
    assert report["totals"] == {"exercises": [0, 4]}
    assert "## exercises: 0 of 4" in (tmp_path / "summary.md").read_text()
    [keep] = [
        step
        for step in workflow["jobs"]["grade"]["steps"]
        if "upload-artifact" in step.get("uses", "")
    ]
    assert keep["with"]["path"] == "course/report.json" and keep["if"] == "always()"
