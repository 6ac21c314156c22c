"""Question 3: the rest of an epoch."""

import torch
from torch.utils.data import DistributedSampler

from ddp_course.checks.claims import Claim, hold, on_every_rank
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question


def rests(rest_of_epoch, cases):
    """What the answer returns on each rank, for each case; and whether torch's global
    generator is where it was.
    """
    torch.rand(5)  # so that its seed alone does not bring its state back
    before, seen = torch.get_rng_state(), []
    for case in cases:
        with trying(str(case)):
            seen.append([[int(index) for index in rest_of_epoch(rank=rank, **case)] for rank in range(case["ranks"])])
    return seen, bool(torch.equal(before, torch.get_rng_state()))


def order_of(length, seed, epoch):
    """The order of an epoch, from a DistributedSampler for one rank."""
    sampler = DistributedSampler(range(length), 1, 0, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


@question(
    "All ranks follow one order, and each takes every n-th place. So the samples that were seen are the beginning "
    "of that order. How long is it?",
    "Each of the old ranks has done batches_done batches of batch_size, so old_ranks * batches_done * batch_size "
    "places are done. Divide the remaining places among the current ranks.",
    "order = torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch)).tolist(); "
    "rest = order[old_ranks * batches_done * batch_size :]; return rest[rank::ranks].",
)
def check_rest_of_epoch(answer, draw):
    """No sample may be seen twice or left out, in the epoch's own order, even if the
    number of ranks changes.
    """
    cases = cases_of_epochs(draw)
    [(seen, generator_stayed)] = answer.on_ranks(rests, cases)
    for case, of_ranks in zip(cases, seen):
        on_every_rank(claims_about(**case), of_ranks)
    stayed = Claim(
        "the state of torch's global random generator", generator_stayed, True,
        "dropout draws from torch's global generator: leave it alone, and draw from a torch.Generator of your own",
        told="as it was before the call", shown="another one",
    )  # fmt: skip
    hold([stayed])


def cases_of_epochs(draw):
    """Interrupted epochs, with lengths that neither the old ranks nor the new ones divide;
    one that has just begun; one that all of them divide; one whose rest is too short for
    all ranks; and one that the padding has filled up. Where other ranks go on, they do not
    divide what is done either: the rest does not begin at a place of rank 0 by chance.
    """
    cases = []
    for old_ranks, ranks in [(2, 2), (3, 2), (2, 3), (1, 4), (3, 1)]:
        done = [(size, batches) for size in (3, 4, 5) for batches in (2, 3)]
        if ranks > 1 and ranks != old_ranks:
            done = [(size, batches) for size, batches in done if old_ranks * size * batches % ranks]
        batch_size, batches = draw.choice(done)
        length = old_ranks * batch_size * (batches + 2) + draw.randrange(4, 9)
        while any(length % n == 0 for n in (old_ranks, ranks) if n > 1):
            length += 1
        case = {"length": length, "seed": draw.randrange(1, 1000)}
        case |= {"epoch": draw.randrange(1, 9), "batches_done": batches}
        case |= {"batch_size": batch_size, "old_ranks": old_ranks, "ranks": ranks}
        cases.append(case)
    cases.append(cases[0] | {"batches_done": 0, "epoch": 0})
    cases.append(cases[1] | {"length": cases[1]["batch_size"] * 6 * draw.randint(2, 4), "batches_done": 1})
    cases.append(cases[3] | {"length": cases[3]["batches_done"] * cases[3]["batch_size"] + 2})
    filled_up = cases[1]["old_ranks"] * cases[1]["batch_size"] * 3 - 2
    cases.append(cases[1] | {"length": filled_up, "batches_done": 3})
    return cases


# ---- what is claimed ----


def claims_about(length, seed, epoch, batches_done, batch_size, old_ranks, ranks):
    """That each rank has its part of the rest, in order."""
    order, first = order_of(length, seed, epoch), order_of(length, seed, 0)
    places = batches_done * batch_size  # of each old rank
    skipped = old_ranks * places
    padded = order + order[: -length % old_ranks]
    checked = f"{length} samples, epoch {epoch}, of which {old_ranks} ranks have done {batches_done} batches of "
    checked += f"{batch_size}; now there are {ranks} ranks"

    def claims(rank, of_ranks):
        got, expected = of_ranks[rank], order[skipped:][rank::ranks]
        mistakes = [
            (order[rank::ranks], "that is the whole epoch from its beginning: leave out the samples that have been seen"),
            (order[rank::ranks][places:], "the samples that have been seen depend on the old number of ranks, not on the "
             "current one"),
            (order[places * ranks :][rank::ranks], "the samples that have been seen depend on old_ranks, not on ranks"),
            (padded[skipped:][rank::ranks], "the padding is in it: DistributedSampler fills up its order with samples from "
             "the beginning, and those have been seen"),
            (order[places:][rank::ranks], "each of the old ranks has done this many places, not all of them together"),
            (order[old_ranks * batches_done :][rank::ranks], "batches_done counts batches, not samples"),
            (order[skipped:], "that is the rest for all ranks: each rank must take its own part of it"),
            (first[skipped:][rank::ranks], "every epoch has the order of epoch 0: the shuffle's seed must be seed + epoch"),
            (list(range(length))[skipped:][rank::ranks], "the samples are in the data set's order, not shuffled"),
        ]  # fmt: skip
        yield Claim(
            checked, got, expected, cause_of_rest(of_ranks, order, skipped), mistakes,
            told=expected or "nothing: all samples have been seen", shown=got or "nothing",
        )  # fmt: skip

    return claims


def cause_of_rest(of_ranks, order, skipped):
    """What is wrong with the ranks' shares of the rest, taken together."""
    everybody = sorted(index for of_rank in of_ranks for index in of_rank)
    rest = sorted(order[skipped:])
    if everybody == rest:
        return "no sample is missing or repeated, but the order is wrong: place p of the rest belongs to rank p % ranks"
    if len(everybody) > len(set(everybody)):
        return "some samples come twice: divide the rest without padding; the ranks' shares may differ by one"
    if set(everybody) & set(order[:skipped]):
        return "some samples that have been seen come again"
    if set(everybody) < set(rest):
        return "some samples are left out that no rank has seen"
    return "do you use DistributedSampler's order, torch.randperm with a generator of seed + epoch?"
