"""How much faster `launch` is than torchrun, and how soon it reports a rank that
raised.

python benchmarks/launch_and_torchrun.py
"""

import subprocess
import sys
from pathlib import Path

import two_ranks
from claims import claim, in_turn, report

from ddp_course.ranks.launch import RankError, launch


def torchrun(task):
    """Two ranks started from a shell."""
    command = [
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        two_ranks.__file__,
        task,
    ]
    subprocess.run(
        [sys.executable, "-m", *command],
        check=True,
        cwd=Path(__file__).parent,
        capture_output=True,
    )


def launch_failing():
    try:
        launch(two_ranks.one_raises)
    except RankError as error:
        assert error.rank == 1 and "planted" in str(error)
    else:
        raise AssertionError("rank 1 raised, and launch did not say so")


def main():
    launch(
        two_ranks.all_reduce
    )  # the first one waits for the fork server to import torch, once in a session
    medians = in_turn(
        5,
        torchrun_all_reduce=lambda: torchrun("all_reduce"),
        launch_all_reduce=lambda: launch(two_ranks.all_reduce),
        torchrun_ddp_step=lambda: torchrun("ddp_step"),
        launch_ddp_step=lambda: launch(two_ranks.ddp_step),
        launch_one_raises=launch_failing,
    )
    report(
        [
            claim(
                "launch() of 2 ranks with one all_reduce against torchrun --standalone, times faster",
                medians["torchrun_all_reduce"] / medians["launch_all_reduce"],
                at_least=25,
            ),
            claim(
                "launch() of 2 ranks with one DDP step against torchrun --standalone, times faster",
                medians["torchrun_ddp_step"] / medians["launch_ddp_step"],
                at_least=25,
            ),
            claim(
                "a rank that raised is reported, seconds",
                medians["launch_one_raises"],
                at_most=1.0,
            ),
        ],
        median_seconds=medians,
    )


if __name__ == "__main__":
    main()
