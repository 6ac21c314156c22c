"""Grading of submissions: each answer gets a verdict and points.

Only what a learner wrote is taken from a submission, as text. Each answer is put into
the course's own notebook, with the reference output of its check, and pytest's nbval
runs that notebook. Each question has its own notebook, process and ranks. Only the
ranks run the learner's code, and those of strangers do so in a sandbox: sandbox.py.
Editing a stored output or a check, or patching a module, gains nothing.
"""

import ctypes
import hashlib
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import nbformat
import psutil

from ddp_course import UsageError
from ddp_course.scenery.readable import Unusable, json_of
from ddp_course.school import exercises, handed_in, reports, sandbox
from ddp_course.school.cleaning import end_those_in, remove, workplace
from ddp_course.school.judge import (
    GRADER_ERROR,
    NOT_ATTEMPTED,
    PASSED,
    PATIENCE,
    RAISED,
    SEED,
    TIMED_OUT,
    VERDICT,
)


@dataclass(frozen=True)
class Rules:
    """How a grading is done.

    seed: of the checks' random choices, the same for everybody; weights: the points of
    questions that give more or less than one, {"03 bucketed": 3}; seconds: the most for
    one question, all told; patience: a factor for the checks' own time limits; memory:
    GB for one answer's ranks together; sandboxed: whether answers are shut in; workers:
    how many answers are graded at once.
    """

    seed: int = 0
    weights: dict = field(default_factory=dict)
    seconds: int = 300
    patience: float = 1.0
    memory: float = 4.0
    sandboxed: bool = True
    workers: int = max(1, min(4, (os.cpu_count() or 1) // 2))


def workers_that_fit(wish, memory):
    """How many answers may be graded at once, of `wish`: what they may use together, and
    a gigabyte each for their judges, stays below this machine's memory. memory: GB for
    one answer.
    """
    return max(
        1, min(wish, int((machine_memory() - sandbox.SPARE) / 1e9 / (memory + 1)))
    )


def machine_memory():
    """Bytes of memory that this machine has, or the container in which this runs."""
    limits = [psutil.virtual_memory().total]
    with suppress(OSError, ValueError):  # "max" is no number
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits)


class Job(NamedTuple):
    """One answer to grade. written: an exercises.Written, or None; damage: why the
    notebook could not be read, a line, or "".
    """

    submission: str
    number: str
    task: exercises.Task
    written: exercises.Written | None
    damage: str

    @property
    def title(self):
        return f"{self.number} {self.task.name}"

    @property
    def digest(self):
        """What tells whether the answer has changed since a grading."""
        text = repr((self.written, self.damage))
        return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


LONGEST_NAME = 200  # bytes; most file systems take 255, and ours begin with more


def must_be_shut_in(path, without_a_sandbox):
    """Whether answers under this path are shut in. Raises UsageError if they must be,
    and cannot, and if there is nothing to grade.
    """
    handed_in.submissions(path)
    if without_a_sandbox:
        return False
    problem = sandbox.why_not()
    if problem and not handed_in.is_own(path):
        raise UsageError(
            f"other people's answers run in a sandbox, but {problem}. "
            "--without-a-sandbox runs them with your rights"
        )
    return not problem


def new_seed():
    return secrets.randbelow(10**6)


def weights_in(file):
    """The weights in a JSON file, {"03 bucketed": 3}. Raises UsageError."""
    known = {
        f"{number} {task.name}"
        for number in exercises.notebooks("solutions")
        for task in exercises.questions_of(number)
    }
    try:
        weights = json_of(file)
        numbers = [0 <= weight < math.inf for weight in weights.values()]
    except (Unusable, TypeError, AttributeError):
        numbers = [False]
    if not all(numbers):
        raise UsageError(f'{file} is no JSON file such as {{"03 bucketed": 3}}')
    if unknown := set(weights) - known:
        raise UsageError(f"{file}: there is no question {min(unknown)}")
    return weights


def report_in(file):
    """An earlier report; {} if there is none. Raises UsageError if it is damaged."""
    try:
        if not os.path.lexists(file):
            return {}
        report = json_of(file)
        for numbers in report["submissions"].values():
            for results in numbers.values():
                for result in results.values():
                    texts = [result["answer"], result["status"]]
                    "".join([*texts, *result["details"].values()])  # all are texts
        if type(report["seed"]) is not int or report["seed"] < 0:
            raise ValueError
        return report
    except (Unusable, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise UsageError(
            f"{file} is no report to resume: delete it, or leave out --resume"
        ) from None


def run(path, rules, earlier, file, table, pages):
    """Grade all submissions under a path, and print each result as it comes; return the
    report.

    earlier: a report to resume. The report is saved in `file` as the grading goes on;
    at the end, `table` is the CSV file, and `pages` the folder with a page for each
    submission. Both may be None.
    """
    jobs = jobs_in(path)
    with ended_by_sigterm():
        with closing(grade(jobs, rules, earlier, tell=print_result)) as reports_so_far:
            save_as_it_grows(reports_so_far, file)
        report = report_in(file)
    for submission, (points, most) in report["totals"].items():
        print(f"{submission}: {reports.score(points, most)}")
    if table:
        exercises.write_text(table, reports.gradebook(report))
    if pages:
        write_pages(pages, report)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a") as page:
            page.write(reports.markdown(report))
    return report


def save_as_it_grows(reports_so_far, file):
    """Save each report, and at least the last one. Where there are so many questions
    that it takes long to save them all, a tenth of the time goes into saving.
    """
    report, next_time = None, 0.0
    try:
        for report in reports_so_far:
            begin = time.monotonic()
            if begin >= next_time:
                exercises.write_text(file, json.dumps(report, indent=2) + "\n")
                end = time.monotonic()
                next_time = end + 9 * (end - begin)
    finally:
        if report:
            exercises.write_text(file, json.dumps(report, indent=2) + "\n")


def exit_code(report, attempted=False):
    """0 if all has passed, or with `attempted` all that was attempted; 1 if not; 2 if
    something could not be graded.
    """
    own = [list(reports.results_of(report, name)) for name in report["totals"]]
    statuses = {result["status"] for results in own for _, _, result in results}
    if GRADER_ERROR in statuses:
        return 2
    if attempted:
        return int(not statuses <= {PASSED, NOT_ATTEMPTED})
    return int(statuses != {PASSED} or not all(own))


def print_result(job, result):
    given = reports.score(result["points"], result["of"] or 1)
    print(f"{job.submission}  {job.title}: {result['status']}, {given}", flush=True)


def write_pages(folder, report):
    """Write the page for each submission. Raises UsageError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {folder}: {error.strerror}") from None
    names = {}
    for submission in report["totals"]:
        short = submission.encode()[:LONGEST_NAME].decode(errors="ignore")
        name = handed_in.unused(short.replace("/", "_").replace("\\", "_"), names)
        names[name] = submission
        text = reports.feedback(report, submission)
        exercises.write_text(folder / f"{name}.md", text)


@contextmanager
def ended_by_sigterm():
    """Let SIGTERM end the grading as Ctrl-C does, so that nothing is left behind."""

    def leave(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except KeyboardInterrupt:
        raise UsageError(
            "interrupted: --resume goes on from what the report has"
        ) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def jobs_in(path):
    """The Jobs of all submissions under a path: {submission: [Job, ...]}."""
    references = exercises.notebooks("solutions")
    if not references:
        raise UsageError(
            "the course's solutions/ are not here: run this in the course's folder"
        )
    jobs = {}
    for submission, notebooks in handed_in.submissions(path).items():
        jobs[submission] = []
        for number, file in notebooks.items():
            tasks, written, damage = exercises.questions_of(number), {}, ""
            try:
                written = exercises.answer_cells(handed_in.read(file), tasks)
            except UsageError as error:
                damage = str(error)
            for task in tasks:
                answer = written.get(task.cell.id)
                jobs[submission].append(Job(submission, number, task, answer, damage))
    return jobs


def grade(jobs, rules, earlier=None, tell=lambda job, result: None):
    """Grade the jobs; yield the report after each of them, a dict (see `report.json`).

    earlier: the report of an earlier grading, of which results are kept where the
    answer is the same. tell: called with each Job and its result.
    """
    report = {"seed": rules.seed, "sandbox": rules.sandboxed, "complete": False}
    report |= {"totals": {}, "submissions": {name: {} for name in jobs}}
    waiting = []
    for job in [job for each in jobs.values() for job in each]:
        questions = report["submissions"][job.submission].setdefault(job.number, {})
        if result := result_in(earlier or {}, job):
            questions[job.task.name] = valued(job, result, rules)
        else:
            waiting.append(job)
    with workplace() as folder, inheriting_orphans():
        for job, result in graded(waiting, folder, rules):
            result = valued(job, result, rules)
            report["submissions"][job.submission][job.number][job.task.name] = result
            tell(job, result)
            yield with_totals(report, jobs, rules)
    report["complete"] = True
    yield with_totals(report, jobs, rules)


def graded(jobs, folder, rules):
    """Yield (job, result) as they come. What others may have disturbed gets another try
    at the end, alone: beside them, or on a slow machine, a right answer may take too
    long; and some of the kernel's limits are those of all sandboxes together.
    """
    disturbed, running = [], Running()
    pool = ThreadPoolExecutor(rules.workers)
    try:
        futures = {
            pool.submit(grade_one, job, folder, rules, running): job for job in jobs
        }
        for future in as_completed(futures):
            job, result = futures[future], future.result()
            if may_be_anothers_doing(result):
                disturbed.append(job)
            yield job, result
        for job in disturbed:
            yield job, grade_one(job, folder, rules, running)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        running.stop()
        pool.shutdown()


def may_be_anothers_doing(result):
    """Whether an answer that ran at the same time may have caused this result."""
    if result["status"] in (TIMED_OUT, GRADER_ERROR):
        return True
    where = result.get("details", {}).get("where", "")
    return any(words in where for words in (sandbox.ENDED, sandbox.FULL))


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


def result_in(earlier, job):
    """The result of a Job in an earlier report, None if it must be graded (again)."""
    found = earlier.get("submissions", {}).get(job.submission, {}).get(job.number, {})
    result = found.get(job.task.name)
    again = (GRADER_ERROR, TIMED_OUT)
    if result and result["answer"] == job.digest and result["status"] not in again:
        return result
    return None


def valued(job, result, rules):
    """A result with its points, and with what tells whether the answer has changed."""
    most = rules.weights.get(job.title, 1)
    points = most if result["status"] == PASSED else 0
    return result | {"points": points, "of": most, "answer": job.digest}


def with_totals(report, jobs, rules):
    """The report with the points of each submission, and the most it could have:
    {submission: (points, most)}.
    """
    for submission, own in jobs.items():
        numbers = report["submissions"][submission].values()
        points = sum(r["points"] for results in numbers for r in results.values())
        most = sum(rules.weights.get(job.title, 1) for job in own)
        report["totals"][submission] = (points, most)
    return report


def grade_one(job, folder, rules, running):
    """The result for one question: {"status", "seconds", "details"}."""
    begin = time.monotonic()
    if job.written is None:
        where = job.damage or "its cell is not in the notebook"
        verdict = {"status": NOT_ATTEMPTED, "rows": {"where": where}}
    elif exercises.untouched(job.task, job.written):
        verdict = {"status": NOT_ATTEMPTED, "rows": {}}
    else:
        verdict = judged(job, folder, rules, running)
        if verdict["status"] == GRADER_ERROR:
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
    lines = ["from ddp_course.school.judge import Source"]
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
        variables[sandbox.SETTINGS] = json.dumps(
            {
                "preloads": exercises.preloads(reference),
                "memory": int(rules.memory * 1e9),
            }
        )
        # no fork server outside, whose socket an answer could reach
        variables["DDP_COURSE_START_METHOD"] = "spawn"
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
    end_those_in(folder)
    process.wait()
    if process.stdout:
        process.stdout.close()
