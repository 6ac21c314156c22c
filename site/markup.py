"""Pieces of Markdown that pages are made of."""

import re

from links import CODE


def fenced(text, language=""):
    """A block of code, Markdown, behind a fence that the text does not have."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"


def escaped(text):
    """Plain text as Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>#$|~^])", r"\\\1", text)


def error_line(text):
    """A line of an error as Markdown: what it has between backticks is code."""
    return "".join(
        part if CODE.fullmatch(part) else escaped(part.replace("`", ""))
        for part in re.split(CODE, text)
    )


# not in the list of pages that Sphinx writes into every page: hundreds would be
OUT_OF_THE_LIST = "orphan: true\n"


def described(about, beside=""):
    """What comes before the title of a page: what it is about, for search engines.
    beside: other lines for Sphinx.
    """
    text = quoted(" ".join(about.split()))
    return f"---\n{beside}myst:\n  html_meta:\n    description: {text}\n---"


def quoted(text):
    """A text as a YAML string."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
