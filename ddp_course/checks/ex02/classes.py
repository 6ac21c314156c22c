"""Question 5: find the bugs in a program that counts the classes of a distributed data set."""

from collections import Counter
from functools import partial

import torch.distributed as dist

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import Between, Claim, on_every_rank
from ddp_course.checks.ex02.classes_cases import Faults, combinations, counted, draw_case, firsts
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group

ENOUGH = 5000  # bytes: all classes and their counts are less, even as a pickled tensor; the labels of a rank are more
ORDERS = (
    "counts of different classes were added: all_reduce adds first to first and second to second, whatever the numbers "
    "mean, so all ranks need the classes in the same order. The order of a dict or a set may be another one on each rank"
)
CAUSES = {
    "before": "each rank has dropped the classes of which it has fewer than `least` samples itself. They may have enough on "
    "all ranks together: add up first, then compare",
    "share": "each rank has dropped the classes of which it has less than its share of `least`. The others may have more of "
    "them: add up first, then compare",
    "names": "a class is missing of which no single rank has `least` samples: all ranks together may have enough, so each "
    "rank has to name all of its classes",
    "none": "there are classes with fewer than `least` samples: drop them, once the counts of all ranks are added up",
    "more": "a class with exactly `least` samples belongs to the result, too",
}  # fmt: skip


def observe(count_classes, case):
    """What a rank returns, in plain numbers, and the bytes it has sent."""
    with process_group() as (rank, _):
        with trying(described(case)), CheckedWatch() as watch:
            returned = count_classes(list(case["labels"][rank]), case["least"])
        dist.barrier()
        return {"returned": plain(returned), "bytes": sum(entry["bytes"] for entry in watch.log)}


def plain(returned):
    """(int, dict of ints) in place of tensors and Counters; anything else unchanged."""
    try:
        first, classes = returned
        return whole(first), {whole(label): whole(count) for label, count in classes.items()}
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return returned


def whole(number):
    return int(number) if int(number) == number else number


def described(case):
    lengths = [len(labels) for labels in case["labels"]]
    return f"count_classes on ranks with {lengths} samples, least={case['least']}"


def claims(case, rank, of_ranks):
    call, got = described(case), of_ranks[rank]["returned"]
    is_pair = isinstance(got, tuple | list) and len(got) == 2 and isinstance(got[1], dict)
    yield Claim(call, is_pair, True, "return two things", told="a pair: a number and a dict", shown=got)
    first, classes = got
    expected, mistakes = firsts(case, rank)
    yield Claim(
        f"{call}: the place of this rank's first sample", first, expected,
        "it is the number of samples of all ranks before this one", mistakes,
    )  # fmt: skip
    wrong = ((counted(case, rank, faults), cause_of(faults)) for faults in combinations())
    yield Claim(
        f"{call}: samples of each class", classes, counted(case, rank, Faults()),
        partial(why, case, rank, of_ranks), lambda: wrong, told=in_words(counted(case, rank, Faults())),
        shown=in_words(classes),
    )  # fmt: skip
    yield Claim(
        f"{call}: bytes that a rank sends", of_ranks[rank]["bytes"], Between(0, ENOUGH),
        too_much(of_ranks[rank]["bytes"], case),
        told=f"at most {ENOUGH:,}: labels and counts of classes, not of samples",
    )  # fmt: skip


def cause_of(faults):
    return ORDERS if faults.order else CAUSES[faults.least.replace("both", "before")]


def too_much(sent, case):
    if sent > max(max(labels) for labels in case["labels"]):
        return "a tensor with a place for each label that there might be is too long: most of its numbers are 0"
    return (
        "the labels of all samples are too many to send: count first, and send the counts, as numbers or as one tensor "
        "(a pickled list of tensors takes hundreds of bytes for each)"
    )


def why(case, rank, of_ranks):
    """The cause of what none of the known mistakes gives."""
    right = counted(case, rank, Faults())
    if rank and of_ranks[0]["returned"][1] == right:
        return "rank 0 has the right counts, and this rank does not: all ranks need the result"
    got, own = of_ranks[rank]["returned"][1], Counter(case["labels"][rank])
    if all(got.get(label, count) == count for label, count in own.items()) and got.keys() <= own.keys():
        return "these are the counts of this rank's own samples: the counts of all ranks have to be added up"
    for other in range(case["n"]):
        rest = set().union(*case["labels"][:other], *case["labels"][other + 1 :])
        if missing := right.keys() - got.keys() - rest:
            return f"class {min(missing)} is missing, which only rank {other} has: each rank names all of its classes"
    if got.keys() - right.keys() or right.keys() - got.keys():
        return "it has other classes: those that have at least `least` samples on all ranks together"
    return "did each rank add its count of each class once, and to the counts of the same class on the other ranks?"


def in_words(classes):
    return "{" + ", ".join(f"{label}: {classes[label]}" for label in sorted(classes, key=str)) + "}"


@question(
    "Print three things on each of two ranks: `lengths` after the all_gather, `counts` after the first filter, and "
    "`list(counts)` just before the all_reduce. Which of them would one process with all samples have?",
    "How many tensors does [torch.zeros(1)] * 3 make? If each of two ranks has half of `least` samples of a class, how many "
    "are there together? And which number of rank 1 is added to the first number of rank 0?",
    "Make the list of lengths with a comprehension, one tensor for each rank. Count without a filter, and drop rare classes "
    "from the totals. Go through the classes in sorted order, on each rank.",
)
def check_count_classes(answer, draw):
    """Each rank must have the place of its first sample, and the frequent classes of the
    whole data set; samples are not sent.
    """
    for n in (2, 3):
        case = draw_case(draw, n)
        on_every_rank(partial(claims, case), answer.on_ranks(observe, case, nproc=n))
