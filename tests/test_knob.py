"""The slider in an output: its pictures are the formulas', and without scripts one
picture shows. tests/browser/ turns it.
"""

import base64
import json
import re
from html.parser import HTMLParser

import pytest

from ddp_course import lesson02, lesson16
from ddp_course.detectors.step_profile import StepProfile
from ddp_course.estimates.memory import STAGES, states
from ddp_course.estimates.pipeline import bubble, schedule
from ddp_course.notebook import plots
from ddp_course.notebook.plots import collectives, display
from ddp_course.notebook.plots.knob import knob
from ddp_course.notebook.plots.knobs import RANKS, STAGE_WIDE
from ddp_course.notebook.plots.speed import TIME_COLORS
from ddp_course.notebook.plots.style import BACKWARD, FORWARD, GREY
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import launch


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


# ---- a pipeline ----

STEPS = {
    m: {f"{p} stages": schedule("1F1B", p, m) for p in (2, 4, 8)}
    for m in (1, 2, 4, 8, 16, 32)
}


def boxes_of(svg, color):
    """The boxes of one colour that are drawn as one path: [(x, y, width, height)]."""
    numbers = r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-[\d.]+z"
    paths = re.findall(rf'<path d="([^"]*)" fill="{color}"/>', svg)
    return [tuple(map(float, place)) for d in paths for place in re.findall(numbers, d)]


def test_each_place_of_the_pipeline_says_and_draws_its_bubble():
    places = places_of(shown(lambda: plots.pipeline_knob(STEPS)))
    assert [int(name) for name, _, _ in places] == list(STEPS)
    for m, (_, alt, svg) in zip(STEPS, places):
        shares = [f"{bubble(p, m):.0%}" for p in (2, 4, 8)]
        assert re.findall(r"of which (\d+%)", alt) == shares
        assert re.findall(r">\d stages: [\d.]+ slots, bubble (\d+%)<", svg) == shares
        of_row = rf'<rect x="64" y="(\d+)" width="([\d.]+)".*?"{GREY}"'
        whole = re.findall(of_row, svg)
        rows, drawn = dict(whole), {}
        for color in (FORWARD, BACKWARD):
            found = boxes_of(svg, color)
            assert len(found) == m * (2 + 4 + 8)
            for x, y, wide, _ in found:
                drawn[f"{y:g}"] = drawn.get(f"{y:g}", 0) + wide
                assert 64 <= x and x + wide <= 64 + float(rows[f"{y:g}"]) + 0.1
        for (y, busy), p in zip(drawn.items(), [2, 2, *[4] * 4, *[8] * 8]):
            full = float(rows[y])
            # all pipelines have one scale, that of the longest step
            most = max(m + n - 1 for n in (2, 4, 8))
            assert full == pytest.approx(STAGE_WIDE * (m + p - 1) / most, abs=1)
            # a gap of at most an eighth follows each box
            assert (1 - bubble(p, m)) * 0.87 <= busy / full <= 1.01 - bubble(p, m)


# ---- overlap ----

PROFILE = StepProfile(0.3, 0.2, [(0.005 * i, 3e5) for i in range(1, 41)])
SPEEDS = 0.2, 1, 5


def overlap(profile=PROFILE, ranks=2, alpha=1e-3):
    planned = {
        f"{mb} MiB": {
            f"{speed} GB/s": lesson16.transfers(
                profile, mb * 2**20, ranks, alpha, 1e-9 / speed
            )
            for speed in SPEEDS
        }
        for mb in (0.25, 1, 4, 25)
    }
    return planned, shown(
        lambda: plots.overlap_knob(planned, profile.backward, "1 MiB")
    )


@pytest.mark.parametrize("alpha", [0, 1e-3, 5e-2])
def test_each_place_of_the_overlap_exposes_what_the_model_predicts(alpha):
    planned, page = overlap(alpha=alpha)
    for mb, (name, alt, svg) in zip((0.25, 1, 4, 25), places_of(page)):
        assert name == f"{mb} MiB"
        expected = [
            1e3 * lesson16.exposed_seconds(PROFILE, mb * 2**20, 2, alpha, 1e-9 / speed)
            for speed in SPEEDS
        ]
        told = re.findall(r"(\d+) buckets?, ([\d,.]+) ms exposed", alt)
        sizes = [float(ms.replace(",", "")) for _, ms in told]
        assert sizes == pytest.approx(expected, rel=6e-3)
        count = len(lesson16.buckets(PROFILE.gradients, mb * 2**20))
        assert [int(number) for number, _ in told] == [count] * 3
        assert re.findall(r"([\d,.]+) ms exposed<", svg) == [ms for _, ms in told]


def test_transfers_are_drawn_as_long_as_they_take_and_exposed_after_backward():
    planned, page = overlap()
    longest = max(
        [0.2, *(s[1] for of in planned.values() for sp in of.values() for s in sp)]
    )
    for (_, links), (_, _, svg) in zip(planned.items(), places_of(page)):
        [first, *_] = re.findall(r'<rect x="96" y="26" width="([\d.]+)"', svg)
        scale = float(first) / PROFILE.backward
        assert longest * scale == pytest.approx(410, abs=1)
        colors = TIME_COLORS["hidden"], TIME_COLORS["exposed"]
        hidden, exposed = (boxes_of(svg, color) for color in colors)
        edge = 96 + float(first)
        assert all(x + wide <= edge + 0.2 for x, _, wide, _ in hidden)
        assert all(x >= edge - 0.2 for x, *_ in exposed)
        lengths = sum(end - begin for of in links.values() for begin, end in of)
        drawn = sum(wide for _, _, wide, _ in hidden + exposed)
        assert 0.85 * lengths * scale <= drawn <= 1.01 * lengths * scale


# ---- the ring ----


def ring_after(steps):
    with process_group() as (rank, world_size):
        chunks = lesson02.marked_chunks(rank, world_size)
        lesson02.ring_all_reduce(chunks, steps)
        return chunks


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_each_place_of_the_ring_has_what_real_ranks_hold_after_the_step(n):
    frames = [launch(ring_after, steps, nproc=n) for steps in range(2 * n - 1)]
    places = places_of(shown(lambda: plots.ring_knob(frames)))
    assert [name for name, _, _ in places] == [str(k) for k in range(2 * n - 1)]
    for frame, (_, alt, svg) in zip(frames, places):
        assert alt.endswith(f"{collectives.in_words(frame)}.")
        names = [collectives.name_of(piece, n) for held in frame for piece in held]
        whole = sorted(name for name in names if "+" not in name)
        uses = re.findall(r'<use href="#(\w+)"', svg)
        shapes = dict(re.findall(r'<g id="(\w+)">(.*?)</g>', svg))
        texts = [
            text for use in uses for text in re.findall(r">([A-DΣ]\d)<", shapes[use])
        ]
        assert sorted(texts) == whole
        assert set(uses) == set(shapes)  # nothing is stored that is not seen


# ---- all of them ----

KNOBS = {
    "memory": (lambda: plots.memory_knob(7.5e9, at=8), RANKS.index(8)),
    "pipeline": (lambda: plots.pipeline_knob(STEPS, at=4), 2),
    "overlap": (lambda: overlap()[1], 1),
    "ring": (lambda: plots.ring_knob([launch(ring_after, k, nproc=3) for k in (0, 1)]), 0),
}  # fmt: skip


@pytest.fixture(scope="module", params=KNOBS)
def a_knob(request):
    """The page of one of the sliders, and the place that it begins at."""
    draw, at = KNOBS[request.param]
    return (draw() if request.param == "overlap" else shown(draw)), at


def test_without_scripts_one_picture_shows_and_no_dead_slider(a_knob):
    page, at = a_knob
    tags = Tags(page).found
    [image] = [attributes for tag, attributes in tags if tag == "img"]
    _, alt, svg = places_of(page)[at]
    assert image["alt"] == alt
    assert base64.b64decode(image["src"].partition(",")[2]).decode() == svg
    assert not [tag for tag, _ in tags if tag in ("input", "label")]
    assert f"slider.value = {at};" in page


def test_an_output_with_a_slider_is_small_and_asks_no_host(a_knob):
    page, _ = a_knob
    assert len(page) < 100_000
    assert not re.search(r"https?://", page)
    for _, _, svg in places_of(page):
        assert set(re.findall(r"https?://[^\"]+", svg)) == {
            "http://www.w3.org/2000/svg"
        }


def test_the_pictures_of_a_slider_are_equally_large(a_knob):
    """So that the page below does not move when it is turned."""
    sizes = {
        re.search(r'width="(\d+)" height="(\d+)"', svg).groups()
        for *_, svg in places_of(a_knob[0])
    }
    assert len(sizes) == 1


def test_a_picture_of_a_slider_is_legible_on_a_phone(a_knob):
    """All of it is seen there, on 368 pixels of 400, where 13 pixels become 9 or more."""
    for *_, svg in places_of(a_knob[0]):
        width = int(re.search(r'width="(\d+)"', svg)[1])
        sizes = [int(size) for size in re.findall(r'font-size="(\d+)"', svg)]
        assert min(sizes) * min(1, 368 / width) >= 8


def test_a_text_that_looks_like_html_does_not_end_the_script():
    page = shown(lambda: knob("x", [("</script>", "a <b> & c", b"<svg/>")]))
    assert page.count("</script>") == 1
    assert places_of(page) == [("</script>", "a <b> & c", "<svg/>")]
