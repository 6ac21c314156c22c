"""Grading: what a submission's answers are worth, whatever else it holds.

Only the solution cells are taken from a submission. Each goes, as text that nothing but its own ranks will run, into the
course's notebook with the reference output of its check, and pytest's nbval runs that: one notebook and one process for
a question, so that none can disturb another. A stored output, an edited check or a patched module gains nothing.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import nbformat
import psutil

from ddp_course import UsageError, exercises
from ddp_course.checks.judge import GRADER_ERROR, NOT_ATTEMPTED, PASSED

MOST_SECONDS = 90  # for one question, all told; a check itself ends within ten


def submissions(path):
    """What there is to grade under a path: {submission: {"01": notebook path}}.

    path: a notebook, a folder of notebooks, or a folder of such folders. Raises UsageError where nothing is found.
    """
    path = Path(path)
    if not path.exists():
        raise UsageError(f"there is nothing at {path}")
    if path.is_file():
        return {path.parent.name or "submission": {path.name[:2]: path}}
    found = {}
    for folder in [path, *sorted(inner for inner in path.rglob("*") if inner.is_dir())]:
        notebooks = {file.name[:2]: file for file in sorted(folder.glob("[0-9][0-9]_*.ipynb"))}
        if notebooks:
            name = str(folder.relative_to(path)) if folder != path else folder.resolve().name
            found[name] = notebooks
    if not found:
        raise UsageError(f"no exercise notebooks (NN_topic.ipynb) in {path}")
    return found


def grade(path, workers=None):
    """Grade all submissions under a path; return the report, a dict (see `report.json`)."""
    references = {number: exercises.read(file) for number, file in exercises.notebooks("solutions").items()}
    if not references:
        raise UsageError("the course's solutions/ are not here: run this in the course's folder")
    jobs, report = [], {}
    for submission, notebooks in submissions(path).items():
        report[submission] = {}
        for number, file in notebooks.items():
            if number not in references:
                raise UsageError(f"{file}: there is no exercise {number}")
            report[submission][number] = {}
            try:
                cells = {cell.get("id"): cell.source for cell in reversed(exercises.read(file).cells)}
            except UsageError as error:
                cells, damage = {}, str(error)
            else:
                damage = ""
            for task in exercises.tasks(references[number]):
                jobs.append((submission, number, task, cells.get(task.cell.id), damage))
    with ThreadPoolExecutor(workers or min(4, os.cpu_count() or 1)) as pool:
        results = list(pool.map(lambda job: grade_one(references[job[1]], *job[1:]), jobs))
    for (submission, number, task, *_), result in zip(jobs, results):
        report[submission][number][task.name] = result
    return report


def grade_one(reference, number, task, answer, damage):
    """The result for one question: {"status", "points", "seconds", "details"}. answer: the learner's cell, or None."""
    begin = time.monotonic()
    if damage or answer is None:
        verdict = {"status": NOT_ATTEMPTED, "rows": {"where": damage or "its cell is not in the notebook"}}
    elif answer.strip() == exercises.cleared(task.cell.source).strip():
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
    """The course's notebook for one question, with the learner's answer, and the check's reference output."""
    notebook = nbformat.v4.new_notebook(metadata=reference.metadata)
    for cell in reference.cells:
        if cell.cell_type == "code" and cell.id == task.check.id:
            break
        if cell.cell_type == "code" and not {"solution", "nbval-check-output"} & set(
            cell.metadata.get("tags", [])
        ):
            notebook.cells.append(nbformat.v4.new_code_cell(cell.source, id=cell.id))
    lines = ["from ddp_course.checks.judge import Source"]
    for name in task.names:
        lines.append(f"{name} = Source({name!r}, preamble={task.preamble!r}, cell={answer!r})")
    notebook.cells.append(nbformat.v4.new_code_cell("\n".join(lines), id=task.cell.id))
    notebook.cells.append(task.check)
    return notebook


def run_nbval(folder, notebook):
    """Run a notebook under nbval in a process of its own; return the verdict, {"status", "rows"}."""
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
    options += ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:timeout", f"--rootdir={folder}"]
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


def end_all_of(process, folder):
    """Kill what a run has left: its session, and whoever still has its folder in the environment."""
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
    """Points of all that there are, for each submission: {submission: (points, questions)}."""
    rows = {}
    for submission, numbers in report.items():
        results = [result for questions in numbers.values() for result in questions.values()]
        rows[submission] = (sum(result["points"] for result in results), len(results))
    return rows


def markdown(report):
    """The report as Markdown, for a page of CI."""
    lines = []
    for submission, (points, questions) in totals(report).items():
        lines += [
            f"## {submission}: {points} of {questions}",
            "",
            "| exercise | question | verdict | why |",
            "|---|---|---|---|",
        ]
        for number, results in report[submission].items():
            for name, result in results.items():
                details = result["details"]
                why = details.get("likely cause") or details.get("where", "")
                why = " ".join(why.split()).replace("|", "\\|")[:200]
                lines.append(f"| {number} | {name} | {result['status']} | {why} |")
        lines.append("")
    return "\n".join(lines)
