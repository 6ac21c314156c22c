"""The benchmarks: each is run, and says so when a claim does not hold. The measuring
itself is `make bench`.
"""

import importlib
import json
import sys

import pytest
import torch
from conftest import COURSE, python

from ddp_course.models.gpt import GPT

HERE = COURSE / "benchmarks"
sys.path.append(str(HERE))


def test_make_bench_runs_every_benchmark():
    scripts = {
        path.stem for path in HERE.glob("*.py") if "report(" in path.read_text()
    } - {"claims"}
    assert set(importlib.import_module("run").BENCHMARKS) == scripts
    for name in scripts:
        assert callable(importlib.import_module(name).main)
        assert f"python benchmarks/{name}.py" in importlib.import_module(name).__doc__


@pytest.mark.parametrize(
    ("measured", "bound", "holds"),
    [
        (26, {"at_least": 25}, True),
        (24, {"at_least": 25}, False),
        (1.3, {"at_most": 1.25}, False),
    ],
)
def test_a_claim_that_does_not_hold_is_told(measured, bound, holds, capsys):
    claims = importlib.import_module("claims")
    with pytest.raises(SystemExit) as left:
        claims.report([claims.claim("planted", measured, **bound)], rounds=1)
    assert left.value.code == (0 if holds else 1)
    told = json.loads(capsys.readouterr().out)
    assert told["claims"] == [
        {"figure": "planted", "measured": measured, **bound, "holds": holds}
    ]


def test_an_unknown_benchmark_gives_one_line():
    done = python(HERE / "run.py", "launching")
    assert done.returncode == 2
    assert (
        "there is no benchmark launching: choose from imports"
        in done.stderr.splitlines()[-1]
    )


def test_the_plain_recipe_computes_what_lesson_10_does():
    """Else comparing their times would say nothing."""
    size = {"context": 16, "layers": 2, "heads": 2, "width": 8}
    ours, plain = (
        GPT(**size).double(),
        importlib.import_module("gpt").PlainGPT(256, **size).double(),
    )
    for value, same in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.nn.init.normal_(value, std=0.5)
        same.data.copy_(value)
    tokens = torch.randint(256, (3, 16))
    torch.testing.assert_close(plain(tokens), ours(tokens))
