"""JupyterLab as a learner uses it, in a real browser: `make browser`.

Every lesson is opened and run; what a person may do in the middle of it is tried on two.
DDP_COURSE_LESSONS=01,03 runs these lessons only.
"""

import os
import re
import sys
import uuid

import nbformat
import psutil
import pytest
from chromium import (  # noqa: F401
    Notebook,
    browser,
    context,
    course_folder,
    errors_in,
    nothing_left,
)
from conftest import COURSE, wait_until
from test_lab import of_its_own, serving

from ddp_course.cli import exercises

LESSONS = {path.name[:2]: path for path in sorted((COURSE / "lessons").glob("*.ipynb"))}
CHOSEN = list(filter(None, os.environ.get("DDP_COURSE_LESSONS", "").split(",")))
if unknown := sorted({*CHOSEN} - {*LESSONS}):
    text = f"there is no lesson {', '.join(unknown)}: LESSONS has numbers such as 01,12"
    pytest.exit(text, returncode=2)
FIGURES = {"text/html", "image/png", "image/svg+xml"}
MAKE_RANKS_WAIT = """\
def here():
    import os, time
    import torch.distributed as dist
    from ddp_course.ranks.environment import process_group
    with process_group():
        dist.barrier()
        print("pid", os.getpid(), flush=True)
        time.sleep({seconds})
    return os.getpid()

launch(here, nproc=2, timeout=600)"""
# the lowest contrast between a text and what is under it, in a part of the page
CONTRAST = """part => {
  const rgba = text => text.match(/[\\d.]+/g).map(Number);
  const light = color => {
    const [r, g, b] = color.slice(0, 3).map(v => v / 255)
      .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = node => {
    if (!node) return [255, 255, 255];
    const [r, g, b, a = 1] = rgba(getComputedStyle(node).backgroundColor);
    if (a === 1) return [r, g, b];
    const under = ground(node.parentElement);
    return [r, g, b].map((v, i) => v * a + under[i] * (1 - a));
  };
  const ratios = [...part.querySelectorAll("*")]
    .filter(node => [...node.childNodes].some(c => c.nodeType === 3 && c.data.trim()))
    .map(node => {
      const pair = [rgba(getComputedStyle(node).color), ground(node)].map(light);
      return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    });
  return Math.min(...ratios);
}"""


@pytest.fixture
def folder(tmp_path):
    return course_folder(tmp_path / "course")


@pytest.fixture
def server(folder, tmp_path):
    """`ddp-course lab`, on a machine on which Jupyter has never run. At the end, no
    process is left of what it has started.
    """
    mark = uuid.uuid4().hex
    environment = os.environ | of_its_own(tmp_path / "home") | {"DDP_COURSE_MARK": mark}
    environment["PYTHONPATH"] = str(COURSE)
    command = [sys.executable, "-m", "ddp_course.cli.command", "lab", "1"]
    (tmp_path / "home").mkdir()
    with nothing_left(mark), serving(command, folder, environment) as server:
        yield server


@pytest.fixture
def opened(server, context, folder):  # noqa: F811
    """A function that opens a notebook of the course folder, by its path in there."""
    return lambda place: Notebook(context, server, folder / place, folder)


def with_waiting_ranks(folder, number, seconds=600):
    """A copy of a lesson that ends after its imports, with a cell whose ranks wait."""
    notebook = exercises.read(LESSONS[number])
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    sources = [first.source, "kept = 6 * 7\nfrom ddp_course.ranks.launch import launch"]
    sources += [MAKE_RANKS_WAIT.format(seconds=seconds), "print('then', kept)"]
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(notebook, folder / f"waiting{number}.ipynb")
    return f"waiting{number}.ipynb"


def ranks_of(notebook):
    """Run all cells; return the processes of the ranks once both have said who they are."""
    notebook.menu("Run", "Run All Cells")
    waiting = notebook.cell("def here")
    notebook.wait_for_text(waiting, re.compile(r"pid \d+[\s\S]*pid \d+"))
    text = waiting.locator(".jp-OutputArea").inner_text()
    return [psutil.Process(int(number)) for number in re.findall(r"pid (\d+)", text)]


def have_ended(processes, within=20):
    return wait_until(
        lambda: not any(process.is_running() for process in processes), within
    )


# ---- lessons ----


@pytest.mark.parametrize("number", CHOSEN or LESSONS)
def test_a_lesson_opens_and_runs_from_top_to_bottom(opened, number):
    notebook = opened(f"lessons/{LESSONS[number].name}")
    cells = notebook.run_all()
    assert errors_in(cells) == []
    counts = [cell["execution_count"] for cell in cells]
    assert counts == list(range(1, len(cells) + 1))
    stored = [
        cell
        for cell in exercises.read(LESSONS[number]).cells
        if cell.cell_type == "code" and cell.source.strip()
    ]
    for cell, as_stored in zip(cells, stored, strict=True):
        assert kinds_of(cell) == kinds_of(as_stored), "".join(cell["source"])
    # pictures are there, and are shown
    figures = notebook.page.locator(".jp-OutputArea-output img")
    broken = "all => all.filter(image => !image.complete || !image.naturalWidth).length"
    assert figures.count() >= 1
    assert figures.evaluate_all(broken) == 0


def kinds_of(cell):
    """What a cell has put out: text, and figures or tables."""
    outputs = cell["outputs"]
    shown = {kind for output in outputs for kind in output.get("data", {})}
    return any(o["output_type"] == "stream" for o in outputs), bool(shown & FIGURES)


# ---- what a person may do in the middle ----


@pytest.mark.parametrize("number", ["02", "04"])
def test_an_interrupt_ends_the_ranks_and_the_kernel_goes_on(opened, folder, number):
    notebook = opened(with_waiting_ranks(folder, number))
    ranks = ranks_of(notebook)
    notebook.button("notebook:interrupt-kernel")
    notebook.wait_for_text(notebook.cell("def here"), "the ranks were stopped")
    assert have_ended(ranks)
    after = notebook.cell("print('then'")
    notebook.run(after)
    notebook.wait_for_text(after, "then 42")


@pytest.mark.parametrize("number", ["02", "04"])
def test_a_restart_ends_the_ranks_and_the_lesson_can_be_run_again(
    opened, folder, number
):
    notebook = opened(with_waiting_ranks(folder, number))
    ranks = ranks_of(notebook)
    notebook.button("notebook:restart-kernel")
    notebook.accept()
    assert have_ended(ranks)
    notebook.page.wait_for_selector('[data-status="idle"]')
    again = ranks_of(notebook)
    assert not {rank.pid for rank in again} & {rank.pid for rank in ranks}
    notebook.button("notebook:interrupt-kernel")
    assert have_ended(again)


@pytest.mark.parametrize("number", ["02", "04"])
def test_after_the_tab_was_closed_the_same_kernel_and_the_output_are_found_again(
    opened, folder, number
):
    place = with_waiting_ranks(folder, number, seconds=30)
    notebook = opened(place)
    ranks = ranks_of(notebook)
    notebook.saved()
    notebook.page.close()
    assert all(rank.is_running() for rank in ranks)
    back = opened(place)  # as soon as the ranks have ended
    assert have_ended(ranks)
    back.wait_for_text(back.cell("def here"), f"pid {ranks[0].pid}")
    after = back.cell("print('then'")
    back.run(after)
    back.wait_for_text(after, "then 42")


def test_two_notebooks_run_at_once(opened, folder):
    both = [
        opened(with_waiting_ranks(folder, number, seconds=40))
        for number in ("02", "04")
    ]
    ranks = [rank for notebook in both for rank in ranks_of(notebook)]
    assert len({rank.pid for rank in ranks}) == 4
    assert all(rank.is_running() for rank in ranks)
    for notebook in both:
        notebook.wait_for_text(notebook.cell("print('then'"), "then 42")


# ---- a slider ----


def test_the_keyboard_turns_a_slider(opened):
    """JupyterLab has commands of its own for the arrow keys."""
    notebook = opened(f"lessons/{LESSONS['12'].name}")
    cell = notebook.cell("plots.memory_knob(")
    notebook.run(notebook.cell("%load_ext"))
    notebook.run(cell)
    slider = cell.get_by_role("slider", name="number of ranks")
    picture = cell.locator(".jp-OutputArea img")
    slider.focus()
    before = picture.get_attribute("alt")
    notebook.page.keyboard.press("ArrowRight")
    assert wait_until(lambda: picture.get_attribute("alt") != before, 10)


# ---- a question ----


WRONG = """\
def global_rank(node_rank, local_rank, ranks_per_node):
    return node_rank + local_rank * ranks_per_node


def node_and_local_rank(rank, ranks_per_node):
    return rank % ranks_per_node, rank // ranks_per_node"""
RIGHT = """\
def global_rank(node_rank, local_rank, ranks_per_node):
    return node_rank * ranks_per_node + local_rank


def node_and_local_rank(rank, ranks_per_node):
    return divmod(rank, ranks_per_node)"""


def test_a_question_is_answered_wrong_and_then_right_and_both_verdicts_are_legible(
    opened,
):
    [name] = [path.name for path in (COURSE / "exercises").glob("02_*.ipynb")]
    notebook = opened(f"exercises/{name}")
    answer = notebook.cell("def global_rank")
    check = notebook.cell("check_rank_arithmetic")
    notebook.run(notebook.cell("%load_ext"))
    notebook.type_into(answer, WRONG)
    notebook.run(check)
    verdict = notebook.wait_for_text(check, "rank_arithmetic: failed")
    assert verdict.evaluate(CONTRAST) >= 4.5
    notebook.type_into(answer, RIGHT)
    notebook.run(check)
    verdict = notebook.wait_for_text(check, "02 rank_arithmetic: passed")
    assert verdict.evaluate(CONTRAST) >= 4.5
    in_the_dark(notebook)
    assert verdict.evaluate(CONTRAST) >= 4.5
    notebook.type_into(answer, WRONG)
    notebook.run(check)
    verdict = notebook.wait_for_text(check, "rank_arithmetic: failed")
    assert verdict.evaluate(CONTRAST) >= 4.5


def in_the_dark(notebook):
    """Choose JupyterLab's dark theme."""
    page = notebook.page
    page.locator(".lm-MenuBar-item", has_text="Settings").click()
    page.locator(".lm-Menu-item", has_text=re.compile("^Theme")).first.click()
    page.locator(".lm-Menu-item", has_text=re.compile("^JupyterLab Dark$")).click()
    page.locator('body[data-jp-theme-light="false"]').wait_for(state="attached")
