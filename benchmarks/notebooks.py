"""How long each lesson's notebook takes from top to bottom through papermill.

Other load on the machine can only make it longer: a notebook that takes too long is run
twice more, and its shortest run counts.

python benchmarks/notebooks.py
"""

import subprocess
import sys
from pathlib import Path

from claims import claim, report, seconds


def execute(number):
    command = [sys.executable, "-m", "ddp_course.school.command", "execute", number]
    subprocess.run(
        command, check=True, capture_output=True, cwd=Path(__file__).parents[1]
    )


def main():
    notebooks = sorted(
        (Path(__file__).parents[1] / "lessons").glob("[0-9][0-9]_*.ipynb")
    )
    times = {path.stem: seconds(execute, path.name[:2]) for path in notebooks}
    # from lesson 5 on they start whole jobs, and may take longer; lesson 13 DeepSpeed's
    # launchers and dozens of engines
    longest = {
        name: 60 if name < "05" else 90 if name < "13" else 240 for name in times
    }
    for _ in range(2):
        for name in [name for name in times if times[name] > longest[name]]:
            times[name] = min(times[name], seconds(execute, name[:2]))
    report(
        [
            claim(f"notebook {name}, seconds", times[name], at_most=longest[name])
            for name in times
        ]
    )


if __name__ == "__main__":
    main()
