"""Starts a learner's program with torchrun, and collects what it left, for question 4."""

import json
import logging
import os
import tempfile
from pathlib import Path

import torch
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args
from torch.distributed.run import run as torchrun

from ddp_course.ranks.machines.agent import loopback_rendezvous


def a_run(program, watched, files, n, arguments):
    """Run a program, a text, on n ranks in a folder with these files, {name: value}.
    watched: the text of watched.py, which runs it.

    Returns {"error": the last lines of the rank that failed first, or ""; "printed": the
    number of lines by rank; "notes": see watched.py, by rank; "result": result.json, or
    None}.
    """
    if not isinstance(program, str):
        return {"error": f"program is no text, but a {type(program).__name__}"}
    with tempfile.TemporaryDirectory() as folder:
        for name, value in files.items():
            torch.save(value, Path(folder, name))
        Path(folder, "logs").mkdir()
        Path(folder, "program.py").write_text(program)
        Path(folder, "logs", "watched.py").write_text(watched)
        os.chdir(folder)
        os.environ["OMP_NUM_THREADS"] = "1"
        error = start_ranks(n, ["logs/watched.py", "logs", "program.py", *arguments])
        return {
            "error": error.replace(f"{folder}{os.sep}", ""),
            "printed": [lines_of(rank, "stdout") for rank in range(n)],
            "notes": [notes_of(rank) for rank in range(n)],
            "result": loaded(Path(folder, "result.json")),
        }


def start_ranks(n, command):
    """Call torchrun, with a store on loopback only. Returns the last lines of the rank
    that failed first, or "".
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    register = rendezvous.rendezvous_handler_registry.register
    register("loopback", loopback_rendezvous)
    options = ["--nproc_per_node", str(n), "--monitor_interval", "0.1"]
    options += ["--rdzv_backend", "loopback", "--rdzv_endpoint", "127.0.0.1"]
    options += ["--redirects", "3", "--log_dir", "logs"]
    try:
        torchrun(parse_args([*options, *command]))
    except ChildFailedError as failed:
        rank, _ = failed.get_first_failure()
        others = (lines for each in range(n) if (lines := lines_of(each, "stderr")))
        lines = lines_of(rank, "stderr") or next(others, [])
        return "\n".join([*lines[-6:], f"(on rank {rank} of {n})"])
    return ""


def lines_of(rank, stream):
    """What a rank printed, without gloo's own lines."""
    paths = sorted(Path("logs").glob(f"*/attempt_0/{rank}/{stream}.log"))
    lines = [line for path in paths for line in path.read_text().splitlines()]
    return [line for line in lines if line.strip() and not line.startswith("[Gloo]")]


def notes_of(rank):
    return loaded(Path("logs", f"{rank}.json")) or {"wrote": [], "stayed": False}


def loaded(path):
    """A JSON file, or None if it is missing or damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
