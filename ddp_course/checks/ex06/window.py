"""Question 3: one update on weighted items, clipped."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_course.checks.claims import Claim, OneOf, agree, on_every_rank
from ddp_course.checks.ex06.watching import changed, copies_of, follow, joined, one_by_one, only, unchanged
from ddp_course.checks.training import fill
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import SYMPTOMS, RankError, RankTimeout

FEATURES, CLASSES, LEARNING_RATE, MOMENTUM = 4, 3, 0.1, 0.5
NOTHING = 2  # the place of the update in which no item of any rank has a weight
LIGHT = 3  # the place of the update in which all weights together are less than 1

# ---- the updates ----


def items_of_windows(draw, n):
    """How many items have a weight in each of five windows: per rank, per micro-batch."""
    lengths = [draw.choice([5, 6]), 3, 2, 2, 1]
    items = [[[draw.randint(4, 10) for _ in range(length)] for _ in range(n)] for length in lengths]
    one, other = draw.sample(range(n), 2)
    items[1][one][draw.randrange(2)] = items[1][other][2] = 0
    items[NOTHING] = [[0, 0] for _ in range(n)]
    items[LIGHT][draw.randrange(n)] = [0, 0]
    return items


def a_window(items, seed, light=False):
    """Micro-batches with these numbers of items that have a weight, and a few without."""
    generator, window = torch.Generator().manual_seed(seed), []
    for number in items:
        size = number + int(torch.randint(2, 5, (), generator=generator))
        inputs = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
        labels = torch.randint(CLASSES, (size,), generator=generator)
        weights = torch.rand(size, generator=generator, dtype=torch.float64) * 3 + 0.2
        weights[torch.randperm(size, generator=generator)[number:]] = 0
        weights *= 0.004 if light else 1
        window.append((inputs, labels, weights))
    return window


def windows_of(rank, items, seed):
    return [a_window(of_ranks[rank], seed + 10 * place + rank, place == LIGHT) for place, of_ranks in enumerate(items)]


def a_classifier(seed):
    return fill(nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)), seed)


SIZES = [value.numel() for value in a_classifier(0).parameters()]


def gradient_of_sum(network, inputs, labels, weights):
    """The gradient of the sum of weight times loss, for all parameters as one vector."""
    losses = F.cross_entropy(network(inputs), labels, reduction="none")
    return joined(torch.autograd.grad((losses * weights).sum(), list(network.parameters())))


def clipped(gradient, limit):
    """As torch's clip_grad_norm_ does it."""
    return gradient * (limit / (gradient.norm() + 1e-6)).clamp(max=1)


def trajectory(draw, items, seed):
    """What one process does that has all items: per window, the gradients of the sums (per
    rank, per micro-batch), the sums of the weights, the mean gradient, the limit of its
    norm, the parameters and the momentum before.
    """
    network, momentum, updates = a_classifier(seed), 0, []
    parts = [windows_of(rank, items, seed) for rank in range(len(items[0]))]
    for place in range(len(items)):
        windows = [of_rank[place] for of_rank in parts]
        own = [[gradient_of_sum(network, *batch) for batch in window] for window in windows]
        plain = [
            [gradient_of_sum(network, x, labels, (weights > 0).double()) for x, labels, weights in window]
            for window in windows
        ]  # fmt: skip
        weights = [[float(batch[2].sum()) for batch in window] for window in windows]
        counts = [[int((batch[2] > 0).sum()) for batch in window] for window in windows]
        total = sum(map(sum, weights))
        mean = sum(map(sum, own)) / max(total, 1e-9)
        factor = draw.choice([0.1, 0.14]) if place in (1, 4) else 2.5
        limit = float(mean.norm()) * factor or 1.0
        before = joined(network.parameters())
        update = {"own": own, "weights": weights, "plain": plain, "counts": counts, "mean": mean}
        update |= {"limit": limit, "before": before, "momentum": momentum}
        if total:
            momentum = MOMENTUM * momentum + clipped(mean, limit)
            after = before - LEARNING_RATE * momentum
            nn.utils.vector_to_parameters(after, network.parameters())
        updates.append(update | {"steps": int(total > 0)})
    return updates


# ---- what the ranks do ----


def steps_of_windows(window_step, items, limits, seed, stop_at_gap=False):
    """Train on the windows in order; return for each the parameters after it and what
    happened in it.
    """
    with process_group(timeout=4) as (rank, _):
        model = DistributedDataParallel(a_classifier(seed))
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        events, steps, seen = follow(model), [], []
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        for number, window in enumerate(windows_of(rank, items, seed), 1):
            events.clear()
            steps.clear()
            before = copies_of(window)
            with trying(f"update {number}, of {len(window)} micro-batches"):
                window_step(model, window, optimizer, limits[number - 1])
            backwards = len(only("backward", events))
            if stop_at_gap and number - 1 != NOTHING and backwards < len(window):
                raise RuntimeError(f"{GAP}: {backwards} for {len(window)} in update {number}")
            seen.append(
                {
                    "end": joined(model.parameters()),
                    "steps": len(steps),
                    "events": list(events),
                    "changed": changed(window, before, model),
                }
            )
        return seen


GAP = "fewer backwards than micro-batches"


def stepped(answer, items, updates, seed, n):
    """`steps_of_windows` on n ranks. If they wait for a rank that left something out,
    name that cause.
    """
    limits = [update["limit"] for update in updates]
    try:
        return answer.on_ranks(steps_of_windows, items, limits, seed, nproc=n)
    except RankError as error:
        symptoms = [*SYMPTOMS, "SIGABRT", "gloo"]
        if isinstance(error, RankTimeout) or any(text in str(error) for text in symptoms):
            try:
                answer.on_ranks(steps_of_windows, items, limits, seed, True, nproc=n)
            except RankError as other:
                if GAP in other.message:
                    cause = "a micro-batch without weights was left out, so the other ranks wait in its "
                    cause += "backward: it adds only zeros, but it must take part"
                    raise Wrong(f"window_step with {len(items)} updates in a row, {n} ranks", cause=cause,
                                rank=f"{other.rank} of {n}", expected="a backward for each micro-batch",
                                got=other.message.removeprefix("RuntimeError: ")) from None  # fmt: skip
        raise


# ---- what is claimed ----


def claims_about(number, updates):
    """For each rank: the step of this update, from 0, is that of one process."""
    update, n = updates[number], len(updates[number]["own"])
    length = len(update["own"][0])
    call = f"update {number + 1}, of {length} micro-batch{'es' * (length > 1)}, {n} ranks"
    earlier = sum(clipped(one["mean"], one["limit"]) for one in updates[:number] if one["steps"])

    def claims(rank, of_ranks):
        seen = of_ranks[rank][number]
        if not update["steps"]:
            yield from no_step(f"{call}, in which all weights are 0", of_ranks[rank][number - 1], seen)
            return
        yield Claim(
            f"{call}: steps of the optimizer", seen["steps"], 1,
            "the step is missing: every rank must call optimizer.step() at the end of the update",
            [(range(2, 100), "the optimizer steps inside the update: let the gradients add up, and step once")],
        )  # fmt: skip
        yield the_step(f"{call}: the gradient of the step, for all parameters", seen, update, rank, earlier)

    return claims


def manners(items, seed):
    """For each rank: it changes nothing else, and keeps one micro-batch at a time."""

    def claims(rank, of_ranks):
        for number, seen in enumerate(of_ranks[rank], 1):
            yield from unchanged(f"update {number}", seen["changed"])
        window = windows_of(rank, items, seed)[0]
        call = f"the calls for the {len(window)} micro-batches of update 1, {len(of_ranks)} ranks"
        yield from one_by_one(call, window, of_ranks[rank][0]["events"])

    return claims


def no_step(call, before, seen):
    yield Claim(
        f"{call}: steps of the optimizer", seen["steps"], 0, "no item of any rank has a weight, so there is no mean and no "
        "step: even with gradients of 0, momentum moves the parameters",
    )  # fmt: skip
    yield Claim(
        f"the parameters after {call}", torch.equal(seen["end"], before["end"]), True, "no item counts, so nothing may "
        "change", told="as before it", shown=seen["end"],
    )  # fmt: skip


def the_step(what, seen, update, rank, earlier):
    """The claim that the optimizer's step was made with the mean gradient, clipped.
    earlier: the sum of these of the updates before.
    """
    expected, got = clipped(update["mean"], update["limit"]), seen["end"]
    if got.shape == expected.shape:
        got = (update["before"] - got) / LEARNING_RATE - MOMENTUM * update["momentum"]
    otherwise = "does it contain weight times loss of each item once, divided by the sum of all weights, and clipped?"
    if got.isnan().any():
        otherwise = "a micro-batch without weights has no mean: 0/0 is nan, and nan times 0 is nan. Its sum is 0"
    return Claim(what, got, expected, otherwise, partial(mistakes, rank, update, earlier), digits=4)


def mistakes(rank, update, earlier):
    """Of clipping, and of the mean, whether it is clipped then or not."""
    limit = update["limit"]
    of_mean = [
        (OneOf([clipped(value, limit) for value in values] + values), cause)
        for values, cause in causes_of_mean(rank, update, earlier)
    ]
    without = clipped(update["mean"], limit) - MOMENTUM * update["momentum"]
    forgotten = (without, "the momentum is gone: the optimizer keeps it from one update to the next")
    return [*mistakes_in_clipping(update), *of_mean, forgotten]


def mistakes_in_clipping(update):
    mean, limit, own = update["mean"], update["limit"], update["own"]
    n, total = len(own), sum(map(sum, update["weights"]))
    scaled = [[gradient * n / total for gradient in of_rank] for of_rank in own]
    finished = clipped(mean, limit)
    one_by_one, parts = 0, [sum(of_ranks) / n for of_ranks in zip(*scaled)]
    for part in parts:
        one_by_one = clipped(one_by_one + part, limit)
    found = [
        (sum(clipped(sum(of_rank), limit) for of_rank in scaled) / n, "each rank has clipped its own gradient: clip "
         "the average, after the last backward"),
        (OneOf([one_by_one, sum(clipped(part, limit) for part in parts)]), "each micro-batch is clipped: clip once, after "
         "the last backward"),
        (OneOf([clipped(mean * total, limit) / total, clipped(mean / n, limit) * n,
                clipped(mean * total / n, limit) * n / total]),
         "it was clipped before it was scaled: max_norm is for the finished gradient"),
        (torch.cat([clipped(part, limit) for part in mean.split(SIZES)]), "each parameter is clipped on its own: "
         "max_norm limits the norm of the whole gradient"),
        (mean.clamp(-limit, limit), "each number is clipped: max_norm limits the norm of the whole gradient"),
        (mean * limit / mean.norm(), "a gradient shorter than max_norm must stay as it is"),
    ]  # fmt: skip
    if not agree(mean, finished):
        found.insert(0, (mean, "it is longer than max_norm: clip it before the step"))
    return found


def causes_of_mean(rank, update, earlier):
    """Likely mistakes in the mean: pairs of the gradients to which they lead, and a cause."""
    own, weights, truth = update["own"], update["weights"], update["mean"]
    plain, counts = update["plain"], update["counts"]
    n, length, total, items = (len(own), len(own[0]), sum(map(sum, weights)), sum(map(sum, counts)))
    sums = [sum(of_rank) for of_rank in own]
    of_micro_batches = [sum(of_ranks) for of_ranks in zip(*own)]
    means = sum(sum(map(mean_of, *of_rank)) for of_rank in zip(own, weights)) / n
    means_of_ranks = sum(map(mean_of, sums, map(sum, weights))) / n
    one_by_one = sum(map(mean_of, of_micro_batches, map(sum, zip(*weights))))
    without = sum(map(sum, plain)) / items
    few = "so an item counts for more in a micro-batch with little weight"
    return [
        ([truth * total] if 0 < total < 1 else [], "the sum of the weights is less than 1 here: divide by it as it is"),
        ([without, without * n, without / n], "the weights are ignored: they only decide which items count at all"),
        ([truth * total / items], "it is divided by the number of items: divide by the sum of their weights"),
        ([truth / n], f"{n} times too small: DDP divides the sum over all ranks by {n}, so multiply the loss by it"),
        ([truth / n**2], f"{n * n} times too small: DDP divides by {n} anyway, so multiply the loss by it"),
        ([truth * n], f"{n} times too large: divide by the weights of all ranks, not by their mean"),
        ([truth / length], f"{length} times too small: the sum of the weights already covers the whole update, so do "
         f"not divide by the {length} micro-batches, too"),
        ([of_micro_batches[-1] / total], "it contains only the last micro-batch: call zero_grad once per update"),
        ([truth + earlier], "it still contains the gradients of earlier updates: call zero_grad"),
        ([means, means / length, means * n / length], f"it is a mean of the micro-batches' means, {few}: use sums, and "
         "divide by the sum of all weights"),
        ([means_of_ranks, means_of_ranks * n], "each rank divides by its own weights, so an item counts for more on a "
         "rank with little weight: sum the weights over the ranks before the first backward"),
        ([one_by_one, one_by_one / length], f"each micro-batch is divided by its own weights, {few}: sum the weights of "
         "the whole update"),
        ([n * sums[rank] / total], "each rank uses its own gradients, which were not averaged: at least the last "
         "micro-batch must go through the DDP model, outside no_sync"),
    ]  # fmt: skip


def mean_of(gradient, weight):
    return gradient / weight if weight else gradient


@question(
    "Sums can be added up, but means cannot: sum weight times loss in each micro-batch, with "
    "F.cross_entropy(..., reduction='none'), and divide it by one number that is the same in all micro-batches of all "
    "ranks. The norm that decides about clipping is that of the finished gradient.",
    "That number is the sum of the weights of the whole update, on all ranks: sum your own, then call dist.all_reduce "
    "once, before the first backward. If it is 0, all ranks know it: return without a step. DDP divides the sum over "
    "the ranks by the number of ranks: undo this division. A rank without weights must take part in everything.",
    "optimizer.zero_grad(); total = sum(weights.sum() for _, _, weights in window); dist.all_reduce(total); if total == "
    "0, return. For each micro-batch: losses = F.cross_entropy(model(inputs), labels, reduction='none'), and ((losses * "
    "weights).sum() * dist.get_world_size() / total).backward(). After the last one, "
    "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm) and optimizer.step().",
)
def check_window_step(answer, draw):
    """After each of several updates, the parameters must be those of one process with all
    items in one batch, also with momentum.
    """
    for n in (2, 3):
        items, seed = items_of_windows(draw, n), draw.randrange(10**6)
        updates = trajectory(draw, items, seed)
        seen = stepped(answer, items, updates, seed, n)
        for number in range(len(updates)):  # a rank that is wrong in one may spoil others in the next
            on_every_rank(claims_about(number, updates), seen)
        on_every_rank(manners(items, seed), seen)
