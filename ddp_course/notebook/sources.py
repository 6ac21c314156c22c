"""Source code in a notebook: show it as it is on the disk, or what changes between two."""

import ast
import difflib
import html
import sys
from pathlib import Path

from IPython.display import Markdown, display
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Literal, Name, Operator, String

# JupyterLab's own colours, which follow its theme, and for other pages ones that read
# well on the light box below.
INK, PAPER = (
    "var(--jp-content-font-color1, #1f2328)",
    "var(--jp-layout-color2, #f6f8fa)",
)
COLORS = {
    Comment: "var(--jp-mirror-editor-comment-color, #57606a)",
    String: "var(--jp-mirror-editor-string-color, #9a3412)",
    Literal: "var(--jp-mirror-editor-number-color, #116329)",
    Keyword: "var(--jp-mirror-editor-keyword-color, #0550ae)",
    Operator.Word: "var(--jp-mirror-editor-keyword-color, #0550ae)",
    Name.Decorator: "var(--jp-mirror-editor-meta-color, #6639ba)",
}
OUT, IN = "rgba(248, 81, 73, 0.20)", "rgba(46, 160, 67, 0.22)"  # of a comparison
BOX = (
    f"background: {PAPER}; color: {INK}; margin: 0 0 6px; padding: 6px 10px; "
    "overflow-x: auto; white-space: pre; line-height: 1.35; "
    "font-family: var(--jp-code-font-family, monospace); "
    "font-size: var(--jp-code-font-size, 13px)"
)


def show(*things):
    """Display the source of functions, classes or modules, as it is on the disk now."""
    for thing in things:
        text = f"# {title(thing)}\n{source(thing)}"
        _display("\n".join(_highlighted(text)), text)


def compare(before, after, context=3):
    """Display what changes from one function, class or module to another.

    Lines that go are red and begin with -, lines that come are green and begin with +.
    """
    old, new = source(before).splitlines(), source(after).splitlines()
    diff = list(difflib.unified_diff(old, new, n=context, lineterm=""))[2:]
    lines = ["  ..." if line.startswith("@@") else line for line in diff]
    lines = lines or ["  no difference"]
    head = f"  {title(before)} -> {title(after)}"
    # the code is highlighted without its signs, which are put back in front of it
    colored = _highlighted("\n".join(line[1:] for line in lines))
    rows = [f"<span>{html.escape(head)}</span>"]
    for line, code in zip(lines, colored):
        background = {"+": IN, "-": OUT}.get(line[0])
        style = f' style="background: {background}"' if background else ""
        rows.append(f"<span{style}>{html.escape(line[0])}{code}</span>")
    _display("\n".join(rows), "\n".join([head, *lines]))


def source(thing):
    """The text of a function, class or module on the disk now, which may be newer."""
    module = sys.modules[getattr(thing, "__module__", None) or thing.__name__]
    text = Path(module.__file__).read_text()
    if thing is module:
        return text.rstrip()
    body = ast.parse(text).body
    for name in thing.__qualname__.split("."):
        node = next(node for node in body if getattr(node, "name", None) == name)
        body = getattr(node, "body", [])
    first = min([node.lineno, *(wrapper.lineno for wrapper in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def title(thing):
    """The file that holds a function, class or module: ddp_course/lesson04.py."""
    module = getattr(thing, "__module__", None) or thing.__name__
    return module.replace(".", "/") + ".py"


def _highlighted(text):
    """The lines of Python code as HTML; what spans lines is closed and opened again."""
    lines = [""]
    for kind, value in PythonLexer(stripnl=False, ensurenl=False).get_tokens(text):
        color = next((COLORS[family] for family in COLORS if kind in family), None)
        for number, part in enumerate(value.split("\n")):
            if number:
                lines.append("")
            if part.strip() and color:
                lines[-1] += f'<span style="color: {color}">{html.escape(part)}</span>'
            else:
                lines[-1] += html.escape(part)
    return lines


def _display(rows, text):
    """A box of code; it scrolls sideways where the page is narrow, and breaks no line."""
    bundle = {"text/html": f'<pre style="{BOX}">{rows}</pre>', "text/plain": text}
    display(bundle, raw=True)


def table(rows):
    """Display a list of dicts as a table, a column for each key of the first.

    Floats are written with four digits.
    """
    columns = list(rows[0])

    def text(value):
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    lines = [
        columns,
        ["---"] * len(columns),
        *([text(row.get(column, "")) for column in columns] for row in rows),
    ]
    display(Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines)))
