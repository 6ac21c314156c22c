"""What question 5 claims of the jobs of a run."""

from functools import partial

from ddp_course.checks.claims import Claim
from ddp_course.checks.ex09.jobs_simulated import CAUSES, fault_sets, simulated

FOLLOW = (
    "is the position in the epoch right, and has each rank its own masks, the velocities and the parameters of the run? "
    "Follow a run of three jobs on paper"
)

FIRST = (
    "this is the first job, without a file: is an update the one of the text, with the mean gradient of all ranks, is the "
    "loss this rank's own, and does each rank draw its masks from the generator as it is given?"
)

ROUNDED = "some digits are lost on the way through the file: keep float64"


def described(case):
    stops = ", ".join(map(str, case["stops"]))
    return f"{case['ranks']} ranks, {len(case['sizes'])} batches per epoch, jobs until update {stops}"


def claims(case, right, rank, of_ranks):
    """right: what `simulated` gives."""
    before = 0
    for job, stop in enumerate(case["stops"]):
        seen, call = of_ranks[rank][job], f"{described(case)}: job {job + 1}"
        losses, otherwise = right[job]["losses"][rank], FOLLOW if job else FIRST
        yield Claim(
            f"{call}, what it returns", seen["is_list"], True, "return the losses of this call's updates, a list of float",
            told="a list of floats", shown=seen["text"],
        )  # fmt: skip
        for place, expected in enumerate(losses[: len(seen["losses"])]):
            yield Claim(
                f"{call}, the loss of update {before + place + 1}", seen["losses"][place], expected, otherwise,
                partial(likely, case, job, lambda found, p=place: found["losses"][rank][p : p + 1]),
            )  # fmt: skip
        yield Claim(
            f"{call}, how many updates it does", len(seen["losses"]), len(losses),
            "a job does the updates from the position in the file up to number `stop` of the run",
            partial(likely, case, job, lambda found: [len(found["losses"][rank])]),
        )  # fmt: skip
        for name, expected in right[job]["parameters"].items():
            yield Claim(
                f"{call}, {name} after it", seen["parameters"].get(name), expected, otherwise,
                partial(likely, case, job, lambda found, n=name: [found["parameters"][n]]),
            )  # fmt: skip
        yield from files(call, job, rank, of_ranks)
        before = stop


def likely(case, job, part):
    """What each set of faults would give: pairs (value, cause)."""
    yield from ((value, ROUNDED) for value in part(simulated(case)[job]))
    for faults in fault_sets():
        jobs = simulated(case, faults)
        cause = next(CAUSES[name] for name in CAUSES if name in faults)
        yield from ((value, cause) for value in part(jobs[job]))


def files(call, job, rank, of_ranks):
    seen = of_ranks[rank][job]
    yield Claim(
        f"{call}, the batches", seen["kept"], True, "they are the caller's: do not change them",
        told="as they were", shown="changed",
    )  # fmt: skip
    yield Claim(
        f"{call}, the file at `path` when this rank returns", seen["there"], True,
        "this rank returns before rank 0 has written the file: wait for it",
        told="the new one", shown="none, or the old one",
    )  # fmt: skip
    others = [name for other, own in enumerate(of_ranks) if other != rank for name in own[job]["saved"]]
    others += ["run.pt"] if rank > 0 else []
    yield Claim(
        f"{call}, another rank's files to which this one writes", sorted(set(seen["saved"]) & set(others)), [],
        "only rank 0 writes to `path`: two ranks that write to one file may tear it",
        told="none", shown=", ".join(seen["saved"]),
    )  # fmt: skip
