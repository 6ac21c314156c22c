"""The command ddp-course, as a person types it."""

import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import COURSE, python
from test_start import jupyter_of_its_own  # noqa: F401

from ddp_course.cli import doctor, start
from ddp_course.data import images


def course(*arguments, **options):
    return python("-m", "ddp_course.cli.command", *arguments, timeout=600, **options)


def test_without_a_command_it_says_where_you_are_and_what_is_next():
    done = course(cwd=COURSE)
    assert done.returncode == 0
    assert "Next: " in done.stdout or "All exercises have passed" in done.stdout
    listed = course("--help").stdout
    for command in (
        "lessons",
        "start",
        "lab",
        "run",
        "execute",
        "doctor",
        "memory",
        "sample",
        "check",
        "hint",
        "solution",
        "reset",
        "grade",
    ):
        assert f" {command} " in listed


def test_lessons_lists_each_with_its_idea_and_notebook():
    done = course("lessons", env=os.environ | {"COLUMNS": "200"}, cwd=COURSE)
    for number, words in (
        ("01", "MNIST on one device"),
        ("04", "DistributedDataParallel, in full"),
    ):
        [line] = [line for line in done.stdout.splitlines() if f" {number} " in line]
        assert words in line and f"lessons/{number}_" in line


def test_run_prints_the_torchrun_line_and_passes_flags_on(workplace):
    flags = [
        "--data",
        "digits",
        "--train-samples",
        "128",
        "--epochs",
        "1",
        "--batch-size",
        "16",
    ]
    done = course("run", "4", "--nproc", "2", *flags)
    assert done.returncode == 0 and done.stderr == ""
    assert (
        done.stdout.splitlines()[0]
        == f"torchrun --nproc_per_node 2 ddp_course/lesson04.py {' '.join(flags)}"
    )
    result = json.loads((workplace / "runs/lesson04/result.json").read_text())
    assert (result["world_size"], result["batch_size"], result["train_samples"]) == (
        2,
        16,
        128,
    )


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["run", "99"], "there is no lesson 99: choose one of 01, 02, 03, 04"),
        (["lab", "99"], "there is no lesson 99"),
        (["execute", "99"], "there is no lesson 99"),
        (
            ["run", "04", "--epochs", "none"],
            "argument --epochs: 'none' is not a whole number from 1",
        ),
    ],
)
def test_wrong_use_gives_one_line(arguments, expected):
    done = course(*arguments, cwd=COURSE)
    assert done.returncode == 2 and done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("ddp-course: ") and expected in line


@pytest.mark.parametrize("command", ["run", "execute"])
def test_who_mistypes_a_lesson_does_not_wait_for_imports(command):
    program = f"""
import sys
from ddp_course.cli import command
sys.argv[1:] = [{command!r}, "99"]
try:
    command.main()
finally:
    print([name for name in ("torch", "papermill") if name in sys.modules])
"""
    assert python("-c", program, cwd=COURSE).stdout == "[]\n"


@pytest.mark.parametrize(
    "arguments, what",
    [
        (["execute"], "there are no lessons here"),
        (["check"], "there are no exercises here"),
        (["progress"], "there are no exercises here"),
        (["check", "03"], "there is no exercise 03"),
    ],
)
def test_elsewhere_one_line_says_how_to_make_a_course_folder(arguments, what, tmp_path):
    done = course(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr == (
        f"ddp-course: {what}: "
        "`ddp-course start FOLDER` makes a course folder to work in\n"
    )


@pytest.mark.parametrize(
    "arguments, line",
    [
        (["lessn"], "No such command 'lessn'. Did you mean 'lessons'?"),
        (["run"], "Missing argument 'lesson'."),
        (["lessons", "04"], "Got unexpected extra argument(s) (04)"),
        (["lab", "--window"], "No such option: --window"),
        (["execute", "02", "--nproc", "0"], "Invalid value for '--nproc': Input"),
        (["execute", "02", "--nproc", "two"], "Invalid value for '--nproc': Input"),
    ],
)
def test_wrong_words_and_flags_get_one_line_too(arguments, line):
    done = course(*arguments, cwd=COURSE)
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr.startswith(f"ddp-course: {line}") and done.stderr.count("\n") == 1
    )


# ---- odd places ----


def test_a_closed_pipe_is_no_news():
    command = f"{sys.executable} -m ddp_course.cli.command --help | head -c 1"
    for line in (command, command.replace("--help", "lessons")):
        done = subprocess.run(line, shell=True, capture_output=True, cwd=COURSE)
        assert done.stderr == b"" and len(done.stdout) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_for_output_is_told_in_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ddp_course.cli.command", "lessons"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=COURSE,
        )
    assert done.returncode == 2
    assert done.stderr == "ddp-course: No space left on device\n"


@pytest.mark.parametrize("arguments", [["lessons"], ["progress"], ["check", "03"]])
def test_a_terminal_without_unicode_gets_what_it_can_show(arguments, tmp_path):
    start.start(tmp_path)
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = course(*arguments, cwd=tmp_path, env=os.environ | ascii_only)
    assert done.returncode == int("check" in arguments), done.stderr
    assert done.stderr == "" and done.stdout.isascii() and done.stdout


READ_ONLY = [
    (["execute", "01"], "cannot make {folder}/runs/notebooks: Permission denied"),
    (["reset", "01"], "cannot keep yours in {folder}/runs/backups/01_"),
    (["start", "new"], "cannot make new/lessons: Permission denied"),
    (["start", "."], None),
    (["check", "01"], None),
    (["hint", "01"], None),
]


@pytest.mark.parametrize("arguments, line", READ_ONLY)
def test_in_a_folder_that_cannot_be_written_to_one_line_says_so(
    arguments, line, read_only
):
    """Where nothing has to be written, all is as elsewhere."""
    done = read_only.run(*arguments)
    if line:
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        expected = line.format(folder=read_only.folder)
        assert done.stderr.startswith(f"ddp-course: {expected}")
    else:
        assert done.returncode < 2 and done.stderr == "", done.stderr


@pytest.fixture(scope="module")
def read_only(tmp_path_factory):
    """A course folder in which we may not write: not even as root, who may all else."""
    folder = tmp_path_factory.mktemp("read-only").resolve()
    start.start(folder)
    for place in (folder, folder / "lessons", folder / "exercises"):
        place.chmod(0o555)
    drop = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []
    if drop and not shutil.which("setpriv"):
        pytest.skip("root may write everywhere, and setpriv is not here")
    command = [*drop, sys.executable, "-m", "ddp_course.cli.command"]

    def run(*arguments):
        return subprocess.run(
            [*command, *arguments], cwd=folder, capture_output=True, text=True
        )

    return SimpleNamespace(folder=folder, run=run)


# ---- the doctor ----


def test_the_doctor_finds_no_problem_on_this_machine():
    done = course("doctor", cwd=COURSE)
    assert done.returncode == 0, done.stdout
    assert "launch()     2 ranks, one all_reduce: right" in done.stdout
    assert "torchrun     2 ranks, one all_reduce: right" in done.stdout
    for subject in (
        "Python",
        "torch",
        "packages",
        "environment",
        "loopback",
        "ports",
        "disk",
        "devices",
        "backends",
        "data",
        "machines",
    ):
        assert re.search(rf"(?m)^ok +{subject} ", done.stdout), subject
    assert done.stdout.endswith("Nothing is missing.\n")


def test_a_left_over_launcher_variable_is_a_problem_with_a_fix(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (
        doctor.environment().fix == "unset WORLD_SIZE: only a launcher should set them"
    )


def test_an_interface_that_is_not_there_is_a_problem_with_a_fix(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    assert doctor.environment().fix == "unset GLOO_SOCKET_IFNAME"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    assert (
        "nope0" in doctor.ranks_by_launch().found
    )  # and it is a real one: gloo says so too


def test_damaged_mnist_is_a_problem_with_a_fix(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_COURSE_DATA", str(tmp_path))
    assert not doctor.images().fix
    (tmp_path / images.RAW).mkdir(parents=True)
    (tmp_path / images.RAW / "train-images-idx3-ubyte").write_bytes(b"half")
    finding = doctor.images()
    assert (
        "half-downloaded" in finding.found
        and "start again to download it" in finding.fix
    )


def test_a_mixed_pair_of_torch_and_torchvision_is_told_in_one_line(
    tmp_path, monkeypatch
):
    """Planted: a torchvision that fails as one built for another torch does."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    done = python(
        "-m",
        "ddp_course.cli.doctor",
        "pair",
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert re.match(
        r"torch \S+, torchvision \S+ do not match \(RuntimeError: operator torchvision::nms does not exist\)",
        line,
    )
    assert "pip install --force-reinstall torch torchvision" in line
    assert python("-m", "ddp_course.cli.doctor", "pair").returncode == 0


def test_a_full_disk_is_a_problem_with_a_fix(monkeypatch):
    monkeypatch.setattr(
        doctor.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 2**20})
    )
    assert "free some space" in doctor.disk().fix
