"""A planner: controls over the formulas of estimates/, as HTML that an output stores, so
that it computes in JupyterLab and on a static page, without a kernel and without a
package.

The formulas are once more in planner.js, in JavaScript, which tests/test_planner.py
compares with Python's to the last bit; models, GPUs and constants come from Python. A
page that runs no script, as GitHub's, and a notebook that JupyterLab does not trust show
a picture of the first plan.
"""

from pathlib import Path

from ddp_course.estimates.memory import Mesh
from ddp_course.estimates.step_time import FITTED, GPUS, parts, utilization
from ddp_course.estimates.transformer import (
    FREE,
    MODELS,
    SHORTEST,
    kept_by_run,
    run_of,
)
from ddp_course.notebook.plots import drawing
from ddp_course.notebook.plots.display import as_img, display_page
from ddp_course.notebook.plots.knob import in_script
from ddp_course.notebook.plots.style import (
    BLUE,
    CARD,
    GREEN,
    INK,
    LINE,
    NOTE,
    ORANGE,
    PAPER,
    RANK_COLORS,
    RED,
    text_color,
)
from ddp_course.notebook.plots.words import count, listing, number

HERE = Path(__file__).parent
MAGENTA, PURPLE, BROWN, TEAL = RANK_COLORS[3:7]
COLORS = {  # the parts of a step have those of `charts.stacked`
    "weights": BLUE,
    "gradients": ORANGE,
    "optimizer": GREEN,
    "activations": MAGENTA,
    "moment": PURPLE,
    "products": BLUE,
    "attention": ORANGE,
    "bubble": GREEN,
    "tensor": MAGENTA,
    "context": PURPLE,
    "expert": BROWN,
    "data": TEAL,
}
# Controls are dark on white in both of a page's modes, as the figures are.
STYLE = f"""
.ddp-course-planner {{container-type: inline-size; max-width: 60rem}}
.ddp-course-planner .bars {{position: sticky; top: var(--ddp-course-top, 0); z-index: 1;
padding: 0.3em 0;
background: var(--pst-color-background, var(--jp-layout-color0, Canvas))}}
.ddp-course-planner .said {{margin: 0}}
.ddp-course-planner .verdict {{color: {PAPER}; border-radius: 0.3em; padding: 0.1em 0.5em;
font-weight: 700; white-space: nowrap}}
.ddp-course-planner .yes {{background: {GREEN}}}
.ddp-course-planner .no {{background: {RED}}}
.ddp-course-planner .bar {{position: relative; display: flex; height: 2em;
background: {CARD}; border: 2px solid {LINE}; margin: 0.2em 0 0.5em; overflow: hidden}}
.ddp-course-planner .over {{border-color: {RED}}}
.ddp-course-planner .part {{box-sizing: border-box; overflow: hidden; padding-left: 4px;
font-size: 0.8em; line-height: 2.4; white-space: nowrap; flex: none;
box-shadow: inset -1px 0 {PAPER}}}
.ddp-course-planner .part:empty {{padding: 0}}
.ddp-course-planner .limit {{position: absolute; top: 0; bottom: 0; width: 2px;
background: {INK}; outline: 2px solid {PAPER}}}
.ddp-course-planner .controls {{margin: 0.6em 0 1em}}
.ddp-course-planner label {{display: flex; align-items: center; gap: 0 0.6em;
justify-content: space-between; margin: 0 0 0.35em}}
.ddp-course-planner .long {{display: block}}
.ddp-course-planner select, .ddp-course-planner input {{box-sizing: border-box;
font: inherit; color: {INK}; background: {PAPER}; color-scheme: light;
border: 1px solid {LINE}; border-radius: 0.2em; padding: 0.15em; width: 11em;
flex: none; margin: 0}}
.ddp-course-planner input::placeholder {{color: {NOTE}; opacity: 1}}
.ddp-course-planner input[type=range] {{width: 100%; background: none; border: none;
accent-color: {BLUE}; padding: 0}}
.ddp-course-planner .entries {{margin-bottom: 0.8em}}
.ddp-course-planner .entry {{display: flex; gap: 0.5em; padding: 0.1em 0}}
.ddp-course-planner data {{margin-left: auto; font-variant-numeric: tabular-nums;
white-space: nowrap}}
.ddp-course-planner .swatch {{width: 0.9em; height: 0.9em; align-self: center;
border: 1px solid {LINE}; flex: none}}
@container (min-width: 660px) {{
.ddp-course-planner .page {{display: grid; gap: 0 1.5em; grid-template-columns: 20em 1fr;
grid-template-rows: auto 1fr}}
.ddp-course-planner .controls {{grid-column: 1; grid-row: 1 / 3}}
.ddp-course-planner .bars {{grid-column: 2; grid-row: 1; position: static}}
.ddp-course-planner .numbers {{grid-column: 2; grid-row: 2; columns: 2 13em;
column-gap: 1.5em}}
.ddp-course-planner .entries {{break-inside: avoid}}
}}"""


def planner(model="llama3-8b", gpu="h100", mesh=None, context=8192, batch=512, **more):
    """Controls over a plan: what a rank keeps, how long a step takes, what a run costs.

    model: one of estimates.transformer.MODELS; gpu: one of estimates.step_time.GPUS;
    mesh: an estimates.memory.Mesh, 64 data ranks unless given; context: tokens per
    sequence; batch: sequences per step. more: micro_batch, stage, recompute, chunks; tokens
    to train on, and the price of a GPU hour. All these are what the controls begin with.
    """
    page, alt = page_of(model, gpu, mesh or Mesh(64), context, batch, **more)
    display_page(page, alt)


def page_of(
    model="llama3-8b",
    gpu="h100",
    mesh=Mesh(64),
    context=8192,
    batch=512,
    micro_batch=1,
    stage=3,
    recompute="none",
    chunks=1,
    tokens=None,
    price=None,
):
    """The HTML of `planner`, and the alternative text of its picture."""
    how = {"stage": stage, "recompute": recompute, "chunks": chunks}
    run = run_of(MODELS[model], mesh, context, batch, micro_batch, **how)
    svg, alt = picture(model, gpu, run)
    first = {
        "model": model,
        "gpu": gpu,
        "gpus": run.gpus(),
        "tensor": mesh.tensor,
        "pipeline": mesh.pipeline,
        "context_ranks": mesh.context,
        "expert": mesh.expert,
        "context": context,
        "batch": batch,
        "micro_batch": micro_batch,
        **how,
        "tokens": tokens,
        "price": price,
    }
    starts = "planner(document.currentScript.parentNode, DATA, FIRST);"
    script = "\n".join(
        [
            "(function () {",
            f"var DATA = {in_script(data())}, FIRST = {in_script(first)};",
            source("planner.js"),
            source("planner_view.js"),
            f"{starts}\n}})();",
        ]
    )
    image = as_img("svg+xml", svg, alt)
    inside = f"{image}<script>{script}</script>"
    return f'<div class="ddp-course-planner">{inside}</div>', alt


def source(name):
    """A script of this folder, without its comments and its empty lines."""
    lines = (HERE / name).read_text().splitlines()
    return "\n".join(
        line for line in lines if line.strip() and not line.strip().startswith("//")
    )


def data():
    """What planner.js takes from Python."""
    return {
        "models": {name: model._asdict() for name, model in MODELS.items()},
        "gpus": {name: gpu._asdict() for name, gpu in GPUS.items()},
        "fitted": {name: constants._asdict() for name, constants in FITTED.items()},
        "free": FREE,
        "shortest": SHORTEST,
        "colors": {name: (color, text_color(color)) for name, color in COLORS.items()},
        "style": STYLE,
    }


# ---- without scripts: a picture of the first plan ----

WIDE, HIGH = 510, 30  # pixels


def picture(model, gpu, run):
    """One plan: SVG in bytes, and alternative text."""
    kept = kept_by_run(MODELS[model], run)._asdict()
    times = parts(run, GPUS[gpu], FITTED[gpu])._asdict()
    memory, seconds = GPUS[gpu].memory, sum(times.values())
    used = utilization(run, GPUS[gpu], seconds)
    on = f"{model} on {count(run.gpus(), 'GPU')} ({gpu})"
    sizes = f"{number(sum(kept.values()) / 1e9)} GB per rank"
    lasts = f"One step: {number(seconds)} s, MFU {used:.0%}"
    pieces = [drawing.text(0, 10, on, anchor="start", weight=700)]
    line = f"{sizes}; a GPU has {number(memory / 1e9)} GB"
    pieces += a_bar(30, line, kept, max(memory, sum(kept.values())), 1e9, " GB")
    below = 30 + tall(kept) + 14
    pieces += a_bar(below, lasts, times, seconds, 1, " s")
    told = listing(f"{name} {number(size / 1e9)} GB" for name, size in kept.items())
    spent = listing(f"{name} {number(size)} s" for name, size in times.items())
    alt = f"A plan for {on}. {sizes}: {told}. {lasts}: {spent}."
    return drawing.document(WIDE, below + tall(times), pieces, alt), alt


def tall(sizes):
    """How high a bar with its title and its legend is."""
    return 24 + HIGH + 12 + 22 * -(-len(sizes) // 3)


def a_bar(top, title, sizes, whole, scale, unit):
    """The pieces of a stacked bar, with a legend of its numbers below."""
    yield drawing.text(0, top + 8, title, anchor="start", color=NOTE)
    yield drawing.rectangle(0, top + 24, WIDE, HIGH, CARD, LINE)
    x = 0
    for place, (name, size) in enumerate(sizes.items()):
        wide = WIDE * size / whole
        if wide > 0.3:
            yield drawing.rectangle(x, top + 24, wide, HIGH, COLORS[name])
        x += wide
        label = f"{name} {number(size / scale)}{unit}"
        at = 170 * (place % 3), top + 24 + HIGH + 18 + 22 * (place // 3)
        yield drawing.legend(*at, {label: COLORS[name]})
