"""The figures: each is one small image with an alternative text, legible, and the same
bytes each time; the animations play.
"""

import asyncio
import base64
import collections
import functools
import html
import inspect
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from xml.etree import ElementTree

import nbformat
import pytest
import torch
from conftest import COURSE, wait_until
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from PIL import Image, ImageChops
from tornado.websocket import websocket_connect

from ddp_course import lesson02, lesson16
from ddp_course.detectors.step_profile import StepProfile
from ddp_course.estimates.memory import Mesh
from ddp_course.estimates.pipeline import PLANS, schedule
from ddp_course.models import context_parallel, tensor_parallel
from ddp_course.models.gpt import GPT
from ddp_course.notebook import plots
from ddp_course.notebook.plots import (
    axes,
    charts,
    display,
    drawing,
    experts_film,
    film,
    knobs,
    pipeline_film,
    style,
)
from ddp_course.notebook.plots.collectives import name_of
from ddp_course.ranks import watch
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import launch

# ---- what is drawn: data as the notebooks have it ----


def falling(steps, start=2.3, end=0.2):
    """Losses of a training run."""
    return [
        end
        + (start - end) * math.exp(-4 * step / steps) * (1 + 0.1 * math.sin(9 * step))
        for step in range(steps)
    ]


def digits(how_many=20):
    """Grey images with as many different pixels as handwritten digits have."""
    torch.manual_seed(0)
    coarse = torch.rand(how_many, 1, 8, 8)
    fine = torch.nn.functional.interpolate(coarse, scale_factor=3.5, mode="bilinear")
    return (255 * fine.clamp(0, 1)).to(torch.uint8).squeeze(1)


@functools.cache
def observed(n):
    """What real ranks hold before and after each collective."""

    def observe():
        with process_group():
            return [lesson02.before_and_after(each) for each in lesson02.COLLECTIVES]

    names = [each.__name__ for each in lesson02.COLLECTIVES]
    return dict(zip(names, (list(zip(*of)) for of in zip(*launch(observe, nproc=n)))))


@functools.cache
def ring_frames(n):
    """What real ranks hold after each step of a ring all-reduce."""

    def after(steps):
        with process_group() as (rank, world_size):
            chunks = lesson02.marked_chunks(rank, world_size)
            lesson02.ring_all_reduce(chunks, steps)
            return chunks

    return [launch(after, steps, nproc=n) for steps in range(2 * n - 1)]


def recording(stretch=1.0):
    """What profiling.record returns, in milliseconds."""
    backward = [(12 + 0.6 * i, 0.5) for i in range(60)]
    sent = [(20 + 8 * i, 7 * stretch) for i in range(4)]
    rows = {"forward": [(0.0, 12.0)], "backward": backward, "all_reduce": sent}
    return rows | {"optimizer": [(52.0 * stretch, 4.0)]}


def traced(computing, communication):
    """What `read_trace` returns, in milliseconds."""
    return {"communication": communication, "computing": computing, "step": (0.0, 90.0)}


def overlaps(backward):
    """Buckets that travel over two links, as lesson16.transfers predicts them."""
    gradients = [(backward * (i + 1) / 40, 3e5) for i in range(40)]
    profile = StepProfile(1.3 * backward, backward, gradients)
    return {
        f"{mb} MiB": {
            f"{speed} GB/s": lesson16.transfers(
                profile, mb * 2**20, 2, 1e-3, 1e-9 / speed
            )
            for speed in (0.2, 5)
        }
        for mb in (0.25, 1, 2, 25)
    }


def two_groups(lost=True):
    """Two replica groups, of which the second is off for eight rounds."""

    def a_round(number, groups, begin, committed=True):
        times = {"begin": begin, "computed": begin + 1.6, "end": begin + 2}
        return {"round": number, "groups": groups, "committed": committed, **times}

    both = lambda first, last, begin: [
        a_round(first + place, 2, begin + 2 * place) for place in range(last - first)
    ]
    alone = [a_round(5, 2, 8, committed=False)] if lost else []
    alone += [a_round(5 + place, 1, 10 + 2 * place) for place in range(8)]
    rounds = [
        both(1, 5, 0) + alone + both(13, 17, 26),
        both(1, 5, 0) + both(13, 17, 26),
    ]
    first = {"rounds": rounds[0], "off": [], "received": []}
    return [first, {"rounds": rounds[1], "off": [[9, 14]], "received": [27.8]}]


def tree_messages(n, size=4096):
    """A broadcast in which every rank that has the tensor sends it on."""
    messages, have, round_ = [], 1, 0
    while have < n:
        round_ += 1
        for source in range(min(have, n - have)):
            place = {"round": round_, "source": source, "target": have + source}
            messages.append({**place, "bytes": size})
        have *= 2
    return messages


def ring_messages(n, size=4000):
    """The messages of a ring all-reduce."""
    return [
        {
            "round": step + 1,
            "source": rank,
            "target": (rank + 1) % n,
            "bytes": size // n,
        }
        for step in range(2 * (n - 1))
        for rank in range(n)
    ]


def choices_of(n):
    """Two of 2n experts for each of four tokens on each of n ranks."""
    first = [[t * t + r for t in range(4)] for r in range(n)]
    return [[[e % (2 * n), (e + 1) % (2 * n)] for e in of_rank] for of_rank in first]


def all_to_all_messages(n):
    """Each rank sends to each other one, all at once, and sizes differ."""
    pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
    return [
        {"round": 1, "source": a, "target": b, "bytes": 100 * (1 + a)} for a, b in pairs
    ]


def owners(ranks, samples=14, padded=True):
    """Which ranks see which sample; with `padded` some samples are seen twice."""
    seen = [[sample % ranks] for sample in range(samples)]
    for extra in range(-samples % ranks):
        if padded:
            seen[extra].append((samples + extra) % ranks)
        else:
            seen[samples - 1 - extra] = []
    return seen


STEPS = {
    "data": "DistributedSampler\nsampler.set_epoch(epoch)",
    "model": "DistributedDataParallel\n(model)",
    "loss": "own loss on each rank",
    "backward": "averages the gradients\n(nothing to write)",
    "step": "the same on all ranks",
    "evaluate": "each sample once,\ncounts are summed",
}
MEMORY = {
    "DDP": {"weights": 15.0, "gradients": 15.0, "optimizer": 90.0},
    "ZeRO 1": {"weights": 15.0, "gradients": 15.0, "optimizer": 1.41},
    "ZeRO 3": {"weights": 0.234, "gradients": 0.234, "optimizer": 1.41},
}
SIZES = [2**power for power in range(10, 23)]
SECONDS = [1.9e-4 + 4.5e-10 * size * (1 + 0.1 * (size % 3)) for size in SIZES]
NF4 = [-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0]
NF4 += [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1]

# name: draw the figure, for those that do not depend on a number of ranks
ALONE = {
    "flow": lambda: plots.flow(STEPS),
    "flow of 7": lambda: plots.flow(
        {"shard": "1/n of a\nblock", "gather": "all_gather:\nthe block"}
        | {"forward": "activations\nare kept", "free": "weights\nare not"}
        | {"gather ": "all_gather,\nonce more", "backward": "gradients of\nthe block"}
        | {"scatter": "reduce_scatter:\nthe mean, 1/n"}
    ),
    "flow of long notes": lambda: plots.flow(
        {
            f"{n}. What?": "steps end, but late: for which rank do the others wait?\nEver?"
            for n in range(4)
        }
    ),  # fmt: skip
    "images": lambda: plots.images(digits(), range(20)),
    "wrong images": lambda: plots.images(
        digits(), [f"{i % 10}, not {i % 7}" for i in range(20)], wrong=range(20)
    ),
    "one loss": lambda: plots.losses({"loss": falling(27)}, every_epoch=9),
    "few steps": lambda: plots.losses({"a": falling(9), "b": falling(9, end=1)}),
    "losses": lambda: plots.losses(
        {name: falling(24) for name in ("one process", "DDP, 2 ranks", "by hand")},
        "Three lines, one on top of the other",
    ),
    "curve": lambda: plots.curve(
        range(200),
        {"learning rate": [min(i / 20, 1) * 2e-3 for i in range(200)]},
        "update",
        "learning rate",
        "Warm-up",
    ),
    "curve with marks": lambda: plots.curve(
        range(1, 301),
        {"each batch": falling(300, 5.5, 2.4)},
        "update",
        "loss (nats per token)",
        "1,228,800 tokens",
        marks={"held-out text": ([50, 100, 150, 200, 250, 300], falling(6, 4, 2.6))},
    ),
    "bars": lambda: plots.bars(
        {"one by one": 14000, "whole batches": 1_100_000, "training": 5400},
        "images per second",
        "Two ways to feed a model",
    ),
    "bars with a unit": lambda: plots.bars(
        {"lesson 4": 2345.6, "Accelerate": 2210.0},
        "images per second",
        "Training on 2 ranks",
        " images/s",
    ),
    "stacked": lambda: plots.stacked(
        MEMORY, "memory per rank (GB)", "7.5 billion parameters, 64 ranks", " GB"
    ),
    "in_use": lambda: plots.in_use(
        {
            name: [16 / k + math.sin(i / 7) * math.sin(i / 300) for i in range(1500)]
            for k, name in enumerate(("DDP", "ZeRO-2 by hand", "FSDP by hand"), 1)
        },
        "One training step of one rank of 2",
    ),
    "in_use, with blocks": lambda: plots.in_use(
        {"FSDP by hand": [4 + math.sin(i / 25) for i in range(800)]},
        "One training step of one rank of 4",
        blocks=[(50 + 60 * i, min(i, 11 - i)) for i in range(12)],
    ),
    "memory_knob": lambda: plots.memory_knob(7.5e9),
    "overlap_knob": lambda: plots.overlap_knob(overlaps(0.1), 0.1, "2 MiB"),
    "overlap_knob, all hidden": lambda: plots.overlap_knob(overlaps(9), 9, "1 MiB"),
    "pipeline_knob": lambda: plots.pipeline_knob(
        {
            m: {f"{p} stages": schedule("1F1B", p, m) for p in (2, 4, 8)}
            for m in (1, 2, 4, 8, 16, 32)
        }
    ),
    "pipeline_steps, two stages per rank": lambda: plots.pipeline_steps(
        {"interleaved": schedule("interleaved", 2, 4)}
    ),
    "pipeline_knob, all kinds": lambda: plots.pipeline_knob(
        {m: {k: schedule(k, 4, m) for k in PLANS} for m in (4, 8)}
    ),
    "planner": lambda: plots.planner(),
    "planner, every part": lambda: plots.planner(
        "mixtral-8x7b",
        "a100",
        Mesh(16, 2, 4, 2, 2),
        context=32768,
        micro_batch=2,
        stage=1,
        recompute="full",
    ),
    "adapter": lambda: plots.adapter(inputs=256, outputs=256, r=8),
    "four_bits": lambda: plots.four_bits(
        NF4, (torch.randn(65536, generator=torch.manual_seed(0)) / 2.8).clamp(-1, 1)
    ),
    "cost_line": lambda: plots.cost_line(SIZES, SECONDS, 1.9e-4, 4.9e-10, SIZES[::2]),
    "step_timelines": lambda: plots.step_timelines(
        {f"version {i}": recording(1 + 0.1 * i) for i in range(4)}
    ),
    "exposed": lambda: plots.exposed(
        {
            "one bucket": traced([(0, 60)], [(61, 85)]),
            "buckets of 2 MiB": traced(
                [(0, 20), (5, 9), (21, 58)], [(25, 52), (50, 70)]
            ),
        },
        "A step of rank 0 of 2",
    ),
    "exposed, nothing sent": lambda: plots.exposed(
        {"one rank": traced([(3, 60)], [])}, "A step of one rank"
    ),
    "ratios": lambda: plots.ratios(
        {
            "nothing changed": (0.97, 1.01, 1.06),
            "bf16, layers of 32": (0.41, 0.52, 0.6),
            "fused AdamW, 120 small tensors": (1.5, 1.8, 1.9),
        },
        "One switch at a time, 2 ranks",
    ),
    "ratios, all slower": lambda: plots.ratios({"FSDP": (0.4, 0.5, 0.7)}, "Sharding"),
    "ratios of samples": lambda: plots.ratios(
        {"64 per rank": (9, 11, 12)}, "Samples per second", "times those of 1 per rank"
    ),
    "predictions": lambda: plots.predictions(
        {f"model {i}": [(30 * i + 1, 33 * i), (20, 21)] for i in range(1, 5)},
        "ms per step",
        "Bucket sizes, models, numbers of ranks",
    ),
    "predictions over two decades": lambda: plots.predictions(
        {"sleeping": [(9, 10), (80, 95), (1000, 1100)]}, "ms", "Bucket sizes"
    ),
    "roofline": lambda: plots.roofline(
        {"ReLU": [(0.125, 3e9)], "products": [(0.5, 8e9), (28, 1.6e11)]},
        3e10,
        1.7e11,
        "A CPU core",
    ),
    "attempts": lambda: plots.attempts(
        [range(1, 8), range(7, 13), range(13, 19)],
        3,
        "A run of 18 updates, killed twice",
    ),
    "replica_groups": lambda: plots.replica_groups(
        two_groups(), "Two replica groups, one of which loses its power"
    ),
    "machines": lambda: plots.machines(nodes=2, ranks_per_node=2),
    "item_weights": lambda: plots.item_weights([9, 1]),
    "weights of many": lambda: plots.item_weights([9, 1, 5, 40]),
    "many messages": lambda: plots.messages(ring_messages(8), 8),
    "all to all": lambda: plots.messages(all_to_all_messages(8), 8),
}
# the same for those that do, for 1 to 4 ranks
OF_RANKS = {
    "data_parallel_step": plots.data_parallel_step,
    "one machine": lambda n: plots.machines(1, n),
    "who_holds_what": lambda n: plots.who_holds_what(observed(n)),
    "ring": lambda n: plots.ring(ring_frames(n)),
    "ring_knob": lambda n: plots.ring_knob(ring_frames(n)),
    "pipelines": lambda n: plots.pipelines(
        {f"{k}, {n} ranks": schedule(k, n, n) for k in PLANS}
    ),
    "pipeline_steps": lambda n: plots.pipeline_steps(
        {f"{k}, {n} ranks": schedule(k, n, 4) for k in ("1F1B", "ZB-H1")}
    ),
    "fsdp": plots.fsdp,
    "tensor_parallel": plots.tensor_parallel,
    "sequence parallel": lambda n: plots.tensor_parallel(n, sequence=True),
    "ring_attention": lambda n: plots.ring_attention(context_parallel.zigzag(4 * n, n)),
    "experts": lambda n: plots.experts(choices_of(n), 2 * n),
    "sample_map": lambda n: plots.sample_map(
        {"padded": owners(n), "drop_last": owners(n, padded=False)}, "14 samples"
    ),
    "all ranks see all": lambda n: plots.sample_map(
        {"epoch 0": [list(range(n)) for _ in range(12)]}, "without a sampler"
    ),
    "batch_statistics": lambda n: plots.batch_statistics(
        {
            who: [(math.sin(i + 3 * k), 1 + 0.3 * math.cos(i)) for i in range(12)]
            for k, who in enumerate([f"rank {r}" for r in range(n)] + ["joined batch"])
        },
        (0.1, 1.1),
        "What BatchNorm sees",
    ),
    "accumulation": lambda n: plots.accumulation(ranks=n, micro_batches=4),
    "messages": lambda n: plots.messages(tree_messages(n), n),
    "ring messages": lambda n: plots.messages(ring_messages(n), n),
    "all-to-all messages": lambda n: plots.messages(all_to_all_messages(n), n),
}
CASES = ALONE | {
    f"{name}, {n}": functools.partial(draw, n)
    for name, draw in OF_RANKS.items()
    for n in (1, 2, 3, 4)
}
each_figure = pytest.mark.parametrize("name", CASES)


# ---- what comes out ----


def outputs_of(draw):
    """What a function displays: a list of bundles."""
    shown = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(display, "display", lambda bundle, raw: shown.append(bundle))
        draw()
    return shown


@functools.cache
def output_of(name):
    """The one output of a figure."""
    [bundle] = outputs_of(CASES[name])
    return bundle


def stem(path):
    return path.stem


def images_of(page):
    """The images of a page: [(kind, alternative text, bytes)]."""
    pattern = r'<img alt="([^"]*)"[^>]* src="data:image/([^;]*);base64,([^"]*)">'
    return [
        (kind, html.unescape(alt), base64.b64decode(data))
        for alt, kind, data in re.findall(pattern, page)
    ]


def svgs_of(bundle):
    images = images_of(bundle["text/html"])
    return [data.decode() for kind, _, data in images if kind == "svg+xml"]


def test_every_public_function_is_drawn_here():
    source = inspect.getsource(sys.modules[__name__])
    assert [name for name in plots.__all__ if f"plots.{name}" not in source] == []


@each_figure
def test_a_figure_is_one_output_whose_alternative_text_has_numbers(name):
    bundle = output_of(name)
    assert sorted(bundle) == ["text/html", "text/plain"]
    alt = bundle["text/plain"]
    images = images_of(bundle["text/html"])
    assert images and all(text == alt for _, text, _ in images)
    assert re.search(r"\d", alt) and alt.endswith(".") and "\n" not in alt
    for svg in svgs_of(bundle):
        root = ElementTree.fromstring(svg)
        assert root.get("role") == "img" and root.get("aria-label") == alt
        assert root[0].tag.endswith("}title") and root[0].text == alt


@each_figure
def test_a_figure_is_small(name):
    assert sum(len(text.encode()) for text in output_of(name).values()) < 100_000


@each_figure
def test_a_figure_has_the_same_bytes_each_time(name):
    assert outputs_of(CASES[name]) == [output_of(name)]


def test_alternative_texts_say_what_a_chart_shows_with_its_numbers():
    alt = output_of("bars")["text/plain"]
    assert "one by one: 14,000; whole batches: 1.1 million; training: 5,400" in alt
    alt = output_of("stacked")["text/plain"]
    assert "ZeRO 1: 31.4 (weights 15, gradients 15 and optimizer 1.41)" in alt
    alt = output_of("curve with marks")["text/plain"]
    assert "; held-out text: 4 at 50, 3.35 at 100, " in alt
    alt = output_of("cost_line")["text/plain"]
    assert alt.startswith("What one message costs. ")
    assert "13 sizes from 1 KiB (0.191 ms) to 4 MiB" in alt
    alt = output_of("messages, 4")["text/plain"]
    assert "round 2: rank 0 to rank 2 and rank 1 to rank 3" in alt


def test_of_replica_groups_it_is_said_what_was_lost_and_who_was_off():
    alt = output_of("replica_groups")["text/plain"]
    assert "group 0 does 16 rounds, 8 of them alone and loses 1 round;" in alt
    off = "is off from 9 to 14 s and receives its state at 27.8 s."
    assert f"group 1 does 8 rounds, 0 of them alone, {off}" in alt
    [svg] = svgs_of(output_of("replica_groups"))
    numbers = [text for text, *_ in Sheet(svg).texts if (text or "").isdigit()]
    for number in range(1, 17):
        assert str(number) in numbers
    whole = plots.replica_groups
    [calm] = outputs_of(lambda: whole(two_groups(lost=False), "Two groups"))
    assert "loses" not in calm["text/plain"]


def test_alternative_texts_of_speed_say_what_is_exposed_and_how_much_faster():
    alt = images_of(output_of("exposed")["text/html"])[0][1]
    first, second = alt.split("Timelines. ")[1].split("; ")
    assert first.startswith(
        "one bucket: computing 60 ms, hidden 0 ms and exposed 24 ms"
    )
    assert "hidden 33 ms and exposed 12 ms, in a step of 90 ms" in second
    alt = images_of(output_of("ratios")["text/html"])[0][1]
    assert "bf16, layers of 32: 0.52 (0.41 to 0.6)" in alt
    alt = images_of(output_of("ratios of samples")["text/html"])[0][1]
    assert "Times those of 1 per rank, median and interval. 64 per rank: 11" in alt
    alt = images_of(output_of("predictions")["text/html"])[0][1]
    assert "model 2: 61 and 66 and 20 and 21" in alt
    alt = images_of(output_of("roofline")["text/html"])[0][1]
    assert "30 GB/s, 170 GFLOP/s; ReLU: 3 at 0.125; products: 8 at 0.5 and 160" in alt


def test_predictions_over_two_decades_are_on_logarithmic_axes_and_others_are_not():
    [svg] = svgs_of(output_of("predictions over two decades"))
    at = {
        content: x
        for content, x, *_ in Sheet(svg).texts
        if content in {"10", "100", "1000"}
    }
    assert at["100"] - at["10"] == pytest.approx(at["1000"] - at["100"], abs=1)
    [svg] = svgs_of(output_of("predictions"))
    at = {content: x for content, x, *_ in Sheet(svg).texts}
    assert at["100"] - at["20"] == pytest.approx(at["80"] - at["0"], abs=1)


def test_a_figure_of_very_many_shapes_is_a_small_png_in_double_resolution():
    noise = torch.randn(4, 3000, generator=torch.manual_seed(0)).cumsum(1).tolist()
    curves = {f"rank {rank}": losses for rank, losses in enumerate(noise)}
    [bundle] = outputs_of(lambda: plots.losses(curves))
    [(kind, alt, data)] = images_of(bundle["text/html"])
    assert kind == "png" and alt == bundle["text/plain"]
    assert len(bundle["text/html"]) < 100_000
    assert outputs_of(lambda: plots.losses(curves)) == [bundle]
    width = int(re.search(r'width="(\d+)"', bundle["text/html"])[1])
    assert int.from_bytes(data[16:20], "big") == 2 * width


def test_all_images_are_drawn_with_their_titles():
    [svg] = svgs_of(output_of("wrong images"))
    titles = [text for text, *_ in Sheet(svg).texts]
    assert svg.count("<image ") == len(titles) == 20
    assert titles[:2] == ["0, not 0", "1, not 1"]
    assert {color for *_, color, _, _ in Sheet(svg).texts} == {style.RED}


# ---- legible ----


def contrast(first, second):
    """The contrast of two colours, #rrggbb, as WCAG 2 defines it: from 1 to 21."""

    def luminance(color):
        parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
            for part in parts
        ]
        return sum(
            weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear)
        )

    dark, light = sorted(map(luminance, (first, second)))
    return (light + 0.05) / (dark + 0.05)


def illegible(table):
    """The pairs of a table {background: colours of text} that have too little contrast."""
    return [
        (background, color)
        for background, colors in table.items()
        for color in colors
        if contrast(background, color) < 4.5
    ]


@style.styled
def test_a_long_title_beside_long_labels_stays_inside_the_figure():
    figure, axis = axes.chart(2)
    axes.rows_down(axis, ["a row with a rather long label", "another one"])
    axis.set_title(
        "Eight micro-batches on 2 ranks, on a network of 1 gigabit per second"
    )
    display.settle(figure)
    extent = axis._left_title.get_window_extent()
    assert figure.bbox.x0 <= extent.x0 < axis.bbox.x0
    assert axis.bbox.x1 - 20 < extent.x1 <= figure.bbox.x1


@style.styled
def test_a_title_with_enough_room_begins_at_its_axis():
    figure, axis = axes.chart(2)
    axis.set_title("Short")
    display.settle(figure)
    assert axis._left_title.get_window_extent().x0 == pytest.approx(axis.bbox.x0, abs=2)


def test_all_pairs_of_text_and_background_have_enough_contrast():
    assert illegible(style.TEXT_ON) == []
    planted = {**style.TEXT_ON, "#e08a1e": ("#222222", "#ffffff")}
    assert illegible(planted) == [("#e08a1e", "#ffffff")]


BOX = r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-[\d.]+z"  # as drawing.boxes writes it


class Sheet:
    """What is drawn where on an SVG: boxes (fill, left, top, right, bottom), texts
    (content, x, y, colour, size in points, the boxes so far) and tips of arrows; and
    `outside`, the texts that reach out of the picture.
    """

    def __init__(self, svg):
        root = ElementTree.fromstring(svg)
        self.named = {node.get("id"): node for node in root.iter() if node.get("id")}
        self.boxes, self.texts, self.tips, self.outside = [], [], [], []
        self.width, self.height = map(float, root.get("viewBox").split()[2:])
        self.points = 1 if root.get("width").endswith("pt") else 0.75
        self.walk(root, 0, 0)

    def walk(self, node, x, y):
        tag = node.tag.split("}")[-1]
        if tag in ("defs", "title", "style"):
            return
        if tag == "use":
            x, y = x + float(node.get("x", 0)), y + float(node.get("y", 0))
            target = node.get("href") or node.get("{http://www.w3.org/1999/xlink}href")
            self.walk(self.named[target[1:]], x, y)
        shift = re.match(
            r"translate\(([-\d.e]+)[ ,]([-\d.e]+)\)", node.get("transform", "")
        )
        if shift and tag == "g":
            x, y = x + float(shift[1]), y + float(shift[2])
        if hasattr(self, f"see_{tag}"):
            getattr(self, f"see_{tag}")(node, x, y)
        for child in node:
            self.walk(child, x, y)

    def look(self, node, name):
        inline = re.search(rf"(?:^|[; ]){name}: ?([^;]+)", node.get("style", ""))
        return inline[1].strip() if inline else node.get(name)

    def see_rect(self, node, x, y):
        left, top = x + float(node.get("x")), y + float(node.get("y"))
        right = left + float(node.get("width"))
        self.cover(node, left, top, right, top + float(node.get("height")))

    def see_path(self, node, x, y):
        path = node.get("d") or ""
        if "h" in path:  # many boxes
            for left, top, wide, tall in re.findall(BOX, path):
                right, bottom = float(left) + float(wide), float(top) + float(tall)
                self.cover(node, x + float(left), y + float(top), x + right, y + bottom)
            return
        numbers = [float(number) for number in re.findall(r"-?[\d.]+", path)]
        xs, ys = numbers[::2], numbers[1::2]
        if len(xs) == len(ys) >= 4 and path.strip().endswith("z"):
            self.cover(node, x + min(xs), y + min(ys), x + max(xs), y + max(ys))

    def cover(self, node, *place):
        fill = self.look(node, "fill")
        if fill and fill.startswith("#"):
            self.boxes.append((fill, *place))

    def see_polygon(self, node, x, y):
        tip = node.get("points").split()[0].split(",")
        self.tips.append((x + float(tip[0]), y + float(tip[1])))

    def see_text(self, node, x, y):
        anchor = self.look(node, "text-anchor")
        inside = {"start": 3, "end": -3}.get(anchor, 0)
        place = x + float(node.get("x")) + inside, y + float(node.get("y")) - 3
        size = float(self.look(node, "font-size").removesuffix("px")) * self.points
        color = self.look(node, "fill") or "#000000"
        ground = self.under(*place, self.boxes)[-1]
        if not self.is_inside(node, x, y, anchor, size / self.points):
            self.outside.append(node.text)
        self.texts.append((node.text or "", *place, color, size, ground))

    def is_inside(self, node, x, y, anchor, size):
        """Whether a text is within the picture. Its letters are taken to be half as wide
        as high, which is less than they are on average.
        """
        wide = 0.5 * size * len((node.text or "").strip())
        begin = {"end": -wide, "middle": -wide / 2}.get(anchor, 0)
        at, limit = x + float(node.get("x")), self.width
        if re.match(r"rotate\(-90", node.get("transform", "")):  # it runs upwards
            at, limit = self.height - y - float(node.get("y")), self.height
        return -1 <= at + begin and at + begin + wide <= limit + 1

    def under(self, x, y, boxes):
        """The colours of the boxes at a point, the topmost last."""
        return ["#ffffff"] + [
            fill
            for fill, left, top, right, bottom in boxes
            if left <= x <= right and top <= y <= bottom
        ]


def texts_too_faint(svg):
    """The texts of an SVG that have too little contrast with what is under them."""
    return [
        (content, color, ground)
        for content, _, _, color, _, ground in Sheet(svg).texts
        if contrast(color, ground) < 4.5
    ]


def texts_too_small(svg):
    """The texts of an SVG of less than 9 points."""
    return [(text, size) for text, *_, size, _ in Sheet(svg).texts if size < 9]


def texts_outside(svg):
    """The texts of an SVG that reach out of the picture."""
    return Sheet(svg).outside


def tips_in_boxes(svg):
    """The tips of arrows that are inside of boxes."""
    sheet = Sheet(svg)
    on_paper = {style.PAPER}
    return [
        tip for tip in sheet.tips if set(sheet.under(*tip, sheet.boxes)) != on_paper
    ]


@each_figure
def test_texts_are_large_enough_and_stand_out_from_what_is_under_them(name):
    for svg in svgs_of(output_of(name)):
        assert Sheet(svg).texts
        assert texts_too_faint(svg) == []
        assert texts_too_small(svg) == []
        assert texts_outside(svg) == []


@pytest.mark.parametrize("path", sorted((COURSE / "lessons").glob("*.ipynb")), ids=stem)
def test_no_text_of_a_stored_figure_reaches_out_of_it_or_shows_a_python_object(path):
    for bundle in stored(path):
        assert not re.search(
            r"\[\(|<\w+\.|\bobject at 0x", bundle.get("text/plain", "")
        )
        for svg in svgs_of(bundle):
            assert texts_outside(svg) == []


def stored(path):
    """The outputs of a notebook that have a picture."""
    for cell in nbformat.read(path, 4).cells:
        for output in cell.get("outputs", []):
            if "svg+xml;base64" in (data := output.get("data", {})).get(
                "text/html", ""
            ):
                yield data


def test_a_text_that_reaches_out_of_a_figure_is_found():
    pieces = [
        drawing.text(20, 20, "inside", style.INK),
        drawing.text(20, 40, "a rather long text that leaves", style.INK),
    ]
    svg = drawing.document(100, 50, pieces, "1 fault").decode()
    assert texts_outside(svg) == ["a rather long text that leaves"]


def test_a_small_text_and_an_arrow_that_ends_in_a_box_are_found():
    pieces = [
        drawing.rectangle(0, 0, 40, 40, style.CARD),
        drawing.text(20, 20, "small", style.CARD, size=11),
        drawing.arrow((80, 20), (50, 20)),
        drawing.arrow((80, 30), (30, 30)),
    ]
    svg = drawing.document(100, 50, pieces, "1 fault").decode()
    assert texts_too_small(svg) == [("small", 8.25)]
    assert tips_in_boxes(svg) == [(30, 30)]


def test_a_text_on_too_light_a_colour_is_found(monkeypatch):
    light = "#e08a1e"
    monkeypatch.setattr(style, "RANK_COLORS", [style.BLUE, light])
    monkeypatch.setitem(style.TEXT_ON, light, (style.PAPER,))
    for draw in (
        lambda: plots.data_parallel_step(2),
        lambda: plots.sample_map({"epoch 0": owners(2)}, "14 samples"),
        lambda: plots.ring(ring_frames(2)),
    ):
        [bundle] = outputs_of(draw)
        faint = [text for svg in svgs_of(bundle) for text in texts_too_faint(svg)]
        assert {ground for _, _, ground in faint} == {light}


def test_a_text_on_a_background_that_is_not_in_the_table_is_refused():
    with pytest.raises(KeyError):
        style.text_color("#e08a1e")
    with pytest.raises(ValueError):
        style.text_color(style.CARD, style.PAPER)


ARROWS = ["flow", "flow of 7", "data_parallel_step, 3", "who_holds_what, 3", "ring, 3"]


@pytest.mark.parametrize("name", ARROWS)
def test_no_arrow_ends_inside_a_box(name):
    for svg in svgs_of(output_of(name)):
        assert Sheet(svg).tips
        assert tips_in_boxes(svg) == []


@pytest.mark.parametrize("name", ["flow", "flow of 7", "flow of long notes"])
def test_the_texts_of_a_flow_stay_inside_their_boxes(name):
    [svg] = svgs_of(output_of(name))
    root = ElementTree.fromstring(svg)
    boxes = [
        [float(rect.get(key)) for key in ("x", "y", "width", "height")]
        for rect in root.findall(".//{*}rect")
    ][1:]  # the first is the ground
    texts = root.findall(".//{*}text")
    assert len(texts) > len(boxes) > 2
    for written in texts:
        x, y, size = (float(written.get(key)) for key in ("x", "y", "font-size"))
        bold = "bold" if written.get("font-weight") else "normal"
        font = FontProperties(family="DejaVu Sans", weight=bold)
        half = TextPath((0, 0), written.text, size, prop=font).get_extents().width / 2
        assert any(
            left < x - half
            and x + half < left + width
            and top < y - size < y < top + tall
            for left, top, width, tall in boxes
        ), written.text


def labels_of_axis(svg, number):
    """What is written along the x axis, 1, or the y axis, 2."""
    root = ElementTree.fromstring(svg)
    [axis] = [n for n in root.iter() if n.get("id") == f"matplotlib.axis_{number}"]
    return [node.text for node in axis.iter() if node.tag.endswith("}text")][:-1]


@pytest.mark.parametrize(
    "scale, expected",
    [
        (1, ["0.2", "0.5", "1", "2"]),
        (30, ["10", "20", "50"]),
        (0.01, ["0.002", "0.005", "0.01", "0.02"]),
    ],
)
def test_both_log_axes_have_numbers(scale, expected):
    seconds = [scale * time for time in SECONDS]
    line = 1.9e-4 * scale, 4.9e-10 * scale
    [bundle] = outputs_of(lambda: plots.cost_line(SIZES, seconds, *line, SIZES[::2]))
    [svg] = svgs_of(bundle)
    assert [label for label in labels_of_axis(svg, 2) if label] == expected
    assert labels_of_axis(svg, 1)[:3] == ["1 KiB", "4 KiB", "16 KiB"]


def test_a_log_axis_of_less_than_a_decade_has_numbers_too():
    seconds = [1e-3 * (0.55 + 0.02 * place) for place in range(len(SIZES))]
    [bundle] = outputs_of(lambda: plots.cost_line(SIZES, seconds, 6e-4, 1e-11, SIZES))
    [svg] = svgs_of(bundle)
    assert len([label for label in labels_of_axis(svg, 2) if label]) >= 3


@pytest.mark.parametrize("precision", ["master", "autocast"])
def test_no_number_of_the_memory_slider_is_under_its_line(precision):
    touched = 0
    for ranks in knobs.RANKS:
        _, svg = knobs.memory_bars(7.5e9, precision, ranks, 80e9)
        line = knobs.LEFT + knobs.BAR * 80e9 / 120e9
        for x, label in re.findall(r'x="([\d.]+)"[^>]*>([\d.]+ GB)<', svg.decode()):
            touched += float(x) - 6 == line
            assert not float(x) <= line <= float(x) + 7 * len(label)
    assert touched  # in some place, a number went to the right of it


def test_half_a_slot_is_said_however_long_the_step_is():
    steps = {"interleaved": schedule("interleaved", 4, 32)}
    alternative, _ = knobs.pipeline_panels(32, steps)
    assert "interleaved, 100.5 slots" in alternative


def test_measured_points_have_the_colour_of_their_prediction(monkeypatch):
    figures = []
    keep = lambda figure, alternative: figures.append(figure)
    monkeypatch.setattr(charts, "display_figure", keep)
    lines, marks = (
        {"few": [1, 2], "many": [2, 4]},
        {"many": ([1], [3]), "few": ([2], [1])},
    )
    plots.curve([1, 2], lines, "ranks", "speed-up", "Predicted and measured", marks)
    [axis] = figures[0].axes
    few, many, of_many, of_few, _ = (line.get_color() for line in axis.get_lines())
    assert (of_few, of_many) == (few, many) and few != many
    [legend] = figures[0].legends or [axis.get_legend()]
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["few", "many", "measured"]


@pytest.mark.parametrize("spikes, below", [(0, False), (1, True)])
def test_a_legend_is_among_the_lines_only_where_there_is_room(
    spikes, below, monkeypatch
):
    figures = []
    keep = lambda figure, alternative: figures.append(figure)
    monkeypatch.setattr(charts, "display_figure", keep)
    steps = range(60)
    lines = {name: [1 + 9 * spikes * (step % 2) for step in steps] for name in "ab"}
    lines["c"] = [10] * 60
    plots.curve(steps, lines, "step", "ms", "With and without spikes")
    assert bool(figures[0].legends) == below != bool(figures[0].axes[0].get_legend())


@pytest.mark.parametrize("name", ["few steps", "one loss", "attempts"])
def test_steps_are_counted_in_whole_numbers(name):
    [svg] = svgs_of(output_of(name))
    assert all(label.isdigit() for label in labels_of_axis(svg, 1))


def test_colours_of_ranks_are_named_wherever_they_are_used():
    for name in (
        "sample_map, 3",
        "batch_statistics, 3",
        "who_holds_what, 3",
        "fsdp, 3",
    ):
        texts = " ".join(text for text, *_ in Sheet(svgs_of(output_of(name))[-1]).texts)
        assert all(f"rank {rank}" in texts for rank in range(3)), name


# ---- animations ----

FILMS = [
    "ring, 3",
    "fsdp, 2",
    "tensor_parallel, 2",
    "pipeline_steps, 3",
    "ring_attention, 3",
    "experts, 2",
]


@functools.cache
def film_of(name):
    """The film of a figure."""
    films = []
    with pytest.MonkeyPatch.context() as patch:
        playing = film.Film.playing
        keep = lambda self, alt: films.append(self) or playing(self, alt)
        patch.setattr(film.Film, "playing", keep)
        outputs_of(CASES[name])
    return films[0]


@pytest.mark.parametrize("name", FILMS)
def test_an_animation_needs_no_script_no_network_and_no_end(name):
    moving, still = svgs_of(output_of(name))
    assert "infinite" in moving and "@keyframes" in moving
    assert "prefers-reduced-motion" in moving and "@keyframes" not in still
    for svg in (moving, still):
        outside = re.sub(r'xmlns="[^"]*"', "", svg)
        assert not re.search(r"<script|https?:|url\(|@import", outside)


@pytest.mark.parametrize("name", FILMS)
def test_on_paper_and_with_less_motion_the_still_picture_is_shown_instead(name):
    page = output_of(name)["text/html"]
    rule = re.search(
        r"@media print, \(prefers-reduced-motion: reduce\) \{(.*?)\n\}", page, re.S
    )
    assert ".ddp-course-film {display: none !important}" in rule[1]
    assert ".ddp-course-still {display: block !important" in rule[1]
    moving, still = re.findall(r"<img .*?>", page)
    assert 'class="ddp-course-film"' in moving and "width=" not in moving
    # without the <style>, which some pages drop, the still picture is not seen
    assert 'class="ddp-course-still" width="0" height="0"' in still


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_ring_shows_after_each_step_what_the_ranks_hold(n):
    frames, steps = ring_frames(n), 2 * (n - 1)
    for step, frame in enumerate(frames):
        svg = film_of(f"ring, {n}").stills([step + 0.9], 1, "").decode()
        caption, *texts = sorted(
            (text for text, *_ in Sheet(svg).texts), key=lambda text: "step" not in text
        )
        assert f"step {step} of {steps}: " in caption or step == 0
        names = [name_of(piece, n) for pieces in frame for piece in pieces]
        whole = sorted(name for name in names if "+" not in name)
        assert sorted(t for t in texts if re.fullmatch(r"[A-DΣ]\d", t)) == whole
        letters = sorted(
            "".join(re.findall("[A-D]", "".join(n for n in names if "+" in n)))
        )
        assert sorted(t for t in texts if re.fullmatch("[A-D]", t)) == letters
        if step:
            finished = "passed on" if step > n - 1 else "added up"
            assert finished in caption


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_fsdp_gathers_a_block_and_frees_it(n):
    blocks = 3
    fsdp = film_of(f"fsdp, {n}")

    def held(beat):
        """The caption, and how many shards of weights and of gradients are seen."""
        texts = [text for text, *_ in Sheet(fsdp.stills([beat], 1, "").decode()).texts]
        [caption] = [text for text in texts if ": " in text and "striped" not in text]
        return (
            caption,
            *(sum(bool(re.fullmatch(rf"{kind}\d", t)) for t in texts) for kind in "WG"),
        )

    own, all_of_one = n * blocks, n * (n - 1)
    assert held(0.9) == ("forward, block 0: all_gather", own + all_of_one, 0)
    assert held(1.5) == ("forward, block 0: compute, then free", own + all_of_one, 0)
    assert held(1.9) == ("forward, block 0: compute, then free", own, 0)
    assert held(6.9) == ("backward, block 2: all_gather again", own + all_of_one, 0)
    computed = ("backward, block 2: gradients, then free", own + all_of_one, n * n)
    assert held(7.5) == computed
    assert held(8.9) == ("backward, block 2: reduce_scatter", own, n)
    assert held(15.9) == ("optimizer: each rank updates its shards", own, own)


def collectives_of_a_block(sequence):
    with process_group():
        network = tensor_parallel.cut(GPT(64, 8, 1, 2, 8), sequence=sequence)
        x = torch.zeros(1, 4 if sequence else 8, 8)
        return watch.count_collectives(lambda: network.blocks[0](x))


@pytest.mark.parametrize("name", ["tensor_parallel, 2", "sequence parallel, 2"])
def test_a_block_that_is_cut_sends_in_the_film_what_it_sends_on_ranks(name):
    of_ranks = launch(collectives_of_a_block, name.startswith("seq"), nproc=2)[0]
    told = collections.Counter(
        re.findall(r"\w+_\w+(?=:)", output_of(name)["text/plain"])
    )
    names = {"allreduce": "all_reduce", "allgather": "all_gather"}
    assert told == {names.get(kind, kind): number for kind, number in of_ranks.items()}
    last = film_of(name).stills([film_of(name).length - 1.6], 1, "").decode()
    texts = [text for text, *_ in Sheet(last).texts]
    assert texts.count("part") == 4 and "rank 1" in texts


@pytest.mark.parametrize(
    "name, kinds, ranks",
    [
        ("pipeline_steps, 3", ["1F1B", "ZB-H1"], 3),
        ("pipeline_steps, two stages per rank", ["interleaved"], 2),
    ],
)
def test_the_ranks_of_a_pipeline_show_what_the_schedule_has_them_do(name, kinds, ranks):
    pipeline, played = film_of(name), [schedule(kind, ranks, 4) for kind in kinds]
    longest = max(begin + long for s in played for of in s for *_, begin, long in of)
    left = drawing.MARGIN + pipeline_film.STAGE + pipeline_film.STAGE_WIDE / 2
    rows = [spans for of_ranks in played for spans in of_ranks]
    for row, spans in enumerate(rows):
        y = 36 * (row // ranks + 1) + row * pipeline_film.ROW + pipeline_film.HIGH / 2
        for kind, _, number, begin, length in spans:
            beat = (begin + 0.9 * length) * pipeline_film.SECONDS / longest
            sheet = Sheet(pipeline.stills([beat], 1, "").decode())
            now = [
                (t, ground)
                for t, x, at, _, _, ground in sheet.texts
                if abs(at - y) < 4 and abs(x + drawing.MARGIN - left) < 1
            ]
            assert now[-1] == (str(number), pipeline_film.COLORS[kind])


def test_each_token_is_shown_at_the_experts_that_it_chose():
    """On paper, and in the words: the experts' loads."""
    moving, still = svgs_of(output_of("experts, 2"))
    places = experts_film.Places(choices_of(2), 4)
    middle = experts_film.TOKEN / 2
    shown = [(text, x, y) for text, x, y, *_ in Sheet(still).texts]
    for _, token, (x, y) in places.copies():
        here = x + middle, y + middle
        assert str(token) in [text for text, *at in shown if math.dist(at, here) < 2]
    assert sum(places.loads) == 16 and places.loads == [2, 6, 6, 2]
    assert "rank 0 get 2 and 6; those of rank 1 get 6 and 2" in moving


def test_the_ring_shows_in_each_step_the_keys_of_a_rank_and_its_pairs():
    ring, pairs = film_of("ring_attention, 3"), context_parallel.pairs("zigzag", 12, 3)
    for step in range(3):
        sheet = Sheet(ring.stills([2 * step + 0.5], 1, "").decode())
        texts = [text for text, *_ in sheet.texts]
        counts = [
            int(text.split()[0]) for text in texts if re.match(r"\d+ pairs?$", text)
        ]
        assert counts == [of_rank[step] for of_rank in pairs]
        assert f"step {step + 1}: at most {max(counts)} pairs" in texts
        # the names of the cards and, in the order of the cards, whose keys they have
        names = [text for text in texts if text.startswith("rank ")]
        owners = [f"rank {(rank - step) % 3}" for rank in range(3)]
        assert names == ["rank 0", "rank 1", "rank 2", *owners]


# ---- animations in a browser, where there is one ----


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Chromium without a window; the port on which it takes commands, on loopback."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip("there is no Chromium here to show animations in")
    folder = tmp_path_factory.mktemp("chromium")
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--disable-background-networking", "--remote-debugging-port=0"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command += [f"--user-data-dir={folder}", "about:blank"]
    running = subprocess.Popen(command, **quiet, start_new_session=True)
    try:
        said = folder / "DevToolsActivePort"
        wait_until(lambda: said.exists() and said.read_text().count("\n"), 60)
        yield int(said.read_text().split()[0])
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()


@pytest.fixture
def photograph(browser, tmp_path):
    """A function that shows a piece of HTML and returns pictures of it after so many
    seconds each.
    """

    async def take(body, seconds, size, less_motion):
        page = tmp_path / "page.html"
        page.write_text(f"<body style='margin: 0'>{body}</body>")
        target = f"http://127.0.0.1:{browser}/json/new?about:blank"
        request = urllib.request.Request(target, method="PUT")
        with urllib.request.urlopen(request) as answer:
            address = json.load(answer)["webSocketDebuggerUrl"]
        tab = await websocket_connect(address, max_message_size=2**28)

        async def tell(method, **options):
            tab.write_message(
                json.dumps({"id": 1, "method": method, "params": options})
            )
            while "id" not in (answer := json.loads(await tab.read_message())):
                pass
            return answer.get("result", {})

        motion = "reduce" if less_motion else "no-preference"
        feature = {"name": "prefers-reduced-motion", "value": motion}
        await tell("Emulation.setEmulatedMedia", features=[feature])
        view = {"width": size[0], "height": size[1]}
        view |= {"deviceScaleFactor": 1, "mobile": False}
        await tell("Emulation.setDeviceMetricsOverride", **view)
        await tell("Page.navigate", url=page.as_uri())
        pictures = []
        for pause in seconds:
            await asyncio.sleep(pause)
            while "data" not in (shot := await tell("Page.captureScreenshot")):
                await asyncio.sleep(0.2)  # a browser that is busy takes none
            picture = Image.open(io.BytesIO(base64.b64decode(shot["data"])))
            pictures.append(picture.convert("RGB"))
        await tell("Page.close")
        return pictures

    def photograph(body, seconds=(1,), size=(900, 500), less_motion=False):
        return asyncio.run(take(body, seconds, size, less_motion))

    return photograph


def differ(first, second):
    """Whether two pictures differ by more than the smoothing of edges."""
    bands = ImageChops.difference(first, second).convert("L").point(lambda v: v > 90)
    return sum(bands.histogram()[1:]) > 60


def side_by_side(svgs):
    """HTML with images in two columns."""
    images = [base64.b64encode(svg).decode() for svg in svgs]
    tags = [f"<img src='data:image/svg+xml;base64,{image}'>" for image in images]
    grid = "display: grid; grid-template-columns: max-content max-content"
    return f"<div style='{grid}'>{''.join(tags)}</div>"


def stopped(svg, seconds):
    """An animation that stands still at a time."""
    stop = f"animation-delay:-{seconds}s!important"
    stop += ";animation-play-state:paused!important"
    return svg.replace(b"</style>", f"[class]{{{stop}}}</style>".encode(), 1)


@pytest.mark.parametrize("name", FILMS)
def test_an_animation_plays_and_rests_for_those_who_prefer_less_motion(
    name, photograph
):
    page = output_of(name)["text/html"]
    one, other = photograph(page, seconds=(0.4, 1.6))
    assert differ(one, other)
    calm = photograph(page, seconds=(0.4, 1.6), less_motion=True)
    assert not differ(*calm) and differ(calm[0], one)


@pytest.mark.parametrize("name", FILMS)
def test_a_browser_shows_at_each_time_what_the_film_has_then(name, photograph):
    shown = film_of(name)
    beats = [0.3, 1.3, 2.8, shown.length / 2 + 0.3, shown.length - 0.3]
    svgs = []
    for beat in beats:
        svgs.append(stopped(shown.playing("playing"), beat * shown.seconds))
        svgs.append(shown.stills([beat], 1, "still"))
    wide, tall = shown.width + 2 * drawing.MARGIN, shown.height + 2 * drawing.MARGIN
    [sheet] = photograph(side_by_side(svgs), size=(2 * wide, len(beats) * tall))
    playing, frozen = (
        [
            sheet.crop((left, row * tall, left + wide, (row + 1) * tall))
            for row in range(len(beats))
        ]
        for left in (0, wide)
    )
    assert not any(map(differ, playing, frozen))
    assert all(map(differ, playing, playing[1:]))
