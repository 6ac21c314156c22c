"""Exercise 04: a sampler, an exact evaluation, one program turned into DDP, and three
programs to repair.
"""

import math
import random
import re
from collections import Counter
from itertools import islice, pairwise

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler

from ddp_course.checks.training import (
    close,
    descend,
    equal,
    fill,
    gradients_of,
    state,
    take_steps,
    unwrapped,
)
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import SYMPTOMS, RankError, RankTimeout
from ddp_course.school.judge import Wrong, question, trying

WIDTH, CLASSES, LEARNING_RATE = 5, 3, 0.1
# the number of the first sample of a test set, above those of all training sets
FIRST_TEST = 1000

# ---- what the answers are tried on ----


class Numbered(Dataset):
    """Random samples of CLASSES classes: inputs, float64 (1 + WIDTH,), and a label. The
    first input is the sample's own number, from `first` on."""

    def __init__(self, samples, seed, first=0):
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.arange(first, first + samples, dtype=torch.float64)
        random_inputs = torch.randn(
            samples, WIDTH, generator=generator, dtype=torch.float64
        )
        self.inputs = torch.cat([numbers[:, None], random_inputs], dim=1)
        self.labels = torch.randint(CLASSES, (samples,), generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


class Diary(nn.Module):
    """A small network, in 64 bits, that ignores the samples' numbers but writes them
    down.

    start: its parameters when it was first trained; trained: the samples of each
    training step, a list of lists;
    tested: all samples that it was given otherwise.
    """

    def __init__(self, norm=False):
        super().__init__()
        middle = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 8), middle, nn.Tanh(), nn.Linear(8, CLASSES)
        ).double()
        self.start, self.trained, self.tested = None, [], []

    def forward(self, inputs):
        numbers = inputs[:, 0].long().tolist()
        if self.training and torch.is_grad_enabled():
            self.start = self.start or state(self)
            self.trained.append(numbers)
        else:
            self.tested += numbers
        return self.layers(inputs[:, 1:])


class TwoGroups(Dataset):
    """Two classes that a line parts with ease: inputs, float32 (WIDTH,), and label,
    float32 (1,), 0.0 or 1.0.
    """

    def __init__(self, samples, seed, group_seed):
        generator = torch.Generator().manual_seed(group_seed)
        center = 2 * F.normalize(torch.randn(WIDTH, generator=generator), dim=0)
        generator.manual_seed(seed)
        self.labels = (torch.arange(samples) % 2).float()[:, None]
        noise = 0.5 * torch.randn(samples, WIDTH, generator=generator)
        self.inputs = (2 * self.labels - 1) * center + noise

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


# ---- 1: the sampler ----


def shares(sampler_class, cases):
    """For each case, what the sampler of each rank gives: in epochs 0, 1, 2 and 0
    again; and where all ranks have the same luck."""
    seen = []
    for samples, ranks, options in cases:
        of_ranks = []
        for rank in range(ranks):
            with trying(call_of(samples, ranks, options, rank)):
                of_ranks.append(share_of(sampler_class, samples, ranks, rank, options))
        seen.append(of_ranks)
    return seen


def share_of(sampler_class, samples, ranks, rank, options):
    before = random_numbers_of_a_process(1 + rank)
    sampler = sampler_class(samples, ranks, rank, **options)
    epochs = [indices(sampler, epoch, samples) for epoch in (0, 1, 2, 0)]
    length = len(sampler)
    touched = next_random_numbers() != before
    random_numbers_of_a_process(0)
    alike = indices(sampler_class(samples, ranks, rank, **options), 0, samples)
    return {"length": length, "epochs": epochs, "alike": alike, "touched": touched}


def indices(sampler, epoch, samples):
    sampler.set_epoch(epoch)
    given = islice(
        sampler, 10 * samples + 100
    )  # one that never ends is longer than it should be, no more
    return [
        int(index) if hasattr(index, "__index__") else str(index) for index in given
    ]


def random_numbers_of_a_process(seed):
    """Seed all that a process draws random numbers from; return what each would draw
    next.
    """
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
    "Think of one list of all indices, the same on all ranks. Make it divisible by num_replicas, and deal it out: "
    "indices[rank::num_replicas].",
    "Without drop_last a rank gets ceil(samples / num_replicas), with it samples // num_replicas. A list of two samples "
    "for five ranks has to be repeated more than once. The shuffle: torch.randperm(samples, generator=...), and the "
    "generator's seed knows of the epoch, but not of the rank.",
    "__iter__: generator = torch.Generator().manual_seed(self.seed + self.epoch); order = randperm or range; repeat "
    "order until it is long enough, cut it to num_replicas * len(self), and return iter(order[rank::num_replicas]).",
)
def check_sharded_sampler(answer, draw):
    """Shares that are equally long, disjoint and complete, out of one shuffle that all
    ranks make alike.
    """
    small = [(draw.randint(20, 30), 1), (12, 3), (14, 4), (2, 5), (1, 3)]
    small.append((draw.randint(5, 30), draw.randint(2, 6)))
    large = [
        (ranks * draw.randint(11, 15) + draw.randrange(1, ranks), ranks)
        for ranks in draw.sample(range(3, 7), 3)
    ]
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
    for drop_last in (False, True):
        judge_odd_ones(
            drop_last,
            [
                pair
                for pair in zip(cases, seen)
                if pair[0][2].get("drop_last") is drop_last
            ],
        )
    for case, of_ranks in zip(cases, seen):
        judge_side_effects(*case, of_ranks)
    checked = f"{call_of(*cases[-3])}, and with seed={seeds[1]}"
    orders = [[of_rank["epochs"] for of_rank in of_ranks] for of_ranks in seen[-3:-1]]
    if orders[0] == orders[1]:
        raise Wrong(checked, expected="two different orders", got=f"twice {orders[0][0][0][:8]} ... on rank 0",
                    cause="the seed has no effect: a shuffle follows from seed and epoch")  # fmt: skip


def call_of(samples, ranks, options, rank="rank"):
    given = "".join(f", {name}={value}" for name, value in options.items())
    return f"ShardedSampler({samples}, {ranks}, {rank}{given})"


def judge_shares(samples, ranks, options, of_ranks):
    """Raise Wrong unless the ranks' shares are as long, and hold each sample as often,
    as torch's.
    """
    torchs = [
        list(DistributedSampler(range(samples), ranks, rank, **options))
        for rank in range(ranks)
    ]
    length, drop_last, call = (
        len(torchs[0]),
        options.get("drop_last", False),
        call_of(samples, ranks, options),
    )
    for epoch in range(3):
        given = [of_rank["epochs"][epoch] for of_rank in of_ranks]
        checked = f"{call}, in epoch {epoch}"
        for rank, share in enumerate(given):
            if odd := [
                index
                for index in share
                if not (isinstance(index, int) and 0 <= index < samples)
            ]:
                raise Wrong(checked, rank=f"{rank} of {ranks}", expected=f"indices from 0 to {samples - 1}", got=odd[0],
                            cause="a sampler gives the numbers of samples: whole, from 0 on")  # fmt: skip
        lengths = [len(share) for share in given]
        if lengths != [length] * ranks:
            raise Wrong(f"how many samples each rank gets from {call}", expected=[length] * ranks, got=lengths,
                        cause=cause_of_lengths(samples, ranks, drop_last, lengths))  # fmt: skip
        if of_ranks[0]["length"] != length:
            cause = "len() is how many samples this rank gets: a DataLoader counts its batches by it"
            if of_ranks[0]["length"] == samples:
                cause = "len() is for this rank's share, not for all samples"
            raise Wrong(f"len({call})", rank=f"0 of {ranks}", expected=length, got=of_ranks[0]["length"],
                        cause=cause)  # fmt: skip
        if how_often(given, samples) != (expected := how_often(torchs, samples)):
            by_luck = [of_rank["alike"] for of_rank in of_ranks]
            raise Wrong(f"{checked}, the shares of all ranks together", expected=in_words(expected),
                        got=f"{in_words(how_often(given, samples))}: {an_example(given, samples)}",
                        cause=cause_of_overlap(samples, ranks, options, given, how_often(by_luck, samples) == expected),
                        )  # fmt: skip


def how_often(given, samples):
    """How many samples come how often: {1: 12, 2: 2} is 12 samples once, 2 samples
    twice.
    """
    counts = Counter(index for share in given for index in share)
    return Counter(counts[sample] for sample in range(samples))


def in_words(tally):
    words = {0: "not at all", 1: "once", 2: "twice"}
    groups = sorted(tally.items(), key=lambda group: (-group[1], group[0]))
    counted = [
        (f"{many} sample{'s' * (many > 1)}", words.get(times, f"{times} times"))
        for times, many in groups
    ]
    return ", ".join(f"{samples} {times}" for samples, times in counted)


def an_example(given, samples):
    """The sample that most ranks have, and one that none has."""
    owners = [
        [rank for rank, share in enumerate(given) if sample in share]
        for sample in range(samples)
    ]
    most = max(range(samples), key=lambda sample: len(owners[sample]))
    texts = [
        f"sample {most} is on rank{'s' * (len(owners[most]) > 1)} {', '.join(map(str, owners[most]))}"
    ]
    return ", ".join(
        texts
        + [
            f"sample {sample} on none"
            for sample in range(samples)
            if not owners[sample]
        ][:2]
    )


def cause_of_lengths(samples, ranks, drop_last, lengths):
    most, fewest = math.ceil(samples / ranks), samples // ranks
    if lengths == [samples] * ranks and ranks > 1:
        return "every rank gets all of the samples: they are to share them"
    if lengths == [most] * ranks and drop_last:
        return "drop_last is not looked at: with it, the tail is left out, and nothing is repeated"
    if lengths == [fewest] * ranks:
        return "samples are left out, though drop_last is False: repeat some, so that all ranks have equally many"
    if samples < ranks and not drop_last:
        return "there are fewer samples than ranks: the samples have to be repeated more than once"
    if sum(lengths) == samples:
        return "the shares are not equally long: a rank with a batch more would wait in its backward for ever"
    return "every rank gets samples / num_replicas, rounded up, or with drop_last rounded down"


def cause_of_overlap(samples, ranks, options, given, right_by_luck):
    if options.get("shuffle", True):  # without it, all was right
        if right_by_luck:
            return "the shuffle takes the process's own random numbers, and each rank has others: seed a generator"
        if samples >= ranks and any(len(set(share)) < len(share) for share in given):
            return "a shuffle holds each sample once: is it a permutation?"
        return "the shares come from different shuffles: all ranks must shuffle alike, so the rank has no part in the seed"
    if ranks > 1 and all(share == given[0] for share in given):
        return "all ranks get the same samples: a share depends on the rank"
    if samples < ranks:
        return "there are fewer samples than ranks: repeat them in turn, none more often than needed"
    if {index for share in given for index in share} == set(range(samples)):
        return "every sample is there, but some come too often: repeat different ones in turn"
    return "the shares do not fit together: cut them from one list that all ranks agree on, without gaps and overlaps"


def judge_order(samples, ranks, options, of_ranks):
    """Raise Wrong unless a shuffle is another one in each epoch, and the same one
    whenever that epoch comes again.
    """
    call = call_of(samples, ranks, options)
    orders = [[of_rank["epochs"][epoch] for of_rank in of_ranks] for epoch in range(4)]
    if not options.get("shuffle", True):
        first = orders[0][0]
        if orders[1] != orders[0] or sum(a > b for a, b in pairwise(first)) > 1:
            raise Wrong(f"{call}, in epochs 0 and 1", rank=f"0 of {ranks}", expected="indices in their order, in both",
                        got=f"{first[:8]} ..., {orders[1][0][:8]} ...", cause="the samples are shuffled, though shuffle "
                        "is False")  # fmt: skip
        return
    if samples < 40:
        return  # so few that two shuffles may agree by chance
    got = "; ".join(
        f"epoch {epoch}: {order[0][:6]} ..." for epoch, order in enumerate(orders[:3])
    )
    pair = next(
        (
            pair
            for pair in ((0, 1), (1, 2), (0, 2))
            if orders[pair[0]] == orders[pair[1]]
        ),
        None,
    )
    if pair:
        cause = "set_epoch has no effect: the epoch must have a part in the shuffle"
        if all(sum(a > b for a, b in pairwise(share)) <= 1 for share in orders[0]):
            cause = "nothing is shuffled, though shuffle is True"
        raise Wrong(f"{call}, after set_epoch(0), (1) and (2)", rank=f"0 of {ranks}", expected="another order in each epoch",
                    got=got, cause=cause)  # fmt: skip
    if orders[3] != orders[0]:
        raise Wrong(f"{call}, after set_epoch(0), and again after set_epoch(0)", rank=f"0 of {ranks}",
                    expected="the same order", got=f"{orders[0][0][:8]} ..., then {orders[3][0][:8]} ...",
                    cause="the order depends on what came before: seed and epoch alone must decide it, or no run can "
                    "be resumed")  # fmt: skip
    if ranks > 1 and all(
        len({frozenset(order[rank]) for order in orders}) == 1 for rank in range(ranks)
    ):
        raise Wrong(f"{call}: which samples each rank gets", rank=f"0 of {ranks}", expected="others in each epoch",
                    got="the same ones in all epochs, in another order", cause="each rank shuffles its own share only: "
                    "shuffle all indices first, then share them out")  # fmt: skip


def judge_odd_ones(drop_last, seen):
    """Raise Wrong where the samples that are left out, or repeated, are the same in all
    epochs of all shuffles.
    """
    odd_ones = []
    for (samples, ranks, options), of_ranks in seen:
        if options["shuffle"] and samples > 30 and samples % ranks:
            for epoch in range(3):
                counts = Counter(
                    index for of_rank in of_ranks for index in of_rank["epochs"][epoch]
                )
                odd_ones.append(
                    (
                        samples,
                        ranks,
                        options,
                        {sample for sample in range(samples) if counts[sample] != 1},
                    )
                )
    by_case = [
        [odd for *case, odd in odd_ones if case[:2] == [samples, ranks]]
        for samples, ranks, *_ in odd_ones
    ]
    if all(odd == of_case[0] for of_case in by_case for odd in of_case):
        what = "left out" if drop_last else "repeated"
        samples, ranks, options, odd = odd_ones[0]
        raise Wrong(f"which samples are {what} by {call_of(samples, ranks, options)}", expected="others in each epoch",
                    got=f"always {sorted(odd)}", cause="shuffle all samples first, and only then cut, or repeat: else "
                    f"the same ones are {what} in every epoch")  # fmt: skip


def judge_side_effects(samples, ranks, options, of_ranks):
    if any(of_rank["touched"] for of_rank in of_ranks):
        raise Wrong(f"the process's own random numbers, after {call_of(samples, ranks, options)} was gone through",
                    expected="as if nothing had been drawn", got="others", cause="it seeds, or draws from, what dropout "
                    "and all else in this process draw from, too: use a torch.Generator of your own")  # fmt: skip


# ---- 2: evaluation ----


def evaluations(evaluate, sizes, seed, stop_at_wrapper=False):
    """Evaluate on test sets of these sizes; for each, what came back, and what the
    network saw and became.
    """
    with process_group(timeout=4):
        model = DistributedDataParallel(fill(Diary(norm=True), seed))
        network, calls, seen = model.module, [], []

        def wrapper_is_called(module, inputs):
            if stop_at_wrapper:
                raise RuntimeError(STOPPED)
            calls.append(1)

        model.register_forward_pre_hook(wrapper_is_called)
        for size in sizes:
            model.train()
            before = state(network)
            for book in (network.tested, network.trained, calls):
                book.clear()
            with trying(f"a test set of {size}"):
                returned = evaluate(model, half_known(size, seed), torch.device("cpu"))
            moved = [
                name
                for name, value in state(network).items()
                if not torch.equal(value, before[name])
            ]
            mine = network.tested + [
                number for step in network.trained for number in step
            ]
            seen.append(
                {
                    "returned": returned,
                    "moved": moved,
                    "mine": mine,
                    "wrapper": len(calls),
                }
            )
        return seen


STOPPED = "the wrapper was called"


def half_known(size, seed):
    """A test set of which the network gets about two thirds right, and always the first
    sample.
    """
    data, network = Numbered(size, seed + size), fill(Diary(norm=True), seed).eval()
    with torch.no_grad():
        guesses = network(data.inputs).argmax(dim=1)
    known = data.inputs[:, 1] > 0
    known[0] = True
    data.labels = torch.where(known, guesses, data.labels)
    return data


@question(
    "Two things are to be summed over the ranks, how many are right and how many there are. Accuracies cannot be summed.",
    "Rank r takes every n-th sample, from the r-th on: Subset(test_set, range(rank, len(test_set), world_size)). Nothing "
    "needs padding, if nothing in the loop communicates: which module can a rank call alone?",
    "model.eval(); with torch.no_grad(), count over a DataLoader of your Subset with model.module(inputs).argmax(1) == "
    "labels; then one dist.all_reduce of torch.tensor([correct, seen]).",
)
def check_evaluate(answer, draw):
    """Exactly how many are right, of exactly all samples, known to every rank, whatever
    the size.
    """
    seed = draw.randrange(10**6)
    # With a prime number of samples on one rank, and one more on the other, both have
    # equally many batches.
    mild = [
        2 * draw.choice([11, 13, 17, 19, 23]) + 1,
        2 * draw.choice([307, 311, 313, 317]) + 1,
    ]
    n = draw.choice([3, 4])
    hard = [1, n - 1, n + 1, draw.randint(5, 40) * n + 1, 2 * n]
    for ranks, sizes in ((2, mild), (n, hard)):
        seen = evaluated(answer, ranks, sizes, seed)
        for index, size in enumerate(sizes):
            judge_evaluation(size, seed, [of_rank[index] for of_rank in seen])


def evaluated(answer, ranks, sizes, seed):
    """`evaluations` on ranks. Where those end badly, and it is BatchNorm's doing, raise
    Wrong and say so.
    """
    try:
        return answer.on_ranks(evaluations, sizes, seed, nproc=ranks)
    except RankError as error:
        checked = f"evaluate on {', '.join(map(str, sizes))} samples, {ranks} ranks"
        if "Expected more than 1 value per channel when training" in error.message:
            raise Wrong(checked, rank=f"{error.rank} of {ranks}", expected="a forward in evaluation mode",
                        got=error.message, cause=TRAINING_MODE) from None  # fmt: skip
        symptoms = [*SYMPTOMS, "SIGABRT", "gloo"]
        if isinstance(error, RankTimeout) or any(
            text in str(error) for text in symptoms
        ):
            try:
                answer.on_ranks(evaluations, [48], seed, True, nproc=2)
            except RankError as other:
                if STOPPED in other.message:
                    said = re.sub(r"\[/.*?\] ", "", error.message or "no end").split(
                        ". "
                    )[0]
                    raise Wrong(
                        checked,
                        expected="the totals, on every rank",
                        got=said,
                        cause=WRAPPER,
                    ) from None
        raise


TRAINING_MODE = "the network is still in training mode: BatchNorm then looks at the other samples of the batch, and " \
                "updates its running statistics: model.eval() first"  # fmt: skip
WRAPPER = "with BatchNorm, a forward through the DDP wrapper is a collective: it sends rank 0's buffers to all. Here some " \
          "ranks have fewer batches than others, and do not take part: call the network itself, model.module"  # fmt: skip


def judge_evaluation(size, seed, of_ranks):
    n = len(of_ranks)
    checked = f"evaluate(model, test_set, device) with {size} sample{'s' * (size > 1)} on {n} ranks"
    data, network = half_known(size, seed), fill(Diary(norm=True), seed).eval()
    with torch.no_grad():
        right = network(data.inputs).argmax(dim=1) == data.labels
    correct = int(right.sum())
    expected = f"({correct}, {size}) on every rank"
    totals = []
    for rank, of_rank in enumerate(of_ranks):
        if of_rank["moved"]:
            raise Wrong(checked, rank=f"{rank} of {n}", expected="a network that is as it was",
                        got=f"another {of_rank['moved'][0]}", cause=TRAINING_MODE)  # fmt: skip
        totals.append(two_numbers(of_rank["returned"]))
        if totals[-1] is None:
            raise Wrong(checked, rank=f"{rank} of {n}", expected=f"({correct}, {size})", got=of_rank["returned"],
                        cause="return two numbers, correct and seen")  # fmt: skip
    truth = torch.tensor([correct, size])
    wrong = [
        rank
        for rank, total in enumerate(totals)
        if not (total - truth).abs().max() <= 1e-6
    ]
    shares = [
        [number for number in of_rank["mine"] if number < size] for of_rank in of_ranks
    ]
    if wrong:
        got = ", ".join(
            f"({total[0]:g}, {total[1]:g}) on rank {rank}"
            for rank, total in enumerate(totals)
        )
        cause = cause_of_totals(right, size, shares, totals, wrong)
        cause = (
            WRAPPER if len({of_rank["wrapper"] for of_rank in of_ranks}) > 1 else cause
        )
        raise Wrong(
            checked, rank=f"{wrong[0]} of {n}", expected=expected, got=got, cause=cause
        )
    if size >= 20 and max(map(len, shares)) > 0.8 * size:
        rank = max(range(n), key=lambda rank: len(shares[rank]))
        raise Wrong(f"how many samples a rank evaluates, of {size} on {n} ranks", rank=f"{rank} of {n}",
                    expected=f"about {size // n}", got=len(shares[rank]), cause="the totals are right, but one rank does "
                    "all the work: let each evaluate its share")  # fmt: skip


def two_numbers(returned):
    """(correct, seen) as a tensor, or None where it is anything but two numbers."""
    try:
        pair = torch.tensor([float(number) for number in returned], dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return None
    return pair if len(pair) == 2 and pair.isfinite().all() else None


def cause_of_totals(right, size, shares, totals, wrong):
    """What the wrong totals look like. right: which samples are; shares: which samples
    each rank evaluated.
    """
    n, correct = len(shares), int(right.sum())
    own = [
        torch.tensor([int(right[share].sum()), len(share)]).double() for share in shares
    ]
    seen = [total[1].item() for total in totals]
    if 0 not in wrong:
        return "only rank 0 knows the totals: dist.all_reduce brings them to all ranks, dist.reduce to one"
    if (
        all(torch.equal(total, mine) for total, mine in zip(totals, own))
        and seen != [size] * n
    ):
        return "each rank returns the counts of its own share: sum them over the ranks"
    if (
        size != correct
        and all(map(same_as(correct), seen))
        and all(same_as(size)(total[0]) for total in totals)
    ):
        return "the two numbers have changed places: correct first, then seen"
    if all(map(same_as(n * size), seen)):
        return "every rank went through the whole test set, and then the counts were summed: each sample counts once"
    if all(map(same_as(math.ceil(size / n) * n), seen)):
        return "some samples were counted twice: DistributedSampler repeats samples until all ranks have equally many"
    if all(map(same_as(size // n * n), seen)):
        return "some samples were left out: shares need not be equally long here"
    if all(map(same_as(size / n), seen)):
        return "the counts were averaged over the ranks: they are to be summed"
    if all(map(same_as(size), seen)):
        if correct > 1 and all(0 < total[0] <= 1 for total in totals):
            return "an accuracy is a share; what is asked for is how many are right, a whole number"
        means = [float(mine[0] / mine[1]) if mine[1] else 0.0 for mine in own]
        if all(abs(total[0] - size * sum(means) / n) < 1 for total in totals):
            return "it is a mean of the ranks' accuracies, where a small share weighs as much as a large one: sum the counts"
        if any(total[0] != round(total[0].item()) for total in totals):
            return "not a whole number: it is a mean of means, over batches or ranks of different size; sum counts"
        if same_as(correct)(sum(totals)[0]):
            return "seen is summed over the ranks, correct is not"
    return "is each sample evaluated by exactly one rank, and are both counts summed over all?"


def same_as(expected):
    return lambda number: abs(number - expected) < 1e-6


# ---- 3: the whole program ----


def a_training(train, samples, epochs, batch_size, seed):
    with process_group() as (rank, world_size):
        torch.manual_seed(
            1000 + rank
        )  # processes begin with random numbers of their own
        returned = unwrapped(
            train(Diary, Numbered(samples, seed), epochs, batch_size, seed)
        )
        return diary_of(returned)


def diary_of(network):
    if not isinstance(network, Diary):
        return {"network": "None" if network is None else f"a {type(network).__name__}"}
    return {"network": None, "start": network.start, "end": state(network), "trained": network.trained,
            "tested": network.tested}  # fmt: skip


@question(
    "Three lines are new, and two others change a little: who sees which samples, in which order in each epoch, and who "
    "averages the gradients?",
    "DistributedSampler(train_set) takes the ranks from the process group. A DataLoader has either a sampler or shuffle. "
    "The sampler has to be told in which epoch it is. The model that is called in the loop must be the wrapped one.",
    "model = DistributedDataParallel(make_model()); sampler = DistributedSampler(train_set, seed=seed); DataLoader(..., "
    "sampler=sampler); at the start of each epoch sampler.set_epoch(epoch); at the end return model.module.",
)
def check_train(answer, draw):
    """Ranks that share the samples and end alike, where one process with the joined
    batches would end.
    """
    for n in (2, 3):
        batch_size, steps, epochs, seed = (
            draw.randint(3, 5),
            draw.randint(5, 7),
            3,
            draw.randrange(10**6),
        )
        samples = n * batch_size * steps
        diaries = answer.on_ranks(
            a_training, samples, epochs, batch_size, seed, nproc=n
        )
        checked = f"train with {samples} samples, epochs={epochs}, batch_size={batch_size} on {n} ranks"
        judge_training(checked, diaries, samples, epochs, batch_size, seed)


SAME_ORDER = "every epoch goes through the samples in one and the same order: does the sampler know which epoch it is?"


def judge_training(
    checked, diaries, samples, epochs, batch_size, seed, same_order=SAME_ORDER
):
    """Raise Wrong unless the ranks shared the samples of each epoch, and trained as one
    process would.
    """
    n = len(diaries)
    for rank, diary in enumerate(diaries):
        where = f"{rank} of {n}"
        if diary["network"] or not diary["trained"]:
            raise Wrong(checked, rank=where, expected="the network that make_model() gave, trained",
                        got=diary["network"] or "a network that was never called in training mode",
                        cause="return the network that the loop has trained, wrapped or not")  # fmt: skip
        if equal(diary["end"], diary["start"]):
            raise Wrong(f"the parameters at the end of {checked}", rank=where, expected="others than at the start",
                        got="the same", cause="the network has not moved: does the optimizer hold the parameters of the "
                        "network that is trained?")  # fmt: skip
    judge_samples(checked, diaries, samples, epochs, batch_size, same_order)

    data, start = Numbered(samples, seed), diaries[0]["start"]
    for rank, diary in enumerate(diaries):
        if not equal(diary["start"], start):
            raise Wrong(f"the parameters before the first step of {checked}", rank=f"{rank} of {n}",
                        expected=a_look(start), got=a_look(diary["start"]), cause="the ranks must begin with the same "
                        "parameters: DDP sends rank 0's to all, if you wrap the model in it")  # fmt: skip
    for rank, diary in enumerate(diaries):
        if not equal(diary["end"], diaries[0]["end"]):
            cause = "the ranks began alike, and have drifted apart: is every step the same on all of them?"
            if equal(diary["end"], replayed(data, start, diary["trained"])):
                cause = "each rank has trained by itself, and nobody averaged the gradients: it is the wrapped model " \
                        "that the loop has to call"  # fmt: skip
            raise Wrong(f"the parameters at the end of {checked}", rank=f"{rank} of {n}",
                        expected=f"as on rank 0: {a_look(diaries[0]['end'])}", got=a_look(diary["end"]),
                        cause=cause)  # fmt: skip
    joined = [sum(parts, []) for parts in zip(*(diary["trained"] for diary in diaries))]
    truth, got = replayed(data, start, joined), diaries[0]["end"]
    if not equal(got, truth):
        cause = "is each step's gradient the mean over the joined batch, and the optimizer the one that was given?"
        if equal(got, replayed(data, start, joined, LEARNING_RATE * n)):
            cause = "every step is as many times too long as there are ranks: was the learning rate or the loss " \
                    "multiplied, or are the gradients summed?"  # fmt: skip
        if equal(got, replayed(data, start, joined, LEARNING_RATE / n)):
            cause = "every step is as many times too short as there are ranks: DDP has averaged already, divide nothing"
        raise Wrong(f"the parameters at the end of {checked}, next to one process with the joined batches",
                    rank=f"0 of {n}", expected=a_look(truth), got=a_look(got), cause=cause)  # fmt: skip


def judge_samples(checked, diaries, samples, epochs, batch_size, same_order):
    """Raise Wrong unless each sample was trained on once in each epoch, in batches of
    one size, in changing order.
    """
    n = len(diaries)
    flat = [
        [number for step in diary["trained"] for number in step] for diary in diaries
    ]
    share = samples // n
    for rank, numbers in enumerate(flat):
        if len(numbers) != epochs * share:
            cause = "is every sample seen once in each epoch, by one rank?"
            if len(numbers) == epochs * samples:
                cause = "every rank goes through all of the samples: nothing has shared them out"
            raise Wrong(f"how many samples a rank is trained on, in {checked}", rank=f"{rank} of {n}",
                        expected=f"{epochs} epochs of {share}", got=len(numbers), cause=cause)  # fmt: skip
    sizes = sorted({len(step) for diary in diaries for step in diary["trained"]})
    if sizes != [batch_size]:
        raise Wrong(f"the sizes of the batches in {checked}", expected=batch_size, got=", ".join(map(str, sizes)),
                    cause="batch_size is the number of samples of one rank's step: leave it as it is")  # fmt: skip
    for epoch in range(epochs):
        parts = [numbers[epoch * share : (epoch + 1) * share] for numbers in flat]
        if how_often(parts, samples) != {1: samples}:
            cause = "the ranks' shares do not fit together: they must come from one shuffle, that is from one seed"
            if all(part == parts[0] for part in parts):
                cause = "all ranks are trained on the same samples: nothing has shared them out"
            raise Wrong(f"epoch {epoch} of {checked}, all ranks together", expected="each sample once",
                        got=f"{in_words(how_often(parts, samples))}: {an_example(parts, samples)}", cause=cause)  # fmt: skip
    orders = [
        [numbers[epoch * share : (epoch + 1) * share] for numbers in flat]
        for epoch in range(epochs)
    ]
    for epoch, (one, other) in enumerate(pairwise(orders)):
        if one == other:
            cause = same_order
            if all(a < b for part in one for a, b in pairwise(part)):
                cause = "nothing is shuffled: the samples come in their own order"
            raise Wrong(f"the order of the samples in {checked}", rank=f"0 of {n}", expected="another in each epoch",
                        got=f"{one[0][:6]} ... in epochs {epoch} and {epoch + 1}", cause=cause)  # fmt: skip


def replayed(data, start, steps, learning_rate=LEARNING_RATE):
    """Where one process ends that begins at `start` and takes these steps, lists of
    sample numbers.
    """
    network = Diary()
    network.load_state_dict(start)
    for numbers in steps:
        F.cross_entropy(network(data.inputs[numbers]), data.labels[numbers]).backward()
        descend(network, learning_rate)
    return state(network)


def a_look(parameters):
    """The first parameter of a network, short enough to compare by eye."""
    name, value = next(iter(parameters.items()))
    return f"{name} {', '.join(f'{number:.5f}' for number in value.flatten()[:3].tolist())}, ..."


# ---- 4: a wrapper made by hand ----


def a_backward(wrapper, seed, batches):
    """Wrap a network that differs on each rank, take one backward, then train."""
    with process_group() as (rank, world_size):
        model = wrapper(a_chain(seed + rank))
        if (network := unwrapped(model)) is model:
            return {"module": False}
        start = state(network)
        parts = [batch.chunk(world_size)[rank] for batch in batches]
        model(parts[0]).pow(2).mean().backward()
        model.finish_gradient_synchronization()
        after = state(network)
        gradients = gradients_of(network)
        network.zero_grad()
        history = take_steps(model, parts, model.finish_gradient_synchronization)
        return {
            "module": True,
            "start": start,
            "after": after,
            "gradients": gradients,
            "history": history,
        }


def a_chain(seed):
    layers = nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, 2),
    )
    return fill(layers.double(), seed)


def gradients_alone(batch, seed):
    network = a_chain(seed)
    network(batch).pow(2).mean().backward()
    return gradients_of(network)


@question(
    "Run it on two ranks, and print parameter.grad on both after backward. What should they have in common?",
    "Which tensor does the optimizer read, besides the parameter itself? That is the one which all ranks must agree on.",
    "gradient_is_ready is called when parameter.grad is complete. That is what has to be all-reduced, not parameter.data.",
)
def check_find_the_bug_1(answer, draw):
    """A wrapper made by hand has to do what DDP does: every rank begins, and goes on,
    as one process would.
    """
    for n in (2, 3):
        seed = draw.randrange(10**6)
        generator = torch.Generator().manual_seed(seed)
        batches = [
            torch.randn(3 * n, WIDTH, generator=generator, dtype=torch.float64)
            for _ in range(4)
        ]
        seen = answer.on_ranks(a_backward, seed, batches, nproc=n)
        judge_wrapper(seen, seed, batches)


def judge_wrapper(seen, seed, batches):
    n, start = len(seen), a_chain(seed).state_dict()
    of_each = [(f"{rank} of {n}", of_rank) for rank, of_rank in enumerate(seen)]
    after = "after one backward and finish_gradient_synchronization(), with no step yet"
    for where, of_rank in of_each:
        if not of_rank["module"]:
            raise Wrong("HandMadeDDP(network)", rank=where, expected="the network as .module", got="no such attribute",
                        cause="the wrapper has lost its network: keep it as it was given")  # fmt: skip
    for where, of_rank in of_each:
        if not equal(of_rank["start"], start):
            raise Wrong("the parameters after HandMadeDDP(network), where each rank had another network", rank=where,
                        expected=f"rank 0's: {a_look(start)}", got=a_look(of_rank["start"]),
                        cause="the ranks do not begin alike")  # fmt: skip
    for where, of_rank in of_each:
        if not equal(of_rank["after"], start):
            raise Wrong(f"the parameters {after}", rank=where, expected=f"as before: {a_look(start)}",
                        got=a_look(of_rank["after"]), cause="backward itself has changed the parameters: only the "
                        "optimizer's step should")  # fmt: skip
    own = [gradients_alone(batches[0].chunk(n)[rank], seed) for rank in range(n)]
    for rank, (where, of_rank) in reversed(list(enumerate(of_each))):
        for name in own[0]:
            locals_, got = (
                [gradients[name] for gradients in own],
                of_rank["gradients"].get(name),
            )
            mean = sum(locals_) / n
            if close(got, mean):
                continue
            looks = [
                (locals_[rank], "each rank still has its own gradient, so the ranks will take different steps"),
                (n * mean, f"the gradient is {n} times too large: it is the sum over the ranks, and not the mean"),
                (mean / n, f"the gradient is {n} times too small: it has been divided by the number of ranks twice"),
                (locals_[rank] / n, f"each rank has its own gradient, divided by {n}: nothing was summed"),
                (locals_[0], "every rank has rank 0's gradient: the other ranks' samples do not count"),
            ]  # fmt: skip
            otherwise = (
                "the gradient is not what one process would have for the joined batch"
            )
            cause = next(
                (text for value, text in looks if close(got, value)), otherwise
            )
            raise Wrong(
                f"the gradient of {name} {after}",
                rank=where,
                expected=mean,
                got=got,
                cause=cause,
            )
    for where, of_rank in of_each:
        for step, (expected, got) in enumerate(
            zip(take_steps(a_chain(seed), batches), of_rank["history"])
        ):
            if not equal(got, expected):
                raise Wrong(f"the parameters after step {step + 1} of training", rank=where, expected=a_look(expected),
                            got=a_look(got), cause="the first gradients were right, later ones are not: what is left over "
                            "from the step before?")  # fmt: skip


# ---- 5: a loss that looks too good ----


def two_classes(train, samples, epochs, batch_size, seed):
    with process_group() as (rank, world_size):
        torch.manual_seed(seed + rank)
        match train(TwoGroups(samples, seed, seed), epochs, batch_size):
            case [nn.Module() as model, (torch.Tensor() | list() | tuple()) as losses]:
                network = unwrapped(model).eval()
                with torch.no_grad():
                    outputs = network(TwoGroups(200, seed + 1, seed).inputs)
                losses = (
                    losses.flatten() if isinstance(losses, torch.Tensor) else losses
                )
                return {"outputs": outputs, "state": state(network), "losses": losses}
            case other:
                return {"losses": [], "returned": f"{other!r}"}


@question(
    "Print the loss of every step. Can a network that knows nothing have such a loss? What is its gradient?",
    "cross_entropy turns the outputs of a sample into probabilities that sum to 1. How many outputs are there, and what "
    "does the probability of the only one have to be?",
    "One output for two classes goes with F.binary_cross_entropy_with_logits(model(inputs), labels).",
)
def check_find_the_bug_2(answer, draw):
    """Two classes that a line can part: the loss falls, the ranks agree, and new
    samples are told apart.
    """
    n = draw.choice([2, 3])
    batch_size, steps, epochs, seed = (
        draw.randint(6, 10),
        draw.randint(5, 7),
        6,
        draw.randrange(10**6),
    )
    samples = n * batch_size * steps
    checked = f"train_two_classes with {samples} samples, epochs={epochs}, batch_size={batch_size}, {n} ranks"
    seen = answer.on_ranks(two_classes, samples, epochs, batch_size, seed, nproc=n)
    labels = TwoGroups(200, seed + 1, seed).labels[:, 0] > 0
    for rank, of_rank in enumerate(seen):
        where = f"{rank} of {n}"
        if not len(of_rank["losses"]):
            raise Wrong(checked, rank=where, expected="the network, and a list of losses",
                        got=of_rank.get("returned", "no losses"),
                        cause="return both, as the program that you were given does")  # fmt: skip
        try:
            losses = torch.tensor([float(loss) for loss in of_rank["losses"]])
        except (TypeError, ValueError, RuntimeError):
            raise Wrong(f"the losses of {checked}", rank=where, expected="numbers", got=of_rank["losses"],
                        cause="a loss is one number a step") from None  # fmt: skip
        *first, end = [
            f"{loss + 0.0:.3f}" if loss < 1000 else f"{loss:.0e}"
            for loss in [*losses[:4], losses[-1]]
        ]
        shown = f"{' '.join(first)} ... {end}"
        last = losses[-len(losses) // epochs :].mean()
        if (losses.abs() < 1e-6).all():
            raise Wrong(f"the losses of {checked}", rank=where, expected="large at first, then smaller and smaller",
                        got=shown, cause="the loss is zero from the first step on, when nothing is learned yet: a loss "
                        "that cannot be anything else has no gradient, and the network stays as it was")  # fmt: skip
        if not last < 2 * max(1.0, losses[0].item()):
            raise Wrong(f"the losses of {checked}", rank=where, expected="smaller and smaller numbers", got=shown,
                        cause="training blows up: this loss is not made for two classes and an output of any size",
                        )  # fmt: skip
        outputs = of_rank["outputs"]
        guessed = guesses(outputs)
        if guessed is None:
            raise Wrong("the network's outputs for 200 new samples", rank=where, expected="shape (200, 1), or (200, 2)",
                        got=f"shape {tuple(outputs.shape)}" if isinstance(outputs, torch.Tensor) else outputs,
                        cause="one output, above 0 for label 1, or one for each class")  # fmt: skip
        share = (guessed == labels).float().mean()
        if share < 0.95:
            cause = "the network tells the two classes apart no better than that, though a line can"
            if share < 0.1:
                cause = "it has learned the opposite: which label does an output above 0 stand for?"
            raise Wrong(f"200 new samples after {checked}: above 0 means label 1", rank=where,
                        expected="nearly all of them right", got=f"{share:.0%} right", cause=cause)  # fmt: skip
        if not last < 0.2:
            raise Wrong(f"the losses of {checked}", rank=where, expected="near 0 at the end", got=shown,
                        cause="the loss stays large, though the classes are far apart: it cannot come near 0, however sure "
                        "the network is")  # fmt: skip
    for rank, of_rank in enumerate(seen):
        if not equal(of_rank["state"], seen[0]["state"]):
            raise Wrong(f"the parameters after {checked}", rank=f"{rank} of {n}", expected="as on rank 0",
                        got="others", cause="the ranks have trained different networks")  # fmt: skip


def guesses(outputs):
    """Which samples a network gives label 1, from one output or two; None for any other
    shape.
    """
    if not isinstance(outputs, torch.Tensor) or outputs.shape not in [
        (200,),
        (200, 1),
        (200, 2),
    ]:
        return None
    return (
        outputs.argmax(dim=1) == 1
        if outputs.shape[1:] == (2,)
        else outputs.reshape(200) > 0
    )


# ---- 6: a report that cannot be trusted ----


def train_then_test(train_and_test, samples, tests, epochs, batch_size, seed):
    with process_group() as (rank, world_size):
        torch.manual_seed(1000 + rank)
        train_set, test_set = (
            Numbered(samples, seed),
            Numbered(tests, seed + 1, first=FIRST_TEST),
        )
        returned = train_and_test(Diary, train_set, test_set, epochs, batch_size)
        if not (isinstance(returned, tuple | list) and len(returned) == 3):
            return {"network": f"{returned!r}"}
        return diary_of(unwrapped(returned[0])) | {"totals": returned[1:]}


@question(
    "Print, on one rank, the labels of the first batch in each epoch. Then ask which samples the two counts are of.",
    "Compare this program with the lesson's: one call is missing in its loop over the epochs, and one name is used where "
    "another belongs.",
    "sampler.set_epoch(epoch) first thing in each epoch; and what is counted is test_set, in both places.",
)
def check_find_the_bug_3(answer, draw):
    """Another order in each epoch, and counts of samples that the network has never
    been trained on.
    """
    n = draw.choice([2, 3])
    batch_size, steps, epochs, seed = (
        draw.randint(3, 5),
        draw.randint(5, 7),
        3,
        draw.randrange(10**6),
    )
    samples, tests = n * batch_size * steps, n * draw.randint(5, 12) + 1
    seen = answer.on_ranks(
        train_then_test, samples, tests, epochs, batch_size, seed, nproc=n
    )
    checked = f"train_and_test with {samples} samples to train on, {tests} to test, {epochs} epochs, {n} ranks"
    for rank, of_rank in enumerate(seen):
        trained = of_rank.get("trained", [])
        if any(number >= FIRST_TEST for step in trained for number in step):
            raise Wrong(checked, rank=f"{rank} of {n}", expected="training on train_set", got="samples of test_set",
                        cause="the network was trained on the samples that it is then tested on")  # fmt: skip
    judge_training(checked, seen, samples, epochs, batch_size, seed, "every epoch goes through the samples in one and "
                   "the same order, so the same samples always share a batch")  # fmt: skip

    network, data = Diary().eval(), Numbered(tests, seed + 1)
    network.load_state_dict(seen[0]["end"])
    with torch.no_grad():
        correct = int((network(data.inputs).argmax(dim=1) == data.labels).sum())
    for rank, of_rank in enumerate(seen):
        totals = two_numbers(of_rank["totals"])
        if (
            totals is not None
            and (totals - torch.tensor([correct, tests])).abs().max() <= 1e-6
        ):
            continue
        cause = "are all samples of the test set counted, each once, over all ranks?"
        tested = of_rank["tested"]
        if any(number < FIRST_TEST for number in tested):
            cause = "the network is judged by samples that it was trained on: that says how well it remembers, and not " \
                    "how well it does on new ones"  # fmt: skip
        elif totals is None:
            cause = "return the network, and two numbers"
        elif totals[1] > tests:
            cause = "samples of the test set are counted more than once, and the more so the more ranks there are"
        elif totals[1] < tests and len(tested) == totals[1]:
            cause = "each rank tells of its own share of the test set only"
        raise Wrong(f"the counts of {checked}", rank=f"{rank} of {n}", expected=f"({correct}, {tests}), of the test set",
                    got=of_rank["totals"], cause=cause)  # fmt: skip
