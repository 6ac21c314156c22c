"""Whether two of a run's streams of random numbers are the same, or two of several runs'."""

import torch

from ddp_course.checks.claims import Claim
from ddp_course.judge.answer import trying
from ddp_course.ranks.environment import process_group

DATA, TENSOR = 64, 8  # ranks of the largest mesh


def numbers_of_streams(kind, seeds):
    """[seed, data rank, tensor rank, first number of the replicated region, of the sharded]:
    on some ranks of the largest mesh, more of them for the first seed.
    """
    found = []
    with process_group():
        for place, seed in enumerate(seeds):
            for data in range(DATA) if place == 0 else (0, 1, 2, DATA - 1):
                for tensor in range(TENSOR) if place == 0 and data in (0, 1, DATA - 1) else (0, 1, TENSOR - 1):
                    with trying(f"seed {seed}, data rank {data}, tensor rank {tensor}"):
                        states = kind(seed, data, tensor)
                        replicated = a_number()
                        with states.sharded():
                            found.append([seed, data, tensor, replicated, a_number()])
    return found


def a_number():
    return torch.randint(2**62, ()).item()


def collisions(streams):
    """The claim that all streams differ, but for those of a tensor group's replicated
    region, and that those are the same.
    """
    owners = {}
    for seed, data, tensor, replicated, sharded in streams:
        regions = {f"replicated, seed {seed}, data rank {data}": replicated}
        regions[f"sharded, seed {seed}, data rank {data}, tensor rank {tensor}"] = sharded
        for words, number in regions.items():
            owner = owners.setdefault(number, words)
            yield Claim(
                f"streams of a mesh of {DATA} × {TENSOR} ranks: {words}", owner == words, True, cause_of(owner, words),
                told="a stream of its own", shown=f"the stream of: {owner}",
            )  # fmt: skip
    first = {}
    for seed, data, tensor, replicated, _ in streams:
        expected = first.setdefault((seed, data), replicated)
        yield Claim(
            f"the first number of the replicated region: seed {seed}, data rank {data}, tensor rank {tensor}", replicated,
            expected, "in the replicated region, all tensor ranks of a data rank need the same numbers",
        )  # fmt: skip


def cause_of(owner, words):
    if owner.split(", ")[1] != words.split(", ")[1]:
        return (
            "runs with different seeds must not share a stream: no seed of one run may be that of another rank of another "
            "run. A CPU's generator uses only the lowest 32 bits of a seed"
        )
    return (
        "two streams of one run have the same seed: make one number of the three that is different for each, as the digits "
        "of a number are: a plain sum is not"
    )
