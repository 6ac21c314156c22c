"""The course's web site in a real browser, on a wide and on a narrow screen: `make browser`."""

import functools
import http.server
import re
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urldefrag, urlencode, urljoin

import pytest
from axe_playwright_python.sync_playwright import Axe
from chromium import SCREENSHOTS, browser, context, photograph  # noqa: F401
from conftest import COURSE, wait_until

from ddp_course import lesson21
from ddp_course.estimates.memory import Mesh
from ddp_course.estimates.transformer import MODELS, run_of
from ddp_course.notebook.plots import words

SITE = COURSE / "site" / "_build" / "html"
NARROW, WIDE = {"width": 400, "height": 800}, {"width": 1400, "height": 900}
SERIOUS = ("serious", "critical")
AN_ERROR = "Expected to have finished reduction in the prior iteration"
# as readers paste them, with the names and numbers of their own jobs: {line: its failures}
PASTED = {
    'Missing key(s) in state_dict: "transformer.wte.weight", "lm_head.weight".': (
        "04-a-state-dict-with-the-prefix-module",
        "10-a-checkpoint-of-a-compiled-model",
        "loading-into-the-wrapper",
    ),
    "The client socket has timed out after 60000ms while trying to connect to "
    "(gpu-a17, 29500)": ("14-master-addr-is-the-wrong-machine",),
    "[rank3]: RuntimeError: No backend type associated with device type cpu": (
        "cpu-tensor-in-a-group-for-gpus",
    ),
    "DistStoreError: wait timeout after 600000ms, keys: /worker_count": (
        "02-a-rank-that-never-joins",
    ),
    "Parameters which did not receive grad for rank 0: classifier.bias": (
        "04-parameters-that-are-not-used",
    ),
}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site():
    """The address of the site, which is built now and served on loopback."""
    subprocess.run([sys.executable, COURSE / "site" / "make.py"], check=True)
    handler = functools.partial(Quiet, directory=SITE)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def names_of_pages():
    """The pages that the site has; the theme leaves a template among its files."""
    found = [path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html")]
    return sorted(name for name in found if not name.startswith("_static/"))


@pytest.fixture
def visit(context, site):  # noqa: F811
    """A function that opens a page of the site; it returns the page, and the complaints
    by then: in its console, of files that are missing or of another host.
    """
    page, said = context.new_page(), []
    page.on(
        "console",
        # the theme also writes there which of its modes it has chosen
        lambda message: message.type in ("log", "debug") or said.append(message.text),
    )
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("requestfailed", lambda request: said.append(f"failed: {request.url}"))
    page.on(
        "response",
        lambda got: got.ok or got.status == 304 or said.append(f"missing: {got.url}"),
    )
    page.on(
        "request",
        lambda request: (
            request.url.startswith((site, "data:", "blob:"))
            or said.append(f"another host: {request.url}")
        ),
    )

    def visit(name):
        said.clear()
        page.goto(urljoin(site, name))
        return page, said

    return visit


def note(problems, page, name, text):
    """Remember what is wrong with a page, and how it looks now."""
    problems.append(f"{name}: {text}")
    photograph(page, name)


def links_of(page):
    """The addresses of all links of a page."""
    return page.eval_on_selector_all("a[href]", "all => all.map(link => link.href)")


def anchors_of(page):
    return set(page.eval_on_selector_all("[id]", "all => all.map(part => part.id)"))


def test_pages_say_nothing_in_the_console_and_their_links_lead_somewhere(site, visit):
    problems, anchors, links = [], {}, set()
    for name in names_of_pages():
        page, said = visit(name)
        for text in said:
            note(problems, page, name, text)
        anchors[urljoin(site, name)] = anchors_of(page)
        links |= {(name, link) for link in links_of(page) if link.startswith(site)}
    for name, link in sorted(links):
        place, anchor = urldefrag(link)
        file = SITE / place.removeprefix(site).split("?")[0]
        file = file / "index.html" if file.is_dir() else file
        if not file.is_file():
            problems.append(f"{name}: {link} is not there")
        elif anchor and place in anchors and anchor not in anchors[place]:
            problems.append(f"{name}: {link} has no such place")
    assert len(anchors) > 100 and len(links) > 1000
    assert not problems, "\n" + "\n".join(problems)


def test_no_page_is_wider_than_a_phone(visit, context):  # noqa: F811
    problems = []
    for name in names_of_pages():
        page, _ = visit(name)
        page.set_viewport_size(NARROW)
        wide = page.evaluate("document.documentElement.scrollWidth")
        if wide > NARROW["width"]:
            note(problems, page, name, f"{wide} pixels")
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(visit, context, scheme, size):  # noqa: F811
    problems, axe = [], Axe()
    [page] = context.pages
    # the theme fades its buttons from light to dark, but not for those who want no motion
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.set_viewport_size(size)
    for name in names_of_pages():
        visit(name)
        for fault in axe.run(page).response["violations"]:
            if fault["impact"] in SERIOUS:
                where = {node["html"][:150] for node in fault["nodes"]}
                note(problems, page, name, f"{fault['id']}: {sorted(where)[:2]}")
    assert not problems, "\n" + "\n".join(problems)


def test_a_search_finds_an_error_text(visit):
    page, _ = visit(f"search.html?q={AN_ERROR.replace(' ', '+')}")
    page.wait_for_selector("#search-results li")
    found = page.locator("#search-results").inner_text()
    assert "DistributedDataParallel" in found
    page.locator("#search-results li a").first.click()
    page.wait_for_load_state()
    assert AN_ERROR in page.locator("main").inner_text()


@pytest.mark.parametrize("line", PASTED)
def test_a_search_finds_an_error_with_names_of_the_readers_own(visit, line):
    page, _ = visit(f"search.html?{urlencode({'q': line})}")
    first = page.locator("#search-results li a").first
    assert Path(first.get_attribute("href").split("?")[0]).stem in PASTED[line]


def test_a_search_for_what_no_lesson_has_finds_nothing(visit):
    page, _ = visit("search.html?q=qwertyuiopasdf")
    page.wait_for_function(
        "document.querySelector('#search-results').innerText.includes('did not match')"
    )
    assert page.locator("#search-results li").count() == 0


def test_a_folded_answer_opens_and_an_animation_plays(visit):
    page, _ = visit("lessons/02_ranks_and_collectives.html")
    answer = page.locator("main details", has_text="Answer").first
    before = answer.inner_text()
    answer.locator("summary").click()
    assert len(answer.inner_text()) > len(before) + 20
    assert moves(page.locator("main img.ddp-course-film").first)


def moves(picture, within=8):
    """Whether a picture soon looks different."""
    picture.scroll_into_view_if_needed()
    before = picture.screenshot()
    return wait_until(lambda: picture.screenshot() != before, within)


@pytest.mark.parametrize(
    "path", ["index.html", "lessons/02_ranks_and_collectives.html"]
)
def test_a_film_can_be_stopped(visit, path):
    page, _ = visit(path)
    film, still = (page.locator(f".film .ddp-course-{name}").first for name in STATES)
    box = page.get_by_role("checkbox", name="stop the film").first
    assert moves(film) and not still.is_visible()
    box.focus()
    page.keyboard.press("Space")
    assert not film.is_visible() and still.bounding_box()["height"] > 100
    assert not moves(still, within=3)
    box.uncheck()
    assert film.is_visible() and not still.is_visible()


STATES = "film", "still"
SIDES = ("left", "prev"), ("right", "next")
SLIDERS = {
    "lessons/02_ranks_and_collectives.html": "step",
    "lessons/12_memory.html": "number of ranks",
    "lessons/16_making_it_fast.html": "bucket size",
    "lessons/18_pipeline_parallel.html": "micro-batches",
}


@pytest.mark.parametrize("path", SLIDERS)
def test_a_slider_turns(visit, path):
    page, _ = visit(path)
    slider = page.get_by_role("slider", name=SLIDERS[path])
    picture = lambda: page.evaluate(
        "input => input.closest('div').parentElement.querySelector('img').alt",
        slider.element_handle(),
    )
    before = picture()
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert wait_until(lambda: picture() != before, 10)


@pytest.mark.parametrize("path", SLIDERS)
def test_a_phone_shows_all_that_a_slider_changes(visit, path):
    page, _ = visit(path)
    page.set_viewport_size(NARROW)
    slider = page.get_by_role("slider", name=SLIDERS[path])
    picture = slider.locator("xpath=ancestor::div[1]/img").bounding_box()
    assert picture["width"] > 300
    assert picture["x"] >= 0 and picture["x"] + picture["width"] <= NARROW["width"]


PHONE = {"width": 360, "height": 740}


def numbers_of(page):
    """What the planner shows, by name: all digits, as the attributes have them."""
    found = page.eval_on_selector_all(
        ".ddp-course-planner data",
        "all => all.map(one => [one.dataset.name, one.value])",
    )
    return {name: float(value) for name, value in found}


def test_a_phone_plans_a_run_with_the_numbers_of_python(visit):
    page, said = visit("planner.html")
    page.set_viewport_size(PHONE)
    box = lambda name: page.get_by_role("combobox", name=name)
    choose = lambda name, text: box(name).select_option(label=text)
    choose("model", "llama3-70b")
    choose("tensor ranks", "8")
    choose("micro-batch", "2")
    slider = page.get_by_role("slider", name="number of GPUs")
    slider.focus()
    for _ in range(3):  # from 64 to 512
        page.keyboard.press("ArrowRight")
    page.get_by_role("spinbutton", name="price").fill("2.5")
    how = {"micro_batch": 2, "stage": 3}
    run = run_of(MODELS["llama3-70b"], Mesh(64, tensor=8), 8192, 512, **how)
    plan = lesson21.plan_of(MODELS["llama3-70b"], run, "h100")
    days = lesson21.days(plan, 20 * MODELS["llama3-70b"].parameters())
    expected = plan.kept._asdict() | plan.parts._asdict()
    expected |= {"bytes": plan.kept.total(), "seconds": plan.seconds(), "days": days}
    expected |= {"cost": days * 24 * 512 * 2.5, "data_ranks": 64}
    shown = numbers_of(page)
    found = {name: shown[name] for name in expected}
    assert found == pytest.approx(expected, rel=1e-14, abs=0)
    verdict = page.locator(".ddp-course-planner .verdict").first
    assert verdict.inner_text() == ("fits" if plan.fits("h100") else "does not fit")
    assert f"One step: {words.number(plan.seconds())} s" in page.inner_text("main")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    for part in page.locator(".ddp-course-planner :is(.bar, select, input)").all():
        place = part.bounding_box()
        assert place["x"] >= 0 and place["x"] + place["width"] <= PHONE["width"]
        assert not part.evaluate("node => node.matches('.bar')") or place["width"] > 300
    slider.scroll_into_view_if_needed()  # what a control changes is still on the screen
    assert 0 <= page.locator(".ddp-course-planner .bar").first.bounding_box()["y"] < 740
    choose("pipeline ranks", "4")
    assert "ZeRO-3 would gather the weights" in page.inner_text("main")
    assert numbers_of(page) == {} and said == []


def test_a_line_does_not_end_within_a_flag_and_titles_are_not_squeezed(visit):
    page, _ = visit("choose.html")
    page.set_viewport_size(NARROW)
    flags = page.locator("main code .pre", has_text=re.compile("^--"))
    rows = flags.evaluate_all("all => all.map(flag => flag.getClientRects().length)")
    assert len(rows) > 20 and {*rows} == {1}
    page, _ = visit("failures/02-shapes-that-do-not-match.html")
    before, after = (
        page.locator(f".prev-next-area .{side}-{way}") for side, way in SIDES
    )
    assert before.bounding_box()["width"] > 150 and after.bounding_box()["width"] > 150
    assert after.bounding_box()["y"] > before.bounding_box()["y"] + 20


def test_a_problem_is_photographed_on_its_own_page(context):  # noqa: F811
    page, problems = context.new_page(), []
    file = SCREENSHOTS / "a-page-of-this-test.png"
    file.unlink(missing_ok=True)
    note(problems, page, "a page/of this test", "wrong")
    assert problems == ["a page/of this test: wrong"] and file.exists()
    file.unlink()


def test_a_wide_page_and_a_low_contrast_are_seen(context, tmp_path):  # noqa: F811
    """A page with faults, so that the tests above are seen to find them."""
    file = Path(tmp_path, "bad.html")
    file.write_text(
        "<html lang=en><title>bad</title><main><p style='width:900px;color:#ccc'>pale"
        "</p><img src='data:,'></main>"
    )
    page = context.new_page()
    page.set_viewport_size(NARROW)
    page.goto(file.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") > NARROW["width"]
    found = {fault["id"] for fault in Axe().run(page).response["violations"]}
    assert {"color-contrast", "image-alt"} <= found
