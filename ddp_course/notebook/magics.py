"""The `%%ranks` cell magic, and what `%load_ext ddp_course.notebook` does besides.

It starts the fork server in the background, and has lessons that were edited on disk
reloaded before the next cell.
"""

import ast
import logging
import signal
import warnings

from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from ddp_course.ranks.launch import launch, start_server


def load_ipython_extension(shell):
    """What `%load_ext ddp_course.notebook` does."""
    # progress bars as text will do, and packages that would be quicker are not needed
    warnings.filterwarnings("ignore", "IProgress not found")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    _keep_signals(shell)
    start_server()
    shell.register_magic_function(ranks, magic_kind="cell")
    shell.run_line_magic("load_ext", "autoreload")
    shell.run_line_magic("autoreload", "2")


def _keep_signals(shell):
    """Undo, after each cell, what notebook_launcher does to the kernel: torchrun's
    agent, which runs within it, answers signals in its own way from then on, and ends
    the kernel with a traceback when that is shut down."""
    before = signal.getsignal(signal.SIGTERM)
    shell.events.register(
        "post_run_cell", lambda result: signal.signal(signal.SIGTERM, before)
    )


@magic_arguments()
@argument("nproc", type=int, nargs="?", default=2, help="how many ranks (2)")
@argument(
    "--timeout",
    type=float,
    default=60,
    help="seconds after which they are stopped (60)",
)
def ranks(line, cell):
    """Run this cell on ranks, in a process group: `rank`, `world_size`, `torch` and
    `dist` are there.

    The cell sees the notebook's variables, as copies. What it prints, and the value of
    its last line, is shown with the number of the rank.
    """
    from IPython import get_ipython

    options = parse_argstring(ranks, line)
    shell = get_ipython()
    used = {node.id for node in ast.walk(ast.parse(cell)) if isinstance(node, ast.Name)}
    variables = {name: shell.user_ns[name] for name in used & shell.user_ns.keys()}
    filename = shell.compile.cache(
        f"%%ranks {line}\n{cell}"
    )  # so that errors can show the line
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

    from ddp_course.ranks.environment import process_group

    statements = ast.increment_lineno(ast.parse(cell)).body  # line 1 is the magic's
    patience = 2 * timeout  # so that launch's own timeout comes first: it says more
    with process_group(timeout=patience) as (rank, world_size):
        given = {"rank": rank, "world_size": world_size, "torch": torch, "dist": dist}
        names = {**variables, **given, "__name__": "__main__"}
        for statement in statements:
            if statement is statements[-1] and isinstance(statement, ast.Expr):
                exec(
                    compile(ast.Interactive([statement]), filename, "single"), names
                )  # shows its value
            else:
                exec(compile(ast.Module([statement], []), filename, "exec"), names)
