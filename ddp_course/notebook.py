"""What a notebook cell calls: show a lesson's source, compare two, expect a failure, and run a cell on ranks.

    %load_ext ddp_course.notebook

adds the `%%ranks` cell magic, starts the fork server in the background, and has lessons that were edited on disk
reloaded before the next cell.
"""

import ast
import difflib
import html
import io
import re
import signal
import subprocess
import sys
import warnings
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import Markdown, display

from ddp_course.launch import RankError, launch, start_server


def show(*things):
    """Display the source of functions, classes or modules, as it is on the disk now."""
    for thing in things:
        display(Markdown(f"```python\n# {_title(thing)}\n{source(thing)}\n```"))


def compare(before, after, context=3):
    """Display what changes from one function, class or module to another: out in red, in in green."""
    diff = difflib.unified_diff(
        source(before).splitlines(), source(after).splitlines(), n=context, lineterm=""
    )
    lines = [f"  {_title(before)} -> {_title(after)}"]
    for line in list(diff)[2:]:
        lines.append("  ..." if line.startswith("@@") else line)
    if len(lines) == 1:
        lines.append("  no difference")
    colors = {"+": "rgba(46, 160, 67, 0.22)", "-": "rgba(248, 81, 73, 0.20)"}
    rows = []
    for line in lines:
        style = f' style="background-color: {colors[line[0]]}"' if line[0] in colors else ""
        rows.append(f"<div{style}>{html.escape(line)}</div>")
    bundle = {"text/html": f"<pre>{''.join(rows)}</pre>", "text/plain": "\n".join(lines)}
    display(bundle, raw=True)


def source(thing):
    """The text of a function, class or module on the disk now: not of what was imported, which may be older."""
    module = sys.modules[getattr(thing, "__module__", None) or thing.__name__]
    text = Path(module.__file__).read_text()
    if thing is module:
        return text.rstrip()
    body = ast.parse(text).body
    for name in thing.__qualname__.split("."):
        node = next(node for node in body if getattr(node, "name", None) == name)
        body = getattr(node, "body", [])
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def _title(thing):
    return f"{getattr(thing, '__module__', None) or thing.__name__}".replace(".", "/") + ".py"


def table(rows):
    """Display a list of dicts as a table, a column for each key of the first; floats with four digits."""
    columns = list(rows[0])

    def text(value):
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    lines = [
        columns,
        ["---"] * len(columns),
        *([text(row.get(column, "")) for column in columns] for row in rows),
    ]
    display(Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines)))


@contextmanager
def fails(*patterns):
    """Expect the block to fail, with a match for each pattern in its error: show the error and go on.

    Raises AssertionError where the block works, or fails with something else. What ranks write to stderr, torch's own
    log lines, is left out.
    """
    try:
        with redirect_stderr(io.StringIO()):
            yield
    except (Exception, SystemExit) as error:
        text = str(error) if isinstance(error, RankError) else f"{type(error).__name__}: {error}"
        missing = [pattern for pattern in patterns if not re.search(pattern, text)]
        if missing:
            raise AssertionError(f"this was to fail with {missing}, but failed with\n{text}") from None
        print(text)
        return
    raise AssertionError("this was to fail, but it worked")


def fresh_kernel(*cells, timeout=60):
    """Run cells, texts, in a kernel of their own, as after "Restart Kernel"; print what they print.

    Raises RuntimeError where a cell raises, with its error, and TimeoutError where one takes longer than `timeout`
    seconds. Either way no process of it is left.
    """
    from jupyter_client.manager import KernelManager

    def show_output(message):
        if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
            print(message["content"]["text"], end="")

    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(stderr=subprocess.DEVNULL)
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=60)
        for cell in cells:
            try:
                reply = client.execute_interactive(cell, timeout=timeout, output_hook=show_output)["content"]
            except TimeoutError:
                raise TimeoutError(
                    f"the cell did not end within {timeout:g} s, and its kernel was stopped"
                ) from None
            if reply["status"] == "error":
                raise RuntimeError(f"{reply['ename']}: {reply['evalue']}")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)  # with the processes that it has started


def load_ipython_extension(shell):
    """What `%load_ext ddp_course.notebook` does."""
    warnings.filterwarnings("ignore", "IProgress not found")  # of progress bars as widgets: text will do
    _keep_signals(shell)
    start_server()
    shell.register_magic_function(ranks, magic_kind="cell")
    shell.run_line_magic("load_ext", "autoreload")
    shell.run_line_magic("autoreload", "2")


def _keep_signals(shell):
    """Undo, after each cell, what notebook_launcher does to the kernel: torchrun's agent, which runs within it, answers
    signals in its own way from then on, and ends the kernel with a traceback when that is shut down."""
    before = signal.getsignal(signal.SIGTERM)
    shell.events.register("post_run_cell", lambda result: signal.signal(signal.SIGTERM, before))


@magic_arguments()
@argument("nproc", type=int, nargs="?", default=2, help="how many ranks (2)")
@argument("--timeout", type=float, default=60, help="seconds after which they are stopped (60)")
def ranks(line, cell):
    """Run this cell on ranks, in a process group: `rank`, `world_size`, `torch` and `dist` are there.

    The cell sees the notebook's variables, as copies. What it prints, and the value of its last line, is shown with the
    number of the rank.
    """
    from IPython import get_ipython

    options = parse_argstring(ranks, line)
    shell = get_ipython()
    used = {node.id for node in ast.walk(ast.parse(cell)) if isinstance(node, ast.Name)}
    variables = {name: shell.user_ns[name] for name in used & shell.user_ns.keys()}
    filename = shell.compile.cache(f"%%ranks {line}\n{cell}")  # so that errors can show the line
    launch(
        _run_cell,
        cell,
        filename,
        variables,
        options.timeout,
        nproc=options.nproc,
        timeout=options.timeout,
    )


def _run_cell(cell, filename, variables, timeout):
    import torch
    import torch.distributed as dist

    from ddp_course.distributed import process_group

    statements = ast.increment_lineno(ast.parse(cell)).body  # line 1 is the magic's
    patience = 2 * timeout  # so that launch's own timeout comes first: it says more
    with process_group(timeout=patience) as (rank, world_size):
        given = {"rank": rank, "world_size": world_size, "torch": torch, "dist": dist}
        names = {**variables, **given, "__name__": "__main__"}
        for statement in statements:
            if statement is statements[-1] and isinstance(statement, ast.Expr):
                exec(compile(ast.Interactive([statement]), filename, "single"), names)  # shows its value
            else:
                exec(compile(ast.Module([statement], []), filename, "exec"), names)
