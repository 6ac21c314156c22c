"""Lessons' programs in a notebook's kernel: main() without flags, with both launchers."""

import pytest
from conftest import (
    COURSE,
    THOROUGH,
    remember_that_there_is_no_mnist,
    share_what_is_made_once,
)

from ddp_course.notebook import fresh_kernel

NUMBERS = sorted(path.stem[6:] for path in (COURSE / "ddp_course").glob("lesson??.py"))
LAUNCH = "from ddp_course.ranks.launch import launch\nlaunch({function}, nproc={nproc}, timeout=900);"
NOTEBOOK_LAUNCHER = """
import os; os.environ["OMP_NUM_THREADS"] = "1"
from accelerate import notebook_launcher
notebook_launcher({function}, args=(), num_processes={nproc}, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0")
"""
LAUNCHERS = {"launch": LAUNCH, "notebook_launcher": NOTEBOOK_LAUNCHER}


@pytest.fixture
def folder(workplace):
    """A working folder without a network, where lessons train on digits."""
    share_what_is_made_once(workplace)
    remember_that_there_is_no_mnist(workplace)
    return workplace


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("number", NUMBERS if THOROUGH else ["04"])
def test_main_runs_without_flags(number, launcher, folder, capsys):
    """As a card or a colleague would call it: `notebook_launcher(lesson04.main)`."""
    cell = LAUNCHERS[launcher].format(
        function=f"lesson{number}.main", nproc=1 if number == "01" else 2
    )
    imported = f"from ddp_course import lesson{number}"
    fresh_kernel(imported, cell, timeout=1000)
    assert (folder / "runs" / f"lesson{number}" / "result.json").exists()
    assert "world_size" in capsys.readouterr().out


def test_no_program_takes_the_kernels_own_command_line_for_its_flags(folder, capsys):
    """argparse reads sys.argv where it is given nothing: there it is `-f kernel.json`."""
    cells = [f"from ddp_course import {', '.join(f'lesson{n}' for n in NUMBERS)}"]
    cells += [f"print(lesson{n}.arguments().lesson)" for n in NUMBERS]
    fresh_kernel(*cells, timeout=600)
    assert capsys.readouterr().out.split() == NUMBERS
    with pytest.raises(RuntimeError, match="unrecognized arguments: -f"):
        fresh_kernel("from ddp_course import lesson04; lesson04.arguments(None)")
