"""The labels that question 5 tries an answer on, and what ranks get from them that make
mistakes.
"""

import itertools
from collections import Counter
from typing import NamedTuple

KINDS = ("large", "large", "split", "split", "exact", "short", "alone", "alone", "alone", "few", "mixed", "mixed")


class Faults(NamedTuple):
    """What is wrong; "" is right."""

    order: str = ""  # of the classes on a rank: own first, sorted own first, set
    least: str = ""  # before, both, share, names, none, more


def combinations():
    """Those with a fault, one fault first."""
    orders = ("", "own first", "sorted own first", "set")
    every = itertools.product(orders, ("", "before", "both", "share", "names", "none", "more"))
    return sorted((Faults(*each) for each in every if any(each)), key=lambda faults: sum(map(bool, faults)))


def draw_case(draw, n):
    """Labels of n ranks, from which each mistake gets something else."""
    while True:
        least, ending = draw.randint(300, 400), draw.randrange(1, 128)
        names = [128 * number + ending for number in draw.sample(range(1000, 90000), len(KINDS))]  # see below
        labels = [[] for _ in range(n)]
        for place, (name, kind) in enumerate(zip(names, KINDS)):
            for own, count in zip(labels, draw_counts(draw, n, least, kind, place)):
                own += [name] * count
        for own in labels:
            draw.shuffle(own)
        case = {"n": n, "least": least, "labels": labels}
        if is_telling(case):
            return case


# All labels end in the same 7 bits, so they collide in a small set, and its order is that in
# which they were added: a program that relies on the order of a set fails here as elsewhere.


def draw_counts(draw, n, least, kind, place):
    """How many samples of a class, the one at this place of KINDS, each rank has."""
    if kind == "large":
        return [draw.randint(least, 3 * least) for _ in range(n)]
    if kind == "alone":  # one after the other, so each rank has a frequent class that no other has
        return [draw.randint(least, 2 * least) * (rank == place % n) for rank in range(n)]
    if kind in ("few", "mixed"):
        count = draw.randint(least, 2 * least) if kind == "mixed" else draw.randint(least // 2, least - 1)
        others = [draw.randint(5, least // 4) if kind == "mixed" else 0 for _ in range(n - 1)]
        counts = [count, *others]
    else:
        total = {"split": draw.randint(least + 2, 2 * least - 4), "exact": least, "short": least - 1}[kind]
        counts = [total // n + (place < total % n) for place in range(n)]
    draw.shuffle(counts)
    return counts


def is_telling(case):
    """Whether each mistake shows on each rank that could make it."""
    for rank in range(case["n"]):
        right, wrong = counted(case, rank, Faults()), [counted(case, rank, each) for each in combinations()]
        first, mistakes = firsts(case, rank)
        if right in wrong or rank and first == mistakes[0][0]:
            return False
    return True


def firsts(case, rank):
    """The place of a rank's first sample in the whole data set; and the wrong ones, pairs
    (place, cause).
    """
    lengths = [len(labels) for labels in case["labels"]]
    same = (
        "the last rank's length was taken for all. If `lengths` is a list with the same tensor n times, [tensor] * n, each "
        "length that arrives overwrites the one before it: make n tensors. Or were all parts taken to be of equal length?"
    )
    mistakes = [
        (rank * lengths[-1], same),
        (0, "only rank 0's samples begin at 0"),
        (sum(lengths[: rank + 1]), "this rank's own samples are not before its first one: it is the place after the last"),
        (rank * lengths[rank], "the other ranks do not have as many samples as this one"),
        (rank * lengths[0], "the other ranks do not have as many samples as rank 0"),
        (sum(lengths[rank + 1 :]), "these are the samples of the ranks after this one"),
        (sum(lengths), "these are the samples of all ranks"),
    ]  # fmt: skip
    return sum(lengths[:rank]), mistakes


def counted(case, rank, faults):
    """{label: count} that a rank returns with these faults."""
    least = case["least"]
    own = [Counter(labels) for labels in case["labels"]]
    enough = least / case["n"] if faults.least == "share" else least
    kept = [{label: count for label, count in each.items() if count >= enough} for each in own]
    named = kept if faults.least in ("before", "both", "share", "names") else own
    added = kept if faults.least in ("before", "both", "share") else own
    orders = [ordered(each, named, faults.order) for each in named]
    totals = [sum(each.get(label, 0) for each, label in zip(added, labels)) for labels in zip(*orders)]
    lowest = {"none": 0, "more": least + 1, "before": 0}.get(faults.least, least)
    return {label: total for label, total in zip(orders[rank], totals) if total >= lowest}


def ordered(own, named, order):
    """The classes of all ranks, in a rank's order."""
    if order == "set":
        return list(set(own).union(*named))
    mine = {"own first": list(own), "sorted own first": sorted(own), "": []}[order]
    return list(dict.fromkeys(itertools.chain(mine, *named)))
