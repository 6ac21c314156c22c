"""Question 2: a sampler."""

import builtins
import math
import random
from collections import Counter
from contextlib import contextmanager
from itertools import islice, pairwise

import torch
from torch.utils.data import DistributedSampler

from ddp_course.checks.samples import an_example, how_often, in_words
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong


def shares(sampler_class, cases):
    """For each case, the indices from each rank's sampler: in epochs 0, 1, 2 and 0
    again, and when all ranks have the same random state.
    """
    seen = []
    for samples, ranks, options in cases:
        of_ranks = []
        for rank in range(ranks):
            with trying(call_of(samples, ranks, options, rank)):
                of_ranks.append(share_of(sampler_class, samples, ranks, rank, options))
        seen.append(of_ranks)
    return seen


def share_of(sampler_class, samples, ranks, rank, options):
    with salted_hash(1 + rank) as salted:
        before = random_numbers_of_a_process(1 + rank)
        sampler = sampler_class(samples, ranks, rank, **options)
        length = int(len(sampler))  # a DataLoader asks for it before the first pass
        untold = indices(sampler, samples)
        epochs = []
        for epoch in (0, 1, 2, 0):
            sampler.set_epoch(epoch)
            epochs.append(indices(sampler, samples))
        again = indices(sampler, samples)
        touched = next_random_numbers() != before
    with salted_hash(0):
        random_numbers_of_a_process(0)
        sampler = sampler_class(samples, ranks, rank, **options)
        sampler.set_epoch(0)
        alike = indices(sampler, samples)
    return {
        "length": length, "untold": untold, "epochs": epochs, "again": again, "alike": alike, "touched": touched,
        "hashed": bool(salted),
    }  # fmt: skip


def resumed(sampler_class, cases):
    """For each case: the order of one rank alone, what each rank of an interrupted
    epoch had, and what the ranks get that go on, then and in the next epoch.
    """
    seen = []
    for samples, before, after, taken, options in cases:
        with trying(f"{call_of(samples, before, options)}, set_epoch(1)"):
            order = indices_of(sampler_class(samples, 1, 0, **options), samples, 1)
            first = [indices_of(sampler_class(samples, before, rank, **options), samples, 1) for rank in range(before)]
        rest, lengths, following, fresh = [], [], [], []
        for rank in range(after):
            sampler = sampler_class(samples, after, rank, **options)
            with trying(f"{call_of(samples, after, options, rank)}, set_epoch(1, {taken * before})"):
                rest.append(indices_of(sampler, samples, 1, taken * before))
                lengths.append(int(len(sampler)))
            with trying(f"{call_of(samples, after, options, rank)}, set_epoch(2)"):
                following.append(indices_of(sampler, samples, 2))
            fresh.append(indices_of(sampler_class(samples, after, rank, **options), samples, 2))
        seen.append(
            {"order": order, "first": first, "rest": rest, "lengths": lengths, "following": following, "fresh": fresh}
        )  # fmt: skip
    return seen


def indices_of(sampler, samples, *epoch):
    sampler.set_epoch(*epoch)
    return indices(sampler, samples)


def indices(sampler, samples):
    given = islice(sampler, 10 * samples + 100)  # an endless sampler is only recorded as too long
    return [int(index) if hasattr(index, "__index__") else str(index) for index in given]


@contextmanager
def salted_hash(salt):
    """Let hash() of a text differ, as it does between processes; a list of the texts.

    The cases of all ranks are tried in one process, which has only one salt.
    """
    original, texts = builtins.hash, []

    def of(value):
        if isinstance(value, str | bytes):
            texts.append(value)
            return original((salt, value))
        if isinstance(value, tuple):
            return original(tuple(of(item) for item in value))
        return original(value)

    builtins.hash = of
    try:
        yield texts
    finally:
        builtins.hash = original


def random_numbers_of_a_process(seed):
    """Seed all of a process's random number generators; return the next number of each."""
    import numpy

    def begin():
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)

    begin()
    following = next_random_numbers()
    begin()
    return following


def next_random_numbers():
    import numpy

    return [torch.rand(()).item(), random.random(), numpy.random.random()]


@question(
    "Think of one list of all indices, the same on all ranks. What is done leaves the list at its front. What is left "
    "is made divisible by num_replicas, and divided: left[rank::num_replicas].",
    "Without drop_last, a rank gets ceil(left / num_replicas) indices; with it, left // num_replicas. A list of two "
    "samples for five ranks must be repeated more than once, an empty one not at all. Shuffle with "
    "torch.randperm(samples, generator=...), where the generator's seed depends on the epoch, but not on the rank. The "
    "shuffle is that of all samples, also when some are done.",
    "set_epoch(epoch, done=0) keeps both. __iter__: generator = torch.Generator().manual_seed(self.seed + self.epoch); "
    "order = randperm or range; left = order[self.done:]; repeat left until it is long enough, cut it to num_replicas * "
    "len(self), and return iter(left[rank::num_replicas]). __len__ computes with samples - done.",
)
def check_sharded_sampler(answer, draw):
    """Disjoint and complete shares of the same length, from one shuffle that is the
    same on all ranks.
    """
    small = [(draw.randint(20, 30), 1), (12, 3), (14, 4), (2, 5), (1, 3)]
    small.append((draw.randint(5, 30), draw.randint(2, 6)))
    large = [(ranks * draw.randint(11, 15) + draw.randrange(1, ranks), ranks) for ranks in draw.sample(range(3, 7), 3)]
    seeds = draw.sample(range(10**6), 2)
    cases = [
        (samples, ranks, {"shuffle": shuffle, "seed": seeds[0], "drop_last": drop_last})
        for shuffle in (False, True)
        for drop_last in (False, True)
        for samples, ranks in small + large
    ]
    cases.append((*large[-1], {"shuffle": True, "seed": seeds[1], "drop_last": True}))
    # the defaults, a seed of 0 among them; enough samples to judge their order
    cases.append((*max(large), {}))
    seen = answer.on_ranks(shares, cases)[0]
    for case, of_ranks in zip(cases, seen):
        judge_shares(*case, of_ranks)
    for case, of_ranks in zip(cases, seen):
        judge_order(*case, of_ranks)
    for case, of_ranks in zip(cases, seen):
        judge_passes(*case, of_ranks)
    for drop_last in (False, True):
        judge_odd_ones(drop_last, [pair for pair in zip(cases, seen) if pair[0][2].get("drop_last") is drop_last])
    for case, of_ranks in zip(cases, seen):
        judge_side_effects(*case, of_ranks)
    interrupted = cases_of_resuming(draw)
    for case, of_case in zip(interrupted, answer.on_ranks(resumed, interrupted)[0]):
        judge_resuming(*case, **of_case)
    checked = f"{call_of(*cases[-3])}, and with seed={seeds[1]}"
    orders = [[of_rank["epochs"] for of_rank in of_ranks] for of_ranks in seen[-3:-1]]
    if orders[0] == orders[1]:
        raise Wrong(checked, expected="two different orders", got=f"{orders[0][0][0][:8]} ... on rank 0, both times",
                    cause="the seed has no effect: the shuffle must depend on seed and epoch")  # fmt: skip


def cases_of_resuming(draw):
    """(samples, ranks before, ranks after, samples that each had taken, options)."""
    options = lambda: {  # noqa: E731
        "shuffle": draw.random() < 0.8, "seed": draw.randrange(10**6), "drop_last": draw.random() < 0.3,
    }  # fmt: skip
    cases = []
    for before, after in [(2, 3), (4, 3), (3, 3), (1, 4), (5, 2)]:
        samples = draw.randint(50, 80)
        taken = draw.randint(3, samples // before - 3)
        cases.append((samples, before, after, taken, options()))
    cases.append((24, 3, 4, 8, options()))  # all are done
    cases.append((26, 5, 4, 5, options() | {"drop_last": False}))  # one is left
    return cases


def judge_resuming(
    samples, before, after, taken, options, order, first, rest, lengths, following, fresh
):  # fmt: skip
    """Raise Wrong unless the ranks go on where the interrupted ones were."""
    call, done = call_of(samples, after, options), taken * before
    for rank, share in enumerate(first):
        if share[:taken] != order[rank::before][:taken]:
            raise Wrong(f"{call_of(samples, before, options, rank)} after set_epoch(1), compared with the order of "
                        "ShardedSampler with one rank", rank=f"{rank} of {before}",
                        expected=f"numbers {rank}, {rank + before}, {rank + 2 * before} ... of the order: "
                        f"{order[rank::before][:6]} ...", got=f"{share[:6]} ...", cause="deal the order out one by one, to "
                        "one rank after the other: then what all ranks have done is the front of the order")  # fmt: skip
    left = order[done:]
    length = len(left) // after if options["drop_last"] else -(-len(left) // after)
    checked = f"{call} after set_epoch(1, done={done})"
    if [len(share) for share in rest] != [length] * after:
        cause = f"{len(left)} samples are left: every rank gets as many of them, rounded as without done"
        if len(rest[0]) == len(following[0]):
            cause = "done has no effect: the first `done` samples of the order are not to come again"
        elif len(rest[0]) == max(0, len(following[0]) - done):
            cause = "each rank leaves out `done` samples of its own share: all ranks together have done that many"
        raise Wrong(f"the number of samples per rank from {checked}", expected=[length] * after,
                    got=[len(share) for share in rest], cause=cause)  # fmt: skip
    counts = Counter(index for share in rest for index in share)
    again = [index for index in order[:done] if counts[index]]
    lost = [index for index in left if not counts[index]]
    if again or len(lost) > len(left) - min(len(left), length * after):
        raise Wrong(f"the samples from {checked}, all ranks together", expected=f"the {len(left)} that are left",
                    got=f"{len(again)} that were done come again, {len(lost)} of the others are lost",
                    cause=f"the {before} ranks before had done the first {done} of the order: take these off the order of "
                    "all samples, and only then divide the rest among the ranks of now")  # fmt: skip
    whole = len(left) // after
    for rank, share in enumerate(rest):
        if share[:whole] != left[rank::after][:whole]:
            raise Wrong(f"the order of {checked}", rank=f"{rank} of {after}", expected=f"{left[rank::after][:8]} ...",
                        got=f"{share[:8]} ...", cause="what is left must keep its order, dealt out one by one: otherwise a "
                        "second interruption in this epoch could not be resumed")  # fmt: skip
    if counts and max(counts.values()) > -(-length * after // len(left)):
        raise Wrong(f"how often one sample comes in {checked}", expected=-(-length * after // len(left)),
                    got=max(counts.values()),
                    cause="repeat different samples in turn, each as seldom as possible")  # fmt: skip
    if lengths != [length] * after:
        raise Wrong(f"len() of {checked}", expected=[length] * after, got=lengths,
                    cause="len() must be the number of samples that still come in this epoch")  # fmt: skip
    if following != fresh:
        raise Wrong(f"{call} after set_epoch(1, done={done}), and then set_epoch(2)", rank=f"0 of {after}",
                    expected=f"a whole epoch: {len(fresh[0])} samples, {fresh[0][:5]} ...",
                    got=f"{len(following[0])} samples, {following[0][:5]} ...", cause="what was done in one epoch must be "
                    "forgotten in the next: set_epoch(epoch) begins at the start of the order")  # fmt: skip


def call_of(samples, ranks, options, rank="rank"):
    given = "".join(f", {name}={value}" for name, value in options.items())
    return f"ShardedSampler({samples}, {ranks}, {rank}{given})"


def judge_shares(samples, ranks, options, of_ranks):
    """Raise Wrong unless the ranks' shares have the lengths of torch's, with each
    sample as often.
    """
    torchs = [list(DistributedSampler(range(samples), ranks, rank, **options)) for rank in range(ranks)]
    length, drop_last, call = (len(torchs[0]), options.get("drop_last", False), call_of(samples, ranks, options))
    for epoch in range(3):
        given = [of_rank["epochs"][epoch] for of_rank in of_ranks]
        checked = f"{call}, in epoch {epoch}"
        for rank, share in enumerate(given):
            if odd := [index for index in share if not (isinstance(index, int) and 0 <= index < samples)]:
                raise Wrong(checked, rank=f"{rank} of {ranks}", expected=f"indices from 0 to {samples - 1}", got=odd[0],
                            cause="a sampler returns indices of samples: integers from 0")  # fmt: skip
        lengths = [len(share) for share in given]
        if lengths != [length] * ranks:
            raise Wrong(f"the number of samples per rank from {call}", expected=[length] * ranks, got=lengths,
                        cause=cause_of_lengths(samples, ranks, drop_last, lengths))  # fmt: skip
        if of_ranks[0]["length"] != length:
            cause = (
                "len() must be the number of samples of this rank: a DataLoader computes its number of batches from it"
            )
            if of_ranks[0]["length"] == samples:
                cause = "len() is for this rank's share, not for all samples"
            raise Wrong(f"len({call})", rank=f"0 of {ranks}", expected=length, got=of_ranks[0]["length"],
                        cause=cause)  # fmt: skip
        if how_often(given, samples) != (expected := how_often(torchs, samples)):
            by_luck = [of_rank["alike"] for of_rank in of_ranks]
            right_by_luck = how_often(by_luck, samples) == expected
            if right_by_luck and any(of_rank["hashed"] for of_rank in of_ranks):
                raise Wrong(f"{checked}, the shares of all ranks together", expected=in_words(expected),
                            got=in_words(how_often(given, samples)), cause=HASHED)  # fmt: skip
            raise Wrong(f"{checked}, the shares of all ranks together", expected=in_words(expected),
                        got=f"{in_words(how_often(given, samples))}: {an_example(given, samples)}",
                        cause=cause_of_overlap(samples, ranks, options, given, right_by_luck),
                        )  # fmt: skip


HASHED = (
    "the seed comes from hash() of a text, which differs from process to process, so each rank has another shuffle: "
    "compute the seed from numbers"
)  # fmt: skip


def cause_of_lengths(samples, ranks, drop_last, lengths):
    most, fewest = math.ceil(samples / ranks), samples // ranks
    if lengths == [samples] * ranks and ranks > 1:
        return "every rank gets all samples: divide them among the ranks"
    if lengths == [most] * ranks and drop_last:
        return "drop_last is ignored: with drop_last=True, leave the tail out and repeat nothing"
    if lengths == [fewest] * ranks:
        return "samples are left out, though drop_last is False: repeat some, so that all ranks have the same number"
    if samples < ranks and not drop_last:
        return "there are fewer samples than ranks: repeat the samples more than once"
    if sum(lengths) == samples:
        return "the shares have different lengths: a rank with one more batch would wait in its backward forever"
    return "every rank gets samples / num_replicas, rounded up, or rounded down with drop_last"


def cause_of_overlap(samples, ranks, options, given, right_by_luck):
    if options.get("shuffle", True):  # without it, all was right
        if right_by_luck:
            return "the shuffle uses the process's own random numbers, which differ between ranks: seed a generator"
        if samples >= ranks and any(len(set(share)) < len(share) for share in given):
            return "a shuffle contains each sample once: is it a permutation?"
        return (
            "the shares come from different shuffles: all ranks must have the same shuffle, so do not add the rank "
            "to the seed"
        )
    if ranks > 1 and all(share == given[0] for share in given):
        return "all ranks get the same samples: a share must depend on the rank"
    if samples < ranks:
        return "there are fewer samples than ranks: repeat them in turn, each as seldom as possible"
    if {index for share in given for index in share} == set(range(samples)):
        return "every sample is included, but some are repeated too often: repeat different ones in turn"
    return (
        "the shares do not fit together: cut them from one list that is the same on all ranks, without gaps or overlaps"
    )


def judge_order(samples, ranks, options, of_ranks):
    """Raise Wrong unless each epoch has its own shuffle, which is the same when the
    epoch is repeated.
    """
    call = call_of(samples, ranks, options)
    orders = [[of_rank["epochs"][epoch] for of_rank in of_ranks] for epoch in range(4)]
    if not options.get("shuffle", True):
        first = orders[0][0]
        if orders[1] != orders[0] or sum(a > b for a, b in pairwise(first)) > 1:
            raise Wrong(f"{call}, in epochs 0 and 1", rank=f"0 of {ranks}", expected="indices in order, in both",
                        got=f"{first[:8]} ..., {orders[1][0][:8]} ...", cause="the samples are shuffled, though shuffle "
                        "is False")  # fmt: skip
        return
    if samples < 40:
        return  # so few samples that two shuffles may agree by chance
    got = "; ".join(f"epoch {epoch}: {order[0][:6]} ..." for epoch, order in enumerate(orders[:3]))
    pair = next((pair for pair in ((0, 1), (1, 2), (0, 2)) if orders[pair[0]] == orders[pair[1]]), None)
    if pair:
        cause = "set_epoch has no effect: the shuffle must depend on the epoch"
        if all(sum(a > b for a, b in pairwise(share)) <= 1 for share in orders[0]):
            cause = "nothing is shuffled, though shuffle is True"
        raise Wrong(f"{call}, after set_epoch(0), (1) and (2)", rank=f"0 of {ranks}", expected="a different order "
                                                                                               "in each epoch",
                    got=got, cause=cause)  # fmt: skip
    if orders[3] != orders[0]:
        raise Wrong(f"{call}, after set_epoch(0), and again after set_epoch(0)", rank=f"0 of {ranks}",
                    expected="the same order", got=f"{orders[0][0][:8]} ..., then {orders[3][0][:8]} ...",
                    cause="the order depends on earlier epochs: it must depend on seed and epoch only, otherwise no "
                    "run can be resumed")  # fmt: skip
    if ranks > 1 and all(len({frozenset(order[rank]) for order in orders}) == 1 for rank in range(ranks)):
        raise Wrong(f"{call}: the samples of each rank", rank=f"0 of {ranks}", expected="different samples in each epoch",
                    got="the same samples in all epochs, in a different order", cause="each rank shuffles only its own "
                    "share: shuffle all indices first, then divide them")  # fmt: skip


def judge_passes(samples, ranks, options, of_ranks):
    """Raise Wrong unless an epoch's indices are the same in each pass, and those of
    epoch 0 before set_epoch was called.
    """
    call = call_of(samples, ranks, options)
    for rank, of_rank in enumerate(of_ranks):
        where, last = f"{rank} of {len(of_ranks)}", of_rank["epochs"][-1]
        if of_rank["again"] != last:
            cause = "the second pass through an epoch differs from the first: an order depends on seed and epoch only"
            if not of_rank["again"] and last:
                cause = "the sampler can be gone through only once: __iter__ must return a new iterator each time"
            raise Wrong(f"{call}, two passes after one set_epoch(0)", rank=where, expected="the same indices",
                        got=f"{last[:8]} ..., then {of_rank['again'][:8]} ...", cause=cause)  # fmt: skip
        if of_rank["untold"] != of_rank["epochs"][0]:
            raise Wrong(f"{call}, before any set_epoch, and after set_epoch(0)", rank=where,
                        expected="the same indices", got=f"{of_rank['untold'][:8]} ..., then {of_rank['epochs'][0][:8]} ...",
                        cause="before the first set_epoch, the epoch is 0, and its order must be that of set_epoch(0)",
                        )  # fmt: skip


def judge_odd_ones(drop_last, seen):
    """Raise Wrong if the samples that are left out, or repeated, are the same in all
    epochs of all shuffles.
    """
    odd_ones = []
    for (samples, ranks, options), of_ranks in seen:
        if options["shuffle"] and samples > 30 and samples % ranks:
            for epoch in range(3):
                counts = Counter(index for of_rank in of_ranks for index in of_rank["epochs"][epoch])
                odd_ones.append((samples, ranks, options, {sample for sample in range(samples) if counts[sample] != 1}))
    by_case = [[odd for *case, odd in odd_ones if case[:2] == [samples, ranks]] for samples, ranks, *_ in odd_ones]
    if all(odd == of_case[0] for of_case in by_case for odd in of_case):
        what = "left out" if drop_last else "repeated"
        samples, ranks, options, odd = odd_ones[0]
        raise Wrong(f"the samples that are {what} by {call_of(samples, ranks, options)}", expected="different samples "
                                                                                                "in each epoch",
                    got=f"always {sorted(odd)}", cause="shuffle all samples first, and only then cut or repeat the "
                    f"list: otherwise the same samples are {what} in every epoch")  # fmt: skip


def judge_side_effects(samples, ranks, options, of_ranks):
    if any(of_rank["touched"] for of_rank in of_ranks):
        raise Wrong(f"the process's own random numbers, after {call_of(samples, ranks, options)} was iterated over",
                    expected="unchanged, as if none had been drawn", got="others", cause="it seeds or uses the random "
                    "numbers of the whole process, which dropout uses, too: use your own torch.Generator")  # fmt: skip
