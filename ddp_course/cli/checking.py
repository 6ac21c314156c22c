"""`ddp-course check` and `ddp-course progress`: the learner's saved exercises."""

import os
import sys

from rich.console import Console
from rich.table import Table

from ddp_course import UsageError
from ddp_course.cli import exercises
from ddp_course.cli.grading import handed_in
from ddp_course.judge import progress as state
from ddp_course.ranks.launch import start_server

console = Console(highlight=False)
STYLES = {"passed": "green", "not attempted": "yellow"}


def check(number):
    """Check the answers to one exercise, or to all of them (None), and print a verdict
    on each; return the exit code.
    """
    worst, chosen = 0, exercises.learners(number)
    for key, path in chosen.items():
        try:
            cells = handed_in.read(path.resolve())
        except UsageError as error:
            if number is not None:
                raise
            print(f"ddp-course: {error}", file=sys.stderr)
            worst = 2
            continue
        tasks = exercises.questions_of(key)
        written = exercises.answer_cells(cells, tasks)
        for task in tasks:
            passed = check_one(key, task, written.get(task.cell.id), chosen)
            worst = max(worst, not passed)
    return int(worst)


def check_one(number, task, answer, chosen):
    """Check the answer to one question, a Written or None; return whether it passed.

    chosen: the notebooks that are being checked.
    """
    title = f"{number} {task.name}"
    if answer is None:
        where = f"its cell is not in {chosen[number].name}"
        console.print(f"{title}: not attempted, {where}", style="yellow")
        return False
    if exercises.untouched(task, answer):
        console.print(f"{title}: not attempted", style="yellow")
        return False
    # these imports and those of the ranks take seconds
    start_server(
        *(name for path in chosen.values() for name in exercises.preloads(path))
    )
    verdict = exercises.question(number, task).judge(*exercises.answers(task, answer))
    state.record(verdict)
    style = STYLES.get(verdict.status, "red")
    console.print(str(verdict), style=style, markup=False, soft_wrap=True)
    return verdict.status == "passed"


def progress():
    """Print which questions have passed, and the next one."""
    done, following = state.load(), None
    table = Table("exercise", "passed", "questions")
    for number, path in exercises.learners().items():
        names = [task.name for task in exercises.questions_of(number)]
        open_ones = [
            name for name in names if not done.get(f"{number} {name}", {}).get("passed")
        ]
        words = [name if name in open_ones else f"[green]{name}[/]" for name in names]
        passed = f"{len(names) - len(open_ones)} of {len(names)}"
        table.add_row(number, passed, ", ".join(words))
        if open_ones and not following:
            following = number, open_ones[0], os.path.relpath(path)
    console.print(table)
    if not following:
        console.print(
            "All exercises have passed. ddp-course solution 04 shows the course's answers to one of them."
        )
        return
    number, name, path = following
    console.print(f"Next: {name} in {path}, after lesson {number}.", soft_wrap=True)
    console.print(
        f"ddp-course lab {number} opens the lesson, "
        f"ddp-course check {number} checks your answers."
    )
