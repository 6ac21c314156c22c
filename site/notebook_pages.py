"""The pages of the lessons and the exercises: their notebooks, as they are stored."""

import ast
import re
from pathlib import Path

from course import read, title_of
from links import relinked

SERVICE = "Open in {}"
FILM = 'class="ddp-course-film"'


def page_of_notebook(path, course):
    """The notebook of a page: with links below its title, and its imports folded."""
    notebook = read(path)
    page = path.relative_to(course.root)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = relinked(cell.source, course, path.parent, page)
        elif mostly_imports(cell.source):
            cell.metadata.tags = [*cell.metadata.get("tags", []), "hide-input"]
        for output in cell.get("outputs", []):
            if FILM in output.get("data", {}).get("text/html", ""):
                output.data["text/html"] = stoppable(output.data["text/html"])
    first = notebook.cells[0]
    title, _, rest = first.source.partition("\n")
    parts = [
        title,
        links_below_title(path, course),
        how_to_open(path, course),
        missing_outputs(notebook, path),
        rest,
    ]
    first.source = "\n\n".join(part for part in parts if part)
    if about := description(rest):
        notebook.metadata["myst"] = {"html_meta": {"description": about}}
    return notebook


def links_below_title(path, course):
    """A line of links: to the other pages of a lesson, and to where it can be opened."""
    number, kind = path.name[:2], path.parent.name
    links = []
    if kind == "lessons":
        if number in course.programs():
            links.append(f"[The program](../programs/lesson{number}.md)")
        if number in course.notebooks("exercises"):
            exercise = course.notebooks("exercises")[number].name
            links.append(f"[The exercise](../exercises/{exercise})")
    else:
        lesson = course.notebooks("lessons")[number]
        links.append(f"[The lesson](../lessons/{lesson.name})")
    links.append(f"{{download}}`Download the notebook </files/{kind}/{path.name}>`")
    services = course.services(path)
    links += [f"[{SERVICE.format(name)}]({to})" for name, to in services.items()]
    return "{.course-links}\n" + "\n".join(links)


def how_to_open(path, course):
    """What to know before a notebook is opened elsewhere; "" if no link leads there."""
    if not course.services(path):
        return ""
    first = (
        "On Colab and Kaggle, run [one cell](../start.md#on-colab-and-kaggle) first."
    )
    kind = path.parent.name
    return f"{first} Codespaces opens lesson 1; all {kind} are in `{kind}/`."


def stoppable(film):
    """A film, HTML, with a box that shows its still instead: site.css does that."""
    stop = '<label><input type="checkbox"> stop the film</label>'
    return f'<div class="film">{stop}{film}</div>'


def mostly_imports(source):
    """Whether a cell is a longer list of imports and magics, with little else."""
    try:
        body = ast.parse(re.sub(r"(?m)^%.*", "", source)).body
    except SyntaxError:
        return False
    imports = [isinstance(node, ast.Import | ast.ImportFrom) for node in body]
    return len(body) > 3 and sum(imports) >= 0.75 * len(body)


def missing_outputs(notebook, path):
    """A note if a lesson's notebook has been stored without outputs."""
    if path.parent.name != "lessons" or any(
        cell.get("outputs") for cell in notebook.cells
    ):
        return ""
    return ":::{note}\nThis notebook has not been run yet, so its outputs are missing.\n:::"


def description(text):
    """The first paragraph of a text as plain text, for search engines."""
    paragraphs = [
        part for part in text.split("\n\n") if not re.match(r"\s*(\*\*|[>#|<-])", part)
    ]
    return plain(paragraphs[0] if paragraphs else "")


def plain(markdown):
    """Markdown without its marks, on one line."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    return " ".join(re.sub(r"[`*]|<[^>]*>", "", text).split())


def headings_above(notebook, number):
    """The headings of level 1 to 3 above a cell, or in it, Markdown."""
    text = "\n".join(
        cell.source
        for cell in notebook.cells[: number + 1]
        if cell.cell_type == "markdown"
    )
    return re.findall(r"(?m)^#{1,3} (.+?) *$", re.sub(r"(?s)```.*?```", "", text))


def heading_above(notebook, number):
    """The last heading of level 1 to 3 above a cell, or in it, Markdown."""
    return [title_of(notebook), *headings_above(notebook, number)][-1]


def anchor_above(notebook, number):
    """The anchor of that heading on the notebook's page, as MyST makes it."""
    headings = headings_above(notebook, number) or [title_of(notebook)]
    anchors = [
        re.sub(r"[^\w -]", "", plain(heading).lower()).replace(" ", "-")
        for heading in headings
    ]
    times = anchors.count(anchors[-1]) - 1
    return f"{anchors[-1]}-{times}" if times else anchors[-1]


def write(path, course, folder):
    """Write a notebook's page into the site's sources, and the notebook to download."""
    import nbformat

    page = folder / path.relative_to(course.root)
    page.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(page_of_notebook(path, course), page)
    download = folder / "files" / path.relative_to(course.root)
    download.parent.mkdir(parents=True, exist_ok=True)
    download.write_bytes(Path(path).read_bytes())
