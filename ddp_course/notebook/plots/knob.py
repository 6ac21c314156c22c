"""A picture with a slider that changes it: HTML that an output stores, so that it turns
in JupyterLab and on a static page, without a kernel and without a package.

The pictures are drawn beforehand, one for each place of the slider. A page that runs no
script, as GitHub's, and a notebook that JupyterLab does not trust show one of them.
"""

import base64
import json

from ddp_course.notebook.plots.display import as_img, display_page
from ddp_course.notebook.plots.drawing import box, document, legend, rectangle, text
from ddp_course.notebook.plots.style import BLUE, GREEN, NOTE, ORANGE, RED
from ddp_course.notebook.plots.words import count, listing, number
from ddp_course.scenery.memory import STAGES, states

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


# ---- memory over the number of ranks ----

RANKS = tuple(2**power for power in range(11))
LEFT, BAR, HIGH, ROW = 190, 500, 26, 38  # pixels
COLORS = {"weights": BLUE, "gradients": ORANGE, "optimizer": GREEN}


def memory_knob(parameters, precision="master", ranks=RANKS, at=8, gpu=80e9):
    """A slider over the number of ranks: what each rank keeps with DDP and ZeRO 1 to 3.

    parameters: how many; precision: one of scenery.memory.PRECISIONS; ranks: the
    slider's places; at: the one that it begins at; gpu: the bytes that a GPU has.
    The bytes are those of scenery.memory.states, without activations.
    """
    pictures = [(str(n), *memory_bars(parameters, precision, n, gpu)) for n in ranks]
    knob("number of ranks", pictures, ranks.index(at))


def memory_bars(parameters, precision, ranks, gpu):
    """The memory per rank, a bar for each stage: alternative text, and SVG in bytes."""
    kept = {stage: states(parameters, ranks, stage, precision) for stage in STAGES}
    most = max(gpu, sum(states(parameters, 1, 0, precision)))
    width, bottom = LEFT + BAR + 90, 30 + ROW * len(kept)
    title = f"Memory per rank, {count(ranks, 'rank')} (without activations)"
    pieces = [text(0, 12, title, anchor="start", weight=700)]
    for place, (stage, state) in enumerate(kept.items()):
        pieces += bar(30 + ROW * place, STAGES[stage].split(":")[0], state, most)
    line = LEFT + BAR * gpu / most
    pieces.append(rectangle(line, 26, 2, bottom - 26, RED))
    pieces.append(text(line, bottom + 8, f"a GPU's {number(gpu / 1e9)} GB", color=RED))
    pieces.append(legend(LEFT, bottom + 32, COLORS))
    told = [
        f"{STAGES[stage].split(':')[0]}: {number(sum(state) / 1e9)} GB ("
        + listing(
            f"{part} {number(size / 1e9)}" for part, size in state._asdict().items()
        )
        + f"), {'below' if sum(state) <= gpu else 'above'} the line"
        for stage, state in kept.items()
    ]
    limit = f"with a line at the {number(gpu / 1e9)} GB of a GPU"
    head = f"Memory per rank on {count(ranks, 'rank')}, without activations, {limit}"
    alt = f"{head}. {'; '.join(told)}."
    return alt, document(width, bottom + 46, pieces, alt)


def bar(top, name, state, most):
    """The pieces of one bar. state: bytes by part; most: what the whole width is."""
    yield text(LEFT - 8, top + HIGH / 2, name, anchor="end")
    x = LEFT
    for part, size in state._asdict().items():
        long = BAR * size / most
        yield box(x, top, max(long, 0.5), HIGH, COLORS[part], "")
        x += long
    label = f"{number(sum(state) / 1e9)} GB"
    yield text(x + 6, top + HIGH / 2, label, anchor="start", color=NOTE)
