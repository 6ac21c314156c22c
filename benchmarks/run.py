"""Measure every figure that the course claims: run each benchmark in turn, print its
table, write runs/benchmarks.json.

python benchmarks/run.py
python benchmarks/run.py imports input_path
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ddp_course.runs import write_atomically

HERE = Path(__file__).parent
BENCHMARKS = [
    "imports",
    "launch_and_torchrun",
    "input_path",
    "bucketed_ddp",
    "no_sync",
    "gpt",
    "gpt_on_gpu",
    "when_it_hangs",
    "making_it_fast",
    "inside_layers",
    "notebooks",
    "exercises",
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "benchmark",
        nargs="*",
        default=BENCHMARKS,
        metavar="benchmark",
        help=", ".join(BENCHMARKS),
    )
    chosen = parser.parse_args().benchmark
    if unknown := set(chosen) - set(BENCHMARKS):
        parser.error(
            f"there is no benchmark {', '.join(unknown)}: choose from {', '.join(BENCHMARKS)}"
        )

    console, reports, failed = Console(highlight=False), {}, False
    results = HERE.parent / "runs" / "benchmarks.json"
    results.parent.mkdir(exist_ok=True)
    for name in (
        chosen
    ):  # each is shown and kept as soon as it is known: all of them take half an hour
        done = subprocess.run(
            [sys.executable, HERE / f"{name}.py"], stdout=subprocess.PIPE, text=True
        )
        failed |= done.returncode != 0
        table = Table(name, "measured", "claimed", "")
        if done.stdout.strip():
            reports[name] = json.loads(done.stdout)
        else:
            table.add_row("could not be measured", "-", "-", "[red]does not hold[/]")
        if needs := reports.get(name, {}).get("details", {}).get("needs"):
            table.add_row(f"needs {needs}, not measured here", "-", "-", "-")
        for claim in reports.get(name, {}).get("claims", []):
            bound = (
                f"at least {claim['at_least']}"
                if "at_least" in claim
                else f"at most {claim['at_most']}"
            )
            verdict = "holds" if claim["holds"] else "[red]does not hold[/]"
            table.add_row(claim["figure"], str(claim["measured"]), bound, verdict)
        console.print(table)
        write_atomically(results, json.dumps(reports, indent=2).encode())
    console.print("All of it: runs/benchmarks.json")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
