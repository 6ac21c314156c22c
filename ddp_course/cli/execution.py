"""`ddp-course execute`: notebooks from top to bottom with papermill."""

import os
import sys
import time

import papermill
import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from traitlets.config import Config

from ddp_course import UsageError, project_folder
from ddp_course.cli import exercises

# Jupyter kills a kernel 5 s after it has asked it to end. On a busy machine, that is too
# early for the kernel to remove its temporary folders.
PATIENT = Config(KernelManager={"shutdown_wait_time": 60.0})
QUIET = 0.6  # processes per core: more is somebody else's work
# what authors write into the metadata of a cell
FOLDED = "jp-MarkdownHeadingCollapsed"  # JupyterLab's name for it
AUTHORS = ("tags", "failure", "jupyter", FOLDED)


def execute(notebooks, parameters, store):
    """Run notebooks in turn and print the result of each; return the exit code, 0 or 1.

    notebooks: their paths. parameters: {name: value} for their cell of parameters.
    store: whether the outputs replace the stored ones. The notebooks with their new
    outputs are written to runs/notebooks/. Raises UsageError where times are to be stored
    and the machine has other work.
    """
    if store and load_per_core() > QUIET:
        busy = f"this machine is busy (load {psutil.getloadavg()[0]:.1f})"
        raise UsageError(f"{busy}: --store needs a quiet one, for its times")
    console = Console(highlight=False)
    folder = project_folder() / "runs" / "notebooks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {folder}: {error.strerror}") from None
    table = Table("lesson", "seconds", "verdict")
    failed = False
    for notebook in notebooks:
        console.print(notebook.stem)
        begin = time.perf_counter()
        try:
            papermill.execute_notebook(
                notebook,
                folder / notebook.name,
                parameters,
                cwd=notebook.parent,
                kernel_name="python3",
                execution_timeout=300,  # per cell; launch stops its ranks sooner
                coalesce_streams=True,
                extra_arguments=["--IPKernelApp.log_level=40"],
                progress_bar=sys.stderr.isatty(),
                config=PATIENT,
            )
            verdict = "ran to its end"
            if store:
                store_outputs(folder / notebook.name, notebook)
        except Exception as error:
            failed = True
            verdict = f"failed: {in_one_line(error)}"
        seconds = time.perf_counter() - begin
        table.add_row(notebook.stem, f"{seconds:.0f}", escape(verdict))
    console.print(table)
    console.print(
        f"The notebooks with their new outputs are in {os.path.relpath(folder)}"
    )
    return int(failed)


def load_per_core():
    """How many processes have waited for each core in the last minute, or run on it."""
    return psutil.getloadavg()[0] / (os.cpu_count() or 1)


def store_outputs(executed, notebook):
    """Put a notebook that has been executed in place of the stored one.

    The metadata of papermill and the kernel about this run is removed.
    """
    fresh = exercises.read(executed)
    kept = ("kernelspec", "language_info")
    fresh.metadata = {name: fresh.metadata[name] for name in kept}
    fresh.metadata["language_info"].pop("version", None)
    for cell in fresh.cells:
        cell.metadata = {
            name: value
            for name, value in cell.metadata.items()
            if name in AUTHORS and value != []
        }
    exercises.write(notebook, fresh)


def in_one_line(error):
    """The most informative line of a cell's error; of several ranks' errors, that of
    the first.
    """
    of_the_first = str(error).strip().split("\n\nmeanwhile ")[0]
    return (of_the_first.splitlines() or [type(error).__name__])[-1].strip()
