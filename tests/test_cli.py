"""The command ddp-course, as a person types it."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import psutil
import pytest
from conftest import COURSE, descendants, python, wait_until

from ddp_course.scenery import images
from ddp_course.school import doctor


def course(*arguments, **options):
    return python("-m", "ddp_course.school.command", *arguments, timeout=150, **options)


def test_without_a_command_it_says_where_you_are_and_what_is_next():
    done = course(cwd=COURSE)
    assert done.returncode == 0
    assert "Next: " in done.stdout or "All exercises have passed" in done.stdout
    listed = course("--help").stdout
    for command in (
        "lessons",
        "lab",
        "run",
        "execute",
        "doctor",
        "memory",
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
        ("04", "DistributedDataParallel, the whole program"),
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
from ddp_course.school import command
sys.argv[1:] = [{command!r}, "99"]
try:
    command.main()
finally:
    print([name for name in ("torch", "papermill") if name in sys.modules])
"""
    assert python("-c", program, cwd=COURSE).stdout == "[]\n"


def test_outside_of_the_course_notebooks_are_missed_in_one_line(tmp_path):
    done = course("lab", cwd=tmp_path)
    assert done.returncode == 2 and "start in the course folder" in done.stderr


def answers(port):
    with (
        contextlib.suppress(ConnectionRefusedError),
        socket.create_connection(("127.0.0.1", port)),
    ):
        return True


def test_lab_opens_a_lesson_on_loopback_with_a_token():
    command = [
        sys.executable,
        "-m",
        "ddp_course.school.command",
        "lab",
        "02",
        "--no-browser",
    ]
    options = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "cwd": COURSE,
        "start_new_session": True,
    }
    process = subprocess.Popen(command, **options)
    try:
        for line in process.stdout:
            if found := re.search(
                r"(http://127\.0\.0\.1:(\d+))(/lab/tree/lessons/02_\S+\.ipynb)\?token=(\w{20,})",
                line,
            ):
                break
        address, port, page, token = found.groups()
        assert wait_until(
            lambda: answers(int(port)), 30
        )  # the address is printed a moment before it is served
        with urllib.request.urlopen(
            f"{address}{page}?token={token}", timeout=20
        ) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{address}/api/contents/lessons", timeout=20)
        servers = [psutil.Process(process.pid), *descendants(process.pid)]
        sockets = [
            c
            for server in servers
            for c in server.net_connections()
            if c.status == psutil.CONN_LISTEN
        ]
        assert int(port) in {c.laddr.port for c in sockets} and {
            c.laddr.ip for c in sockets
        } <= {
            "127.0.0.1",
            "::1",
        }
    finally:
        started = descendants(process.pid)
        process.terminate()  # the command alone, not all that it has started
        try:
            assert process.wait(timeout=20) == 0
            assert not psutil.wait_procs(started, timeout=10)[1]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.stdout.close()


# ---- the doctor ----


def test_the_doctor_finds_this_machine_well():
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
    ):
        assert re.search(rf"(?m)^well +{subject} ", done.stdout), subject
    assert done.stdout.endswith("Nothing is missing.\n")


def test_a_left_over_launcher_variable_is_a_problem_with_a_cure(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (
        doctor.environment().cure == "unset WORLD_SIZE: only a launcher should set them"
    )


def test_an_interface_that_is_not_there_is_a_problem_with_a_cure(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    assert doctor.environment().cure == "unset GLOO_SOCKET_IFNAME"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    assert (
        "nope0" in doctor.ranks_by_launch().found
    )  # and it is a real one: gloo says so too


def test_damaged_mnist_is_a_problem_with_a_cure(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_COURSE_DATA", str(tmp_path))
    assert not doctor.images().cure
    (tmp_path / images.RAW).mkdir(parents=True)
    (tmp_path / images.RAW / "train-images-idx3-ubyte").write_bytes(b"half")
    finding = doctor.images()
    assert (
        "half-downloaded" in finding.found
        and "start again to download it" in finding.cure
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
        "ddp_course.school.doctor",
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
    assert python("-m", "ddp_course.school.doctor", "pair").returncode == 0


def test_a_full_disk_is_a_problem_with_a_cure(monkeypatch):
    monkeypatch.setattr(
        doctor.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 2**20})
    )
    assert "make some room" in doctor.disk().cure
