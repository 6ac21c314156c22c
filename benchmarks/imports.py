"""The cost of importing the course: very little, and for a lesson hardly more than its
libraries.

python benchmarks/imports.py
"""

import json
import subprocess
import sys
from pathlib import Path

from claims import claim, report

IMPORT = """
import sys, time
begin = time.perf_counter()
import {module}
import json
print(json.dumps([time.perf_counter() - begin, "torch" in sys.modules]))
"""


def import_fresh(module):
    """Import a module in a new Python process; return the seconds, and whether it
    imported torch.
    """
    command = [sys.executable, "-c", IMPORT.format(module=module)]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


STANDS_ON = {
    "ddp_course.lesson07": "accelerate",
    "ddp_course.lesson08": "torch, transformers",
    "ddp_course.lesson11": "torch, transformers, datasets",
    "ddp_course.lesson12": "torch.distributed.fsdp",
}  # the others: torch


def main():
    folder = Path(__file__).parents[1] / "ddp_course"
    lessons = [
        f"ddp_course.{path.stem}" for path in sorted(folder.glob("lesson[0-9][0-9].py"))
    ]
    modules = [
        "ddp_course",
        "torch",
        *dict.fromkeys(STANDS_ON.values()),
        *lessons,
    ]
    seconds = {module: [] for module in modules}
    for _ in range(3):
        for module in modules:
            took, brought_torch = import_fresh(module)
            assert brought_torch == (module != "ddp_course"), (
                f"{module}: torch came: {brought_torch}"
            )
            seconds[module].append(took)
    least = {
        module: min(times) for module, times in seconds.items()
    }  # the rest is other load on the machine
    claims = [
        claim(
            "import ddp_course, which brings no torch, seconds",
            least["ddp_course"],
            at_most=0.15,
        )
    ]
    for lesson in lessons:
        base = STANDS_ON.get(lesson, "torch")
        figure = f"import {lesson} against import {base}, times as long"
        claims.append(claim(figure, least[lesson] / least[base], at_most=1.4))
    report(claims, least_seconds=least)


if __name__ == "__main__":
    main()
