"""The slider in an output: its pictures are the formulas', and without scripts one
picture shows. tests/browser/ turns it.
"""

import base64
import json
import re
from html.parser import HTMLParser

import pytest

from ddp_course.notebook import plots
from ddp_course.notebook.plots import display
from ddp_course.notebook.plots.knob import RANKS, knob
from ddp_course.scenery.memory import STAGES, states


def shown(draw):
    """What a function displays, the HTML of one output."""
    bundles = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(display, "display", lambda bundle, raw: bundles.append(bundle))
        draw()
    [bundle] = bundles
    return bundle["text/html"]


def places_of(page):
    """The slider's places, [(text, alternative text, SVG)], from the script."""
    coded = json.loads(re.search(r"pictures = (\[.*\]), picture", page)[1])
    return [(name, alt, base64.b64decode(svg).decode()) for name, alt, svg in coded]


class Tags(HTMLParser):
    """The start tags of a page, [(tag, attributes)]."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


@pytest.mark.parametrize("parameters, precision", [(7.5e9, "master"), (124e6, "fp32")])
def test_each_place_of_the_slider_has_the_bytes_of_the_formulas(parameters, precision):
    page = shown(lambda: plots.memory_knob(parameters, precision, at=2))
    places = places_of(page)
    assert [name for name, _, _ in places] == [str(ranks) for ranks in RANKS]
    for ranks, (_, alt, svg) in zip(RANKS, places):
        told = [float(size) for size in re.findall(r": ([\d.]+) GB \(", alt)]
        written = [float(size) for size in re.findall(r">([\d.]+) GB<", svg)]
        kept = [
            sum(states(parameters, ranks, stage, precision)) / 1e9 for stage in STAGES
        ]
        assert told == pytest.approx(kept, rel=5e-3)
        assert written == told


def test_a_bar_is_as_long_as_its_bytes():
    svg = places_of(shown(lambda: plots.memory_knob(7.5e9, gpu=80e9)))[3][2]
    bars = re.findall(
        r'<rect x="[\d.]+" y="([\d.]+)" width="([\d.]+)" height="26"', svg
    )
    rows = {top: sum(float(long) for y, long in bars if y == top) for top, _ in bars}
    sizes = [sum(states(7.5e9, 8, stage, "master")) for stage in STAGES]
    longest = max(rows.values())
    for long, size in zip(rows.values(), sizes):
        assert long / longest == pytest.approx(size / max(sizes), abs=0.005)


def test_without_scripts_one_picture_shows_and_no_dead_slider():
    page = shown(lambda: plots.memory_knob(7.5e9, at=8))
    tags = Tags(page).found
    [image] = [attributes for tag, attributes in tags if tag == "img"]
    _, alt, svg = places_of(page)[RANKS.index(8)]
    assert image["alt"] == alt and "on 8 ranks" in alt
    assert base64.b64decode(image["src"].partition(",")[2]).decode() == svg
    assert not [tag for tag, _ in tags if tag in ("input", "label")]


def test_an_output_with_a_slider_is_small_and_asks_no_host():
    page = shown(lambda: plots.memory_knob(7.5e9))
    assert len(page) < 100_000
    assert not re.search(r"https?://", page)
    for _, _, svg in places_of(page):
        assert set(re.findall(r"https?://[^\"]+", svg)) == {
            "http://www.w3.org/2000/svg"
        }


def test_a_text_that_looks_like_html_does_not_end_the_script():
    page = shown(lambda: knob("x", [("</script>", "a <b> & c", b"<svg/>")]))
    assert page.count("</script>") == 1
    assert places_of(page) == [("</script>", "a <b> & c", "<svg/>")]
