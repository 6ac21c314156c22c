"""What a rank keeps and sends, by the formulas of the ZeRO paper."""

import math
import os

import pytest
from conftest import COURSE, python

from ddp_course.scenery import memory


def gigabytes(stage, ranks=64, parameters=7.5e9, precision="mixed"):
    return sum(memory.states(parameters, ranks, stage, precision)) / 1e9


def test_the_papers_figure_1_comes_out():
    """Figure 1: 7.5 billion parameters on 64 devices, 120, 31.4, 16.6 and 1.9 GB."""
    assert [round(gigabytes(stage), 1) for stage in range(4)] == [
        120.0,
        31.4,
        16.6,
        1.9,
    ]


def test_the_papers_table_1_comes_out():
    """Table 1, in GB: for each number of devices, stages 1 to 3 of 7.5, 128 and 1000
    billion parameters.
    """
    table = {
        1: [(120, 120, 120), (2048, 2048, 2048), (16000, 16000, 16000)],
        4: [(52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)],
        16: [(35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)],
        1024: [(30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)],
    }
    for ranks, of_sizes in table.items():
        for parameters, printed in zip((7.5e9, 128e9, 1e12), of_sizes):
            for stage, value in zip((1, 2, 3), printed):
                assert gigabytes(stage, ranks, parameters) == pytest.approx(
                    value, rel=0.025
                ), (ranks, stage)


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
def test_in_fp32_a_parameter_and_adam_take_16_bytes_and_the_stages_shard_them(ranks):
    got = [gigabytes(stage, ranks, 1e9, "fp32") for stage in range(4)]
    assert got == pytest.approx([16, 8 + 8 / ranks, 4 + 12 / ranks, 16 / ranks])


def test_stages_1_and_2_send_what_ddp_sends_and_stage_3_half_as_much_again():
    sent = [memory.sent(1e9, 4, stage) for stage in range(4)]
    assert sent[0] == sent[1] == sent[2] == 2 * 2e9 * 3 / 4
    assert sent[3] == 1.5 * sent[0]
    assert all(memory.sent(1e9, 1, stage) == 0 for stage in range(4))


def course(*arguments):
    return python(
        "-m",
        "ddp_course.school.command",
        "memory",
        *arguments,
        env=os.environ | {"COLUMNS": "120"},
        cwd=COURSE,
    )


def test_the_command_prints_the_table():
    done = course("--params", "7.5e9", "--ranks", "64")
    assert done.returncode == 0, done.stderr
    sums = [
        line.split("│")[5].strip()
        for line in done.stdout.splitlines()
        if line.startswith("│")
    ]
    assert sums == ["120", "31.4", "16.6", "1.88"]
    assert "Traceback" not in done.stderr and math.isclose(
        float(sums[1]), gigabytes(1), rel_tol=0.01
    )


@pytest.mark.parametrize(
    "arguments, said",
    [
        (
            ["--params", "many", "--ranks", "4"],
            "--params many is not a whole number from 1",
        ),
        (["--params", "7e9", "--ranks", "0"], "--ranks 0 is not a whole number from 1"),
        (
            ["--params", "inf", "--ranks", "1"],
            "--params inf is not a whole number from 1",
        ),
        (
            ["--params", "nan", "--ranks", "1"],
            "--params nan is not a whole number from 1",
        ),
        (
            ["--params", "7e9", "--ranks", "2", "--precision", "fp8"],
            "--precision fp8 is none of fp32, mixed",
        ),
    ],
)
def test_wrong_use_gives_one_line_and_exit_code_2(arguments, said):
    done = course(*arguments)
    assert done.returncode == 2 and done.stderr == f"ddp-course: {said}\n"
