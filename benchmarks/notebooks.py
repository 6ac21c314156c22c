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
    # from lesson 9 on they are jobs, and may take longer; lesson 13 starts DeepSpeed's launchers and dozens of engines
    longest = {name: 60 if name < "09" else 90 if name < "13" else 240 for name in times}
    report([claim(f"notebook {name}, seconds", times[name], at_most=longest[name]) for name in times])


if __name__ == "__main__":
    main()
