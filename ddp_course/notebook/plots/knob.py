"""A picture with a slider that changes it: HTML that an output stores, so that it turns
in JupyterLab and on a static page, without a kernel and without a package.

The pictures are drawn beforehand, one for each place of the slider. A page that runs no
script, as GitHub's, and a notebook that JupyterLab does not trust show one of them.
"""

import base64
import json

from ddp_course.notebook.plots.display import as_img, display_page

# The script makes the slider, so that there is none where no script runs. It finds its
# picture without an id: both have the same parent. JupyterLab would take the arrow keys
# for its own commands; the attribute beginning with data-lm tells it not to.
SCRIPT = """\
(function (knob) {
  var label = %s, pictures = %s, picture = knob.querySelector("img");
  var box = document.createElement("label"), slider = document.createElement("input");
  var said = document.createElement("output");
  function turn() {
    var chosen = pictures[slider.value];
    said.textContent = " " + chosen[0];
    slider.setAttribute("aria-valuetext", chosen[0]);
    picture.alt = chosen[1];
    picture.src = "data:image/svg+xml;base64," + chosen[2];
  }
  slider.type = "range";
  slider.max = pictures.length - 1;
  slider.value = %d;
  slider.style.verticalAlign = "middle";
  slider.setAttribute("data-lm-suppress-shortcuts", "true");
  slider.oninput = turn;
  box.style.display = "block";
  box.append(label + " ", slider, said);
  knob.prepend(box);
  turn();
})(document.currentScript.parentNode);"""


def knob(label, pictures, at=0):
    """A slider over pictures. label: what it sets; pictures: for each of its places,
    (text, alternative text, SVG in bytes); at: the place that it begins at, which is
    also what shows where no script runs.
    """
    coded = [(name, alt, base64.b64encode(svg).decode()) for name, alt, svg in pictures]
    script = SCRIPT % (in_script(label), in_script(coded), at)
    _, alt, svg = pictures[at]
    picture = as_img("svg+xml", svg, alt)
    display_page(f"<div>{picture}<script>{script}</script></div>", alt)


def in_script(value):
    """A value as JavaScript; a "<" in it cannot end the script."""
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")
