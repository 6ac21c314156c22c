"""One answer's verdict: from a notebook that pytest's nbval runs in a process of its own,
of which nothing is left.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import nbformat

from ddp_course.cli import exercises
from ddp_course.cli.grading import reports
from ddp_course.judge.cleaning import end_those_in, remove
from ddp_course.judge.question import TOO_BUSY
from ddp_course.judge.verdict import (
    GRADER_ERROR,
    NOT_ATTEMPTED,
    PASSED,
    RAISED,
)
from ddp_course.ranks.variables import PATIENCE, SANDBOX, SEED, START_METHOD, VERDICT


class Running:
    """The processes that grade now, so that all can be stopped."""

    def __init__(self):
        self.processes, self.stopped, self.lock = set(), False, threading.Lock()

    def start(self, *arguments, **options):
        with self.lock:
            if self.stopped:
                raise RuntimeError("the grading is being stopped")
            process = subprocess.Popen(*arguments, **options)
            self.processes.add(process)
        return process

    def stop(self):
        with self.lock:
            self.stopped = True
            for process in self.processes:
                with suppress(ProcessLookupError):
                    process.kill()


def grade_one(job, folder, rules, running, alone=False):
    """The result for one question: {"status", "seconds", "details"}.

    alone: whether no other is graded at the same time. Only then is a check that fails
    itself the answer's doing, and not perhaps another answer's.
    """
    begin = time.monotonic()
    if job.written is None:
        where = job.damage or "its cell is not in the notebook"
        verdict = {"status": NOT_ATTEMPTED, "rows": {"where": where}}
    elif exercises.untouched(job.task, job.written):
        verdict = {"status": NOT_ATTEMPTED, "rows": {}}
    else:
        verdict = judged(job, folder, rules, running)
        busy = verdict["rows"].get("where") == TOO_BUSY
        if alone and verdict["status"] == GRADER_ERROR and not busy:
            verdict = blamed(verdict, job, folder, rules, running)
    return {
        "status": verdict["status"],
        "seconds": round(time.monotonic() - begin, 1),
        "details": {
            row: reports.harmless(said) for row, said in verdict["rows"].items()
        },
    }


def judged(job, folder, rules, running):
    """The verdict on a Job, {"status", "rows"}; what its run has left is removed."""
    own = tempfile.mkdtemp(prefix="", dir=folder)
    try:
        return run_nbval(Path(own), job, rules, running)
    finally:
        remove(own)


def blamed(verdict, job, folder, rules, running):
    """The verdict where a check has failed itself: if it can judge the course's own
    answer, it is the learner's that has sent back what no answer sends.
    """
    ours = exercises.Written(exercises.answer_of(job.task.cell.source))
    if judged(job._replace(written=ours), folder, rules, running)["status"] != PASSED:
        return verdict
    cause = "the check cannot make sense of what your ranks have sent back"
    return {"status": RAISED, "rows": verdict["rows"] | {"likely cause": cause}}


def merged(reference, task, written):
    """The course's notebook for one question, with the learner's answer, and the
    check's reference output.
    """
    notebook = nbformat.v4.new_notebook(metadata=reference.metadata)
    for cell in reference.cells:
        if cell.cell_type == "code" and cell.id == task.check.id:
            break
        if cell.cell_type == "code" and not {"solution", exercises.COMPARED} & set(
            cell.metadata.get("tags", [])
        ):
            notebook.cells.append(nbformat.v4.new_code_cell(cell.source, id=cell.id))
    lines = ["from ddp_course.judge.answer import Source"]
    for source in exercises.answers(task, written):
        lines.append(f"{source.name} = {source!r}")
    notebook.cells.append(nbformat.v4.new_code_cell("\n".join(lines), id=task.cell.id))
    notebook.cells.append(task.check)
    return notebook


def run_nbval(folder, job, rules, running):
    """Run the notebook of a Job under nbval in a process of its own; return the
    verdict, {"status", "rows"}.

    folder: a new one. An answer in a sandbox sees nothing of it.
    """
    judge = folder / "judge"
    judge.mkdir()
    path = exercises.notebooks("solutions")[job.number]
    notebook = merged(exercises.read(path), job.task, job.written)
    nbformat.write(notebook, judge / "question.ipynb")
    (judge / "pytest.ini").write_text("[pytest]\n")
    process = running.start(
        [sys.executable, "-m", "pytest", *nbval_options(rules), "question.ipynb"],
        cwd=judge,
        env=os.environ | environment(judge, path, rules),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    limit_memory(process, rules)
    try:
        output, _ = process.communicate(timeout=rules.seconds)
    except subprocess.TimeoutExpired:
        output = f"it took longer than {rules.seconds} s"
    finally:
        end_all_of(process, folder)
    try:
        verdict = json.loads((judge / "verdict.json").read_text())
    except (OSError, ValueError):
        return {"status": GRADER_ERROR, "rows": {"where": output[-2000:]}}
    if verdict["status"] == PASSED and process.returncode != 0:
        return {"status": GRADER_ERROR, "rows": {"where": output[-2000:]}}
    return verdict


def nbval_options(rules):
    options = ["--nbval-lax", "--nbval-current-env", "--noconftest", "-q"]
    options += [f"--nbval-cell-timeout={max(rules.seconds - 30, 5)}"]
    options += ["-c", "pytest.ini", "--rootdir=."]  # no other pytest.ini counts
    return [*options, "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:timeout"]


def environment(judge, reference, rules):
    """The environment variables of the process that judges: nothing of the instructor's
    own Jupyter and IPython counts there.
    """
    variables = {
        VERDICT: str(judge / "verdict.json"),
        SEED: str(rules.seed),
        PATIENCE: str(rules.patience),
        "TMPDIR": str(judge),
        "NO_COLOR": "1",
    }
    for name in ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR"):
        variables[f"JUPYTER_{name}"] = str(judge / "jupyter" / name)
    variables["IPYTHONDIR"] = str(judge / "ipython")
    if rules.sandboxed:
        variables[SANDBOX] = json.dumps(
            {
                "preloads": exercises.preloads(reference),
                "memory": int(rules.memory * 1e9),
                "hidden": list(rules.hidden),
            }
        )
        # no fork server outside, whose socket an answer could reach
        variables[START_METHOD] = "spawn"
    return variables


def limit_memory(process, rules):
    """Bound what the judging process, too, may allocate: an answer's tensors come to
    it.
    """
    if sys.platform == "linux":
        import resource

        limit = int(max(rules.memory, 4.0) * 1e9)
        with suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (limit, limit))


def end_all_of(process, folder):
    """Kill the processes that a run has left: those of its session, and those that
    still have the run's folder in their environment.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    end_those_in(folder)
    process.wait()
    if process.stdout:
        process.stdout.close()
