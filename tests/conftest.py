"""What the tests share: where things are, MNIST where it is there, and looking for what
a run left behind.
"""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import psutil
import pytest
from costs import (
    Total,
    pytest_runtest_makereport,
    pytest_runtest_protocol,
    pytest_sessionfinish,
)

from ddp_course.ranks import gpus
from ddp_course.ranks import launch as launching
from ddp_course.ranks.launch import prepare_environment, start_server

__all__ = [  # pytest's hooks
    "pytest_runtest_makereport",
    "pytest_runtest_protocol",
    "pytest_sessionfinish",
]
COURSE = Path(__file__).resolve().parents[1]
# `make thorough`: everything in every way, however long it takes
THOROUGH = "DDP_COURSE_THOROUGH" in os.environ
# `make quick`: only tests of these files, and none that starts ranks
QUICK = "DDP_COURSE_QUICK" in os.environ
WITHOUT_RANKS = [
    f"tests/test_{name}.py"
    for name in "benchmarks damaged_files hints house images memory notebooks "
    "packaging plots site standalone".split()
]
# what a notebook on Colab has, by googlecolab/backend-info; google-colab needs these versions
COLAB = {
    "ipython": "7.34.0",
    "ipykernel": "6.17.1",
    "jupyter_client": "7.4.9",
    "psutil": "5.9.5",
}

PRELOADED = [
    *(
        f"ddp_course.{path.stem}"
        for path in COURSE.glob("ddp_course/lesson[0-9][0-9].py")
    ),
    "ddp_course.judge.question",
    # what programs import on the way: Accelerate, Trainer, LoRA, DeepSpeed's engine
    "datasets",
    "deepspeed",
    "transformers.trainer",
    "peft",
    "bitsandbytes",
    "torch._inductor.compile_fx",
]

# what a shell starts in its background ignores Ctrl-C, and so would all that the tests
# start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if "DDP_COURSE_DATA" in os.environ:  # tests change the working folder
    os.environ["DDP_COURSE_DATA"] = os.path.abspath(os.environ["DDP_COURSE_DATA"])
# the tests are about CPUs, also where there are GPUs: test_on_a_gpu.py is about those
os.environ.setdefault("DDP_COURSE_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
os.environ.update(gpus.HIDDEN)
if (
    "PYTEST_XDIST_WORKER" in os.environ
):  # tests run side by side: threads would only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # hundreds of launches: what their ranks need is imported once, and not by each rank
    if not QUICK:
        start_server(*PRELOADED)
prepare_environment()
# a slow machine is no fault: a launch that is to hang says its own limit
launching.launch.__kwdefaults__["timeout"] = 300


def on_the_gpus(*arguments, **options):
    """python(), with the GPUs of this machine, which all other tests do not see."""
    names = [*gpus.HIDDEN, "DDP_COURSE_GPUS"]
    env = {name: value for name, value in os.environ.items() if name not in names}
    if os.environ["DDP_COURSE_GPUS"] != "all":
        env["CUDA_VISIBLE_DEVICES"] = os.environ["DDP_COURSE_GPUS"]
    return python(*arguments, env=env, **options)


def mnist_folder():
    """The folder with MNIST; None where it is not there."""
    from ddp_course.data.images import MNIST_FILES, RAW, data_folder

    folder = data_folder().absolute()
    return (
        folder if all((folder / RAW / name).exists() for name in MNIST_FILES) else None
    )


@pytest.fixture
def mnist():
    """The folder with MNIST. Tests that need it are skipped, visibly, where it is not
    there.
    """
    return mnist_folder() or pytest.skip("MNIST is not here: set DDP_COURSE_DATA")


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """An empty working folder without a network, from which `ddp_course/lessonNN.py`
    can be run.
    """
    (tmp_path / "ddp_course").symlink_to(COURSE / "ddp_course")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DDP_COURSE_DATA", str(tmp_path / "data"))
    for name, value in no_network().items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.fixture(autouse=QUICK)
def leave_ranks_to_make_test(monkeypatch):
    """In `make quick`, a test that starts ranks is skipped there, and says so."""

    def skip(*_):
        pytest.skip("starts ranks: make test")

    monkeypatch.setattr(launching._Run, "start", skip)


def share_what_is_made_once(folder):
    """Let a working folder use the texts and the base model that the course's own has,
    or they would be made anew.
    """
    (folder / "runs").mkdir()
    for kind in ("corpus", "llama", "questions"):
        (COURSE / "runs" / kind).mkdir(parents=True, exist_ok=True)
        (folder / "runs" / kind).symlink_to(COURSE / "runs" / kind)


def remember_that_there_is_no_mnist(folder):
    """As a failed download does, in a working folder: to try one takes seconds, and
    test_images.py does.
    """
    (folder / "data").mkdir()
    (folder / "data" / "mnist-not-downloaded.txt").write_text(
        "MNIST could not be downloaded: no network here"
    )


def no_network():
    """Environment variables with which downloads fail at once, on a machine with and
    without a network.
    """
    return {
        name: "http://127.0.0.1:9"
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    }


def see_the_scale():
    """For a rank: from now on, AdamW has a large ε. With the usual one it hides a wrong
    scale of all gradients, because it divides them by their size.
    """
    import torch

    class AdamW(torch.optim.AdamW):
        def __init__(self, *args, **options):
            super().__init__(*args, **options | {"eps": 1e-3})

    torch.optim.AdamW = AdamW


def seeing_the_scale(main, *arguments):
    see_the_scale()
    return main(*arguments)


def python(*arguments, **options):
    """Run this Python in a process of its own; return what came of it, with stdout and
    stderr as text.
    """
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        **options,
    )


def descendants(pid=None):
    """The processes that a process has started, and those that they have, ranks and
    fork servers among them.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid or os.getpid()).children(recursive=True)
    return []


def wait_until(condition, seconds=60):
    """Whether the condition came true in that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # a worker of xdist has it
        config.pluginmanager.register(Total(), "total")


def pytest_ignore_collect(collection_path):
    """In `make quick`, the other files are not even read: to import them costs more than
    these tests do.
    """
    if QUICK and collection_path.name.startswith("test_"):
        return f"tests/{collection_path.name}" not in WITHOUT_RANKS or None
    return None


DEAR = set((COURSE / "tests" / "dear.txt").read_text().split("\n"))
SHARE = 3  # `make rest` runs one in so many cases of a test


def pytest_collection_modifyitems(items, config):
    """Mark the dear ones, see dear.txt, of which `make rest` leaves most cases of a kind to
    `make thorough`; and the tests that take longest come first, so that no worker is left
    with one of them at the end.
    """
    cases = {}
    for item in items:
        whole = item.nodeid.partition("[")[0]
        if item.nodeid in DEAR or whole in DEAR or whole.partition("::")[0] in DEAR:
            item.add_marker(pytest.mark.dear)
        if item.get_closest_marker("dear"):
            cases.setdefault(whole, []).append(item)
    if config.option.markexpr == "dear":
        left = {item for of_one in cases.values() for item in all_but_a_share(of_one)}
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=list(left))
    long = [
        "test_a_right_a_half_done_a_cheating_and_a_hanging_submission_in_one_call",
        "test_from_a_wheel_a_learner_solves_exercises",
        "test_from_a_wheel_lessons_and_their_programs_run",
        "test_it_runs_on_other_ranks_and_data_than_it_is_stored_with",
        "test_deepspeeds_launcher_starts_the_program_on_loopback_only_and_leaves_nothing",
        "test_every_command_in_a_docstring_runs",
        "test_the_site_is_made_without_a_warning_or_a_problem",
    ]
    rank = {name: place for place, name in enumerate(long)}
    items.sort(key=lambda item: rank.get(item.originalname, len(long)))


def all_but_a_share(cases):
    """Chosen by their names: a new case changes at most one of the choice."""
    by_name = sorted(cases, key=lambda item: zlib.crc32(item.nodeid.encode()))
    return by_name[math.ceil(len(cases) / SHARE) :]
