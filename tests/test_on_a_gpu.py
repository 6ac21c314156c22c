"""What only a machine with a GPU can show: skipped, visibly, where there is none.

The other tests are about CPUs, and hide what GPUs there are.
"""

import json
import os

import pytest
from conftest import COURSE, THOROUGH, on_the_gpus

from ddp_course.ranks import gpus

pytestmark = pytest.mark.skipif(
    not gpus.driver_is_here() or os.environ["DDP_COURSE_GPUS"] == "",
    reason="there is no GPU here",
)
LESSONS = sorted(
    path.stem
    for path in (COURSE / "ddp_course").glob("lesson[0-9][0-9].py")
    if path.stem != "lesson21"  # plans a run, and trains nothing
)
SHORT = ["--epochs", "1", "--train-samples", "256"]
FLAGS = {  # where they are others
    "lesson02": ["--largest-mb", "1"],
    "lesson10": [*SHORT, "--sample-tokens", "1"],
    "lesson14": [*SHORT, "--global-batch", "64"],
}


def run(lesson, out, *flags):
    """The result of a program on one rank, with its device named."""
    program = COURSE / "ddp_course" / f"{lesson}.py"
    flags = [*FLAGS.get(lesson, SHORT), *flags, "--device", "cuda", "--out", out]
    done = on_the_gpus(program, *flags, cwd=out, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((out / "result.json").read_text())


@pytest.mark.parametrize("lesson", LESSONS)
def test_each_program_trains_on_a_gpu(lesson, tmp_path):
    result = run(lesson, tmp_path)
    assert result["device"] == "cuda"
    assert result["backend"] in ("nccl", "none")


def test_adapters_train_on_all_questions_in_bf16(tmp_path):
    """cuDNN's attention beside a mask gave nan within 500 steps, on an H100."""
    out = ["--device", "cuda", "--out", tmp_path]
    done = on_the_gpus(
        COURSE / "ddp_course/lesson11.py", *out, cwd=tmp_path, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["loss_after"] < result["loss_before"] - 1.5


@pytest.mark.parametrize("lesson", ["lesson04", "lesson10"])
def test_bits_repeat_with_deterministic(lesson, tmp_path):
    ends = set()
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        result = run(lesson, tmp_path / name, "--deterministic")
        ends.add(result["params_sha256"])
    assert len(ends) == 1


SERVER = """
import torch
from ddp_course.ranks.launch import launch, start_server

def doubled():
    import bitsandbytes
    return (2 * torch.ones(3, device="cuda")).sum().item()

start_server("transformers.trainer", "peft", "bitsandbytes", "deepspeed")
print(launch(doubled, nproc=1, timeout=600))
"""


def test_a_rank_can_use_a_gpu_whatever_the_fork_server_was_told_to_import():
    done = on_the_gpus("-c", SERVER, cwd=COURSE, timeout=600)
    assert done.stdout == "[6.0]\n", done.stderr


@pytest.mark.skipif(not THOROUGH, reason="runs all notebooks: make thorough")
@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("lesson", LESSONS)
def test_each_notebook_runs_where_there_is_a_gpu(lesson, nproc, tmp_path):
    command = ["-m", "ddp_course.cli.command", "execute", lesson[-2:]]
    done = on_the_gpus(*command, "--nproc", nproc, cwd=COURSE, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
