"""Source code in a notebook: show the version on disk, or the changes between two
objects.
"""

import ast
import difflib
import html
import sys
from itertools import groupby
from pathlib import Path

from IPython.display import Markdown, display
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Operator, String

# Keywords are bold and comments italic wherever the page keeps nothing but HTML. Where it
# keeps styles, the colours are those of JupyterLab's cells, which follow its theme, and
# elsewhere ones that read well on the light box.
STYLE = """<style>
.ddp-code { background: var(--jp-cell-editor-background, #f6f8fa);
  color: var(--jp-content-font-color1, #1f2328); padding: 6px 10px }
.ddp-code b { color: var(--jp-mirror-editor-keyword-color, #0550ae) }
.ddp-code i { color: var(--jp-content-font-color2, #57606a) }
.ddp-code .s { color: var(--jp-mirror-editor-string-color, #9a3412) }
</style>"""
# what must hold without the style sheet, too: no line is broken, and each is as wide as
# the longest, so that its background is
BOX = "overflow-x: auto"
TEXT = (
    "display: inline-block; min-width: 100%; vertical-align: top; white-space: pre; "
    "margin: 0; background: none; line-height: 1.35; "
    "font-size: var(--jp-code-font-size, 13px); "
    "font-family: var(--jp-code-font-family, monospace)"
)
MARKS = {
    Comment: ("<i>", "</i>"),
    String: ('<span class="s">', "</span>"),
    Keyword: ("<b>", "</b>"),
    Operator.Word: ("<b>", "</b>"),
    Name.Decorator: ("<b>", "</b>"),
}
OUT, IN = "rgba(248, 81, 73, 0.20)", "rgba(46, 160, 67, 0.22)"  # of a comparison


def show(*things):
    """Display the source of functions, classes, modules or files, as on the disk now.

    A file is a Path, which begins at the notebook's own folder.
    """
    for thing in things:
        text = f"# {title(thing)}\n{source(thing)}"
        _display("\n".join(_highlighted(text)), text)


def compare(before, after, context=3):
    """Display what changes from one function, class, module or file to another.

    Either may be a list of several, which are read as one text, in this order. Lines
    that go are red and begin with -, lines that come are green and begin with +.
    """
    lines = _difference(source(before), source(after), context)
    head = f"  {title(before)} -> {title(after)}"
    rows = f"{html.escape(head)}\n"
    for sign, run in groupby(lines, key=lambda line: line[0]):
        code = "".join(f"{sign}{colored}\n" for _, _, colored in run)
        color = {"+": IN, "-": OUT}.get(sign)
        rows += f'<div style="background: {color}">{code}</div>' if color else code
    _display(rows, "\n".join([head, *(sign + text for sign, text, _ in lines)]))


def _difference(old, new, context):
    """The lines of a comparison: their sign, their text, and their text as HTML."""
    before = list(zip(old.split("\n"), _highlighted(old)))
    after = list(zip(new.split("\n"), _highlighted(new)))
    matcher = difflib.SequenceMatcher(None, old.split("\n"), new.split("\n"))
    lines = []
    for group in matcher.get_grouped_opcodes(context):
        lines.append((" ", " ...", " ..."))
        for kind, first, last, start, end in group:
            if kind == "equal":
                lines += [(" ", *line) for line in after[start:end]]
            else:
                lines += [("-", *line) for line in before[first:last]]
                lines += [("+", *line) for line in after[start:end]]
    return lines or [(" ", " no difference", " no difference")]


def source(thing):
    """The text of a function, class, module or file on the disk now, maybe newer."""
    if isinstance(thing, list):
        return "\n\n\n".join(map(source, thing))
    if isinstance(thing, Path):
        return thing.read_text().rstrip()
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
    if isinstance(thing, list):
        thing = thing[0]
    if isinstance(thing, Path):
        return thing.as_posix()
    module = getattr(thing, "__module__", None) or thing.__name__
    return module.replace(".", "/") + ".py"


def _highlighted(text):
    """The lines of Python code as HTML; what spans lines is closed and opened again."""
    lines = [""]
    for kind, value in PythonLexer(stripnl=False, ensurenl=False).get_tokens(text):
        mark = next((MARKS[family] for family in MARKS if kind in family), ("", ""))
        for number, part in enumerate(value.split("\n")):
            if number:
                lines.append("")
            before, after = mark if part.strip() else ("", "")
            lines[-1] += f"{before}{html.escape(part, quote=False)}{after}"
    return lines


def _display(rows, text):
    """A box of code; it scrolls sideways where the page is narrow, and breaks no line."""
    code = f'<div class="ddp-code" style="{BOX}"><pre style="{TEXT}">{rows}</pre></div>'
    display({"text/html": f"{STYLE}\n{code}", "text/plain": text}, raw=True)


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
