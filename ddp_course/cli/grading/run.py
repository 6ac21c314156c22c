"""Grading of submissions: each answer gets a verdict and points.

Only what a learner wrote is taken from a submission, as text. Each answer is put into
the course's own notebook, with the reference output of its check, and pytest's nbval
runs that notebook. Each question has its own notebook, process and ranks. Only the
ranks run the learner's code, and those of strangers do so in a sandbox: sandbox.py.
Editing a stored output or a check, or patching a module, gains nothing.
"""

import ctypes
import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager, suppress

import psutil

from ddp_course import UsageError
from ddp_course.cli.grading import handed_in, reports
from ddp_course.cli.grading.jobs import jobs_in
from ddp_course.cli.grading.one_question import Running, grade_one
from ddp_course.files import Unusable, json_of, write_atomically
from ddp_course.judge import sandbox
from ddp_course.judge.cleaning import workplace
from ddp_course.judge.verdict import (
    GRADER_ERROR,
    NOT_ATTEMPTED,
    PASSED,
    TIMED_OUT,
)

LONGEST_NAME = 200  # bytes; most file systems take 255, and ours begin with more


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
        write_atomically(table, reports.gradebook(report))
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
                write_atomically(file, json.dumps(report, indent=2) + "\n")
                end = time.monotonic()
                next_time = end + 9 * (end - begin)
    finally:
        if report:
            write_atomically(file, json.dumps(report, indent=2) + "\n")


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
        write_atomically(folder / f"{name}.md", text)


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
            exercises = report["submissions"][job.submission]
            exercises[job.number][job.task.name] = result
            exercises[job.number] = in_order(exercises[job.number], job, jobs)
            tell(job, result)
            yield with_totals(report, jobs, rules)
    report["complete"] = True
    yield with_totals(report, jobs, rules)


def in_order(results, of, jobs):
    """The results of the exercise of a job, in the order of its questions: answers are
    graded side by side, and may end in any order.
    """
    questions = [
        job.task.name for job in jobs[of.submission] if job.number == of.number
    ]
    return {name: results[name] for name in questions if name in results}


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
            yield job, grade_one(job, folder, rules, running, alone=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        running.stop()
        pool.shutdown()


# what says that something is used up which all processes of a user have together
NOT_FOR_ONE_ALONE = (
    *(sandbox.ENDED, sandbox.FULL),
    *("No space left on device", "Too many open files", "Cannot allocate memory"),
    "Resource temporarily unavailable",
)


def may_be_anothers_doing(result):
    """Whether an answer that ran at the same time may have caused this result."""
    if result["status"] in (TIMED_OUT, GRADER_ERROR):
        return True
    where = result.get("details", {}).get("where", "")
    return any(words in where for words in NOT_FOR_ONE_ALONE)


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
