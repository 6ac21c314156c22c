"""How a figure gets onto the page: as an image with an alternative text.

The output is text/html with an <img>. Of all forms only this one keeps its alternative
text in JupyterLab, VS Code and nbconvert, and is also shown in notebooks that
JupyterLab does not trust (there the text/plain of an image/svg+xml is shown instead).
"""

import base64
import html
import io

from IPython.display import display
from matplotlib.text import Text
from PIL import Image

from ddp_course.notebook.plots import drawing

LARGEST_SVG = 70_000  # bytes; in base64 they are a third more
PIXELS = 96  # per inch, as browsers count
ONE_OF_TWO = """\
.ddp-course-still {display: none !important}
@media print, (prefers-reduced-motion: reduce) {
.ddp-course-film {display: none !important}
.ddp-course-still {display: block !important; width: auto !important;
height: auto !important}
}
"""


def display_drawing(width, height, pieces, alt):
    """Display pieces of SVG. alt: what they show, in a sentence with its numbers."""
    image = drawing.document(width, height, pieces, alt)
    display_page(as_img("svg+xml", image, alt), alt)


def display_figure(figure, alt):
    """Display a matplotlib figure: as SVG, or as PNG in double resolution where the SVG
    would be large. alt: what it shows, in a sentence with its numbers.
    """
    settle(figure)
    image = as_svg(figure, alt)
    if len(image) <= LARGEST_SVG:
        page = as_img("svg+xml", image, alt)
    else:
        width = round(figure.get_figwidth() * PIXELS)
        page = as_img("png", as_png(figure), alt, f'width="{width}"')
    display_page(page, alt)


def display_film(film, still, alt):
    """Display an animation; on paper, and for readers who prefer less motion, a still
    SVG in its place.

    A page that drops the <style>, as JupyterLab does in notebooks that it does not
    trust, has the animation only, since the still is 0 pixels wide there.
    """
    page = as_img("svg+xml", film.playing(alt), alt, 'class="ddp-course-film"')
    hidden = 'class="ddp-course-still" width="0" height="0"'
    page += as_img("svg+xml", still, alt, hidden)
    display_page(f"<style>{ONE_OF_TWO}</style>{page}", alt)


def display_page(page, alt):
    """Display HTML; where only text is shown, the alternative text."""
    display({"text/html": page, "text/plain": alt}, raw=True)


def as_img(kind, image, alt, more=""):
    """An <img> that carries its image, bytes, within itself."""
    data = base64.b64encode(image).decode()
    head = f'<img alt="{html.escape(alt)}" {more}'.rstrip()
    return f'{head} src="data:image/{kind};base64,{data}">'


def settle(figure):
    """Lay the axes out, once and for all: the last digits that constrained layout finds
    are not the same each time.
    """
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axis in figure.axes:
        axis.set_position([round(part, 6) for part in axis.get_position().bounds])
        keep_title_inside(axis)


def keep_title_inside(axis):
    """Move a title to the left that would be cut off at the figure's right edge."""
    title = axis.get_title(loc="left")
    for text in axis.get_children():
        if isinstance(text, Text) and title and text.get_text() == title:
            outside = text.get_window_extent().x1 - axis.figure.bbox.x1
            text.set_x(min(0, round(-outside / axis.bbox.width - 0.01, 6)))


def as_svg(figure, alt):
    """A matplotlib figure as SVG, the same bytes each time."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(["Creator", "Date", "Format", "Type"])
    figure.savefig(buffer, format="svg", metadata=nothing)
    svg = " ".join(buffer.getvalue().split())  # without its indentation
    return drawing.titled(svg[svg.index("<svg ") :], alt).encode()


def as_png(figure):
    """A matplotlib figure as PNG, two pixels for each of the page, in 128 colours."""
    full, small = io.BytesIO(), io.BytesIO()
    figure.savefig(full, format="png", dpi=2 * PIXELS)
    Image.open(full).convert("RGB").quantize(128).save(small, "png", optimize=True)
    return small.getvalue()
