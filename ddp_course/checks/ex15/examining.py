"""What a learner has to examine the five patients: one run, and what its ranks leave."""

import pickle
import tempfile
from pathlib import Path

from ddp_course.checks.ex15.patients import LIMIT, RANKS, train_with, truths
from ddp_course.detectors.flight_record import flight_recorded
from ddp_course.ranks.launch import RankError, launch


def examine(letter, name, watch=None):
    """Run a patient; print how its ranks end, and, unless all end well, the latest
    collectives in their flight records.

    letter: A to E. name: yours, which decides what is wrong. watch: a function of model
    and optimizer that attaches tools, as in the lesson.
    """
    truth = truths(name)[letter]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        try:
            launch(on_a_rank, truth, watch, folder, nproc=RANKS, timeout=3 * LIMIT)
            print("all ranks have ended without an error")
        except RankError as error:
            print(error)
            for rank in range(RANKS):
                print("\n".join(latest_collectives(rank, folder / f"fr_{rank}")))


def on_a_rank(truth, watch, folder):
    with flight_recorded(folder, after=LIMIT - 1):
        train_with(truth, watch)


def latest_collectives(rank, path, count=2):
    """Lines about the latest collectives in a rank's flight record."""
    if not path.exists():
        return [f"rank {rank} has left no flight record"]
    calls = [call for call in pickle.loads(path.read_bytes())["entries"] if call["process_group"][0] == "0"]
    lines = []
    for call in calls[-count:]:
        frame = next(f for f in call["frames"] if "patients" in f["filename"])
        kind = call["profiling_name"].partition(":")[2]
        where = f"in {frame['name']}, line {frame['line']}"
        number = f"collective {call['collective_seq_id']}"
        lines.append(f"rank {rank}: {number} is {kind} {call['input_sizes']}, {where}")
    return lines
