"""What the themes leave out for those who listen to a page: names of controls."""

from pathlib import Path

# The arrows in the list of pages have no name. The other two have one that is not what
# is written on them, so that a person who speaks commands cannot press them.
NAMES = {
    '<summary><span class="toctree-toggle"': '<summary aria-label="pages below"><span class="toctree-toggle"',
    '<summary aria-label="Toggle hidden content">': "<summary>",
    'title="Search" aria-label="Search"': 'title="Search"',
}


def name_controls(app, error):
    """Give the controls of all pages their names, once Sphinx has written the pages."""
    for path in [] if error else Path(app.outdir).rglob("*.html"):
        text = page = path.read_text()
        for old, new in NAMES.items():
            page = page.replace(old, new)
        if page != text:
            path.write_text(page)


def setup(app):
    app.connect("build-finished", name_controls)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
