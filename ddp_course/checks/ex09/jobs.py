"""Question 5: find the bugs in a run of several jobs."""

import io
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_course.checks.claims import on_every_rank
from ddp_course.checks.ex09.jobs_claims import claims, described
from ddp_course.checks.ex09.jobs_simulated import batches_of, network_of, random_seed, simulated
from ddp_course.checks.ex09.saving_watch import replacing
from ddp_course.checks.training import state
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group


def observe_jobs(answer, case):
    """Each job of a run: with a new network, and with random generators as a new process
    has them.
    """
    seen = []
    with process_group(timeout=6) as (rank, _), tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)  # rank 0's is for all
        path = Path(folder[0], "run.pt")
        for job, stop in enumerate(case["stops"]):
            network, batches = network_of(case, job), batches_of(case, rank)
            torch.manual_seed(random_seed(case, job, rank))
            before = stamp(path)
            dist.barrier()
            with trying(f"{described(case)}: job {job + 1}"), slow_saving(answer, rank) as saved:
                losses = answer(network, batches, stop, path)
            there = stamp(path) != before
            dist.barrier()
            seen.append({
                "losses": numbers(losses), "is_list": isinstance(losses, list | tuple) and None not in numbers(losses),
                "text": repr(losses)[:60], "parameters": state(network), "there": there, "saved": sorted(saved),
                "kept": all(map(torch.equal, batches, batches_of(case, rank))),
            })  # fmt: skip
        dist.barrier()  # rank 0 removes the folder
    return seen


def numbers(losses):
    """The losses as floats, None for what is none."""
    number = lambda loss: float(loss) if isinstance(loss, float | torch.Tensor) else None  # noqa: E731
    return list(map(number, losses)) if isinstance(losses, list | tuple) else []


def stamp(path):
    """What changes with each file that is written to a path; None without a file."""
    return [path.stat().st_mtime_ns, path.stat().st_ino] if path.exists() else None


@contextmanager
def slow_saving(function, rank):
    """A list of the names to which torch.save writes meanwhile. It takes longer than it
    would, so that a rank that does not wait for it is detected; and each rank's own time,
    so that a file that all of them write is not torn.
    """
    names, save = [], torch.save

    def slowly(thing, file, *options, **more):
        if not isinstance(file, io.BytesIO):  # torch pickles a tensor into one, to send it
            time.sleep(0.06 * (rank + 1))
            names.append(Path(getattr(file, "name", file)).name)
        return save(thing, file, *options, **more)

    places = [vars(torch), vars(torch.serialization), getattr(function, "__globals__", {})]
    with replacing({save: slowly}, places):
        yield names


@question(
    "A run in one job is right. Follow a run of three jobs on paper: what is different in the second job, in the epoch with "
    "which it begins and in the one after that? What does the third job load? And which state differs from rank to rank?",
    "Three places. Each rank has a random state of its own, and the file has only rank 0's. `skipped` is about one epoch, "
    "the interrupted one. `done` in the file must count the updates of the whole run, in the second file, too.",
    "Before saving, on all ranks: random = [None] * ranks; dist.all_gather_object(random, torch.get_rng_state()), and after "
    "loading torch.set_rng_state(saved['random'][rank]). After the for loop, skipped = 0. In the file, 'done': done + "
    "len(losses).",
)
def check_train_job(answer, draw):
    """The losses and parameters of a run of four jobs are those of one process that never
    stops; rank 0 writes the file, and all ranks wait for it.
    """
    for n in (2, 3):
        number = draw.randrange(5, 7)  # batches per epoch
        stops = [draw.randrange(2, number - 1), number + draw.randrange(1, number - 1)]
        stops += [3 * number, 3 * number + draw.randrange(2, number)]
        case = {"ranks": n, "stops": stops, "sizes": [draw.randrange(2, 5) for _ in range(number)]}
        case |= {"width": draw.randrange(3, 6), "seed": 1000 * draw.randrange(10**4)}
        of_ranks = answer.on_ranks(observe_jobs, case, nproc=n, timeout=8)
        on_every_rank(partial(claims, case, simulated(case)), of_ranks)
