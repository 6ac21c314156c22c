"""How long each lesson's notebook takes from top to bottom through papermill.

Other load on the machine can only make it longer: a notebook that takes too long is run
twice more, and its shortest run counts.

python benchmarks/notebooks.py
"""

import subprocess
import sys
from pathlib import Path

from claims import claim, report, seconds

FAILED = {}  # what was printed, by name of the notebook


def execute(name):
    command = [sys.executable, "-m", "ddp_course.cli.command", "execute", name[:2]]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    if done.returncode:
        FAILED[name] = (done.stdout + done.stderr)[-2000:]


def main():
    notebooks = sorted(
        (Path(__file__).parents[1] / "lessons").glob("[0-9][0-9]_*.ipynb")
    )
    times = {path.stem: seconds(execute, path.stem) for path in notebooks}
    # from lesson 5 on they start whole jobs, and may take longer; lesson 13 DeepSpeed's
    # launchers and dozens of engines
    longest = {
        name: 60 if name < "05" else 90 if name < "13" else 240 for name in times
    }
    for _ in range(2):
        for name in [name for name in times if times[name] > longest[name]]:
            times[name] = min(times[name], seconds(execute, name))
    claims = [
        claim(f"notebook {name}, seconds", times[name], at_most=longest[name])
        for name in times
    ]
    claims.append(claim("executions with an error", len(FAILED), at_most=0))
    report(claims, failed=FAILED)


if __name__ == "__main__":
    main()
