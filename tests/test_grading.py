"""Grading: right answers gain their points, cheating gains none, and no answer keeps
another from being graded.
"""

import dataclasses
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import attacks
import nbformat
import psutil
import pytest
import torch
import yaml
from conftest import COURSE, THOROUGH, descendants, python, wait_until
from test_exercises import course, ddp_course, solution_tasks  # noqa: F401

from ddp_course import UsageError
from ddp_course.checks.ex09 import saving
from ddp_course.cli import doctor, exercises
from ddp_course.cli.grading import handed_in, one_question, rules, run
from ddp_course.cli.grading.jobs import jobs_in
from ddp_course.judge import cleaning, sandbox, system_calls
from ddp_course.judge.answer import Source
from ddp_course.ranks.in_each_rank import MOST_OPEN
from ddp_course.ranks.launch import RankError

QUESTIONS = "average_gradients overlapped bucketed traffic train_by_hand".split()
PATCHES = """
def average_gradients(module):
    import ddp_course.checks.ex03 as ex03
    import ddp_course.judge.question as question, ddp_course.judge.verdict as verdict
    print("03 average_gradients: passed")
    for name in QUESTIONS:
        setattr(ex03, f"check_{name}", lambda *_: print("passed"))
    question.Question.__call__ = lambda self, *_: print("passed")
    question.Question.judge = lambda self, *_: verdict.Verdict(self.title, "passed", {})
    verdict.Wrong.__init__ = lambda self, *_, **__: None
    ex03.compare_gradient = ex03.compare_with_joined = lambda *_: None
""".replace("QUESTIONS", str(QUESTIONS))
FORKS = """
class Overlapped:
    import os, subprocess, time
    subprocess.Popen(["sleep", "SECONDS"], env={}, start_new_session=True)
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
"""
SECONDS = str(10**6 + os.getpid())  # no other process has it among its arguments


needs_bwrap = pytest.mark.skipif(sandbox.why_not() is not None, reason=str(sandbox.why_not()))  # fmt: skip


def grade(path, *flags, sandboxed=False, **options):
    flags = [*flags] if sandboxed else ["--without-a-sandbox", *flags]
    command = ["-m", "ddp_course.cli.command", "grade", path, *flags]
    return python(*command, timeout=900, **options)


def results(folder, submission="a", number="03"):
    """{question: result} of the report in a folder."""
    report = json.loads((folder / "report.json").read_text())
    return report["submissions"][submission][number]


def submit(folder, edits, change=None, number="03"):
    """A submission of an exercise with these cells in place of the given ones:
    {question: source}.
    """
    name = exercises.notebooks("exercises")[number].name
    notebook = exercises.read(exercises.notebooks("exercises")[number])
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


@needs_bwrap
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
        {
            "average_gradients": PATCHES,
            "overlapped": "class Overlapped:\n    import os\n    os._exit(0)",
        },
        forge,
    )
    submit(
        there / "hanging",
        {
            "average_gradients": attacks.HANGS,
            "overlapped": FORKS.replace("SECONDS", SECONDS),
            "bucketed": ours["bucketed"],
        },
    )
    summary = course / "summary.md"
    done = grade(
        "submissions",
        sandboxed=True,
        env=os.environ | {"GITHUB_STEP_SUMMARY": str(summary)},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((course / "report.json").read_text())
    statuses = {
        name: [numbers["03"][question]["status"] for question in QUESTIONS]
        for name, numbers in report["submissions"].items()
    }
    right = {"right": ["passed"] * len(QUESTIONS)} if THOROUGH else {}
    none = "not attempted"
    assert statuses == right | {
        "half": [none, "passed", "your code raised", none, none],
        "cheating": ["failed", "your code raised", none, none, none],
        "hanging": ["timed out", "your code raised", "passed", none, none],
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
        f"## half: 1 of {len(QUESTIONS)}" in summary.read_text()
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

def average_gradients(module):
    if not pathlib.Path(MARKER).exists():
        pathlib.Path(MARKER).touch()
        time.sleep(600)
    ours(module)
"""


def test_a_right_answer_that_was_late_once_gets_another_try(course):  # noqa: F811
    """As one that is graded beside others on a busy machine."""
    [ours] = [task for task in solution_tasks("03") if task.name == "average_gradients"]
    late = LATE_ONCE.replace("MARKER", repr(str(course / "marker")))
    answer = exercises.answer_of(ours.cell.source)
    answer = answer.replace("def average_gradients(", "def ours(")
    submit(course / "late", {ours.name: late + answer})
    done = grade("late")
    assert results(course, "late")[ours.name]["status"] == "passed", done.stdout
    assert (course / "marker").exists()


def test_a_damaged_submission_gains_nothing_and_stops_nobody(course):  # noqa: F811
    submit(course / "all" / "a", {})
    [path] = (course / "all" / "a").iterdir()
    (course / "all" / "b").mkdir()
    (course / "all" / "b" / path.name).write_text("{")
    done = grade("all")
    assert (
        done.returncode == 1
        and f"a: 0 of {len(QUESTIONS)}" in done.stdout
        and f"b: 0 of {len(QUESTIONS)}" in done.stdout
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
    assert handed_in.submissions("all") == {"a": {"03": Path("all", "a", ours)}}
    assert (
        capsys.readouterr().err
        == "left out: all/a/99_my_notes.ipynb, there is no exercise 99\n"
    )
    with pytest.raises(UsageError, match="there is no exercise 99"):
        handed_in.submissions("all/a/99_my_notes.ipynb")
    (course / "all" / "a" / ours).unlink()
    with pytest.raises(UsageError, match="no exercise notebooks"):
        handed_in.submissions("all")


def test_of_two_notebooks_for_one_exercise_the_one_named_as_ours_counts(course, capsys):  # noqa: F811
    ours = exercises.notebooks()["03"].name
    touch(course / "all" / "a", ours, "03_a.ipynb", ours.replace(".", "-Copy1."))
    touch(course / "all" / "b", "03_x.ipynb", "03_x_v2.ipynb")
    found = handed_in.submissions("all")
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
    found = handed_in.submissions("all")
    assert list(found) == ["a/exercises", "b"] and found["b"] == {}
    assert list(handed_in.submissions("all/a/exercises")) == ["exercises"]
    touch(course / "all" / "a" / "exercises" / "figures")
    assert list(handed_in.submissions("all/a/exercises")) == ["exercises"]

    passed = {"status": "passed", "seconds": 1.0, "details": {}}
    monkeypatch.setattr(run, "grade_one", lambda *_, **__: passed)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(course / "summary.md"))
    done = ddp_course("grade", "--without-a-sandbox", "all/a")
    assert done.returncode == 0, done.stderr
    done = ddp_course("grade", "--without-a-sandbox", "all")
    assert done.returncode == 1
    report = json.loads((course / "report.json").read_text())
    assert (
        report["totals"] == {"a/exercises": [len(QUESTIONS)] * 2, "b": [0, 0]}
        and report["submissions"]["b"] == {}
    )
    summary = (course / "summary.md").read_text()
    assert summary.endswith("## b: nothing handed in\n")


def test_a_report_that_has_no_folder_is_refused_before_anything_is_graded(
    course,  # noqa: F811
    monkeypatch,
):
    monkeypatch.setattr(run, "grade", lambda *_: pytest.fail("graded"))
    done = ddp_course("grade", "exercises", "--report", "nowhere/x.json")
    assert done.returncode == 2
    assert done.stderr == "ddp-course: there is no folder nowhere for x.json\n"


def test_a_report_is_in_the_order_of_the_questions_whichever_ends_first(
    course,  # noqa: F811
    monkeypatch,
):
    submit(course / "a", {}, without_ids)

    def last_first(job, *_, **__):
        time.sleep(0.5 - 0.1 * QUESTIONS.index(job.task.name))
        return {"status": job.written.cell}

    monkeypatch.setattr(run, "grade_one", last_first)
    *_, report = run.grade(jobs_in("a"), rules.Rules(workers=5))
    assert list(report["submissions"]["a"]["03"]) == QUESTIONS


def test_answers_without_cell_ids_are_graded(course, monkeypatch):  # noqa: F811
    submit(course / "a", {"bucketed": "mine = 1"}, without_ids)
    monkeypatch.setattr(
        run,
        "grade_one",
        lambda job, *_, **__: {"status": job.written.cell},
    )
    *_, report = run.grade(jobs_in("a"), rules.Rules())
    answers = report["submissions"]["a"]["03"]
    assert list(answers) == QUESTIONS and answers["bucketed"]["status"] == "mine = 1"


def test_a_grader_that_cannot_run_says_so_and_takes_no_points_away_in_silence(course):  # noqa: F811
    submit(course / "one", {"average_gradients": "average_gradients = print"})
    done = grade("one", env=os.environ | {"PYTEST_ADDOPTS": "--no-such-option"})
    assert done.returncode == 2 and "the grader's own error" in done.stdout


# ---- strangers ----


@needs_bwrap
def test_an_answer_reaches_nothing_and_ends_nobody(course):  # noqa: F811
    """Not the judge, the course, the instructor's home, other submissions, the network;
    one that kills all it can, and one that takes all memory, cost their own question.
    """
    probe = attacks.PROBE.replace("SUBMISSIONS", str(course / "all"))
    edits = {
        "average_gradients": probe.replace("HOME", str(Path.home())),
        "overlapped": attacks.KILLS_ALL,
        "bucketed": attacks.TAKES_MEMORY,
    }
    submit(course / "all" / "a", edits)
    before = set(Path("/dev/shm").iterdir())
    line = ["all", "--patience", "5"]  # a busy machine is no excuse
    done = grade(*line, sandboxed=True, env=os.environ | {"SECRET": "1"})
    assert done.returncode == 1, done.stdout + done.stderr
    found = results(course)
    assert [found[name]["status"] for name in edits] == ["your code raised"] * 3
    where = [found[name]["details"]["where"] for name in edits]
    assert "ValueError: reached: []" in where[0]
    assert "ended the process" in where[1] or "was killed by" in where[1]
    assert "GB of memory" in where[2] or "MemoryError" in where[2]
    assert set(Path("/dev/shm").iterdir()) <= before


@needs_bwrap
def test_a_forged_result_costs_its_own_question_only(course):  # noqa: F811
    """One that the check cannot read is no error of the grader's."""
    submit(course / "all" / "a", {"average_gradients": attacks.FORGES_ITS_RESULT})
    done = grade("all", sandboxed=True)
    assert done.returncode == 1, done.stdout + done.stderr
    found = results(course)["average_gradients"]
    assert found["status"] == "your code raised"
    assert "cannot make sense" in found["details"]["likely cause"]


@needs_bwrap
def test_an_answer_whose_check_makes_machines_is_graded_in_the_sandbox(course):  # noqa: F811
    """Exercise 14, question 2: its ranks meet on three machines."""
    ours = {
        task.name: exercises.answer_of(task.cell.source)
        for task in solution_tasks("14")
        if task.name == "meeting_place"
    }
    submit(course / "all" / "a", ours, number="14")
    done = grade("all", "--patience", "5", sandboxed=True)
    assert done.returncode == 1  # the other questions were not attempted
    found = results(course, number="14")["meeting_place"]
    assert found["status"] == "passed", found


@pytest.mark.skipif(not THOROUGH, reason="takes minutes: make thorough")
@needs_bwrap
def test_the_courses_own_answers_pass_in_the_sandbox(course):  # noqa: F811
    done = grade("solutions", "--patience", "5", sandboxed=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not THOROUGH, reason="takes minutes: make thorough")
@needs_bwrap
def test_thirty_submissions_in_one_call(course):  # noqa: F811
    """Right, half done, broken, hostile and hanging ones."""
    ours = {
        task.name: exercises.answer_of(task.cell.source)
        for task in solution_tasks("03")
    }
    average = ours["average_gradients"]
    there, expected = course / "all", {}
    for number in range(6):
        submit(
            there / f"right{number}", ours if number == 0 else {QUESTIONS[0]: average}
        )
        expected[f"right{number}"] = len(QUESTIONS) if number == 0 else 1
    for number in range(6):
        submit(there / f"half{number}", {"overlapped": ours["overlapped"]})
        expected[f"half{number}"] = 1
    for number, source in enumerate(attacks.HOSTILE):
        submit(there / f"hostile{number}", {QUESTIONS[0]: source})
        expected[f"hostile{number}"] = 0
    for number in range(3):
        submit(there / f"hanging{number}", {QUESTIONS[0]: attacks.HANGS})
        expected[f"hanging{number}"] = 0
    for name, make in UNREADABLE.items():
        (there / name).mkdir()
        make(there / name / exercises.notebooks()["03"].name)
        expected[name] = 0
    assert len(expected) >= 30
    begun = set(Path(tempfile.gettempdir()).glob("ddp-course-*"))
    done = grade("all", "--seed", "7", "-j", "2", sandboxed=True)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr
    report = json.loads((course / "report.json").read_text())
    points = {name: points for name, (points, _) in report["totals"].items()}
    assert points == expected
    assert report["complete"] and report["seed"] == 7
    statuses = {r["status"] for n in expected for r in results(course, n).values()}
    assert "the grader's own error" not in statuses
    assert set(Path(tempfile.gettempdir()).glob("ddp-course-*")) <= begun


def test_without_bubblewrap_only_ones_own_answers_are_graded(course, monkeypatch):  # noqa: F811
    monkeypatch.setattr(sandbox, "why_not", lambda: "bubblewrap is not installed: X")
    submit(course / "all" / "a", {})
    done = ddp_course("grade", "all")
    assert done.returncode == 2 and done.stderr == (
        "ddp-course: other people's answers run in a sandbox, but bubblewrap is not "
        "installed: X. --without-a-sandbox runs them with your rights\n"
    )
    assert not rules.must_be_shut_in(Path("exercises"), without_a_sandbox=False)
    finding = doctor.grading()
    assert finding.found.endswith("bubblewrap is not installed: X") and not finding.fix


# ---- read as data ----


def deep(path):
    path.write_text("[" * 10**6 + "]" * 10**6)


def huge(path):
    with path.open("wb") as file:
        file.truncate(handed_in.LARGEST + 1)


UNREADABLE = {
    "link": lambda path: path.symlink_to(exercises.notebooks("solutions")["03"]),
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "deep": deep,
    "huge": huge,
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "missing": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_is_no_file_of_a_notebook_is_told_in_one_line(kind, course):  # noqa: F811
    name = exercises.notebooks()["03"].name
    (course / "all" / "a").mkdir(parents=True)
    UNREADABLE[kind](course / "all" / "a" / name)
    submit(course / "all" / "b", {})
    jobs = jobs_in("all")
    assert all(job.written for job in jobs["b"])
    for job in jobs["a"]:
        assert job.written is None and job.damage.startswith(f"all/a/{name} is not ")
        assert "\n" not in job.damage


def test_a_notebook_of_thousands_of_cells_is_not_read(course, quick):  # noqa: F811
    submit(course / "all" / "a", {"bucketed": "right"})
    [path] = (course / "all" / "a").glob("*.ipynb")
    notebook = nbformat.read(path, 4)
    notebook.cells += [nbformat.v4.new_code_cell("1") for _ in range(2000)]
    nbformat.write(notebook, path)
    [job, *_] = jobs_in("all")["a"]
    assert "a is not read: it has more than 2000 cells" in job.damage.replace(
        path.name, "a"
    )


def test_the_answers_that_are_graded_at_once_fit_into_the_machine(
    course,  # noqa: F811
    quick,
    monkeypatch,
):
    monkeypatch.setattr(rules, "machine_memory", lambda: 16 * 10**9)
    fits = rules.workers_that_fit
    assert [fits(8, 4.0), fits(2, 4.0), fits(8, 1.0), fits(8, 30.0)] == [3, 2, 7, 1]
    submit(course / "all" / "a", {"bucketed": "right"})
    used = []
    grade_all = run.grade

    def noting(jobs, its, *rest, **more):
        used.append(its)
        return grade_all(jobs, its, *rest, **more)

    monkeypatch.setattr(run, "grade", noting)
    done = ddp_course("grade", "--without-a-sandbox", "all", "-j", "8")
    assert "grading 3 at once: 8 with 4 GB each are more than" in done.stderr
    assert used[0].workers == 3
    everything = (str(course / "all"), str(course))
    assert used[0].hidden == everything
    given = one_question.environment(
        course, exercises.notebooks("solutions")["03"], used[0]
    )
    assert (
        "DDP_COURSE_SANDBOX" not in given
    )  # which --without-a-sandbox does not ask for
    shut_in = dataclasses.replace(used[0], sandboxed=True)
    given = one_question.environment(
        course, exercises.notebooks("solutions")["03"], shut_in
    )
    assert json.loads(given["DDP_COURSE_SANDBOX"])["hidden"] == list(everything)


def test_links_to_folders_are_left_out_and_odd_names_do_no_harm(course, capsys):  # noqa: F811
    submit(course / "all" / "a", {})
    (course / "all" / "b").mkdir()
    (course / "all" / "b" / "exercises").symlink_to(course / "solutions")
    odd = os.fsdecode(b"\xff\n=1")
    submit(course / "all" / odd, {})
    submit(course / "all" / "::error::c", {})  # GitHub would take it for a command
    names = [":_error:_c", "a", "b", "\ufffd\ufffd=1"]
    assert list(handed_in.submissions("all")) == names
    assert "left out: all/b/exercises, it is a link\n" == capsys.readouterr().err
    with pytest.raises(UsageError, match="is a link"):
        handed_in.submissions("all/b/exercises")


def test_a_notebook_of_many_cells_is_read_in_a_moment(course):  # noqa: F811
    """With ten times as many cells, it takes some ten times as long, and no hundred."""
    tasks = exercises.questions_of("03")

    def seconds(cells):
        cell = {"cell_type": "code", "source": "a_cell_of_theirs"}
        content = json.dumps({"cells": [cell] * cells}).encode()
        begin = time.process_time()
        assert exercises.answer_cells(handed_in.cells_of(content), tasks) == {}
        return time.process_time() - begin

    few, many = (min(seconds(cells) for _ in range(3)) for cells in (200, 2_000))
    assert many < 40 * few


def test_no_module_of_a_submission_takes_the_place_of_ours(course):  # noqa: F811
    """Wherever grading is started."""
    submit(course / "all" / "a", {})
    for name in ("shutil.py", "psutil.py", "tempfile.py"):
        text = f"open({str(course / 'reached')!r}, 'w')\nraise SystemExit"
        (course / "all" / "a" / name).write_text(text)
    line = [sys.executable, "-P", "-m", "ddp_course.cli.command", "grade", "."]
    done = subprocess.run(
        [*line, "--without-a-sandbox"],
        cwd=course / "all" / "a",
        capture_output=True,
        text=True,
    )
    assert f"a: 0 of {len(QUESTIONS)}" in done.stdout, done.stderr
    assert not (course / "reached").exists() and not done.stderr


def test_whatever_an_answer_leaves_in_a_folder_is_removed(tmp_path):
    folder, here = tmp_path / "left", os.getcwd()
    (folder / "locked").mkdir(parents=True)
    (folder / "locked" / "file").touch()
    (folder / "locked").chmod(0)
    os.chdir(folder)
    for _ in range(1500):  # within one another: deeper than Python's recursion
        os.mkdir("x")
        os.chdir("x")
    os.chdir(here)
    cleaning.remove(folder)
    assert not folder.exists()


def test_the_judge_waits_for_no_pipe_and_follows_no_link(tmp_path):
    torch.save(saving.a_state(3), tmp_path / "state.pt")
    (tmp_path / "link").symlink_to("state.pt")
    os.mkfifo(tmp_path / "pipe")
    assert saving.reading(tmp_path / "state.pt") == 3
    for name in ("link", "pipe"):
        assert "Error" in str(saving.reading(tmp_path / name))


def test_an_error_that_a_sandbox_tells_is_cut():
    told = json.dumps({"printed": "p", "error": ["RankError", "x" * 10**6, 0, ""]})
    with pytest.raises(sandbox.Printed) as failed:
        sandbox.Sandbox._results(None, told, b"", 1)
    assert len(str(failed.value.error)) == sandbox.MOST_TEXT


@needs_bwrap
def test_memory_without_an_owner_is_not_given_and_nobody_makes_namespaces():
    got, *namespaces = [
        one
        for [one] in in_a_sandbox(attacks.FILES_WITHOUT_NAMES, attacks.MAKES_NAMESPACES)
    ]
    refused = "Operation not permitted"
    assert got["a file in memory"] == got["memory without a file"] == refused
    assert got["buffers"] == 0 and got["end"] == "No space left on device"
    assert got["written"] <= sandbox.SIZE
    if sandbox.no_namespaces_within():
        assert namespaces == [0]


@needs_bwrap
def test_names_are_limited_as_bytes_are():
    with pytest.raises(RankError, match="made more than 20000 files"):
        in_a_sandbox(attacks.MANY_NAMES)


@needs_bwrap
def test_threads_and_open_files_are_limited():
    [[opened]] = in_a_sandbox(attacks.MANY_OPEN_FILES)
    assert isinstance(opened, int) and opened < MOST_OPEN, opened
    with pytest.raises(RankError, match="started more than 2000 threads"):
        in_a_sandbox(attacks.MANY_THREADS)


TOUCHES = """
import mmap, sys
memory = mmap.mmap(-1, 20 * 2**30, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
for place in range(0, len(memory), 2**21):
    memory[place]
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_tables_of_a_processs_pages_count_as_its_memory():
    """Of 20 GB, one byte in each 2 MB is read: that takes 40 MB of tables, and no page."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", TOUCHES], **pipes) as process:
        process.stdout.readline()
        one = psutil.Process(process.pid)
        assert sandbox.resident(one) > one.memory_info().rss + 35 * 2**20
        assert sandbox.proportional(one) > one.memory_full_info().pss + 35 * 2**20
        process.kill()


@needs_bwrap
def test_no_descriptor_of_the_judge_is_within_reach_and_process_1_stays():
    """Of multiprocessing's own, one is: the tracker's pipe, which is no way out."""
    [[(got, on_the_path)], [one]] = in_a_sandbox(
        attacks.OPENS_DESCRIPTORS, "result = 1"
    )
    assert one == 1 and not on_the_path
    assert {(number, kind) for process, number, kind in got if process < 4} <= {
        (number, "pipe") for number in range(3, 6)
    }


@needs_bwrap
def test_what_an_answer_puts_in_the_place_of_our_processes_does_not_start():
    with pytest.raises(RankError, match="ended the process that starts its ranks"):
        in_a_sandbox(attacks.TAKES_THE_PLACE)


def test_what_others_may_have_caused_gets_another_try_alone(course, monkeypatch):  # noqa: F811
    submit(course / "all" / "a", {"bucketed": "mine = 1"})
    begin, asked = {"details": {"where": f"... {sandbox.FULL}"}}, []

    def grade_one(job, *_, **__):
        asked.append(job.task.name)
        again = asked.count(job.task.name) > 1
        return {"status": "passed"} if again else {"status": "your code raised"} | begin

    monkeypatch.setattr(run, "grade_one", grade_one)
    *_, report = run.grade(jobs_in("all"), rules.Rules(workers=1))
    assert {one["status"] for one in report["submissions"]["a"]["03"].values()} == {
        "passed"
    }
    assert sorted(asked) == sorted(2 * QUESTIONS)


def test_a_check_that_fails_itself_beside_others_gets_another_try_before_anyone_is_blamed(
    course,  # noqa: F811
    monkeypatch,
):
    """Another answer may have taken what its process needed."""
    submit(course / "all" / "a", {"bucketed": "mine = 1", "overlapped": "mine = 1"})
    asked = []

    def judged(job, *_):
        asked.append(job.task.name)
        again = asked.count(job.task.name) > 1
        passes = again and job.task.name == "bucketed"
        return {"status": "passed" if passes else "the grader's own error", "rows": {}}

    monkeypatch.setattr(one_question, "judged", judged)
    *_, report = run.grade(jobs_in("all"), rules.Rules(workers=1))
    found = report["submissions"]["a"]["03"]
    assert found["bucketed"]["status"] == "passed"
    assert found["overlapped"]["status"] == "the grader's own error"  # ours fails, too


@needs_bwrap
def test_no_memory_and_no_file_in_the_sandbox_is_nobodys():
    """System V's, message queues, keys, /dev: no limit would count them."""
    numbers = system_calls.DENIED[platform.machine()]
    text = f"NUMBERS = {numbers}\n" + attacks.GETS_MEMORY_THAT_NOBODY_COUNTS
    [[got]] = in_a_sandbox(text)
    assert set(got.values()) == {"Operation not permitted"} and len(got) == 6, got


@needs_bwrap
@pytest.mark.parametrize("left", ["LEAVES_A_PROCESS", "LEAVES_ONE_WHOSE_FIRST_THREAD_ENDS"])  # fmt: skip
def test_an_answers_processes_end_with_its_call_also_those_that_have_left_its_session(
    left,
):
    [_, [found]] = in_a_sandbox(getattr(attacks, left), attacks.LOOKS_FOR_IT)
    values, processes = found
    assert values == 1  # it writes no more
    assert processes == 4  # the first one, multiprocessing's two, and this rank


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_of_a_process_counts_whose_first_thread_has_ended():
    text = attacks.FIRST_THREAD_ENDS + "print(flush=True); end_the_first_thread()"
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as one:
        one.stdout.readline()
        process = psutil.Process(one.pid)
        assert wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE, 10)
        assert process.memory_info().rss == 0
        for counted in (sandbox.resident, sandbox.proportional):
            assert counted(process) > 200 * 10**6
        assert sandbox.Opened([process]).without_names >= 10**6
        one.kill()


@needs_bwrap
def test_sockets_count_as_the_memory_that_they_may_hold():
    """Those that a process has filled: nobody's memory."""
    with pytest.raises(RankError, match="used more than 4 GB of memory"):
        in_a_sandbox(attacks.MANY_SOCKETS)


@needs_bwrap
def test_watches_of_epoll_are_limited_which_a_user_has_together():
    with pytest.raises(RankError, match="watched more than 5000 files with epoll"):
        in_a_sandbox(attacks.MANY_WATCHES)


@needs_bwrap
def test_nothing_secret_is_shown_by_another_path(monkeypatch, tmp_path):
    """Python may be below a link, or the course in a folder of the system: what they show
    has no checks and no solutions, and no folder that the grader hides.
    """
    link = tmp_path / "course"
    link.symlink_to(COURSE)
    folders = [*sandbox.python_folders(), link]
    monkeypatch.setattr(sandbox, "python_folders", lambda: folders)
    asked = {
        "preloads": [],
        "memory": 0,
        "hidden": [str(COURSE / "benchmarks"), "/usr", "/"],
    }
    monkeypatch.setattr(sandbox, "settings", lambda: asked)
    # where somebody grades in a folder that Python needs
    assert Path("/usr") not in sandbox.hidden_in([Path("/usr")])
    names = ["solutions", "tests", "ddp_course/checks", "benchmarks", "lessons"]
    lists = ", ".join(f"os.listdir('{link}/{name}')" for name in names)
    [[found]] = in_a_sandbox(f"import os\nresult = [{lists}]")
    assert found[:4] == [[], [], [], []] and len(found[4]) > 10


@needs_bwrap
def test_what_is_measured_without_an_answer_is_out_of_its_reach(course):  # noqa: F811
    """Of a process that stays, and writes in the place of the rank that measures."""
    submit(course / "all" / "a", {"predict_run": attacks.FORGES_RESULTS}, number="01")
    done = grade("all", "--patience", "3", sandboxed=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert results(course, number="01")["predict_run"]["status"] != "passed"


@needs_bwrap
def test_links_that_an_answer_plants_lead_nobody_to_a_file_outside(course):  # noqa: F811
    precious = course / "precious"
    precious.write_text("a thesis")
    answer = attacks.PLANTS_LINKS.replace("PRECIOUS", str(precious))
    submit(course / "all" / "a", {"save_whole": answer}, number="09")
    done = grade("all", "--patience", "5", sandboxed=True)
    assert done.returncode == 1, done.stdout + done.stderr
    status = results(course, number="09")["save_whole"]["status"]
    assert status in ("failed", "your code raised")
    assert precious.read_text() == "a thesis"
    assert not [
        option for option in sandbox.mounts() if option in ("--bind", "--bind-try")
    ]


def in_a_sandbox(*texts):
    """What each cell makes of the name `result`, on each rank, which is one; all cells
    run in the same sandbox, one after another.
    """
    shut_in = sandbox.Sandbox([], 4 * 10**9)
    try:
        return [
            shut_in.launch(
                Source.load,
                Source("result", "", text),
                nproc=1,
                timeout=60,
            )[0]
            for text in texts
        ]
    finally:
        shut_in.process.kill()
        shut_in.process.wait()


# ---- what an instructor gets ----


@pytest.fixture
def quick(monkeypatch):
    """Grading in no time: an answer passes if "right" is in it. Returns the list of
    the questions that were graded.
    """
    asked = []

    def grade_one(job, _folder, rules, _running, **_):
        asked.append((job.submission, job.task.name, rules.seed))
        passed = job.written and "right" in job.written.cell
        rows = {} if passed else {"likely cause": "a <b> | c", "got": "x\ny"}
        status = "passed" if passed else "failed"
        return {"status": status, "seconds": 0.1, "details": rows}

    monkeypatch.setattr(run, "grade_one", grade_one)
    return asked


def test_points_have_weights_and_go_to_a_gradebook_and_a_page_for_each(course, quick):  # noqa: F811
    submit(course / "all" / "a", {"bucketed": "right", "overlapped": "right"})
    submit(course / "all" / "=b", {"bucketed": "wrong"})
    (course / "weights.json").write_text('{"03 bucketed": 2.5}')
    flags = ["--weights", "weights.json", "--csv", "grades.csv", "--feedback", "pages"]
    done = ddp_course("grade", "--without-a-sandbox", "all", *flags)
    assert done.returncode == 1, done.stderr
    assert "a: 3.5 of 6.5" in done.stdout
    assert "a  03 bucketed: passed, 2.5 of 2.5" in done.stdout
    assert (course / "grades.csv").read_text().splitlines() == [
        "submission,points,of,03 average_gradients,03 bucketed,03 overlapped,03 traffic,"
        "03 train_by_hand",
        "'=b,0,6.5,0,0,0,0,0",
        "a,3.5,6.5,0,2.5,1,0,0",
    ]
    page = (course / "pages" / "=b.md").read_text()
    assert "| 03 | bucketed | failed | 0 of 2.5 | a &lt;b> \\| c |" in page
    assert "Got:\n\n    x\n    y\n" in page
    (course / "weights.json").write_text('{"03 bucket": 2}')
    report = json.loads((course / "report.json").read_text())
    assert run.exit_code(report, attempted=True) == 1
    report["submissions"]["=b"] = {}
    assert run.exit_code(report) == 1
    refused = ddp_course("grade", "all", *flags)
    assert refused.returncode == 2 and "no question 03 bucket" in refused.stderr


def test_nothing_that_was_said_or_named_harms_a_page(course, monkeypatch):  # noqa: F811
    """Neither halves of characters nor escape sequences, links or long names."""
    said = "\ud800 \x1b[2J ![](http://a) \\| <b>"

    def run_nbval(*_):
        return {"status": "failed", "rows": {"where": said}}

    monkeypatch.setattr(one_question, "run_nbval", run_nbval)
    submit(course / "all" / ("a" * 250), {"bucketed": "def bucketed(): pass"})
    folder = course / "all" / "b"
    folder.mkdir()
    (folder / os.fsdecode(b"03_\xff.ipynb")).write_text("{")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(course / "summary.md"))
    done = ddp_course("grade", "--without-a-sandbox", "all", "--feedback", "pages")
    assert done.returncode == 1, done.stderr
    texts = [path.read_text() for path in (course / "pages").iterdir()]
    assert len(texts) == 2
    for text in [*texts, (course / "summary.md").read_text()]:
        assert "\x1b" not in text and "\ufffd" in text
    assert r"!\[](http://a) \\\| &lt;b>" in (course / "summary.md").read_text()


@pytest.mark.parametrize("said", ["x", None, {"where": 5}])
def test_a_report_with_something_else_in_it_is_refused(said, tmp_path):
    result = {"answer": "a", "status": "failed", "details": said}
    report = {"seed": 1, "submissions": {"a": {"03": {"bucketed": result}}}}
    (tmp_path / "report.json").write_text(json.dumps(report))
    with pytest.raises(UsageError, match="is no report to resume"):
        run.report_in(tmp_path / "report.json")


@pytest.mark.parametrize("weight", ['"3"', "-1", "1e999", "NaN", "[]"])
def test_a_weight_that_is_no_number_is_refused(weight, tmp_path):
    (tmp_path / "weights.json").write_text(f'{{"03 bucketed": {weight}}}')
    with pytest.raises(UsageError, match="is no JSON file such as"):
        rules.weights_in(tmp_path / "weights.json")


def test_an_interrupted_grading_is_resumed_with_its_seed(course, quick, monkeypatch):  # noqa: F811
    submit(course / "all" / "a", {"bucketed": "right"})
    submit(course / "all" / "b", {"bucketed": "right", "overlapped": "wrong"})
    told = []

    def interrupted(job, result):
        told.append(job)
        if len(told) == 2 * len(QUESTIONS) - 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(run, "print_result", interrupted)
    line = ["grade", "--without-a-sandbox", "all", "-j", "1"]
    done = ddp_course(*line)
    assert done.returncode == 2 and "--resume goes on" in done.stderr
    report = json.loads((course / "report.json").read_text())
    assert not report["complete"] and len(told) == 2 * len(QUESTIONS) - 2
    quick.clear()
    done = ddp_course(*line, "--resume")
    assert done.returncode == 1 and len(quick) == 2
    assert {seed for _, _, seed in quick} == {report["seed"]}
    shutil.rmtree(course / "all" / "b")
    submit(course / "all" / "b", {"bucketed": "right", "overlapped": "right"})
    quick.clear()
    ddp_course(*line, "--resume")
    again = [("b", name) for name in QUESTIONS[1:]]
    assert [graded[:2] for graded in quick] == again


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_grader_that_is_killed_leaves_nothing_behind(end, course):  # noqa: F811
    if end == signal.SIGTERM and not THOROUGH:
        pytest.skip("the harder one is tried: make thorough")
    marker = course / "begun"
    hangs = f"def average_gradients(module):\n    open({str(marker)!r}, 'w')\n    while True:\n        pass"
    submit(course / "all" / "a", {"average_gradients": hangs})
    folder = course / "tmp"
    folder.mkdir()
    line = [sys.executable, "-m", "ddp_course.cli.command", "grade", "all"]
    grader = subprocess.Popen(
        [*line, "--without-a-sandbox"],
        env=os.environ | {"TMPDIR": str(folder)},
        start_new_session=True,
    )
    assert wait_until(marker.exists, 200)
    started = descendants(grader.pid)
    grader.send_signal(end)
    grader.wait(60)
    assert wait_until(lambda: not any(p.is_running() for p in started), 30)
    assert wait_until(lambda: not list(folder.glob("ddp-course-grade-*")))


# ---- in CI ----


@pytest.fixture
def workflow():
    return yaml.safe_load((COURSE / ".github/workflows/grade.yml").read_text())


@needs_bwrap
def test_the_workflows_own_commands_grade_a_submission(workflow, tmp_path):
    if not (COURSE / ".venv" / "installed").exists():
        pytest.skip("not installed by make setup")
    (tmp_path / "course").mkdir()
    parts = ["Makefile", "pyproject.toml", "constraints.txt", ".venv", "ddp_course"]
    for part in [*parts, "lessons", "solutions"]:
        (tmp_path / "course" / part).symlink_to(COURSE / part)
    submit(tmp_path / "submission" / "exercises", {})
    steps = {step.get("name"): step for step in workflow["jobs"]["grade"]["steps"]}
    assert "install -qq -y bubblewrap" in steps["The sandbox"]["run"]
    environment = os.environ | {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    for name in ("Set up", "Grade"):
        line = f"set -e; {steps[name]['run']}"
        done = subprocess.run(line, shell=True, cwd=tmp_path, env=environment)
        assert done.returncode == 0
    report = json.loads((tmp_path / "course" / "report.json").read_text())
    assert report["totals"] == {"exercises": [0, len(QUESTIONS)]} and report["sandbox"]
    assert (
        f"## exercises: 0 of {len(QUESTIONS)}" in (tmp_path / "summary.md").read_text()
    )
    kept = steps["Keep the report"]["with"]["path"].split()
    assert steps["Keep the report"]["if"] == "always()"
    assert all((tmp_path / path).exists() for path in kept)


def test_the_workflow_leaves_no_token_where_answers_could_read_it(workflow):
    checkouts = [
        step
        for step in workflow["jobs"]["grade"]["steps"]
        if step.get("uses", "").startswith("actions/checkout")
    ]
    assert len(checkouts) == 2
    assert not any(step["with"]["persist-credentials"] for step in checkouts)
