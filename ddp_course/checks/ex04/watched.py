"""Runs a learner's program on a rank that torchrun has started, and notes what it does.

torchrun watched.py NOTES program.py arguments ...

NOTES: a folder. Rank 0 leaves `0.json` there: {"wrote": the names of the files in the
current folder that it wrote; "stayed": whether it ended within a process group}.
"""

import json
import os
import runpy
import sys
from pathlib import Path

HERE = os.getcwd()
WRITING = os.O_WRONLY | os.O_RDWR


def note_files(wrote):
    """Add to a list the names of the files in this folder that are written from now on."""

    def note(event, arguments):
        if event == "open" and isinstance(arguments[0], str | os.PathLike):
            path = os.path.abspath(os.fspath(arguments[0]))
            if arguments[2] & WRITING and os.path.dirname(path) == HERE:
                wrote.append(os.path.basename(path))

    sys.addaudithook(note)


def in_a_group():
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_initialized())


def main(notes, program, *arguments):
    sys.argv = [program, *arguments]
    sys.path[0] = HERE
    wrote = []
    note_files(wrote)
    runpy.run_path(program, run_name="__main__")
    text = json.dumps({"wrote": wrote, "stayed": in_a_group()})
    Path(notes, f"{os.environ['RANK']}.json").write_text(text)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what torch does at the end of a process is not the program's doing


if __name__ == "__main__":
    main(*sys.argv[1:])
