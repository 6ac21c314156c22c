"""What the themes leave out: names of controls for those who listen to a page, long
lines of code that the keyboard scrolls, and flags that stay on one line.
"""

from pathlib import Path

# The arrows in the list of pages have no name. The other two have one that is not what
# is written on them, so that a person who speaks commands cannot press them.
ADDED = {
    '<summary><span class="toctree-toggle"': '<summary aria-label="pages below"><span class="toctree-toggle"',
    '<summary aria-label="Toggle hidden content">': "<summary>",
    'title="Search" aria-label="Search"': 'title="Search"',
    '<div class="ddp-code" style=': '<div class="ddp-code" tabindex="0" style=',
    '<span class="pre">-': '<span class="pre flag">-',
}


def complete(app, error):
    """Add to all pages what the themes leave out, once Sphinx has written the pages."""
    for path in [] if error else Path(app.outdir).rglob("*.html"):
        text = page = path.read_text()
        for old, new in ADDED.items():
            page = page.replace(old, new)
        if page != text:
            path.write_text(page)


def setup(app):
    app.connect("build-finished", complete)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
