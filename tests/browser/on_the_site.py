"""The course's web site in a real browser, on a wide and on a narrow screen: `make browser`."""

import functools
import http.server
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urldefrag, urljoin

import pytest
from axe_playwright_python.sync_playwright import Axe
from chromium import browser, context  # noqa: F401
from conftest import COURSE, wait_until

SITE = COURSE / "site" / "_build" / "html"
NARROW, WIDE = {"width": 400, "height": 800}, {"width": 1400, "height": 900}
SERIOUS = ("serious", "critical")
AN_ERROR = "Expected to have finished reduction in the prior iteration"


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


def links_of(page):
    """The addresses of all links of a page."""
    return page.eval_on_selector_all("a[href]", "all => all.map(link => link.href)")


def anchors_of(page):
    return set(page.eval_on_selector_all("[id]", "all => all.map(part => part.id)"))


def test_pages_say_nothing_in_the_console_and_their_links_lead_somewhere(site, visit):
    problems, anchors, links = [], {}, set()
    for name in names_of_pages():
        page, said = visit(name)
        problems += [f"{name}: {text}" for text in said]
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
            problems.append(f"{name}: {wide} pixels")
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(visit, context, scheme):  # noqa: F811
    problems, axe = [], Axe()
    [page] = context.pages
    # the theme fades its buttons from light to dark, but not for those who want no motion
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.set_viewport_size(WIDE)
    for name in names_of_pages():
        visit(name)
        for fault in axe.run(page).response["violations"]:
            if fault["impact"] in SERIOUS:
                where = {node["html"][:150] for node in fault["nodes"]}
                problems.append(f"{name}: {fault['id']}: {sorted(where)[:2]}")
    assert not problems, "\n" + "\n".join(problems)


def test_a_search_finds_an_error_text(visit):
    page, _ = visit(f"search.html?q={AN_ERROR.replace(' ', '+')}")
    page.wait_for_selector("#search-results li")
    found = page.locator("#search-results").inner_text()
    assert "DistributedDataParallel" in found
    page.locator("#search-results li a").first.click()
    page.wait_for_load_state()
    assert AN_ERROR in page.locator("main").inner_text()


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
    film = page.locator("main img[src^='data:image/svg'], main img[src$='.svg']").first
    film.scroll_into_view_if_needed()
    assert film.evaluate("image => image.complete && image.naturalWidth > 0")


SLIDERS = {
    "lessons/02_ranks_and_collectives.html": "step",
    "lessons/12_memory.html": "number of ranks",
    "lessons/13_deepspeed.html": "micro-batches",
    "lessons/16_making_it_fast.html": "bucket size",
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
