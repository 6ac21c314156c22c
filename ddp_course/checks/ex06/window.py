"""Question 3: one update on weighted items, clipped."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_course.checks.ex06.watching import (
    agree,
    changed,
    copies_of,
    follow,
    joined,
    judge_changes,
    judge_memory,
    only,
    the_likely,
)
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
    norm, the parameters before and after, and the momentum before.
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
        updates.append(update | {"after": joined(network.parameters()), "steps": int(total > 0)})
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
        judge_updates(stepped(answer, items, updates, seed, n), items, updates, seed)


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


def judge_updates(seen, items, updates, seed):
    n, earlier = len(seen), 0
    for number, update in enumerate(updates):
        length = len(items[number][0])
        checked = f"update {number + 1}, of {length} micro-batch{'es' * (length > 1)}, {n} ranks"
        judge_steps(checked, [of_rank[number] for of_rank in seen], update)
        truth = clipped(update["mean"], update["limit"]) if update["steps"] else None
        for rank, of_rank in reversed(list(enumerate(seen))):
            end, where = of_rank[number]["end"], f"{rank} of {n}"
            if truth is None:
                if not torch.equal(end, of_rank[number - 1]["end"]):
                    raise Wrong(f"the parameters after {checked}, in which all weights are 0", rank=where,
                                expected="as before it", got=end, cause="no item counts, so nothing may change")  # fmt: skip
                continue
            got = (update["before"] - end) / LEARNING_RATE - MOMENTUM * update["momentum"]
            if not agree(got, truth, 1e-4):
                raise Wrong(f"{checked}: the gradient of the step, for all parameters", rank=where,
                            expected=truth, got=got, cause=cause_of_step(got, rank, update, earlier))  # fmt: skip
        earlier = earlier + (0 if truth is None else truth)
    for rank, of_rank in enumerate(seen):
        for number, of_update in enumerate(of_rank, 1):
            judge_changes(f"update {number}", f"{rank} of {n}", of_update["changed"])
        window = [batch[:2] for batch in windows_of(rank, items, seed)[0]]
        checked = f"the calls for the {len(window)} micro-batches of update 1, {n} ranks"
        judge_memory(checked, f"{rank} of {n}", window, of_rank[0]["events"])


def judge_steps(checked, seen, update):
    """Raise Wrong unless each rank took one step, or none if no item has a weight."""
    for rank, of_rank in reversed(list(enumerate(seen))):
        steps, expected = of_rank["steps"], update["steps"]
        if steps == expected:
            continue
        cause = "the step is missing: every rank must call optimizer.step() at the end of the update"
        if steps > 1:
            cause = "the optimizer steps inside the update: let the gradients add up, and step once"
        if not expected:
            checked = f"{checked}, in which all weights are 0"
            cause = (
                "no item of any rank has a weight, so there is no mean and no step: even with gradients of 0, "
                "momentum moves the parameters"
            )  # fmt: skip
        raise Wrong(f"{checked}: steps of the optimizer", rank=f"{rank} of {len(seen)}", expected=expected,
                    got=steps, cause=cause)  # fmt: skip


def cause_of_step(got, rank, update, earlier):
    """The likely cause of a wrong step. earlier: the sum of the steps before."""
    if got.isnan().any():
        return "a micro-batch without weights has no mean: 0/0 is nan, and nan times 0 is nan. Its sum is 0"
    limit = update["limit"]
    looks = [([clipped(value, limit) for value in values] + values, cause)
             for values, cause in looks_of_mean(rank, update, earlier)]  # fmt: skip
    otherwise = "does it contain weight times loss of each item once, divided by the sum of all weights, and clipped?"
    return the_likely(looks_of_clipping(update) + looks, got, otherwise)


def looks_of_clipping(update):
    mean, limit, own = update["mean"], update["limit"], update["own"]
    n, total = len(own), sum(map(sum, update["weights"]))
    scaled = [[gradient * n / total for gradient in of_rank] for of_rank in own]
    finished = clipped(mean, limit)
    one_by_one, parts = 0, [sum(of_ranks) / n for of_ranks in zip(*scaled)]
    for part in parts:
        one_by_one = clipped(one_by_one + part, limit)
    looks = [
        ([sum(clipped(sum(of_rank), limit) for of_rank in scaled) / n], "each rank has clipped its own gradient: clip "
         "the average, after the last backward"),
        ([one_by_one, sum(clipped(part, limit) for part in parts)], "each micro-batch is clipped: clip once, after the "
         "last backward"),
        ([clipped(mean * total, limit) / total, clipped(mean / n, limit) * n, clipped(mean * total / n, limit) * n / total],
         "it was clipped before it was scaled: max_norm is for the finished gradient"),
        ([torch.cat([clipped(part, limit) for part in mean.split(SIZES)])], "each parameter is clipped on its own: "
         "max_norm limits the norm of the whole gradient"),
        ([mean.clamp(-limit, limit)], "each number is clipped: max_norm limits the norm of the whole gradient"),
        ([mean * limit / mean.norm()], "a gradient shorter than max_norm must stay as it is"),
    ]  # fmt: skip
    if not agree(mean, finished):
        looks.insert(0, ([mean], "it is longer than max_norm: clip it before the step"))
    return looks


def looks_of_mean(rank, update, earlier):
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
