"""The planner: its JavaScript computes what Python does, to the last bit, and it refuses
what lesson 21 refuses. tests/browser/ turns its controls.
"""

import functools
import json
import math
import operator
import random
import re
import sys

import pytest

from ddp_course import lesson21
from ddp_course.estimates.memory import Mesh
from ddp_course.estimates.step_time import (
    FITTED,
    GPUS,
    Parts,
    parts,
    seconds,
    utilization,
)
from ddp_course.estimates.transformer import MODELS, Kept, kept_by_run, run_of
from ddp_course.notebook.plots import planner_page, words
from ddp_course.notebook.plots.style import RANK_COLORS

quickjs = pytest.importorskip("quickjs", reason="runs the page's script: .[test]")

# what the script says of many plans at once, as JSON: it has each number's shortest digits
ASKED = """
function of_runs(asked) {
  return JSON.stringify(JSON.parse(asked).map(function (of) {
    var model = DATA.models[of.model], gpu = DATA.gpus[of.gpu];
    var run = run_of(model, of.mesh, of.context, of.batch, of.micro_batch, of);
    var times = parts(run, gpu, DATA.fitted[of.gpu]);
    return {
      kept: kept_by_run(model, run), parts: times,
      utilization: utilization(run, gpu, total(times))
    };
  }));
}
function of_plans(asked) {
  return JSON.stringify(JSON.parse(asked).map(function (chosen) {
    var why = problem(DATA, chosen);
    return why ? { why: why } : plan_of(DATA, chosen);
  }));
}
function written(asked) {
  return JSON.stringify(JSON.parse(asked).map(number));
}"""


@functools.cache
def script(old="", new=""):
    """The page's script, without a page; with a fault planted, if one is named."""
    text = planner_page.source("planner.js")
    assert old in text
    page = quickjs.Context()
    page.eval(f"var DATA = {json.dumps(planner_page.data())};")
    page.eval(text.replace(old, new, 1) if old else text)
    page.eval(planner_page.source("planner_view.js"))
    page.eval(ASKED)
    return page


def answers(name, asked, *planted):
    """What a function of ASKED says of each item."""
    return json.loads(script(*planted).eval(name)(json.dumps(asked)))


def in_order(numbers):
    """Their sum, from the first to the last. From Python 3.12 on, `sum` of floats keeps
    what each addition rounds away.
    """
    return functools.reduce(operator.add, numbers, 0)


# ---- the formulas ----


def drawn_run(chance):
    """A run, whether or not a step of it could be shared like that."""
    one_of = chance.choice
    mesh = {
        "data": one_of([1, 2, 3, 8, 12, 64, 100, 512, 1023, 2048]),
        "tensor": one_of([1, 2, 3, 4, 6, 8, 16]),
        "pipeline": one_of([1, 2, 3, 4, 5, 8, 12, 16, 64]),
        "context": one_of([1, 2, 3, 4, 8, 16]),
        "expert": one_of([1, 1, 2, 4, 8]),
    }
    return {
        "model": one_of(list(MODELS)),
        "gpu": one_of(list(GPUS)),
        "mesh": mesh,
        "context": one_of([1024, 2048, 4096, 8192, 10_007, 2**17, 2**20]),
        "batch": chance.randrange(1, 1 << chance.randrange(1, 15)),
        "micro_batch": one_of([1, 2, 3, 4, 8, 16]),
        "stage": one_of([0, 1, 2, 3]),
        "recompute": one_of(["none", "selective", "full"]),
        "chunks": one_of([1, 1, 2, 3, 4]),
        "shards": one_of([0, 0, 0, 1, 8, 64, 4096]),
    }


def of_python(drawn):
    """What Python says of a drawn run."""
    run = dict(drawn)
    model, gpu = MODELS[run.pop("model")], GPUS[run["gpu"]]
    constants = FITTED[run.pop("gpu")]
    run = run_of(model, Mesh(**run.pop("mesh")), **run)
    times = parts(run, gpu, constants)
    return {
        "kept": kept_by_run(model, run)._asdict(),
        "parts": times._asdict(),
        "utilization": utilization(run, gpu, in_order(times)),
    }


def differing(number, *planted):
    """The fields in which the script and Python differ, of so many drawn runs."""
    chance = random.Random(21)
    drawn = [drawn_run(chance) for _ in range(number)]
    found = set()
    for run, said in zip(drawn, answers("of_runs", drawn, *planted)):
        expected = of_python(run)
        for part, of in expected.items():
            pairs = of.items() if isinstance(of, dict) else [(part, of)]
            for name, value in pairs:
                other = said[part][name] if isinstance(of, dict) else said[part]
                if float(other).hex() != float(value).hex():
                    found.add(name)
    return found


def test_the_script_computes_what_python_does_to_the_last_bit():
    assert differing(2500) == set()


@pytest.mark.parametrize(
    "old, new, fields",
    [
        ("4.0 / 3.0", "1.3333333333333", {"products", "attention", "bubble"}),
        ("times * 2.0 * (n - 1) / n", "2.0 * times * ((n - 1) / n)", {"tensor"}),
        ("seconds + seconds_of(sent[0]", "seconds + 1e-9 + seconds_of(sent[0]", {"data"}),
        ("12.0 * tokens * model", "12.0 * 1.0000000000000002 * tokens * model", {"moment"}),
        ("parameters * 8 / ranks", "8 / ranks * parameters", {"optimizer"}),
        ("total(last) > total(first)", "false", {"weights", "activations", "moment"}),
    ],
)  # fmt: skip
def test_a_formula_that_differs_in_its_last_digits_is_found(old, new, fields):
    assert fields <= differing(400, old, new)


# ---- the plans of the page ----


def drawn_plan(chance):
    """What the controls could say."""
    one_of, power = chance.choice, lambda most: 2 ** chance.randrange(most + 1)
    many = chance.random() < 0.8  # else a job that is too small for most meshes
    return {
        "model": one_of(list(MODELS)),
        "gpu": one_of(list(GPUS)),
        "gpus": 2 ** chance.randrange(5, 15) if many else power(5),
        "tensor": one_of([1, 1, 2, 4, 8]),
        "pipeline": one_of([1, 1, 2, 4, 8, 32]),
        "context_ranks": one_of([1, 1, 2, 4]),
        "expert": one_of([1, 1, 1, 2, 4, 8]),
        "context": one_of([1024, 4096, 8192, 12_288, 10_002, 2**17]),
        "batch": one_of([16, 96, 256, 1024, 1536, 4096, 16_384]),
        "micro_batch": one_of([1, 1, 2, 3, 4, 16]),
        "stage": one_of([0, 1, 3]),
        "recompute": one_of(["none", "full"]),
        "chunks": one_of([1, 1, 2, 4]),
        "tokens": one_of([0, 2e9, 15e12]),
        "price": one_of([0, 1.99, 3]),
    }


def run_in_lesson(chosen):
    """The run of the controls; None if lesson 21 would not propose it."""
    model, gpu, c = MODELS[chosen["model"]], GPUS[chosen["gpu"]], chosen
    ranks = c["tensor"] * c["pipeline"] * c["context_ranks"] * c["expert"]
    sizes = c["tensor"], c["pipeline"], c["context_ranks"], c["expert"]
    mesh = Mesh(max(1, c["gpus"] // ranks), *sizes)
    if mesh not in all_meshes(c["model"], c["gpus"], c["context"], gpu.per_machine):
        return None
    how = {name: c[name] for name in ("stage", "recompute", "chunks")}
    found = run_of(model, mesh, c["context"], c["batch"], c["micro_batch"], **how)
    runs = lesson21.runs_on(mesh, model, c["context"], c["batch"])
    return found if found in [*runs] else None


@functools.cache
def all_meshes(model, gpus, context, per_machine):
    return {*lesson21.meshes(MODELS[model], gpus, context, per_machine)}


def plan_in_python(chosen, run):
    """What the page should show of this run, beside the parts."""
    kept = kept_by_run(MODELS[chosen["model"]], run)
    gpu, constants = GPUS[chosen["gpu"]], FITTED[chosen["gpu"]]
    times = parts(run, gpu, constants)
    step = in_order(times)
    assert math.isclose(step, seconds(run, gpu, constants), rel_tol=1e-15)
    model = MODELS[chosen["model"]]
    tokens = chosen["tokens"] or 20 * model.parameters(model.chosen)
    days = tokens / (run.batch * run.context) * step / 86400
    plan = lesson21.Plan(run, kept, times)
    if sys.version_info < (3, 12):
        assert days == lesson21.days(plan, tokens)
    return {
        "kept": kept._asdict(),
        "parts": times._asdict(),
        "bytes": in_order(kept),
        "seconds": step,
        "fits": plan.fits(chosen["gpu"]),
        "utilization": utilization(run, gpu, step),
        "tokens": tokens,
        "days": days,
        "gpu_hours": days * 24 * run.gpus(),
        "cost": days * 24 * run.gpus() * chosen["price"],
    }


def test_the_page_shows_the_plans_of_lesson_21_and_refuses_what_it_refuses():
    chance = random.Random(44)
    drawn = [drawn_plan(chance) for _ in range(3000)]
    shown, reasons = 0, set()
    for chosen, said in zip(drawn, answers("of_plans", drawn)):
        run = run_in_lesson(chosen)
        assert (run is None) == ("why" in said), (chosen, said)
        if run is None:
            assert re.fullmatch(r"[^.]+(\.\d+[^.]*)?\.", said["why"]), said["why"]
            reasons.add(re.sub(r"\d+", "n", said["why"]))
            continue
        shown += 1
        expected = plan_in_python(chosen, run)
        assert {name: said[name] for name in expected} == expected, chosen
    assert shown > 200 and len(reasons) >= 10, (shown, reasons)


@pytest.mark.parametrize("batch", [0, -8, 2.5])
def test_what_is_no_number_of_sequences_is_refused(batch):
    [said] = answers("of_plans", [drawn_plan(random.Random(0)) | {"batch": batch}])
    assert said == {"why": "GPUs, sequences and tokens are whole numbers above 0."}


def test_numbers_are_written_as_in_the_other_figures():
    values = [0, 0.00123, 0.5, 6.27, 44.4, 61.8, 100.4, 999, 1234.4, 13_999, 81e4]
    values += [999_600, 1.6e8, 1.51e9, 405e9]
    assert answers("written", values) == [words.number(value) for value in values]
    assert answers("written", [999.7, 15e12]) == ["1000", "15 trillion"]


# ---- the page ----

PLACES = r"https?:|[\"'(]//|fetch|XMLHttp|import|src=\"(?!data:)|url\("


def test_the_page_is_small_and_names_no_other_host():
    page, alt = planner_page.page_of(tokens=15e12, price=2)
    assert len(page) < 50_000
    assert not re.search(PLACES, page)
    assert page.count("<script>") == page.count("</script>") == 1
    assert alt.startswith("A plan for llama3-8b on 64 GPUs (h100). 61.8 GB per rank")


def test_without_scripts_a_picture_has_the_numbers_of_the_first_plan():
    page, alt = planner_page.page_of(
        "mixtral-8x7b", "a100", Mesh(16, expert=8), stage=1
    )
    assert re.match(r'<div class="ddp-course-planner"><img alt="A plan for ', page)
    run = run_of(MODELS["mixtral-8x7b"], Mesh(16, expert=8), 8192, 512, stage=1)
    kept = kept_by_run(MODELS["mixtral-8x7b"], run)
    assert f"{words.number(kept.total() / 1e9)} GB per rank" in alt
    for name, size in zip(Kept._fields, kept):
        assert f"{name} {words.number(size / 1e9)} GB" in alt
    for name, time in parts(run, GPUS["a100"], FITTED["a100"])._asdict().items():
        assert f"{name} {words.number(time)} s" in alt


def test_the_parts_of_a_step_have_the_colours_of_lesson_21s_bars():
    colors = [planner_page.COLORS[name] for name in Parts._fields]
    assert colors == RANK_COLORS[: len(colors)]  # in which charts.stacked draws them
