"""`ddp-course diagnose`, and the index that it shares with the site's search: each failure
is found by its text, with other paths, numbers and prefixes, cut, and inside a log.
"""

import io
import re

import pytest
from conftest import COURSE

from ddp_course.cli.diagnosis.index import index, known
from ddp_course.cli.diagnosis.log import findings, lines_of

KNOWN = known()
PROGRAMS = sorted((COURSE / "lessons" / "failures").glob("*.py"))


def number_of(page):
    """The place of a page in the index."""
    [number] = [n for n, failure in enumerate(KNOWN) if failure.page == page]
    return number


def stranger(text):
    """A text as another machine prints it: other numbers and another path."""
    text = re.sub(r"\d+", lambda number: str(int(number[0]) * 3 + 17), text)
    return f"/home/ana/venv/lib/python3.12/site-packages/torch/x.py:88: {text}"


def cut(text):
    """The first part of a text, as it is left when it has been copied carelessly."""
    return text[: max(int(len(text) * 0.7), 60)]


def prefixed(text):
    """A text behind what launchers and loggers add."""
    return f"3: [default5]:[rank21]: [2026-03-01 12:44:01,442] [ERROR] \x1b[31m{text}\x1b[0m"


LOG = """\
W0301 12:40:11.000000 140 torch/distributed/run.py:792] *****************************************
Setting up data, 40000 samples
epoch 1/3 [>.............] step 12 loss 2.31 3.1 it/s
{line}
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/ana/train.py", line 8, in <module>
[rank1]:     main()
E0301 12:44:01.000000 140 torch/distributed/elastic/agent/server/api.py:900] shutting down
train.py FAILED
"""


def pages_first(found):
    """The pages that fit equally well as the best one, by (score, failure) pairs."""
    return {number for score, number in found if score >= 0.98 * found[0][0]}


def alone(line):
    return [(match.score, match.failure) for match in index().matches(line)]


def in_a_log(line):
    stream = io.BytesIO(LOG.format(line=line).encode())
    found = findings(lines_of(stream), index())
    return [(finding.weight, finding.failure) for finding in found]


GARBLED = {
    "another machine": lambda text: alone(stranger(text)),
    "cut": lambda text: alone(cut(text)),
    "prefixed": lambda text: alone(prefixed(stranger(text))),
    "in a log": lambda text: in_a_log(prefixed(text)),
}


def first_for(text, number):
    """Which ways of garbling a text do not find its failure first."""
    for way, search in GARBLED.items():
        found = search(text)
        if not found or number not in pages_first(found):
            yield way, [KNOWN[n].page for _, n in found[:3]]


@pytest.mark.parametrize("page", [failure.page for failure in KNOWN])
def test_a_failures_text_finds_it_first_also_when_it_is_garbled(page):
    number = number_of(page)
    assert not list(first_for(KNOWN[number].title, number))
