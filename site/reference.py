"""The reference: what a cell calls, the command, and the programs, from their code."""

import contextlib
import importlib
import inspect
import io

from markup import described, fenced

FUNCTIONS = [
    "launch",
    "process_group",
    "show",
    "compare",
    "table",
    "fails",
    "fresh_kernel",
]
MAGICS = ["ranks", "machines"]


def reference(programs):
    """The page of the reference, Markdown. programs: {"01": path}."""
    lines = "\n".join(f"programs/lesson{number}" for number in programs)
    rows = "\n".join(
        f"| [lesson{number}.py](programs/lesson{number}.md) | {first_line(path)} |"
        for number, path in programs.items()
    )
    about = (
        "What the course's cells call, the command ddp-course, and the programs' flags."
    )
    return f"""{described(about)}
# Reference

## In a notebook

`%load_ext ddp_course.notebook` makes the magics known. The functions are imported.

{functions()}

{magics()}

## In a terminal: ddp-course

{commands()}

## The programs

Each page has a program's flags and its source.

| program | what it does |
|---|---|
{rows}

```{{toctree}}
:hidden:

{lines}
```
"""


def functions():
    """What a cell calls, with signatures and docstrings."""
    from ddp_course import notebook
    from ddp_course.ranks import environment
    from ddp_course.ranks import launch as launching

    parts = []
    for name in FUNCTIONS:
        homes = [launching, environment, notebook]
        home = next(home for home in homes if name in vars(home))
        function = getattr(home, name)
        text = f"{name}{inspect.signature(function)}\n\n{inspect.getdoc(function)}"
        parts.append(
            f"### {name}\n\n`from {home.__name__} import {name}`\n\n{fenced(text)}"
        )
    return "\n\n".join(parts)


def magics():
    """The cell magics, with their options."""
    from ddp_course.notebook import magics

    parts = []
    for name in MAGICS:
        text = inspect.getdoc(getattr(magics, name)).removeprefix("::\n\n").lstrip()
        text = text.replace(f"%{name}", f"%%{name}", 1)
        parts.append(f"### %%{name}\n\n{fenced(text)}")
    return "\n\n".join(parts)


def commands():
    """What ddp-course can do: each command with its arguments and options."""
    import typer

    from ddp_course.cli.command import app

    parts = []
    for name, command in typer.main.get_command(app).commands.items():
        words = ["ddp-course", name]
        words += [in_usage(each) for each in command.params if is_argument(each)]
        if not all(map(is_argument, command.params)):
            words.append("[OPTIONS]")
        rows = "\n".join(row_of(each) for each in command.params)
        table = f"\n\n| | |\n|---|---|\n{rows}" if rows else ""
        parts.append(
            f"### ddp-course {name}\n\n`{' '.join(words)}`\n\n{command.help}{table}"
        )
    return "\n\n".join(parts)


def is_argument(parameter):
    """Whether a parameter of a command has no name before it, as LESSON."""
    return parameter.param_type_name == "argument"


def in_usage(argument):
    """An argument as a usage line writes it: in brackets if it may be left out."""
    return argument.name.upper() if argument.required else f"[{argument.name.upper()}]"


def row_of(parameter):
    """A parameter of a command as a row of a table."""
    names = [parameter.name.upper()] if is_argument(parameter) else parameter.opts
    default = parameter.default
    told = f" (default: {default})" if default not in (None, False, True) else ""
    return f"| `{', '.join(names)}` | {parameter.help or ''}{told} |"


# ---- the programs ----


def first_line(path):
    """The first line of a program's docstring."""
    return (module_of(path).__doc__ or "").splitlines()[0]


def module_of(path):
    return importlib.import_module(f"ddp_course.{path.stem}")


def flags_of(path):
    """What a program prints for --help, as wide as $COLUMNS."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        module_of(path).arguments(["--help"])
    text = printed.getvalue()
    return text[text.index("options:") :].strip()


def page_of_program(path, course):
    """The page of a program: its commands, its flags, its source."""
    head, _, rest = inspect.cleandoc(module_of(path).__doc__).partition("\n\n")
    number = path.stem.removeprefix("lesson")
    lesson = course.notebooks("lessons").get(number)
    link = f"[The lesson](../lessons/{lesson.name})\n" if lesson else ""
    return f"""{described(first_line(path))}
# {path.name}

{{.course-links}}
{link}{{download}}`Download the program </files/{path.name}>`

{head}

{fenced(rest, "bash")}

## Flags

{fenced(flags_of(path))}

## Source

{fenced(path.read_text().strip(), "python")}
"""


def write(course, folder):
    """Write the reference and a page for each program into the site's sources."""
    programs = course.programs()
    (folder / "reference.md").write_text(reference(programs))
    for kind in ("programs", "files"):
        (folder / kind).mkdir(exist_ok=True)
    for path in programs.values():
        page = folder / "programs" / f"{path.stem}.md"
        page.write_text(page_of_program(path, course))
        (folder / "files" / path.name).write_bytes(path.read_bytes())
