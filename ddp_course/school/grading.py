"""Grading of submissions: each answer gets a verdict and points.

Only the solution cells are taken from a submission. Each one is put, as text, into the
course's own notebook, with the reference output of its check, and pytest's nbval runs
that notebook. Each question has its own notebook, process and ranks, and only the ranks
run the learner's code, so no answer can disturb another. Editing a stored output or a
check, or patching a module, gains nothing.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import nbformat
import psutil

from ddp_course import UsageError
from ddp_course.school import exercises
from ddp_course.school.judge import GRADER_ERROR, NOT_ATTEMPTED, PASSED, TIMED_OUT

MOST_SECONDS = 90  # for one question, all told; a check itself ends within ten


def submissions(path):
    """The notebooks to grade under a path: {submission: {"01": notebook path}}.

    path: a notebook, a folder of notebooks, or a folder with one folder per person. A
    person's folder without notebooks has handed in nothing: {}. Hidden folders do not
    count. Raises UsageError if nothing is found.
    """
    path = Path(path)
    if not path.exists():
        raise UsageError(f"there is nothing at {path}")
    if path.is_file():
        number = path.name[:2]
        if number not in exercises.notebooks("solutions"):
            raise UsageError(f"{path}: there is no exercise {number}")
        return {path.parent.name or "submission": {number: path}}
    inner = [
        folder
        for folder in sorted(path.rglob("*"))
        if folder.is_dir() and not hidden(folder, path)
    ]
    found = {folder: notebooks_in(folder) for folder in [path, *inner]}
    full = [folder for folder, notebooks in found.items() if notebooks]
    if not full:
        raise UsageError(f"no exercise notebooks (NN_*.ipynb) in {path}")
    people = (
        [] if found[path] else [folder for folder in inner if folder.parent == path]
    )
    empty = [
        folder
        for folder in people
        if not any(other.is_relative_to(folder) for other in full)
    ]
    return {
        str(folder.relative_to(path))
        if folder != path
        else folder.resolve().name: notebooks
        for folder, notebooks in found.items()
        if notebooks or folder in empty
    }


def hidden(folder, path):
    """Whether a folder, or one between it and the path, belongs to a program and not to
    a person: Jupyter's .ipynb_checkpoints, a Mac's __MACOSX.
    """
    return any(part.startswith((".", "__")) for part in folder.relative_to(path).parts)


def notebooks_in(folder):
    """The exercise notebooks directly in a folder, {"01": path}. One line on stderr
    names each that is left out.

    If several have the same number, the one with the course's own name counts, or else
    the first by name.
    """
    course, found = exercises.notebooks("solutions"), {}
    ours = {exercises.exercise_name(path) for path in course.values()}
    files = sorted(
        folder.glob("[0-9][0-9]_*.ipynb"),
        key=lambda file: (file.name not in ours, file.name),
    )
    for file in files:
        number = file.name[:2]
        if number not in course:
            print(f"left out: {file}, there is no exercise {number}", file=sys.stderr)
        elif number in found:
            print(f"left out: {file}, {found[number].name} counts", file=sys.stderr)
        else:
            found[number] = file
    return dict(sorted(found.items()))


def grade(path, workers=None):
    """Grade all submissions under a path; return the report, a dict (see
    `report.json`).
    """
    references = {
        number: exercises.read(file)
        for number, file in exercises.notebooks("solutions").items()
    }
    if not references:
        raise UsageError(
            "the course's solutions/ are not here: run this in the course's folder"
        )
    jobs, report = [], {}
    for submission, notebooks in submissions(path).items():
        report[submission] = {}
        for number, file in notebooks.items():
            report[submission][number] = {}
            tasks, cells, damage = exercises.tasks(references[number]), {}, ""
            try:
                cells = exercises.answer_cells(exercises.read(file), tasks)
            except UsageError as error:
                damage = str(error)
            for task in tasks:
                jobs.append((submission, number, task, cells.get(task.cell.id), damage))

    def grade_job(job):
        return grade_one(references[job[1]], *job[1:])

    with inheriting_orphans():
        with ThreadPoolExecutor(workers or min(4, os.cpu_count() or 1)) as pool:
            results = list(pool.map(grade_job, jobs))
        # beside other answers, or on a slow machine, a right answer may take too long:
        # it gets another try, alone
        for place, job in enumerate(jobs):
            if results[place]["status"] == TIMED_OUT:
                results[place] = grade_job(job)
    for (submission, number, task, *_), result in zip(jobs, results):
        report[submission][number][task.name] = result
    return report


def grade_one(reference, number, task, answer, damage):
    """The result for one question: {"status", "points", "seconds", "details"}. answer:
    the learner's cell, or None.
    """
    begin = time.monotonic()
    if damage or answer is None:
        verdict = {
            "status": NOT_ATTEMPTED,
            "rows": {"where": damage or "its cell is not in the notebook"},
        }
    elif exercises.untouched(task, answer):
        verdict = {"status": NOT_ATTEMPTED, "rows": {}}
    else:
        with tempfile.TemporaryDirectory(prefix="ddp-course-grade-") as folder:
            verdict = run_nbval(Path(folder), merged(reference, task, answer))
    return {
        "status": verdict["status"],
        "points": int(verdict["status"] == PASSED),
        "seconds": round(time.monotonic() - begin, 1),
        "details": verdict["rows"],
    }


def merged(reference, task, answer):
    """The course's notebook for one question, with the learner's answer, and the
    check's reference output.
    """
    notebook = nbformat.v4.new_notebook(metadata=reference.metadata)
    for cell in reference.cells:
        if cell.cell_type == "code" and cell.id == task.check.id:
            break
        if cell.cell_type == "code" and not {"solution", "nbval-check-output"} & set(
            cell.metadata.get("tags", [])
        ):
            notebook.cells.append(nbformat.v4.new_code_cell(cell.source, id=cell.id))
    lines = ["from ddp_course.school.judge import Source"]
    for name in task.names:
        lines.append(
            f"{name} = Source({name!r}, preamble={task.preamble!r}, cell={answer!r})"
        )
    notebook.cells.append(nbformat.v4.new_code_cell("\n".join(lines), id=task.cell.id))
    notebook.cells.append(task.check)
    return notebook


def run_nbval(folder, notebook):
    """Run a notebook under nbval in a process of its own; return the verdict,
    {"status", "rows"}.
    """
    nbformat.write(notebook, folder / "question.ipynb")
    verdict_file = folder / "verdict.json"
    environment = os.environ | {
        "DDP_COURSE_VERDICT": str(verdict_file),
        "TMPDIR": str(folder),
        "NO_COLOR": "1",
    }
    options = [
        "--nbval-lax",
        "--nbval-current-env",
        f"--nbval-cell-timeout={MOST_SECONDS - 30}",
        "--noconftest",
    ]
    options += [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-p",
        "no:timeout",
        f"--rootdir={folder}",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, "question.ipynb"],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        output = f"it took longer than {MOST_SECONDS} s"
    finally:
        end_all_of(process, folder)
    try:
        verdict = json.loads(verdict_file.read_text())
    except (OSError, ValueError):
        return {"status": GRADER_ERROR, "rows": {"where": output[-2000:]}}
    if verdict["status"] == PASSED and process.returncode != 0:
        return {"status": GRADER_ERROR, "rows": {"where": output[-2000:]}}
    return verdict


@contextmanager
def inheriting_orphans():
    """At the end, kill all processes that answers have started and that have lost their
    parent.

    On Linux, this process becomes the parent of all orphans among its descendants, see
    prctl(2).
    """
    before = psutil.Process().children()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        for child in psutil.Process().children(recursive=True):
            if child not in before:
                with suppress(psutil.Error):
                    child.kill()
                    child.wait(5)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)


PR_SET_CHILD_SUBREAPER = 36


def end_all_of(process, folder):
    """Kill the processes that a run has left: those of its session, and those that
    still have the run's folder in their environment.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for other in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if other.environ().get("TMPDIR") == str(folder):
                other.kill()
    process.wait()
    if process.stdout:
        process.stdout.close()


def totals(report):
    """The points of each submission, and the number of its questions: {submission:
    (points, questions)}.
    """
    rows = {}
    for submission, numbers in report.items():
        results = [
            result for questions in numbers.values() for result in questions.values()
        ]
        rows[submission] = (sum(result["points"] for result in results), len(results))
    return rows


def score(points, questions):
    """A submission's total in words."""
    return f"{points} of {questions}" if questions else "nothing handed in"


def markdown(report):
    """The report as Markdown, for a page of CI."""
    lines = []
    for submission, (points, questions) in totals(report).items():
        lines += [f"## {submission}: {score(points, questions)}", ""]
        if not questions:
            continue
        lines += ["| exercise | question | verdict | why |", "|---|---|---|---|"]
        for number, results in report[submission].items():
            for name, result in results.items():
                details = result["details"]
                why = details.get("likely cause") or details.get("where", "")
                why = " ".join(why.split()).replace("|", "\\|")[:200]
                lines.append(f"| {number} | {name} | {result['status']} | {why} |")
        lines.append("")
    return "\n".join(lines)
