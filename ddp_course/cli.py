"""The command `ddp-course`."""

import ast
import importlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ddp_course import UsageError, project_folder
from ddp_course.launch import keep_freed_memory

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Distributed training with PyTorch, on any machine.",
)
console = Console(highlight=False)


def main():
    """Run the command; wrong use ends with one line and exit code 2."""
    keep_freed_memory()
    try:
        app()
    except UsageError as error:
        print(f"ddp-course: {error}", file=sys.stderr)
        sys.exit(2)


def lesson_scripts():
    """The lessons' programs, {"01": path}."""
    return {
        path.stem.removeprefix("lesson"): path
        for path in sorted(Path(__file__).parent.glob("lesson[0-9][0-9].py"))
    }


def lesson_notebooks():
    """The lessons' notebooks, {"01": path}; none where the course is installed without its folder."""
    return {path.name[:2]: path for path in sorted((project_folder() / "lessons").glob("[0-9][0-9]_*.ipynb"))}


def find(lessons, number):
    """The path of a lesson by its number, which may come without the leading zero."""
    number = number.zfill(2)
    if number not in lessons:
        raise UsageError(
            f"there is no lesson {number}: choose one of {', '.join(lessons) or 'none, start in the course folder'}"
        )
    return lessons[number]


@app.command()
def lessons():
    """List the lessons."""
    notebooks = lesson_notebooks()
    table = Table("lesson", "what it is about", "notebook")
    for number, script in lesson_scripts().items():
        idea = ast.get_docstring(ast.parse(script.read_text())).splitlines()[0]
        table.add_row(number, idea, f"lessons/{notebooks[number].name}" if number in notebooks else "")
    console.print(table)
    console.print("ddp-course lab 02 opens a lesson, ddp-course run 02 --nproc 2 runs its program.")


@app.command()
def lab(
    lesson: str = typer.Argument("01", help="the lesson to open"),
    browser: bool = typer.Option(True, help="open a browser window"),
):
    """Start JupyterLab on a lesson, on 127.0.0.1 and with its token. It prints its address."""
    notebook = find(lesson_notebooks(), lesson).relative_to(project_folder())
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--ServerApp.ip=127.0.0.1",
        "--ServerApp.log_level=WARN",
    ]
    command += [f"--LabApp.default_url=/lab/tree/{notebook.as_posix()}"]
    command += [
        f"--LabApp.app_settings_dir={Path(__file__).parent / 'lab'}"
    ]  # asks for no news, and asks nobody
    if not browser:
        command += ["--no-browser"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command += ["--allow-root"]  # in a container, where everybody is root
    server = subprocess.Popen(command, cwd=project_folder())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's: it asks whether to stop
    raise typer.Exit(server.wait())


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def run(
    context: typer.Context,
    lesson: str = typer.Argument(help="its number"),
    nproc: int = typer.Option(1, min=1, help="how many ranks"),
):
    """Run a lesson's program with torchrun. All other flags are the lesson's own."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args
    from torch.distributed.run import run as torchrun

    script = find(lesson_scripts(), lesson)
    importlib.import_module(f"ddp_course.{script.stem}").arguments(
        context.args
    )  # wrong flags end here, in one line
    command = ["--nproc_per_node", str(nproc), os.path.relpath(script), *context.args]
    if nproc > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, of which it would warn
    print(f"torchrun {shlex.join(command)}", flush=True)
    logging.getLogger("torch.distributed.elastic").setLevel(
        logging.CRITICAL
    )  # the ranks have said it themselves
    try:
        torchrun(parse_args(command))
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        if 2 not in codes:
            print(error, file=sys.stderr)
        raise typer.Exit(2 if 2 in codes else 1) from None
    except (SignalException, KeyboardInterrupt):
        raise typer.Exit(130) from None


@app.command()
def execute(
    lesson: list[str] = typer.Argument(None, help="which lessons; all where none is named"),
    nproc: int = typer.Option(None, min=1, help="the notebooks' nproc"),
    data: str = typer.Option(None, help="the notebooks' data"),
    train_samples: int = typer.Option(None, min=1, help="the notebooks' train_samples"),
    epochs: int = typer.Option(None, min=1, help="the notebooks' epochs"),
    store: bool = typer.Option(False, "--store", help="keep the outputs in lessons/, for all readers to see"),
):
    """Run lessons' notebooks from top to bottom with papermill, and say how each went."""
    import papermill

    given = {"nproc": nproc, "data": data, "train_samples": train_samples, "epochs": epochs}
    parameters = {name: value for name, value in given.items() if value is not None}
    if store and parameters:
        raise UsageError(f"--store keeps what readers will see: run it without {', '.join(parameters)}")

    chosen = [find(lesson_notebooks(), number) for number in lesson or lesson_notebooks()]
    folder = project_folder() / "runs" / "notebooks"
    folder.mkdir(parents=True, exist_ok=True)
    table = Table("lesson", "seconds", "verdict")
    failed = False
    for notebook in chosen:
        console.print(notebook.stem)
        begin = time.perf_counter()
        try:
            papermill.execute_notebook(
                notebook,
                folder / notebook.name,
                parameters,
                cwd=notebook.parent,
                kernel_name="python3",
                execution_timeout=120,
                coalesce_streams=True,
                extra_arguments=["--IPKernelApp.log_level=40"],
            )
            verdict = "ran to its end"
            if store:
                store_outputs(folder / notebook.name, notebook)
        except Exception as error:
            failed = True
            verdict = f"failed: {str(error).strip().splitlines()[-1]}"
        table.add_row(notebook.stem, f"{time.perf_counter() - begin:.0f}", verdict)
    console.print(table)
    console.print(f"The notebooks with today's outputs: {os.path.relpath(folder)}")
    raise typer.Exit(1 if failed else 0)


def store_outputs(executed, notebook):
    """Put a notebook that has been executed in place of the stored one, without the run's own metadata."""
    import nbformat

    from ddp_course.runs import write_atomically

    fresh = nbformat.read(executed, as_version=4)
    fresh.metadata = {name: fresh.metadata[name] for name in ("kernelspec", "language_info")}
    fresh.metadata["language_info"].pop("version", None)
    for cell in fresh.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
    write_atomically(notebook, nbformat.writes(fresh) + "\n")


@app.command()
def doctor():
    """Look at what is here and what is missing, run two real ranks, and name the cure for each problem."""
    from ddp_course.doctor import examine

    problems = 0
    for finding in examine():
        problems += bool(finding.cure)
        verdict = "[red]problem[/]" if finding.cure else "[green]well[/]   "
        console.print(f"{verdict}  {finding.subject:12} {escape(finding.found)}", soft_wrap=True)
        if finding.cure:
            console.print(f"         cure         {escape(finding.cure)}", soft_wrap=True)
    console.print("Nothing is missing." if not problems else f"{problems} to cure.")
    raise typer.Exit(1 if problems else 0)


if __name__ == "__main__":
    main()
