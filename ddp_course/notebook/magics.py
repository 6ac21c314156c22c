"""The `%%ranks` and `%%machines` cell magics, and what `%load_ext ddp_course.notebook` does besides.

It starts the fork server in the background, reloads lessons that were edited on disk
before the next cell, and shows a line below long cells.
"""

import ast
import builtins
import difflib
import importlib
import logging
import re
import signal
import symtable
import sys
import traceback
import warnings

from IPython.core.error import UsageError
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from ddp_course import UsageError as CourseError
from ddp_course.notebook.alive import watch_cells
from ddp_course.ranks.launch import RankError, launch, start_server

LONGEST = 86400  # seconds, a day


def load_ipython_extension(shell):
    """What `%load_ext ddp_course.notebook` does."""
    # text progress bars are enough, and the recommended faster packages are not needed
    warnings.filterwarnings("ignore", "IProgress not found")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    _keep_signals(shell)
    start_server()
    shell.register_magic_function(ranks, magic_kind="cell")
    shell.register_magic_function(machines, magic_kind="cell")
    shell.set_custom_exc((NameError, RankError), _explain_name_error)
    watch_cells(shell)
    try:
        shell.run_line_magic("load_ext", "autoreload")
    except ImportError:  # IPython 7 (Colab's) imports `imp`, which Python 3.12 removed
        sys.modules["imp"] = importlib  # both have reload()
        shell.run_line_magic("load_ext", "autoreload")
        del sys.modules["imp"]
    shell.run_line_magic("autoreload", "2")


def _keep_signals(shell):
    """After each cell, undo what notebook_launcher does to the kernel: torchrun's agent
    runs in it and installs its own signal handlers, which end the kernel with a
    traceback when it is shut down.
    """
    before = signal.getsignal(signal.SIGTERM)
    shell.events.register(
        "post_run_cell", lambda result: signal.signal(signal.SIGTERM, before)
    )


# ---- the magics ----


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
    `dist` are defined.

    The cell sees the notebook's variables, as copies. What it prints, and the value of
    its last line, is shown with the number of the rank.
    """
    options = _options(ranks, line)
    _run_on_ranks(f"%%ranks {line}", cell, options)


@magic_arguments()
@argument("count", type=int, nargs="?", default=2, help="how many machines (2)")
@argument("--nproc", type=int, default=1, help="how many ranks in each (1)")
@argument("--bandwidth", help="what each can send per second, such as 100mbit")
@argument("--delay", help="how long each packet travels, such as 1ms")
@argument(
    "--timeout",
    type=float,
    default=60,
    help="seconds after which they are stopped (60)",
)
def machines(line, cell):
    """Run this cell on ranks on several machines, as `%%ranks` does on one. `machine`,
    the number of the rank's machine, is defined, too.
    """
    from ddp_course.ranks.machines.machines import Machines

    options = _options(machines, line)
    try:
        pretend_machines = Machines(options.count, options.bandwidth, options.delay)
    except CourseError as error:
        raise UsageError(f"%%machines {line}: {error}") from None
    with pretend_machines:
        _run_on_ranks(f"%%machines {line}", cell, options, machines=pretend_machines)


def _run_on_ranks(magic, cell, options, **where_to):
    """Run a cell by launch(). magic: the cell's first line. where_to: more options of
    launch().
    """
    from IPython import get_ipython

    shell = get_ipython()
    number = shell.displayhook.prompt_count  # as in Out[4]
    where = f"cell In[{number}]"
    text = f"\n{cell}"  # line 1 is the magic's
    used, assigned = _names(text, where, shell)
    _assigned.update(dict.fromkeys(assigned, where))
    launch(
        _run_cell,
        text,
        # with this name, errors can show the line
        shell.compile.cache(f"{magic}\n{cell}", number),
        {name: shell.user_ns[name] for name in used & shell.user_ns.keys()},
        options.timeout,
        nproc=options.nproc,
        timeout=options.timeout,
        **where_to,
    )


def _run_cell(text, filename, variables, timeout):
    import torch
    import torch.distributed as dist

    from ddp_course.ranks.environment import process_group, whole_number

    statements = ast.parse(text).body
    patience = (
        2 * timeout
    )  # so that launch's own timeout, with its better message, comes first
    with process_group(timeout=patience) as (rank, world_size):
        given = {"rank": rank, "world_size": world_size, "torch": torch, "dist": dist}
        given["machine"] = whole_number("GROUP_RANK")
        names = {**variables, **given, "__name__": "__main__"}
        for statement in statements:
            if statement is statements[-1] and isinstance(statement, ast.Expr):
                exec(
                    compile(ast.Interactive([statement]), filename, "single"), names
                )  # shows its value
            else:
                exec(compile(ast.Module([statement], []), filename, "exec"), names)


# ---- what may be wrong with a cell, before any rank starts ----


def _options(magic, line):
    """A magic's arguments. Raises UsageError, of which IPython shows one line."""
    from IPython import get_ipython

    name = f"%%{magic.__name__}"
    expressions = re.findall(r"\{.*?\}", line)
    if expressions:  # IPython has replaced none, since one of them has no value
        raise UsageError(_without_value(expressions, get_ipython().user_ns))
    try:
        options = parse_argstring(magic, line)
    except ValueError as error:
        raise UsageError(f"{name} {line}: {error}") from None
    if options.nproc < 1:
        raise UsageError(
            f"{name} takes a number of ranks, 1 or more, not {options.nproc}"
        )
    if not 0 < options.timeout <= LONGEST:
        raise UsageError(
            f"--timeout takes seconds, above 0 and at most a day, not {options.timeout:g}"
        )
    return options


def _without_value(expressions, variables):
    """The error message for expressions in braces, one of which has no value."""
    for name in re.findall(r"[^\W\d]\w*", " ".join(expressions)):
        if name not in variables and not hasattr(builtins, name):
            similar = difflib.get_close_matches(name, variables, n=1)
            hint = f"; there is {similar[0]}" if similar else ""
            return f"no variable is called {name} here{hint}"
    return f"there is no value for {' '.join(expressions)}"


class CellSyntaxError(Exception):
    """A cell on ranks that is not valid Python. The text is three lines: where, the
    line, and what is wrong.
    """

    def _render_traceback_(self):
        """IPython's hook: shows only the text."""
        return str(self).splitlines()


def _names(text, where, shell):
    """The names that a cell uses, and those that it assigns: two sets.

    Raises UsageError for IPython's own syntax, and CellSyntaxError.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks will raise the same error
            compile(text, where, "exec")
    except SyntaxError as error:
        number = min(error.lineno or 1, text.count("\n") + 1)
        line = text.split("\n")[number - 1]
        code = line.strip()
        if shell.transform_cell(code).strip() != code:
            raise UsageError(
                f"cells on ranks are plain Python, without IPython's commands: "
                f"line {number} of {where}, {code}"
            ) from None
        indent = len(line) - len(line.lstrip())
        caret = " " * max((error.offset or 1) - 1 - indent, 0) + "^"
        raise CellSyntaxError(
            f"SyntaxError in line {number} of {where}:\n    {code}\n    {caret} {error.msg}"
        ) from None
    table = symtable.symtable(text, where, "exec")
    used = {name.id for name in ast.walk(ast.parse(text)) if isinstance(name, ast.Name)}
    assigned = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_assigned() or symbol.is_imported()
    }
    return used, assigned


# ---- what the ranks assign stays with them ----

_assigned = {}  # names that a cell has assigned on ranks, and which cell did


def _explain_name_error(shell, kind, error, trace, tb_offset=None):
    """IPython's hook: show the error as usual, with a note if the name was assigned on
    the ranks, or if a check asks for an answer that is not there.
    """
    name = getattr(error, "name", None)
    if isinstance(error, RankError):
        found = re.match(r"NameError: name '(\w+)' is not defined", error.message)
        name = found and found[1]
    if name in _assigned:
        error.add_note(
            f"{name} was assigned on the ranks, in {_assigned[name]}. Their variables are\n"
            "their own and end with the cell. To get values back, let a function return them:\n"
            "    values = launch(function, nproc=2)  # one per rank"
        )
    elif name and re.match(r"checks\.ex\d\d\.check_", _line_of(trace)):
        error.add_note(
            f"This check asks for {name}: run the cell that defines it, then this one."
        )
    shell.showtraceback((kind, error, trace), running_compiled_code=True)


def _line_of(trace):
    """The line of source that raised an error, by its traceback."""
    return traceback.extract_tb(trace)[-1].line or ""
