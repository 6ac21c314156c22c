"""The command `ddp-course`."""

import ast
import os
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ddp_course import UsageError, project_folder
from ddp_course.ranks.launch import prepare_environment, start_server
from ddp_course.school import exercises
from ddp_course.school import progress as state

PACKAGE = Path(__file__).parents[1]  # ddp_course/

app = typer.Typer(
    add_completion=False,
    help="Distributed training with PyTorch, on any machine.",
)
console = Console(highlight=False)


def main():
    """Run the command; wrong use ends with one line and exit code 2."""
    prepare_environment()
    try:
        app()
    except UsageError as error:
        print(f"ddp-course: {error}", file=sys.stderr)
        sys.exit(2)


def lesson_scripts():
    """The lessons' programs, {"01": path}."""
    return {
        path.stem.removeprefix("lesson"): path
        for path in sorted(PACKAGE.glob("lesson[0-9][0-9].py"))
    }


def lesson_notebooks():
    """The lessons' notebooks, {"01": path}; none where the course is installed without
    its folder.
    """
    return {
        path.name[:2]: path
        for path in sorted((project_folder() / "lessons").glob("[0-9][0-9]_*.ipynb"))
    }


def find(paths, number, kind="lesson"):
    """The path of a lesson, or of an exercise, by its number, which may come without
    the leading zero.
    """
    number = number.zfill(2)
    if number not in paths:
        choice = (
            f"choose one of {', '.join(paths)}"
            if paths
            else "start in the course folder"
        )
        raise UsageError(f"there is no {kind} {number}: {choice}")
    return paths[number]


@app.callback(invoke_without_command=True)
def where_you_are(context: typer.Context):
    """Without a command: say where you are, and what is next."""
    if context.invoked_subcommand is None:
        progress()
        console.print("All commands: ddp-course --help")


@app.command()
def lessons():
    """List the lessons."""
    notebooks = lesson_notebooks()
    table = Table("lesson", "what it is about", "notebook")
    for number, script in lesson_scripts().items():
        idea = ast.get_docstring(ast.parse(script.read_text())).splitlines()[0]
        table.add_row(
            number,
            idea,
            f"lessons/{notebooks[number].name}" if number in notebooks else "",
        )
    console.print(table)
    console.print(
        "ddp-course lab 02 opens a lesson, ddp-course run 02 --nproc 2 runs its program."
    )


@app.command()
def lab(
    lesson: str = typer.Argument("01", help="the lesson to open"),
    browser: bool = typer.Option(True, help="open a browser window"),
):
    """Start JupyterLab on a lesson, on 127.0.0.1 and with its token. It prints its
    address.
    """
    notebook = find(lesson_notebooks(), lesson).relative_to(project_folder())
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--ServerApp.ip=127.0.0.1",
        "--ServerApp.log_level=WARN",
    ]
    command += [f"--LabApp.default_url=/lab/tree/{notebook.as_posix()}"]
    # it asks the reader for no news, and nobody else
    command += [f"--LabApp.app_settings_dir={Path(__file__).parent / 'jupyterlab'}"]
    if not browser:
        command += ["--no-browser"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command += ["--allow-root"]  # in a container, where everybody is root
    server = subprocess.Popen(command, cwd=project_folder())
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is the server's: it asks whether to stop
    signal.signal(
        signal.SIGTERM, lambda *_: server.terminate()
    )  # who ends this ends the server
    raise typer.Exit(server.wait())


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
def run(
    context: typer.Context,
    lesson: str = typer.Argument(help="its number"),
    nproc: int = typer.Option(1, min=1, help="how many ranks"),
):
    """Run a lesson's program as torchrun does. All other flags are the lesson's own."""
    script = find(lesson_scripts(), lesson)  # before torch is imported: that takes long

    from ddp_course.school import run

    raise typer.Exit(run.run(script, nproc, context.args))


@app.command()
def execute(
    lesson: list[str] = typer.Argument(
        None, help="which lessons; all where none is named"
    ),
    solutions: bool = typer.Option(
        False, "--solutions", help="the solutions' notebooks, and not the lessons'"
    ),
    nproc: int = typer.Option(None, min=1, help="the notebooks' nproc"),
    data: str = typer.Option(None, help="the notebooks' data"),
    train_samples: int = typer.Option(None, min=1, help="the notebooks' train_samples"),
    epochs: int = typer.Option(None, min=1, help="the notebooks' epochs"),
    store: bool = typer.Option(
        False, "--store", help="keep the outputs in lessons/, for all readers to see"
    ),
):
    """Run lessons' notebooks from top to bottom with papermill; say how each went."""
    there = exercises.notebooks("solutions") if solutions else lesson_notebooks()
    chosen = [find(there, number) for number in lesson or there]
    given = [("nproc", nproc), ("data", data), ("train_samples", train_samples)]
    given.append(("epochs", epochs))
    parameters = {name: value for name, value in given if value is not None}
    if store and parameters:
        names = ", ".join(parameters)
        raise UsageError(f"--store keeps what readers will see: run it without {names}")

    from ddp_course.school import execution

    raise typer.Exit(execution.execute(chosen, parameters, store))


# ---- the exercises ----

LESSON = typer.Argument(None, help="its number; all where none is given")


def chosen_exercises(number):
    """The exercises' notebooks, {"03": path}: of one number, or all."""
    here = project_folder() / "exercises"
    found = {
        number: here / path.name
        for number, path in exercises.notebooks("solutions").items()
        if (here / path.name).exists()
    }
    if not found:
        raise UsageError("there are no exercises here: start in the course folder")
    return (
        found if number is None else {number.zfill(2): find(found, number, "exercise")}
    )


def questions_of(number):
    """The names of an exercise's questions, and the Tasks of its notebook as the course
    gives it.
    """
    path = find(exercises.notebooks("solutions"), number, "exercise")
    return exercises.tasks(exercises.read(path))


@app.command()
def check(lesson: str = LESSON):
    """Check the answers in your exercise notebooks, as they are saved."""
    worst = 0
    chosen = chosen_exercises(lesson)
    # the server imports while we read
    start_server(
        *(module for path in chosen.values() for module in exercises.preloads(path))
    )
    for number, path in chosen.items():
        try:
            notebook = exercises.read(path)
        except UsageError as error:
            if lesson is not None:
                raise
            print(f"ddp-course: {error}", file=sys.stderr)
            worst = 2
            continue
        tasks = questions_of(number)
        cells = exercises.answer_cells(notebook, tasks)
        for task in tasks:
            question = exercises.question(number, task)
            if task.cell.id not in cells:
                console.print(
                    f"{number} {task.name}: not attempted, its cell is not in {path.name}",
                    style="yellow",
                )
                worst = max(worst, 1)
                continue
            verdict = question.judge(*exercises.answers(task, cells[task.cell.id]))
            state.record(verdict)
            console.print(
                str(verdict),
                style=STYLES.get(verdict.status, "red"),
                markup=False,
                soft_wrap=True,
            )
            worst = max(worst, verdict.status != "passed")
    raise typer.Exit(worst)


STYLES = {"passed": "green", "not attempted": "yellow"}


@app.command()
def progress():
    """Show what has passed, and what is next."""
    done, following = state.load(), None
    table = Table("exercise", "passed", "questions")
    for number, path in chosen_exercises(None).items():
        names = [task.name for task in questions_of(number)]
        passed = [
            name for name in names if done.get(f"{number} {name}", {}).get("passed")
        ]
        words = [f"[green]{name}[/]" if name in passed else name for name in names]
        table.add_row(number, f"{len(passed)} of {len(names)}", ", ".join(words))
        if following is None and len(passed) < len(names):
            following = (
                number,
                path.name,
                next(name for name in names if name not in passed),
            )
    console.print(table)
    if following:
        number, notebook, name = following
        console.print(f"Next: {name} in exercises/{notebook}, after lesson {number}.")
        console.print(
            f"ddp-course lab {number} opens the lesson, ddp-course check {number} checks your answers."
        )
    else:
        console.print(
            "All exercises have passed. ddp-course solution 04 shows how we did one of them."
        )


@app.command()
def hint(
    lesson: str = typer.Argument(help="its number"),
    name: str = typer.Argument(None, help="the question"),
):
    """Give a hint: the next stronger one each time, for a question or for the first
    that has not passed.
    """
    number, done = lesson.zfill(2), state.load()
    names = {task.name: task for task in questions_of(number)}
    if name is None:
        open_ones = [
            other
            for other in names
            if not done.get(f"{number} {other}", {}).get("passed")
        ]
        name = (open_ones or list(names))[0]
    if name not in names:
        raise UsageError(
            f"exercise {number} has no question {name}: choose one of {', '.join(names)}"
        )
    hints = exercises.question(number, names[name]).hints
    given = state.count_hint(f"{number} {name}", len(hints))
    console.print(
        f"{number} {name}, hint {given} of {len(hints)}: {hints[given - 1]}",
        markup=False,
        soft_wrap=True,
    )


@app.command()
def solution(
    lesson: str = typer.Argument(help="its number"),
    force: bool = typer.Option(
        False, "--force", help="also before your own answers have passed"
    ),
):
    """Show our answers, once yours have passed."""
    number, done = lesson.zfill(2), state.load()
    given = questions_of(number)
    missing = [
        task.name
        for task in given
        if not done.get(f"{number} {task.name}", {}).get("passed")
    ]
    if missing and not force:
        raise UsageError(
            f"not yet passed: {', '.join(missing)}; --force shows the answers all the same"
        )
    for task in given:
        console.print(f"# {task.name}", style="bold")
        console.print(
            f"{exercises.answer_of(task.cell.source)}\n", markup=False, soft_wrap=True
        )


@app.command()
def reset(lesson: str = typer.Argument(help="its number")):
    """Bring back an exercise as it was at first; what you had is kept in
    runs/backups/.
    """
    source = find(exercises.notebooks("solutions"), lesson, "exercise")
    fresh = exercises.released(exercises.read(source))
    target = project_folder() / "exercises" / source.name
    if target.exists():
        now = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        backup = project_folder() / "runs" / "backups" / f"{source.stem}-{now}.ipynb"
        try:
            backup.parent.mkdir(parents=True, exist_ok=True)
            backup.write_bytes(target.read_bytes())
        except OSError as error:
            raise UsageError(
                f"cannot keep yours in {backup}: {error.strerror}"
            ) from None
        console.print(f"Yours is kept as {os.path.relpath(backup)}")
    exercises.write(target, fresh)
    console.print(f"exercises/{source.name} is as it was at first.")


@app.command()
def grade(
    path: Path = typer.Argument(
        help="a notebook, a folder of them, or a folder of such folders"
    ),
    report: Path = typer.Option(Path("report.json"), help="where the report goes"),
):
    """Grade submissions: only their solution cells count. Exit code 0: all passed; 1:
    not all; 2: could not grade.
    """
    import json

    from ddp_course.school import grading

    if not report.parent.is_dir():
        raise UsageError(f"there is no folder {report.parent} for the report")
    outcome = grading.grade(path)
    table = Table("submission", "exercise", "question", "verdict", "points")
    for submission, numbers in outcome.items():
        for number, results in numbers.items():
            for name, result in results.items():
                color = STYLES.get(result["status"], "red")
                row = (
                    escape(submission),
                    number,
                    name,
                    f"[{color}]{result['status']}[/]",
                    str(result["points"]),
                )
                table.add_row(*row)
    console.print(table)
    totals = grading.totals(outcome)
    for submission, (points, questions) in totals.items():
        console.print(f"{submission}: {grading.score(points, questions)}", markup=False)
    exercises.write_text(
        report, json.dumps({"totals": totals, "submissions": outcome}, indent=2) + "\n"
    )
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a") as file:
            file.write(grading.markdown(outcome))
    statuses = {
        r["status"]
        for numbers in outcome.values()
        for results in numbers.values()
        for r in results.values()
    }
    all_passed = statuses == {"passed"} and all(outcome.values())
    raise typer.Exit(2 if grading.GRADER_ERROR in statuses else int(not all_passed))


@app.command()
def memory(
    params: str = typer.Option(..., help="how many parameters, such as 7.5e9"),
    ranks: str = typer.Option(..., help="how many ranks"),
    precision: str = typer.Option(
        "mixed", help="mixed, 16 bits with Adam in fp32, or fp32"
    ),
):
    """Estimate what a rank keeps and sends with DDP and with ZeRO 1 to 3, without
    activations.
    """
    from ddp_course.scenery.memory import PRECISIONS, STAGES, sent, states

    parameters, world_size = (
        whole_number("--params", params),
        whole_number("--ranks", ranks),
    )
    if precision not in PRECISIONS:
        raise UsageError(f"--precision {precision} is none of {', '.join(PRECISIONS)}")
    table = Table(
        "",
        *(
            f"{name}, GB"
            for name in ("weights", "gradients", "optimizer", "sum", "sent")
        ),
    )
    for stage, name in STAGES.items():
        kept = states(parameters, world_size, stage, precision)
        row = [*kept, sum(kept), sent(parameters, world_size, stage, precision)]
        table.add_row(
            name,
            *(
                f"{value / 1e9:,.3g}" if value < 1e12 else f"{value / 1e9:,.0f}"
                for value in row
            ),
        )
    console.print(table)
    console.print(
        "For each rank: kept between two steps, and sent in one. 1 GB is 10^9 bytes; activations come on top."
    )


def whole_number(flag, text):
    """A number from 1, which may be written as 7.5e9. Raises UsageError for all
    else.
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.5
    if not 1 <= number < float("inf") or number != int(number):
        raise UsageError(f"{flag} {text} is not a whole number from 1")
    return int(number)


@app.command()
def doctor():
    """Look at what is here and what is missing, run two real ranks, and name the cure
    for each problem.
    """
    from ddp_course.school.doctor import examine

    problems = 0
    for finding in examine():
        problems += bool(finding.cure)
        verdict = "[red]problem[/]" if finding.cure else "[green]well[/]   "
        console.print(
            f"{verdict}  {finding.subject:12} {escape(finding.found)}", soft_wrap=True
        )
        if finding.cure:
            console.print(
                f"         cure         {escape(finding.cure)}", soft_wrap=True
            )
    console.print("Nothing is missing." if not problems else f"{problems} to cure.")
    raise typer.Exit(1 if problems else 0)


if __name__ == "__main__":
    main()
