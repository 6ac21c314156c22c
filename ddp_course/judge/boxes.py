"""A box in a notebook: how verdicts and hints are shown there."""

import html
import sys

CELL = (
    "padding: 2px 12px 2px 0; text-align: left; vertical-align: top; background: none; "
    "overflow-wrap: anywhere"
)


def shell():
    """IPython's shell, None where this Python runs without one."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def show(text, as_html):
    """Display the HTML in a notebook, and print the text elsewhere."""
    if not hasattr(shell(), "kernel"):
        print(text)
        return
    from IPython.display import display

    display({"text/plain": text, "text/html": as_html}, raw=True)


def box(title, body, color):
    """HTML of a box. color: of its edge and tint, "46, 160, 67"; its text has the
    page's own colour, so that it reads on light and on dark.
    """
    style = (
        f"border-left: 5px solid rgb({color}); background: rgba({color}, 0.12); "
        "padding: 6px 12px"
    )
    return f'<div style="{style}"><b>{html.escape(title)}</b>{body}</div>'


def table(rows, prose=()):
    """HTML of a table of names and texts, in monospace but for the rows in `prose`."""
    lines = ""
    for name, text in rows.items():
        font = "" if name in prose else "; font-family: monospace"
        lines += (
            f'<tr style="background: none"><td style="{CELL}; white-space: nowrap">'
            f'{html.escape(name)}</td><td style="{CELL}; white-space: pre-wrap{font}">'
            f"{html.escape(text)}</td></tr>"
        )
    return f"<table>{lines}</table>" if lines else ""


def folded(hints):
    """HTML of hints, each folded away within the one before it."""
    inner = ""
    for number, text in reversed(list(enumerate(hints, 1))):
        last = " (the last one)" if number == len(hints) else ""
        inner = (
            '<details style="margin: 4px 0"><summary style="cursor: pointer">'
            f"Hint {number} of {len(hints)}{last}</summary>{html.escape(text)}{inner}"
            "</details>"
        )
    return inner
