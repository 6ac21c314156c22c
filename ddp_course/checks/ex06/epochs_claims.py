"""What question 5 claims of a rank that has trained for some epochs."""

from ddp_course.checks.claims import Claim
from ddp_course.checks.ex06.epochs_cases import combinations, epochs_of, trained, updates_of
from ddp_course.checks.ex06.no_sync import in_words
from ddp_course.checks.ex06.watching import one_by_one, only, unchanged

REST = {
    "leaks": "at the end of an epoch, micro-batches are left over. Their gradients stay in .grad and get into the first "
    "update of the next epoch: make an update from them, too",
    "lost": "the micro-batches that are left over at the end of an epoch have no effect: make an update from them, too",
    "every": "the last update of an epoch has fewer micro-batches: its loss is a mean over those, so divide by their number",
    "own": "the last update of an epoch is made with each rank's own gradients: its last micro-batch has to be outside of "
    "no_sync, or nothing is averaged",
}  # fmt: skip
RATE = {
    "each": "the learning rate moves on with each micro-batch. It is planned per update, so here it falls too fast",
    "epoch": "the learning rate begins anew in each epoch: the updates are numbered through all epochs",
    "late": "the first update has the number 0: here the learning rate is one update ahead",
    "first": "the learning rate never moves on",
}  # fmt: skip
SHARE = {
    "sum": "the losses of the micro-batches are added up: the loss of an update is their mean",
    "small": "DDP has divided by the number of ranks, and here it is done again",
    "alone": "the gradients have not been averaged over the ranks: outside of no_sync, the last micro-batch sends them",
}  # fmt: skip
OTHERWISE = (
    "which micro-batches have gone into each update, by what was their loss divided, and what was the learning rate? Write "
    "that down for an epoch, and next to it what one process does"
)
NOT_FINITE = (
    "some numbers are not finite: is anything divided by 0? Where `every` divides the length of an epoch, no micro-batches "
    "are left over"
)


def cause_of(faults):
    if faults.rest:
        return REST[faults.rest.split()[0]]
    return SHARE[faults.share] if faults.share else RATE[faults.rate]


def claims(case, rank, of_ranks):
    mine, right, call = of_ranks[rank], trained(case), described(case)
    for name, value in right.items():
        values = ((trained(case, rank, faults)[name], cause_of(faults)) for faults in combinations())
        yield Claim(
            f"{call}: {name} of the network", mine["state"][name], value,
            OTHERWISE if mine["state"][name].isfinite().all() else NOT_FINITE,
            lambda values=values: values, digits=6, scale=1e-3,
        )  # fmt: skip
    updates, once, total = updates_of(case), mine["once"], sum(case["lengths"])
    yield Claim(
        f"{call}: what was sent", mine["sent"], sorted(once * updates), cause_of_sending(mine, once, total),
        told=f"in each of {updates} updates: {in_words(once)}", shown=f"in all: {in_words(mine['sent'])[:150]}",
    )  # fmt: skip
    yield from unchanged(call, mine["changed"])
    yield from one_by_one(f"the calls in {call}", sum(epochs_of(case, rank), []), mine["events"])
    yield Claim(
        f"{call}: the forward passes", len(only("forward", mine["events"])), total, "each micro-batch goes through the "
        "network once",
    )  # fmt: skip


def cause_of_sending(mine, once, total):
    """Why ranks have sent more than they need to, though the parameters are right."""
    if len(mine["sent"]) % len(once) or mine["sent"] != sorted(once * (len(mine["sent"]) // len(once))):
        return "not all of it was sent by DDP, which averages on its own: do not call collectives yourself"
    if any(event["alone"] for event in only("backward", mine["events"])):
        return (
            "no_sync was active in the backward of some micro-batches that were sent all the same: DDP decides in forward "
            "whether it sends, so forward belongs inside of no_sync, too"
        )  # fmt: skip
    times = len(mine["sent"]) // len(once)
    return f"{times} of {total} micro-batches were sent: all but the last of each update belong inside of no_sync"


def described(case):
    lengths = f"epochs of {case['lengths']} micro-batches"
    return f"train_epochs on {case['n']} ranks, {lengths}, every={case['every']}"
