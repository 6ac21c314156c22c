"""Run the programs of lessons/failures/ and store what they print:
python -m ddp_course.cli.diagnosis.store [NAME ...]
"""

import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from ddp_course import folders
from ddp_course.cli.diagnosis.from_programs import program_of
from ddp_course.cli.diagnosis.log import without_frames
from ddp_course.cli.diagnosis.matching import cleaned

SECONDS = 300  # for one program
LINES = 40  # that are stored, the last ones
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def printed_by(path):
    """What a program prints when it is run as its docstring says, without the frames of
    tracebacks, and without anything of this machine.
    """
    words = shlex.split(program_of(path).run)
    command = {"python": [sys.executable], "torchrun": TORCHRUN}[words[0]]
    script = [word if word[-3:] != ".py" else str(path) for word in words[1:]]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    environment.pop("OMP_NUM_THREADS", None)  # torchrun says when it sets it
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, *script],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    return of_any_machine(done.stdout)


def of_any_machine(text):
    """An output without frames, paths and the machine's name."""
    text = text.replace(socket.gethostname(), "node0").replace("\0", "")
    lines = [line for _, _, line in without_frames(text.splitlines()) if line]
    text = "\n".join(lines[-LINES:]) + "\n"
    return re.sub(r"(?<![\w.…/])/[\w.+-]+(/[\w.+-]+)*/(?=[\w.+-])", "…/", text)


def shows(output, failure):
    """Whether an output has one of a failure's texts, but for what is different in each
    run. Which one may depend on how torch was built.
    """
    words = lambda line: " ".join(re.findall(r"[\w'`-]+", cleaned(line)))
    printed = words(" ".join(output.splitlines()))
    return any(words(text) in printed for text in failure.texts)


def main(names):
    folder = folders.originals("lessons") / "failures"
    for path in [folder / f"{name}.py" for name in names] or sorted(
        folder.glob("*.py")
    ):
        if (failure := program_of(path)).runs:
            output = printed_by(path)
            path.with_suffix(".txt").write_text(output, encoding="utf-8")
            right = shows(output, failure)
            print(f"{'ok    ' if right else 'OTHER '} {Path(path).stem}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
