"""Whether two of a run's streams of random numbers are the same, or two of several runs'."""

import torch

from ddp_course.checks.claims import Claim
from ddp_course.checks.ex17.places import DATA, NUMBERS, TENSOR, likely
from ddp_course.judge.answer import trying
from ddp_course.ranks.environment import process_group

LONG, FEW = 2**20, 3  # numbers of a stream in which the first few of others are looked for


def numbers_of_streams(kind, places):
    """[seed, data rank, tensor rank, first number of the replicated region, of the sharded]
    at these places and at likely ones; and what repeats another stream.
    """
    with process_group():
        streams = [[*place, *both_regions(kind, place, a_number)] for place in places]
        streams += [
            [*place, *both_regions(kind, place, a_number)]
            for place in likely(lambda *place: both_regions(kind, place, lambda: torch.initial_seed() % NUMBERS))
        ]
        return streams, repeated(kind, places[0][0])


def both_regions(kind, place, observe):
    """What observe() returns in the replicated and in the sharded region."""
    with trying("seed {}, data rank {}, tensor rank {}".format(*place)):
        states = kind(*place)
        replicated = observe()
        with states.sharded():
            return replicated, observe()


def a_number():
    return torch.randint(2**62, ()).item()


def some(count):
    """Each takes 32 bits of the stream."""
    return torch.randint(2**24, (count,))


def repeated(kind, seed):
    """[a stream, another one, after how many numbers of that it begins]"""
    whole = both_regions(kind, (seed, 0, 0), lambda: some(LONG))
    found = []
    for data, tensor in [(0, 0), (0, 1), (0, TENSOR - 1), (1, 0), (DATA - 1, TENSOR - 1)]:
        place = seed, data, tensor
        for name, first in zip(names(*place), both_regions(kind, place, lambda: some(FEW))):
            for other, numbers in zip(names(seed, 0, 0), whole):
                same = numbers.unfold(0, FEW, 1).eq(first).all(1).nonzero()[:, 0].tolist()
                found += [[name, other, same[0]]] if same and name != other else []
    return found


def names(seed, data, tensor):
    """Of the streams of a rank."""
    yield f"replicated, seed {seed}, data rank {data}"
    yield f"sharded, seed {seed}, data rank {data}, tensor rank {tensor}"


def collisions(streams):
    """The claim that all streams differ, but for those of a tensor group's replicated
    region, and that those are the same.
    """
    owners = {}
    for *place, replicated, sharded in streams:
        for words, number in zip(names(*place), (replicated, sharded)):
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


def overlaps(repeated):
    """The claims that no stream is a later part of another one."""
    for name, other, after in repeated:
        yield Claim(
            f"the first numbers of a stream: {name}", False, True,
            "one stream is another one, moved forward, so their numbers repeat: seed each stream with a number of its own",
            told="numbers of its own", shown=f"those of another stream, from place {after} on: {other}",
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
