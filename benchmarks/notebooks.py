"""How long each lesson's notebook takes from top to bottom through papermill.

python benchmarks/notebooks.py
"""

import subprocess
import sys
from pathlib import Path

from claims import claim, report, seconds


def execute(number):
    command = [sys.executable, "-m", "ddp_course.cli", "execute", number]
    subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[1])


def main():
    notebooks = sorted((Path(__file__).parents[1] / "lessons").glob("[0-9][0-9]_*.ipynb"))
    times = {path.stem: seconds(execute, path.name[:2]) for path in notebooks}
    # from lesson 9 on they are jobs, and may take longer
    report(
        [
            claim(f"notebook {name}, seconds", took, at_most=60 if name < "09" else 90)
            for name, took in times.items()
        ]
    )


if __name__ == "__main__":
    main()
