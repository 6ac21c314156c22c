"""Question 2: a sampler."""

import math
import random
from collections import Counter
from functools import partial
from itertools import combinations, islice, pairwise

import torch
from torch.utils.data import DistributedSampler

from ddp_course.checks.claims import Claim, hold
from ddp_course.checks.salted import salted_hash
from ddp_course.checks.samples import an_example, how_often, in_words
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question


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
    epoch had; and of the ranks that go on, what they get then, what in a second pass, how
    many, and what in the next epoch, also without an interruption.
    """
    seen = []
    for samples, before, after, taken, options in cases:
        with trying(f"{call_of(samples, before, options)}, set_epoch(1)"):
            order = indices_of(sampler_class(samples, 1, 0, **options), samples, 1)
            first = [indices_of(sampler_class(samples, before, rank, **options), samples, 1) for rank in range(before)]
        rest, again, lengths, following, fresh = [], [], [], [], []
        for rank in range(after):
            sampler = sampler_class(samples, after, rank, **options)
            with trying(f"{call_of(samples, after, options, rank)}, set_epoch(1, {taken * before})"):
                sampler.set_epoch(1, taken * before)
                lengths.append(int(len(sampler)))
                rest.append(indices(sampler, samples))
                again.append(indices(sampler, samples))
            with trying(f"{call_of(samples, after, options, rank)}, set_epoch(2)"):
                following.append(indices_of(sampler, samples, 2))
            fresh.append(indices_of(sampler_class(samples, after, rank, **options), samples, 2))
        seen.append([order, first, rest, again, lengths, following, fresh])
    return seen


def indices_of(sampler, samples, *epoch):
    sampler.set_epoch(*epoch)
    return indices(sampler, samples)


def indices(sampler, samples):
    given = islice(sampler, 10 * samples + 100)  # an endless sampler is only recorded as too long
    return [int(index) if hasattr(index, "__index__") else str(index) for index in given]


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
    small = [(draw.randint(20, 30), 1), (12, 3), (14, 4), (2, 5), (1, 3), (11, 20)]
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
    [seen] = answer.on_ranks(shares, cases)
    for claims in (divided, ordered, repeatable):
        for case, of_ranks in zip(cases, seen):
            hold(claims(*case, of_ranks))
    for drop_last in (False, True):
        hold(odd_ones(drop_last, [pair for pair in zip(cases, seen) if pair[0][2].get("drop_last") is drop_last]))
    for case, of_ranks in zip(cases, seen):
        hold(side_effects(*case, of_ranks))
    interrupted = cases_of_resuming(draw)
    for case, of_case in zip(interrupted, answer.on_ranks(resumed, interrupted)[0]):
        hold(goes_on(*case, *of_case))
    orders = [[of_rank["epochs"] for of_rank in of_ranks] for of_ranks in seen[-3:-1]]
    hold([Claim(f"{call_of(*cases[-3])}, and with seed={seeds[1]}", orders[0] == orders[1], False, "the seed has no effect: "
                "the shuffle must depend on seed and epoch", told="two different orders",
                shown=f"{orders[0][0][0][:8]} ... on rank 0, both times")])  # fmt: skip


def cases_of_resuming(draw):
    """(samples, ranks before, ranks after, samples that each had taken, options)."""

    def options(shuffle, drop_last):
        return {"shuffle": shuffle, "seed": draw.randrange(10**6), "drop_last": drop_last}

    kinds = draw.sample([(True, False), (False, False), (True, True), (False, True), (True, False)], 5)
    cases = []
    for (before, after), kind in zip([(2, 3), (4, 3), (3, 3), (1, 4), (5, 2)], kinds):
        samples = draw.randint(50, 80)
        taken = draw.randint(3, samples // before - 3)
        cases.append((samples, before, after, taken, options(*kind)))
    cases.append((24, 3, 4, 8, options(*kinds[0])))  # all are done
    cases.append((26, 5, 4, 5, options(True, False)))  # one is left
    return cases


# ---- what is claimed ----


def call_of(samples, ranks, options, rank="rank"):
    given = "".join(f", {name}={value}" for name, value in options.items())
    return f"ShardedSampler({samples}, {ranks}, {rank}{given})"


def divided(samples, ranks, options, of_ranks):
    """Claims that the ranks' shares have the lengths of torch's, with each sample as often."""
    torchs = [list(DistributedSampler(range(samples), ranks, rank, **options)) for rank in range(ranks)]
    lengths, expected, call = [len(torchs[0])] * ranks, how_often(torchs, samples), call_of(samples, ranks, options)
    for epoch in range(3):
        given, checked = [of_rank["epochs"][epoch] for of_rank in of_ranks], f"{call}, in epoch {epoch}"
        yield Claim(checked, [index for share in given for index in share if index not in range(samples)][:1], [],
                    "a sampler returns indices of samples: integers from 0",
                    told=f"indices from 0 to {samples - 1}")  # fmt: skip
        got = list(map(len, given))
        yield Claim(f"the number of samples per rank from {call}", got, lengths, cause_of_lengths(samples, ranks, got), [
            ([samples] * ranks, "every rank gets all samples: divide them among the ranks"),
            ([math.ceil(samples / ranks)] * ranks, "drop_last is ignored: with drop_last=True, leave the tail out and "
             "repeat nothing"),
            ([samples // ranks] * ranks, "samples are left out, though drop_last is False: repeat some, so that all ranks "
             "have the same number"),
        ])  # fmt: skip
        yield Claim(f"len({call}), of each rank", [of_rank["length"] for of_rank in of_ranks], lengths, "len() must be the "
                    "number of samples of this rank: a DataLoader computes its number of batches from it",
                    [([samples] * ranks, "len() is for this rank's share, not for all samples")])  # fmt: skip
        yield Claim(f"{checked}, the shares of all ranks together", how_often(given, samples), expected,
                    partial(cause_of_overlap, samples, ranks, options, of_ranks, given, expected), told=in_words(expected),
                    shown=f"{in_words(how_often(given, samples))}: {an_example(given, samples)}")  # fmt: skip


def cause_of_lengths(samples, ranks, lengths):
    if samples < ranks:
        return "there are fewer samples than ranks: repeat the samples more than once, or leave all out with drop_last"
    if sum(lengths) == samples:
        return "the shares have different lengths: a rank with one more batch would wait in its backward forever"
    return "every rank gets samples / num_replicas, rounded up, or rounded down with drop_last"


def cause_of_overlap(samples, ranks, options, of_ranks, given, expected):
    if options.get("shuffle", True):  # without it, all was right
        right_by_luck = how_often([of_rank["alike"] for of_rank in of_ranks], samples) == expected
        if right_by_luck and any(of_rank["hashed"] for of_rank in of_ranks):
            return (
                "the seed comes from hash() of a text, which differs from process to process, so each rank has another "
                "shuffle: compute the seed from numbers"
            )
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


def ordered(samples, ranks, options, of_ranks):
    """Claims that each epoch has its own shuffle, or none at all, which is the same when
    the epoch is repeated.
    """
    call = call_of(samples, ranks, options)
    orders = [[of_rank["epochs"][epoch] for of_rank in of_ranks] for epoch in range(4)]
    rising = all(sum(a > b for a, b in pairwise(share)) <= 1 for share in orders[0])  # repeated ones follow
    if not options.get("shuffle", True):
        in_order = orders[0] == orders[1] and rising and (ranks > 1 or orders[0] == [list(range(samples))])
        yield Claim(f"{call}, in epochs 0 and 1", in_order, True, "the samples are shuffled, though shuffle is False",
                    told="indices in order, in both",
                    shown=f"on rank 0 {orders[0][0][:8]} ..., {orders[1][0][:8]} ...")  # fmt: skip
    elif samples >= 40:  # so many samples that two shuffles do not agree by chance
        yield Claim(f"{call}, after set_epoch(0), (1) and (2)",
                    any(orders[one] == orders[other] for one, other in combinations(range(3), 2)), False,
                    "nothing is shuffled, though shuffle is True" if rising else "set_epoch has no effect: the shuffle must "
                    "depend on the epoch", told="a different order in each epoch", shown="on rank 0, "
                    + "; ".join(f"epoch {epoch}: {order[0][:6]} ..." for epoch, order in enumerate(orders[:3])))  # fmt: skip
        yield Claim(f"{call}, after set_epoch(0), and again after set_epoch(0)", orders[3] == orders[0], True, "the order "
                    "depends on earlier epochs: it must depend on seed and epoch only, otherwise no run can be resumed",
                    told="the same order",
                    shown=f"on rank 0 {orders[0][0][:8]} ..., then {orders[3][0][:8]} ...")  # fmt: skip
        same = all(len({frozenset(order[rank]) for order in orders}) == 1 for rank in range(ranks))
        yield Claim(f"{call}: the samples of each rank", ranks > 1 and same, False, "each rank shuffles only its own share: "
                    "shuffle all indices first, then divide them", told="different samples in each epoch",
                    shown="the same samples in all epochs, in a different order")  # fmt: skip


def repeatable(samples, ranks, options, of_ranks):
    """Claims that an epoch's indices are the same in each pass, and those of epoch 0
    before set_epoch was called.
    """
    for rank, of_rank in enumerate(of_ranks):
        call, first, last = call_of(samples, ranks, options, rank), of_rank["epochs"][0], of_rank["epochs"][-1]
        yield Claim(f"{call}, two passes after one set_epoch(0)", of_rank["again"], last, "the second pass through an epoch "
                    "differs from the first: an order depends on seed and epoch only",
                    [([], "the sampler can be gone through only once: __iter__ must return a new iterator each time")],
                    told="the same indices", shown=f"{last[:8]} ..., then {of_rank['again'][:8]} ...")  # fmt: skip
        yield Claim(f"{call}, before any set_epoch, and after set_epoch(0)", of_rank["untold"], first, "before the first "
                    "set_epoch, the epoch is 0, and its order must be that of set_epoch(0)", told="the same indices",
                    shown=f"{of_rank['untold'][:8]} ..., then {first[:8]} ...")  # fmt: skip


def odd_ones(drop_last, seen):
    """The claim that the samples that are left out, or repeated, are not the same in all
    epochs of all shuffles.
    """
    found = []  # for each case, those of three epochs
    for (samples, ranks, options), of_ranks in seen:
        if options["shuffle"] and samples > 30 and samples % ranks:
            counts = [
                Counter(index for of_rank in of_ranks for index in of_rank["epochs"][epoch]) for epoch in range(3)
            ]
            odd = [[sample for sample in range(samples) if of_epoch[sample] != 1] for of_epoch in counts]
            found.append((call_of(samples, ranks, options), odd))
    what, (call, odd) = "left out" if drop_last else "repeated", found[0]
    always = all(of_epochs == of_epochs[:1] * 3 for _, of_epochs in found)
    yield Claim(f"the samples that are {what} by {call}", always, False,
                "shuffle all samples first, and only then cut or repeat the list: otherwise the same samples are "
                f"{what} in every epoch", told="different samples in each epoch", shown=f"always {odd[0]}")  # fmt: skip


def side_effects(samples, ranks, options, of_ranks):
    yield Claim(f"the process's own random numbers, after {call_of(samples, ranks, options)} was iterated over",
                any(of_rank["touched"] for of_rank in of_ranks), False, "it seeds or uses the random numbers of the whole "
                "process, which dropout uses, too: use your own torch.Generator",
                told="unchanged, as if none had been drawn", shown="others")  # fmt: skip


def goes_on(samples, before, after, taken, options, order, first, rest, again, lengths, following, fresh):
    """Claims that the ranks go on where the interrupted ones were."""
    for rank, share in enumerate(first):
        yield Claim(f"{call_of(samples, before, options, rank)} after set_epoch(1), compared with the order of "
                    "ShardedSampler with one rank", share[:taken], order[rank::before][:taken], "deal the order out one by "
                    "one, to one rank after the other: then what all ranks have done is the front of the order",
                    told=f"numbers {rank}, {rank + before}, {rank + 2 * before} ... of the order: "
                    f"{order[rank::before][:6]} ...", shown=f"{share[:6]} ...")  # fmt: skip
    done = taken * before
    left, checked = order[done:], f"{call_of(samples, after, options)} after set_epoch(1, done={done})"
    length = len(left) // after if options["drop_last"] else -(-len(left) // after)
    yield Claim(f"the number of samples per rank from {checked}", list(map(len, rest)), [length] * after,
                f"{len(left)} samples are left: every rank gets as many of them, rounded as without done", [
                    (list(map(len, following)), "done has no effect: the first `done` samples of the order are not to come "
                     "again"),
                    ([max(0, len(following[0]) - done)] * after, "each rank leaves out `done` samples of its own share: all "
                     "ranks together have done that many"),
                ])  # fmt: skip
    counts = Counter(index for share in rest for index in share)
    come_again = [index for index in order[:done] if counts[index]]
    lost = [index for index in left if not counts[index]]
    yield Claim(f"the samples from {checked}, all ranks together", [len(come_again), len(lost)],
                [0, len(left) - min(len(left), length * after)], f"the {before} ranks before had done the first {done} of "
                "the order: take these off the order of all samples, and only then divide the rest among the ranks of now",
                told=f"the {len(left)} that are left",
                shown=f"{len(come_again)} that were done come again, {len(lost)} of the others are lost")  # fmt: skip
    whole = len(left) // after
    for rank, share in enumerate(rest):
        yield Claim(f"the order of {call_of(samples, after, options, rank)} after set_epoch(1, done={done})", share[:whole],
                    left[rank::after][:whole], "what is left must keep its order, dealt out one by one: otherwise a second "
                    "interruption in this epoch could not be resumed",
                    told=f"{left[rank::after][:8]} ...", shown=f"{share[:8]} ...")  # fmt: skip
    most = -(-length * after // len(left)) if left else 0
    yield Claim(f"how often one sample comes in {checked}", max(counts.values(), default=0), range(most + 1),
                "repeat different samples in turn, each as seldom as possible", told=most)  # fmt: skip
    yield Claim(f"len() of {checked}", lengths, [length] * after, "len() must be the number of samples that still come in "
                "this epoch")  # fmt: skip
    yield Claim(f"{checked}, two passes on rank 0", again, rest, "what was done is left out in each pass over the epoch, "
                "until the next set_epoch", told=f"{rest[0][:8]} ..., both times",
                shown=f"{rest[0][:8]} ..., then {again[0][:8]} ...")  # fmt: skip
    yield Claim(f"{checked}, and then set_epoch(2)", following, fresh, "what was done in one epoch must be forgotten in the "
                "next: set_epoch(epoch) begins at the start of the order",
                told=f"a whole epoch: {len(fresh[0])} samples on rank 0, {fresh[0][:5]} ...",
                shown=f"{len(following[0])} samples, {following[0][:5]} ...")  # fmt: skip
