"""Measure every figure that the course claims: run each benchmark in turn, print a table, write runs/benchmarks.json.

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
    "notebooks",
    "exercises",
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "benchmark", nargs="*", default=BENCHMARKS, metavar="benchmark", help=", ".join(BENCHMARKS)
    )
    chosen = parser.parse_args().benchmark
    if unknown := set(chosen) - set(BENCHMARKS):
        parser.error(f"there is no benchmark {', '.join(unknown)}: choose from {', '.join(BENCHMARKS)}")

    console, reports, failed = Console(highlight=False), {}, False
    table = Table("figure", "measured", "claimed", "")
    for name in chosen:
        console.print(f"{name} ...")
        done = subprocess.run([sys.executable, HERE / f"{name}.py"], stdout=subprocess.PIPE, text=True)
        failed |= done.returncode != 0
        if not done.stdout.strip():
            table.add_row(name, "-", "-", "[red]could not be measured[/]")
            continue
        reports[name] = json.loads(done.stdout)
        for claim in reports[name]["claims"]:
            bound = f"at least {claim['at_least']}" if "at_least" in claim else f"at most {claim['at_most']}"
            verdict = "holds" if claim["holds"] else "[red]does not hold[/]"
            table.add_row(claim["figure"], str(claim["measured"]), bound, verdict)
    console.print(table)
    results = HERE.parent / "runs" / "benchmarks.json"
    results.parent.mkdir(exist_ok=True)
    write_atomically(results, json.dumps(reports, indent=2).encode())
    console.print("All of it: runs/benchmarks.json")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
