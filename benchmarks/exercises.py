"""How long the exercises' checks take on our own answers, whether they pass each time,
and how long grading takes.

python benchmarks/exercises.py
python benchmarks/exercises.py --repeats 30
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import contextmanager, nullcontext
from pathlib import Path

import nbformat
from claims import claim, report, seconds

from ddp_course.cli import exercises
from ddp_course.judge.verdict import PASSED
from ddp_course.ranks.launch import launch, start_server

UNTIL_THE_PARENT_ENDS = (
    "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
)


@contextmanager
def all_cores_busy():
    """As many endless loops as there are cores."""
    loops = [
        subprocess.Popen([sys.executable, "-c", UNTIL_THE_PARENT_ENDS])
        for _ in range(os.cpu_count())
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def solutions():
    """The Question and our own answer for each question: {"01 normalize": (question,
    answers)}.
    """
    found = {}
    for number, path in exercises.notebooks("solutions").items():
        for task in exercises.tasks(exercises.read(path)):
            question = exercises.question(number, task)
            found[question.title] = (
                question,
                exercises.answers(
                    task, exercises.Written(exercises.answer_of(task.cell.source))
                ),
            )
    return found


def repeat(repeats):
    """Check our own answers, on an idle and on a busy machine in turn; the seconds of
    each, and what did not pass.
    """
    times, others = {True: {}, False: {}}, []

    def check(title, question, answers):
        verdict = question.judge(*answers)
        if verdict.status != PASSED:
            others.append(f"{title}: {verdict}")

    for round_ in range(repeats):
        busy = round_ % 2 == 1
        with all_cores_busy() if busy else nullcontext():
            for title, (question, answers) in solutions().items():
                times[busy].setdefault(title, []).append(
                    seconds(check, title, question, answers)
                )
    return times, others


def grade(folder):
    """Grade a submission with all of our own answers, into report.json in the
    folder.
    """
    shutil.copytree(exercises.project_folder() / "solutions", folder / "ours")
    for path in (folder / "ours").iterdir():
        notebook = exercises.read(path)
        for task in exercises.tasks(notebook):
            task.cell.source = exercises.answer_of(task.cell.source)
        nbformat.write(notebook, path)
    command = [
        sys.executable,
        "-m",
        "ddp_course.cli.command",
        "grade",
        folder / "ours",
        "--report",
        folder / "report.json",
    ]
    subprocess.run(command, check=False, capture_output=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--repeats",
        type=int,
        default=2,
        help="of each check, every other one with all cores busy",
    )
    repeats = parser.parse_args().repeats
    # as `ddp-course check` and the exercises' first cells do; the first launch waits
    # for the imports
    start_server(
        *(
            name
            for path in exercises.notebooks().values()
            for name in exercises.preloads(path)
        )
    )
    launch(int)
    times, others = repeat(repeats)
    with tempfile.TemporaryDirectory() as folder:
        grading = seconds(grade, Path(folder))
        report_card = json.loads((Path(folder) / "report.json").read_text())
    [(points, questions)] = report_card["totals"].values()
    [ours] = report_card["submissions"].values()
    lost = {
        f"{number} {name}": result
        for number, results in ours.items()
        for name, result in results.items()
        if not result["points"]
    }
    idle = [statistics.median(of_one) for of_one in times[False].values()]
    report(
        [
            claim("a check, the slowest, seconds", max(idle), at_most=10),
            claim(
                "a check, the median of all, seconds",
                statistics.median(idle),
                at_most=3,
            ),
            claim("right answers that did not pass", len(others), at_most=0),
            claim(
                "grading all exercises, seconds a question",
                grading / questions,
                at_most=12,
            ),
            claim("questions that gained their point", points, at_least=questions),
        ],
        times={"idle": times[False], "all cores busy": times[True]},
        not_passed=others,
        lost_when_graded=lost,
    )


if __name__ == "__main__":
    main()
