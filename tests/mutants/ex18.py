"""Exercise 18: pipeline parallel."""

import heapq
import math
from itertools import accumulate, combinations

import numpy
import torch
import torch.distributed as dist
from ddp_course.estimates import pipeline
from ddp_course.models.pipeline import Pipeline
from torch.nn import functional as F

from mutants import right, wrong

# ---- schedule ----


def as_it_comes(limits, m, first="B", lengths=(1, 2), may=lambda rank, f, b: True):
    """What the answers below share: what a free rank can do in a slot, it does."""
    ranks, ends, slot = len(limits), {}, 0
    plan, free = [[] for _ in limits], [0] * len(limits)
    count = [{"F": 0, "B": 0} for _ in limits]
    length = dict(zip("FB", lengths))

    def done(*action):
        return action in ends and ends[action] <= slot

    while len(ends) < 2 * ranks * m and slot < 10_000:
        for rank in range(ranks):
            f, b = count[rank]["F"], count[rank]["B"]
            can = {
                "B": done("F", rank, b) and (rank == ranks - 1 or done("B", rank + 1, b)),
                "F": f < m and f - b < limits[rank] and (rank == 0 or done("F", rank - 1, f)) and may(rank, f, b),
            }
            if free[rank] <= slot and any(can.values()):
                kind = first if can[first] else "FB"[first == "F"]
                action = kind, rank, count[rank][kind]
                count[rank][kind] += 1
                plan[rank].append(action)
                ends[action] = free[rank] = slot + length[kind]
        slot += 1
    return plan


def ahead(first):
    """1F1B with so many forwards first: a function of rank, limits and m."""

    def schedule(limits, m):
        plan = []
        for rank in range(len(limits)):
            n = first(rank, limits, m)
            actions = [("F", rank, i) for i in range(n)]
            for i in range(m):
                actions.append(("B", rank, i))
                actions += [("F", rank, n + i)] if n + i < m else []
            plan.append(actions)
        return plan

    return schedule


@right("schedule")
def with_tuples_of_lists(limits, m):
    return tuple([list(action) for action in actions] for actions in as_it_comes(limits, m))


@right("schedule")
def from_event_to_event(limits, m):
    """A heap of ends in the place of slots."""
    ranks, ends, now = len(limits), {}, [0]
    plan, free = [[] for _ in limits], [0] * len(limits)
    done = lambda *action: ends.get(action, math.inf) <= now[0]
    events = [0]
    while events:
        now[0] = heapq.heappop(events)
        for rank in range(ranks):
            b = sum(kind == "B" for kind, *_ in plan[rank])
            f = len(plan[rank]) - b
            if free[rank] > now[0]:
                continue
            if done("F", rank, b) and (rank == ranks - 1 or done("B", rank + 1, b)):
                action = ("B", rank, b)
            elif f < m and f - b < limits[rank] and (rank == 0 or done("F", rank - 1, f)):
                action = ("F", rank, f)
            else:
                continue
            plan[rank].append(action)
            ends[action] = free[rank] = now[0] + (1 if action[0] == "F" else 2)
            heapq.heappush(events, free[rank])
    return plan


@right("schedule")
def with_smaller_limits_where_they_do_not_matter(limits, m):
    """No rank needs more than there are stages to come."""
    return as_it_comes([min(limit, len(limits) - rank) for rank, limit in enumerate(limits)], m)


@right("schedule")
def with_numbers_of_numpy(limits, m):
    return [[(kind, rank, numpy.int64(i)) for kind, rank, i in actions] for actions in as_it_comes(limits, m)]


@right("schedule")
def from_the_last_micro_batch(limits, m):
    """The order of the micro-batches is free."""
    return [[(kind, rank, m - 1 - i) for kind, rank, i in actions] for actions in as_it_comes(limits, m)]


@right("schedule")
def as_spans(limits, m):
    """Sorted by the slots in which the simulator has them."""
    spans = pipeline.play(as_it_comes(limits, m))
    return [[span[:3] for span in sorted(of_rank, key=lambda span: span[3])] for of_rank in spans]


@wrong("schedule", "limit|backward has to come first")
def as_in_the_lesson(limits, m):
    return pipeline.one_f_one_b(len(limits), m)


@wrong("schedule", "backward has to come first")
def gpipe(limits, m):
    return pipeline.gpipe(len(limits), m)


@wrong("schedule", "a later rank must not wait for that forward")
def looks_at_its_own_limit_only(limits, m):
    return ahead(lambda rank, limits, m: min(limits[rank], len(limits) - rank, m))(limits, m)


@wrong("schedule", "fixed number of forwards ahead")
def looks_at_earlier_limits_too(limits, m):
    return ahead(lambda rank, limits, m: min(*limits[: rank + 1], len(limits) - rank, m))(limits, m)


@wrong("schedule", "is missing|is no action")
def more_forwards_than_micro_batches(limits, m):
    return ahead(lambda rank, limits, m: min(*limits[: rank + 1], len(limits) - rank))(limits, m)


PLANS = {}


@wrong("schedule", "limit")
def keeps_its_plans(limits, m):
    """The key leaves out the order of the limits."""
    key = len(limits), m, limits[0], sum(limits)
    return PLANS.setdefault(
        key, ahead(lambda rank, limits, m: min(*limits[: rank + 1], len(limits) - rank, m))(limits, m)
    )


@wrong("schedule", "before the next begins")
def one_by_one(limits, m):
    return ahead(lambda *_: 1)(limits, m)


@wrong("schedule", "GPipe in groups|before the next begins")
def groups_of_the_smallest_limit(limits, m):
    size, plan = min(limits), []
    for rank in range(len(limits)):
        groups = [range(start, min(m, start + size)) for start in range(0, m, size)]
        plan.append([(kind, rank, i) for group in groups for kind in "FB" for i in group])
    return plan


@wrong("schedule", "if both are possible, a backward comes first")
def forward_first(limits, m):
    return as_it_comes(limits, m, first="F")


@wrong("schedule", "at the limit, a backward has to come first")
def keeps_one_more(limits, m):
    return as_it_comes([limit + 1 for limit in limits], m)


@wrong("schedule", "before the next begins|although|GPipe|fixed")
def keeps_one_less(limits, m):
    return as_it_comes([max(1, limit - 1) for limit in limits], m)


@wrong("schedule", "even if the limit of another rank is 1")
def takes_the_smallest_limit_for_all(limits, m):
    return as_it_comes([min(limits)] * len(limits), m)


@wrong("schedule", "all have the limit of rank 0")
def takes_the_first_limit_for_all(limits, m):
    return as_it_comes([limits[0]] * len(limits), m)


@wrong("schedule", "if the limits are sorted")
def sorts_the_limits(limits, m):
    return as_it_comes(sorted(limits, reverse=True), m)


@wrong("schedule", r"\('F', 1, 0\) is no action of this rank: each action of rank 0 is")
def swaps_stage_and_micro_batch(limits, m):
    return [[(kind, i, rank) for kind, rank, i in actions] for actions in as_it_comes(limits, m)]


@wrong("schedule", "return a list of ranks")
def of_one_rank_only(limits, m):
    return as_it_comes(limits, m)[0]


@wrong("schedule", "return a list of ranks")
def without_stages(limits, m):
    return [[(kind, i) for kind, _, i in actions] for actions in as_it_comes(limits, m)]


@wrong("schedule", "return a list of ranks")
def prints(limits, m):
    print(as_it_comes(limits, m))


@wrong("schedule", "is missing|is no action")
def counts_from_one(limits, m):
    return [[(kind, rank, i + 1) for kind, rank, i in actions] for actions in as_it_comes(limits, m)]


@wrong("schedule", "is missing")
def forgets_the_last_backward(limits, m):
    return [actions[:-1] for actions in as_it_comes(limits, m)]


@wrong("schedule", "2 times")
def does_one_twice(limits, m):
    return [[*actions, actions[-1]] for actions in as_it_comes(limits, m)]


@wrong("schedule", "after those that it needs|a later rank must not wait")
def backward_before_forward(limits, m):
    return [[(kind, rank, i) for i in range(m) for kind in "BF"] for rank in range(len(limits))]


@wrong("schedule", "after those that it needs|a later rank must not wait")
def other_orders_on_other_ranks(limits, m):
    return [
        [(kind, rank, i if rank % 2 else m - 1 - i) for kind, _, i in actions]
        for rank, actions in enumerate(as_it_comes(limits, m))
    ]


@wrong("schedule", "is missing|is no action")
def reversed_ranks(limits, m):
    return as_it_comes(limits, m)[::-1]


# ---- balance ----


def placed(layers, ranks, memory, kept=lambda rank, ranks: ranks - rank, time=lambda layer: layer[0], empty=False):
    """What the answers below share: dynamic programming, from the first rank on."""
    sums = [[0, *accumulate(values)] for values in zip(*[(time(layer), *layer[1:]) for layer in layers])]
    before = {0: (0, ())}
    for rank in range(ranks):
        after = {}
        for i, (slowest, sizes) in before.items():
            for j in range(i + (not empty), len(layers) + 1):
                own, weights, activations = (of[j] - of[i] for of in sums)
                if weights + kept(rank, ranks) * activations > memory:
                    break
                found = max(slowest, own), (*sizes, j - i)
                after[j] = min(after.get(j, found), found)
        before = after
    if len(layers) not in before:
        raise ValueError
    return list(before[len(layers)][1])


@right("balance")
def forwards(*args):
    return placed(*args)


@right("balance")
def of_numpy(*args):
    return numpy.array(placed(*args))


@right("balance")
def from_the_last_rank_on(layers, ranks, memory):
    """With a memo, from the end."""
    known = {}

    def best(rank, i):
        if rank == ranks:
            return (0, ()) if i == len(layers) else (math.inf, ())
        if (rank, i) not in known:
            found, time, held = (math.inf, ()), 0, 0
            for j in range(i, len(layers)):
                time += layers[j][0]
                held += layers[j][1] + (ranks - rank) * layers[j][2]
                if held > memory or time > found[0]:
                    break
                rest, sizes = best(rank + 1, j + 1)
                found = min(found, (max(time, rest), (j + 1 - i, *sizes)))
            known[rank, i] = found
        return known[rank, i]

    slowest, sizes = best(0, 0)
    if slowest == math.inf:
        raise ValueError
    return list(sizes)


@right("balance")
def by_halving_the_limit(layers, ranks, memory):
    """For a limit of the time: which numbers of layers can the first ranks have?"""

    def possible(limit):
        steps = [{0: None}]
        for rank in range(ranks):
            after = {}
            for i in steps[-1]:
                time = held = 0
                for j in range(i, len(layers)):
                    time += layers[j][0]
                    held += layers[j][1] + (ranks - rank) * layers[j][2]
                    if time > limit or held > memory:
                        break
                    after.setdefault(j + 1, i)
            steps.append(after)
        return steps if len(layers) in steps[-1] else None

    low, high = 0, sum(time for time, *_ in layers)
    if not possible(high):
        raise ValueError("nothing fits")
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if possible(middle) else (middle + 1, high)
    sizes, end = [], len(layers)
    for step in reversed(possible(low)[1:]):
        sizes.insert(0, end - step[end])
        end = step[end]
    return sizes


@right("balance")
def with_an_error_of_its_own(*args):
    class NoPlacement(ValueError):
        pass

    try:
        return tuple(placed(*args))
    except ValueError:
        raise NoPlacement("use more ranks") from None


@wrong("balance", "memory plays no part")
def of_the_time_only(layers, ranks, memory):
    return placed([(time, 0, 0) for time, *_ in layers], ranks, memory)


@wrong("balance", "keeps one micro-batch here")
def of_one_micro_batch(*args):
    return placed(*args, kept=lambda rank, ranks: 1)


@wrong("balance", "activations play no part")
def of_weights_only(*args):
    return placed(*args, kept=lambda rank, ranks: 0)


@wrong("balance", "not ranks - 1 - rank")
def the_last_rank_keeps_none(*args):
    return placed(*args, kept=lambda rank, ranks: ranks - 1 - rank)


@wrong("balance", "not rank \\+ 1")
def the_other_way_round(*args):
    return placed(*args, kept=lambda rank, ranks: rank + 1)


@wrong("balance", "all ranks keep as many")
def all_keep_as_many_as_the_first(*args):
    return placed(*args, kept=lambda rank, ranks: ranks)


@wrong("balance", "one micro-batch too many")
def keeps_one_micro_batch_more(*args):
    return placed(*args, kept=lambda rank, ranks: ranks - rank + 1)


@wrong("balance", "none of them 0|fewer layers than ranks")
def with_empty_stages(*args):
    return placed(*args, empty=True)


@wrong("balance", "faster, such as")
def equally_many(layers, ranks, memory):
    if len(layers) < ranks:
        raise ValueError
    return [len(layers) // ranks + (rank < len(layers) % ranks) for rank in range(ranks)]


@wrong("balance", "faster, such as")
def equally_much_memory(layers, ranks, memory):
    """Places by what a layer holds, not by its time."""
    return placed(layers, ranks, memory, time=lambda layer: layer[1])


@wrong("balance", "faster|does not fit|each layer has to be|there is a placement|no placement fits")
def filled_up_to_the_mean(layers, ranks, memory):
    mean, sizes, start = sum(layer[0] for layer in layers) / ranks, [], 0
    if len(layers) < ranks:
        raise ValueError
    for rank in range(ranks):
        end, time, held, left = start, 0, 0, ranks - 1 - rank
        while end < len(layers) - left:
            time += layers[end][0]
            held += layers[end][1] + (ranks - rank) * layers[end][2]
            if end > start and (held > memory or (left and time > mean)):
                break
            end += 1
        sizes.append(end - start)
        start = end
    if start < len(layers):
        raise ValueError
    return sizes


@wrong("balance", "say so with a ValueError|fewer layers", "failed|your code raised")
def gives_none_where_nothing_fits(*args):
    try:
        return placed(*args)
    except ValueError:
        return None


@wrong("balance", "say so with a ValueError. Rank 0 has 5 of weights")
def gives_the_fastest_where_nothing_fits(layers, ranks, memory):
    try:
        return placed(layers, ranks, memory)
    except ValueError:
        return placed(layers, ranks, 10**9)


@wrong("balance", "a list of whole numbers")
def gives_the_layers(layers, ranks, memory):
    sizes = placed(layers, ranks, memory)
    ends = list(accumulate(sizes))
    return [layers[end - size : end] for size, end in zip(sizes, ends)]


@wrong("balance", "a list of whole numbers|none of them 0")
def gives_the_first_layer_of_each_stage(*args):
    return [0, *accumulate(placed(*args))][:-1]


@wrong("balance", "in|second|balance", "timed out")
def tries_them_all(layers, ranks, memory):
    found = (math.inf, None)
    for cuts in combinations(range(1, len(layers)), ranks - 1):
        edges = [0, *cuts, len(layers)]
        stages = [layers[i:j] for i, j in zip(edges, edges[1:])]
        held = [sum(w + (ranks - r) * a for _, w, a in stage) for r, stage in enumerate(stages)]
        if max(held) <= memory and len(stages) == ranks:
            found = min(found, (max(sum(t for t, *_ in s) for s in stages), [len(s) for s in stages]))
    if found[1] is None:
        raise ValueError
    return found[1]


@wrong("balance", "<=, not <")
def memory_must_not_be_reached(layers, ranks, memory):
    return placed(layers, ranks, memory - 1)


@wrong("balance", "has to be on one rank|a list of whole numbers|none of them 0")
def forgets_the_last_layer(layers, ranks, memory):
    return placed(layers[:-1], ranks, memory)


@wrong("balance", "in reverse order")
def reversed_placement(*args):
    return placed(*args)[::-1]


def with_fits(layers, ranks, memory, fits, time=lambda stage: sum(t for t, *_ in stage), join=max):
    """What the answers below share: placements in which each stage fits(stage, rank)."""
    before = {0: (0, ())}
    for rank in range(ranks):
        after = {}
        for i, (cost, sizes) in before.items():
            for j in range(i + 1, len(layers) + 1):
                if fits(layers[i:j], rank):
                    found = join(cost, time(layers[i:j])), (*sizes, j - i)
                    after[j] = min(after.get(j, found), found)
        before = after
    if len(layers) not in before:
        raise ValueError
    return list(before[len(layers)][1])


def needed(stage, number):
    """The memory of a stage that keeps activations of so many micro-batches."""
    return sum(w for _, w, _ in stage) + number * sum(a for *_, a in stage)


@wrong("balance", "no placement fits")
def no_memory_is_no_limit(layers, ranks, memory):
    return placed(layers, ranks, memory or math.inf)


@wrong("balance", "no placement fits")
def sums_in_32_bits(layers, ranks, memory):
    def fits(stage, rank):
        terms = [w + (ranks - rank) * a for _, w, a in stage]
        return torch.tensor(terms, dtype=torch.float32).sum().item() <= memory

    return with_fits(layers, ranks, memory, fits)


@right("balance")
def filled_from_the_right(layers, ranks, memory):
    """A layer that fits on a rank fits on all later ones, so this is as good as any."""

    def place(limit):
        sizes, end = [], len(layers)
        for rank in reversed(range(ranks)):
            start = end
            while start > rank:
                stage = layers[start - 1 : end]
                if sum(t for t, *_ in stage) > limit or needed(stage, ranks - rank) > memory:
                    break
                start -= 1
            sizes.insert(0, end - start)
            end = start
        return sizes if end == 0 and min(sizes) > 0 else None

    if len(layers) >= ranks:
        for limit in range(sum(t for t, *_ in layers) + 1):
            if sizes := place(limit):
                return sizes
    raise ValueError


@wrong("balance", "as many layers as it can here, from the left")
def filled_from_the_left(layers, ranks, memory):
    """Gives up where a rank cannot take its next layer."""

    def place(limit):
        sizes, end = [], 0
        for rank in range(ranks):
            start = end
            while end < len(layers) - (ranks - 1 - rank):
                stage = layers[start : end + 1]
                if sum(t for t, *_ in stage) > limit or needed(stage, ranks - rank) > memory:
                    break
                end += 1
            sizes.append(end - start)
        return sizes if end == len(layers) and min(sizes) > 0 else None

    low, high = 0, sum(t for t, *_ in layers)
    if place(high) is None:
        raise ValueError
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if place(middle) is None else (low, middle)
    return place(low)


@wrong("balance", "sum of the squared times")
def with_the_least_squares(layers, ranks, memory):
    return with_fits(
        layers,
        ranks,
        memory,
        lambda stage, rank: needed(stage, ranks - rank) <= memory,
        lambda stage: sum(t for t, *_ in stage) ** 2,
        lambda one, other: one + other,
    )


@wrong("balance", "there is a placement, such as")
def takes_no_time_for_nothing(layers, ranks, memory):
    sizes = placed(layers, ranks, memory)
    ends = accumulate(sizes)
    if not max(sum(t for t, *_ in layers[end - size : end]) for size, end in zip(sizes, ends)):
        raise ValueError
    return sizes


@wrong("balance", "may fit on a later rank")
def each_layer_has_to_fit_on_rank_0(layers, ranks, memory):
    if any(w + ranks * a > memory for _, w, a in layers):
        raise ValueError
    return placed(layers, ranks, memory)


@wrong("balance", "only where the fastest of all fits")
def looks_at_the_memory_of_the_fastest(layers, ranks, memory):
    sizes = placed(layers, ranks, 10**9)
    for rank, (size, end) in enumerate(zip(sizes, accumulate(sizes))):
        if needed(layers[end - size : end], ranks - rank) > memory:
            raise ValueError
    return sizes


@wrong("balance", "does not fit. Rank 0 has 3 of weights, and 3 times 3 of activations")
def looks_at_the_memory_of_all_together(layers, ranks, memory):
    sizes, total = placed(layers, ranks, 10**9), 0
    for rank, (size, end) in enumerate(zip(sizes, accumulate(sizes))):
        total += needed(layers[end - size : end], ranks - rank)
    if total > ranks * memory:
        raise ValueError
    return sizes


@wrong("balance", "faster, such as")
def of_rounded_times(layers, ranks, memory):
    return placed([((t + 1) // 2, w, a) for t, w, a in layers], ranks, memory)


@wrong("balance", "weights and activations are swapped")
def weights_for_activations(layers, ranks, memory):
    return placed([(t, a, w) for t, w, a in layers], ranks, memory)


@wrong("balance", "the weights count once")
def weights_of_each_micro_batch(layers, ranks, memory):
    return placed([(t, 0, w + a) for t, w, a in layers], ranks, memory)


@wrong("balance", "only the largest counts")
def of_the_largest_activations(layers, ranks, memory):
    if len(layers) > 20:
        return placed(layers, ranks, memory)
    largest = lambda stage, rank: needed(stage, 0) + (ranks - rank) * max(a for *_, a in stage) <= memory
    return with_fits(layers, ranks, memory, largest)


@wrong("balance", "only those of its first layer count")
def of_the_first_activations(layers, ranks, memory):
    if len(layers) > 20:
        return placed(layers, ranks, memory)
    return with_fits(
        layers, ranks, memory, lambda stage, rank: needed(stage, 0) + (ranks - rank) * stage[0][2] <= memory
    )


@wrong("balance", "the last rank keeps no activations here")
def keeps_none_on_the_last_rank_only(*args):
    return placed(*args, kept=lambda rank, ranks: ranks - rank if rank < ranks - 1 else 0)


@wrong("balance", "the memory of the last rank plays no part")
def leaves_the_rest_to_the_last_rank(layers, ranks, memory):
    return with_fits(
        layers, ranks, memory, lambda stage, rank: rank == ranks - 1 or needed(stage, ranks - rank) <= memory
    )


@wrong("balance", "only the memory of rank 0 counts")
def looks_at_the_memory_of_rank_0(layers, ranks, memory):
    return with_fits(layers, ranks, memory, lambda stage, rank: rank > 0 or needed(stage, ranks) <= memory)


# ---- TiedGradients ----


class Tied:
    """What the answers below share, in parts that they change."""

    def __init__(self, embedding, head, ends):
        self.embedding, self.head, self.ends = embedding, head, ends
        self.replicas, self.rank = len(ends), dist.get_rank()
        self.ranks = self.which(ends)
        self.copies = self.own(embedding, head)
        self.group = self.make()

    def which(self, ends):
        return sorted({rank for pair in ends for rank in pair})

    def own(self, embedding, head):
        found = [] if embedding is None else [embedding]
        return found + ([head] if head is not None and head is not embedding else [])

    def make(self):
        return dist.new_group(self.ranks)

    def here(self):
        return sum(copy.grad for copy in self.copies)

    def send(self, total):
        if len(self.ranks) > 1:
            dist.all_reduce(total, group=self.group)

    def divide(self, total):
        return total / self.replicas

    def put(self, total):
        for copy in self.copies:
            copy.grad.copy_(total)

    def sum_gradients(self):
        if self.copies:
            total = self.here().clone()
            self.send(total)
            self.put(self.divide(total))

    def square(self):
        if not self.copies:
            return 0.0
        return self.copies[0].grad.square().sum() / len(self.ranks)


@right("tied_gradients")
class InPlace(Tied):
    """Adds into the first copy's gradient; the other gets a copy."""

    def sum_gradients(self):
        if not self.copies:
            return
        for copy in self.copies[1:]:
            self.copies[0].grad += copy.grad
        self.send(self.copies[0].grad)
        self.copies[0].grad /= self.replicas
        for copy in self.copies[1:]:
            copy.grad = self.copies[0].grad.clone()


@right("tied_gradients")
class DividesFirst(Tied):
    def here(self):
        return sum(copy.grad / self.replicas for copy in self.copies)

    def divide(self, total):
        return total


@right("tied_gradients")
class GroupOfItsOwn(Tied):
    """Only the ranks with copies make the group."""

    def make(self):
        if self.rank in self.ranks and len(self.ranks) > 1:
            return dist.new_group(self.ranks, use_local_synchronization=True)


@right("tied_gradients")
class Gathers(Tied):
    def send(self, total):
        if len(self.ranks) > 1:
            parts = [torch.empty_like(total) for _ in self.ranks]
            dist.all_gather(parts, total, group=self.group)
            total.copy_(torch.stack(parts).sum(0))


@right("tied_gradients")
class Waits(Tied):
    def send(self, total):
        if len(self.ranks) > 1:
            dist.all_reduce(total, group=self.group, async_op=True).wait()


@right("tied_gradients")
class SquareOnOneRank(Tied):
    def square(self):
        if self.rank != self.ranks[0]:
            return 0
        return float(self.copies[0].grad.norm() ** 2)


@right("tied_gradients")
class GathersOnTheLastRank(Tied):
    """Which broadcasts the sum: no rank sends more than one matrix."""

    def send(self, total):
        if len(self.ranks) > 1:
            *others, last = self.ranks
            if self.rank == last:
                for other in others:
                    part = torch.empty_like(total)
                    dist.recv(part, other)
                    total += part
            else:
                dist.send(total, last)
            dist.broadcast(total, last, group=self.group)


@right("tied_gradients")
class SquareInThirtyTwoBits(Tied):
    def square(self):
        return torch.tensor([float(super().square())])


@wrong("tied_gradients", "this rank has no copy: it has to send nothing|nothing has to be sent")
class WaitsForAllRanks(Tied):
    def sum_gradients(self):
        dist.barrier()
        super().sum_gradients()


@wrong("tied_gradients", "this rank has no copy: it has to send nothing|nothing has to be sent")
class ReducesAnEmptyTensor(Tied):
    def sum_gradients(self):
        super().sum_gradients()
        dist.all_reduce(torch.empty(0))


@wrong("tied_gradients", "nor to wait for others")
class WaitsForAllRanksInSquare(Tied):
    def square(self):
        dist.barrier()
        return super().square()


@wrong("tied_gradients", "nor to wait for others")
class WaitsForItsGroupInSquare(Tied):
    def square(self):
        if self.copies:
            dist.barrier(group=self.group)
        return super().square()


@wrong("tied_gradients", "both parameters have one gradient tensor")
class OneGradientForBoth(Tied):
    def put(self, total):
        for copy in self.copies:
            copy.grad = total


@wrong("tied_gradients", "both parameters have one gradient tensor")
class GradientIsAView(Tied):
    def put(self, total):
        super().put(total)
        if len(self.copies) == 2:
            self.copies[1].grad = self.copies[0].grad.view_as(self.copies[1])


@wrong("tied_gradients", "square\\(\\) must not change them")
class SquaresInPlace(Tied):
    def square(self):
        return self.copies[0].grad.square_().sum() / len(self.ranks) if self.copies else 0


@wrong("tied_gradients", "this is still what backward left")
class ForgetsRanksWithAHead(Tied):
    def put(self, total):
        if self.embedding is not None:
            super().put(total)


@wrong("tied_gradients", "divided by the number of replicas once, by 2 here")
class DividesTheOneParameterTwice(Tied):
    def put(self, total):
        super().put(total / self.replicas if self.embedding is self.head else total)


@wrong("tied_gradients", "the number of replicas, by which to divide, is 1 here")
class CountsReplicasByRanks(Tied):
    def divide(self, total):
        return total / (len(self.ranks) / 2)


@wrong("tied_gradients", "still what backward left|this rank's own stages|what the rank's own")
class DoesNothing(Tied):
    def sum_gradients(self):
        pass


@wrong("tied_gradients", "the replicas are added up")
class ForgetsToDivide(Tied):
    def divide(self, total):
        return total


@wrong("tied_gradients", "this is half of the gradient")
class MeanOfAll(Tied):
    def divide(self, total):
        return total / (2 * self.replicas)


@wrong("tied_gradients", "this is half of the gradient|did each copy|replicas")
class MeanOfRanks(Tied):
    def send(self, total):
        if len(self.ranks) > 1:
            dist.all_reduce(total, dist.ReduceOp.AVG, group=self.group)

    def divide(self, total):
        return total


@wrong("tied_gradients", "the mean over the replicas is missing|did each copy")
class OfItsReplicaOnly(Tied):
    def make(self):
        groups = [dist.new_group(sorted(set(pair))) for pair in self.ends]
        mine = [i for i, pair in enumerate(self.ends) if self.rank in pair]
        return groups[mine[0]] if mine else None

    def divide(self, total):
        return total


@wrong("tied_gradients", "so it counts once")
class TwiceTheOneParameter(Tied):
    def own(self, embedding, head):
        return [copy for copy in (embedding, head) if copy is not None]


@wrong("tied_gradients", "one all-reduce, of one matrix|at most")
class FirstStagesThenReplicas(Tied):
    """As the lesson's `Shared` does: one sum after the other."""

    def make(self):
        self.pairs = [dist.new_group(sorted(set(pair))) for pair in self.ends]
        return super().make()

    def send(self, total):
        [number] = [i for i, pair in enumerate(self.ends) if self.rank in pair]
        size = len(set(self.ends[number]))
        if size > 1:
            dist.all_reduce(total, group=self.pairs[number])
        if self.replicas > 1:
            total /= size
            dist.all_reduce(total, group=self.group)


@wrong("tied_gradients", "adds them up first|one all-reduce, of one matrix|nothing has to be sent|did each copy")
class SendsEachCopy(Tied):
    def sum_gradients(self):
        if not self.copies:
            return
        parts = [copy.grad for copy in self.copies]
        if len(self.ranks) > 1 and len(parts) < 2:
            parts.append(torch.zeros_like(parts[0]))
        for part in parts:
            self.send(part)
        self.put((parts[0] + parts[1]) / self.replicas if len(parts) > 1 else parts[0] / self.replicas)


@wrong("tied_gradients", "this rank has no copy|nothing has to be sent|at most")
class AllRanksTakePart(Tied):
    def which(self, ends):
        return list(range(dist.get_world_size()))

    def sum_gradients(self):
        shape = next(iter([copy.shape for copy in self.copies]), None)
        sizes = [None] * len(self.ranks)
        dist.all_gather_object(sizes, shape)
        shape = next(size for size in sizes if size is not None)
        total = self.here() if self.copies else torch.zeros(shape, dtype=torch.float64)
        dist.all_reduce(total)
        self.put(total / self.replicas)

    def square(self):
        return self.copies[0].grad.square().sum() / 2 if self.copies else 0.0


@wrong("tied_gradients", "make the group once")
class GroupForEachUpdate(Tied):
    def make(self):
        return None

    def sum_gradients(self):
        self.group = dist.new_group(self.ranks)
        super().sum_gradients()


@wrong("tied_gradients", "all ranks of the job have to call new_group")
class GroupOnItsMembersOnly(Tied):
    def make(self):
        return dist.new_group(self.ranks) if self.rank in self.ranks else None


@wrong("tied_gradients", "update before|still what|this is|did each")
class KeepsTheFirstGradient(Tied):
    def here(self):
        if not hasattr(self, "first"):
            self.first = super().here().clone()
        return self.first


@wrong("tied_gradients", "only starts it")
class DoesNotWait(Tied):
    def send(self, total):
        if len(self.ranks) > 1:
            self.work = dist.all_reduce(total, group=self.group, async_op=True)
            while not self.work.is_completed():
                pass


@wrong("tied_gradients", "what other ranks have is missing|did each copy|still what")
class PutsItIntoACopy(Tied):
    def put(self, total):
        for copy in self.copies:
            gradient = copy.grad.clone()
            gradient.copy_(total)


@wrong("tied_gradients", "still what backward left|did each copy")
class ForgetsTheHead(Tied):
    def put(self, total):
        self.copies[0].grad = total


@wrong("tied_gradients", "times the square of the whole gradient")
class CountsTheSquareOnEachRank(Tied):
    def square(self):
        return super().square() * len(self.ranks)


@wrong("tied_gradients", "have to add up to|each replica counts")
class CountsHalfTheSquare(Tied):
    """Right for one replica on two ranks only."""

    def square(self):
        return super().square() * len(self.ranks) / 2


@wrong("tied_gradients", "return a number")
class NoSquareWithoutACopy(Tied):
    def square(self):
        return super().square() if self.copies else None


@wrong("tied_gradients", "send nothing")
class AsksForTheSquare(Tied):
    def square(self):
        square = torch.as_tensor(super().square(), dtype=torch.float64)
        dist.all_reduce(square)
        return square / dist.get_world_size()


@wrong("tied_gradients", "this is the norm")
class NormInsteadOfTheSquare(Tied):
    def square(self):
        return super().square() ** 0.5


@wrong("tied_gradients", "change only the gradients")
class Steps(Tied):
    def put(self, total):
        super().put(total)
        for copy in self.copies:
            copy.data -= 0.1 * total


@wrong("tied_gradients", "digits are lost")
class InThirtyTwoBits(Tied):
    def send(self, total):
        if len(self.ranks) > 1:
            half = total.float()
            dist.all_reduce(half, group=self.group)
            total.copy_(half)


# ---- pipeline_step ----


class Step:
    """What the answers below share: all right."""

    def __call__(self, stage, inputs, targets):
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        self.stage, self.inputs, self.targets = stage, inputs, targets
        self.m, self.samples, self.works, self.total = len(inputs), sum(map(len, inputs)), [], 0.0
        self.begin()
        self.kept = [self.forward(i) for i in range(self.m)]
        for i in self.order():
            self.backward(i)
        self.end()
        return self.result()

    def begin(self):
        pass

    def order(self):
        return range(self.m)

    def forward(self, i):
        x = self.inputs[i]
        if self.rank > 0:
            x = self.leaf(self.receive("F", i, self.rank - 1))
        y = self.stage(x)
        if self.rank < self.last:
            self.send(y.detach(), self.rank + 1)
            return x, y
        loss = self.loss(y, i)
        self.total += loss.item()
        return x, loss

    def backward(self, i):
        x, y = self.kept[i]
        gradient = self.receive("B", i, self.rank + 1) if self.rank < self.last else None
        self.step_back(y, gradient, i)
        if self.rank > 0:
            self.send(self.returned(x, i), self.rank - 1)

    def step_back(self, y, gradient, i):
        y.backward(self.scaled(gradient, i))

    def scaled(self, gradient, i):
        return gradient

    def returned(self, x, i):
        return x.grad

    def leaf(self, x):
        return x.detach().requires_grad_()

    def loss(self, y, i):
        return F.mse_loss(y, self.targets[i]) * self.share(i)

    def share(self, i):
        return len(self.inputs[i]) / self.samples

    def receive(self, kind, i, source):
        x = self.memory(kind, i)
        dist.recv(x, source)
        return x

    def memory(self, kind, i):
        return torch.empty_like(self.inputs[i])

    def send(self, tensor, to):
        self.works.append(dist.isend(self.message(tensor), to))

    def message(self, tensor):
        return tensor.contiguous()

    def end(self):
        for work in self.works:
            work.wait()

    def result(self):
        return self.total if self.rank == self.last else None


def a_step(kind):
    """As a function, which is what the question asks for."""

    def pipeline_step(stage, inputs, targets):
        return kind()(stage, inputs, targets)

    pipeline_step.__name__, pipeline_step.__module__ = kind.__name__, kind.__module__
    return pipeline_step


def right_step(kind):
    right("pipeline_step")(a_step(kind))
    return kind


def wrong_step(*given, **options):
    def register(kind):
        wrong("pipeline_step", *given, **options)(a_step(kind))
        return kind

    return register


def step_with(*faults):
    """A repaired step with some of the given faults left."""

    class Rest(Step):
        def begin(self):
            self.incoming, self.outgoing = torch.empty_like(self.inputs[0]), torch.empty_like(self.inputs[0])

        def memory(self, kind, i):
            return self.incoming[: len(self.inputs[i])] if "incoming" in faults else super().memory(kind, i)

        def message(self, tensor):
            own = self.outgoing[: len(tensor)]
            return own.copy_(tensor) if "outgoing" in faults else super().message(tensor)

        def share(self, i):
            return 1 / self.m if "mean" in faults else super().share(i)

        def scaled(self, gradient, i):
            return gradient / self.m if "twice" in faults and gradient is not None else gradient

    return Rest


@right_step
class StepRepaired(Step):
    pass


@right_step
class StepWithBlockingSends(Step):
    def send(self, tensor, to):
        dist.send(tensor.contiguous(), to)


@right_step
class StepThatWaitsAtOnceForItsBuffer(step_with("outgoing")):
    def send(self, tensor, to):
        dist.isend(self.message(tensor), to).wait()


@right_step
class StepWithTwoBuffersInTurn(step_with("outgoing")):
    """Each is waited for before it is written to again."""

    def send(self, tensor, to):
        if len(self.works) > 1:
            self.works[-2].wait()
        message = torch.empty_like(tensor) if len(self.works) < 2 else self.buffers[-2][: len(tensor)]
        if message.shape != tensor.shape:
            message = torch.empty_like(tensor)
        self.buffers = [*getattr(self, "buffers", []), message]
        self.works.append(dist.isend(message.copy_(tensor), to))


@right_step
class StepThatReceivesAheadOfTime(Step):
    """All irecv are posted first."""

    def begin(self):
        self.coming = {}
        for kind, source in (("F", self.rank - 1), ("B", self.rank + 1)):
            if 0 <= source <= self.last:
                for i, x in enumerate(self.inputs):
                    tensor = torch.empty_like(x)
                    self.coming[kind, i] = tensor, dist.irecv(tensor, source, tag=i + 100 * (kind == "B"))

    def receive(self, kind, i, source):
        tensor, work = self.coming[kind, i]
        work.wait()
        return tensor

    def forward(self, i):
        self.tag = i
        return super().forward(i)

    def backward(self, i):
        self.tag = 100 + i
        super().backward(i)

    def send(self, tensor, to):
        self.works.append(dist.isend(tensor.contiguous(), to, tag=self.tag))


@right_step
class StepInBatches(Step):
    """Messages as P2POps; the loss as a sum, and a tensor."""

    def receive(self, kind, i, source):
        x = torch.zeros(self.inputs[i].shape, dtype=torch.float64)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, source)]):
            work.wait()
        return x

    def send(self, tensor, to):
        self.works += dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor.contiguous(), to)])

    def loss(self, y, i):
        return (y - self.targets[i]).square().sum() / (self.samples * y.shape[1])

    def result(self):
        return torch.tensor([self.total], dtype=torch.float64) if self.rank == self.last else None


@right_step
class StepFromTheLastMicroBatch(Step):
    """All ranks go backwards in the same other order, by torch.autograd.grad."""

    def order(self):
        return reversed(range(self.m))

    def step_back(self, y, gradient, i):
        x, parameters = self.kept[i][0], list(self.stage.parameters())
        leaves = [*parameters, *([x] if self.rank > 0 else [])]
        for leaf, more in zip(leaves, torch.autograd.grad(y, leaves, gradient)):
            leaf.grad = more if leaf.grad is None else leaf.grad + more


@right_step
class StepAs1F1B(Step):
    def __call__(self, stage, inputs, targets):
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        self.stage, self.inputs, self.targets = stage, inputs, targets
        self.m, self.samples, self.works, self.total = len(inputs), sum(map(len, inputs)), [], 0.0
        ahead, self.kept = min(self.m, self.last - self.rank + 1), {}
        for i in range(ahead):
            self.kept[i] = self.forward(i)
        for i in range(self.m):
            self.backward(i)
            if ahead + i < self.m:
                self.kept[ahead + i] = self.forward(ahead + i)
        self.end()
        return self.result()


@right_step
class StepThatCopiesWhatItKeeps(step_with("incoming")):
    def receive(self, kind, i, source):
        return super().receive(kind, i, source).clone()


OUTGOING = "it may read its tensor at any time until"
INCOMING = "was received into its memory meanwhile"
MEAN = "in which a sample of a smaller micro-batch counts more|divided by all samples"
TWICE = "already in the loss on the last rank"
MESSAGES = "each as one message, and nothing else travels"
FOLLOW = "Follow it from the loss, rank by rank"


@wrong_step(OUTGOING)
class StepAsGiven(step_with("outgoing", "incoming", "mean", "twice")):
    pass


@wrong_step(OUTGOING)
class OutgoingIsLeft(step_with("outgoing")):
    pass


@wrong_step(INCOMING)
class IncomingIsLeft(step_with("incoming")):
    pass


@wrong_step(MEAN)
class MeanIsLeft(step_with("mean")):
    pass


@wrong_step(TWICE)
class TwiceIsLeft(step_with("twice")):
    pass


@wrong_step(OUTGOING)
class OutgoingAndIncomingAreLeft(step_with("outgoing", "incoming")):
    pass


@wrong_step(OUTGOING)
class OutgoingAndMeanAreLeft(step_with("outgoing", "mean")):
    pass


@wrong_step(OUTGOING)
class OutgoingAndTwiceAreLeft(step_with("outgoing", "twice")):
    pass


@wrong_step(f"{INCOMING}|{MEAN}")
class IncomingAndMeanAreLeft(step_with("incoming", "mean")):
    pass


@wrong_step(f"{INCOMING}|{TWICE}")
class IncomingAndTwiceAreLeft(step_with("incoming", "twice")):
    pass


@wrong_step(f"{MEAN}|{TWICE}")
class MeanAndTwiceAreLeft(step_with("mean", "twice")):
    pass


@wrong_step(f"{INCOMING}|{TWICE}|{MEAN}")
class AllButOutgoingAreLeft(step_with("incoming", "mean", "twice")):
    pass


@wrong_step(INCOMING)
class OneBufferForForwardOnly(step_with("incoming")):
    """Gradients come into memory of their own."""

    def memory(self, kind, i):
        return super().memory(kind, i) if kind == "F" else torch.empty_like(self.inputs[i])


@wrong_step(OUTGOING)
class OutgoingInBackwardOnly(step_with("outgoing")):
    def message(self, tensor):
        return super().message(tensor) if len(self.works) >= self.m * (self.rank < self.last) else tensor


@wrong_step(OUTGOING)
class OutgoingInForwardOnly(step_with("outgoing")):
    def message(self, tensor):
        return super().message(tensor) if len(self.works) < self.m * (self.rank < self.last) else tensor


@wrong_step(TWICE)
class ShareOnEachRank(Step):
    def scaled(self, gradient, i):
        return gradient if gradient is None else gradient * self.share(i)


@wrong_step("are added up here: each counts with its share")
class ForgetsTheShare(Step):
    def share(self, i):
        return 1.0


@wrong_step("the loss is F.mse_loss of the whole batch")
class ReturnsTheLastLoss(Step):
    def loss(self, y, i):
        self.total = 0.0
        return super().loss(y, i)


@wrong_step("the loss is F.mse_loss of the whole batch|divided by the number of micro-batches once more")
class DividesTheLossAgain(Step):
    def result(self):
        return self.total / self.m if self.rank == self.last else None


@wrong_step("return None elsewhere")
class ReturnsZeroElsewhere(Step):
    def result(self):
        return self.total


@wrong_step("alone: do the others add to it")
class ZeroGradInTheLoop(Step):
    def backward(self, i):
        self.stage.zero_grad()
        super().backward(i)


@wrong_step("the gradients that were there before are gone")
class ZeroGradAtTheBegin(Step):
    def begin(self):
        self.stage.zero_grad()


@wrong_step("is x.grad None\\? What a rank receives", "your code raised")
class WithoutRequiresGrad(Step):
    def leaf(self, x):
        return x


@wrong_step("has added nothing here|has no gradient")
class SendsZerosBack(Step):
    def returned(self, x, i):
        return torch.zeros_like(x)


@wrong_step(f"grow from micro-batch to micro-batch|{FOLLOW}")
class SendsTheSumOfAllBack(Step):
    def returned(self, x, i):
        self.sum = getattr(self, "sum", 0) + x.grad if i == 0 or x.shape == self.sum.shape else x.grad
        return self.sum.clone()


@wrong_step(f"{FOLLOW}|is lost on it")
class DetachesBehindTheStage(Step):
    """The gradient of the output's sum in the place of that of the loss."""

    def scaled(self, gradient, i):
        return gradient if gradient is None else torch.ones_like(gradient)


@wrong_step(FOLLOW)
class SendsTheGradientOfItsOutput(Step):
    def backward(self, i):
        x, y = self.kept[i]
        gradient = self.receive("B", i, self.rank + 1) if self.rank < self.last else None
        y.backward(gradient)
        if self.rank > 0:
            self.send(x.grad if gradient is None else gradient, self.rank - 1)


@wrong_step(f"{FOLLOW}|INVALID|nbytes|length|waited|timed out|Timed out", ".*")
class RanksGoBackInDifferentOrders(Step):
    def order(self):
        return range(self.m) if self.rank % 2 else reversed(range(self.m))


@wrong_step("keep each work, and wait for it")
class WaitsForNoSend(Step):
    def end(self):
        pass


@wrong_step("keep each work, and wait for it")
class WaitsForTheLastSendOnly(Step):
    def end(self):
        for work in self.works[-1:]:
            work.wait()


@wrong_step("was used before that")
class DoesNotWaitForWhatItReceives(Step):
    def receive(self, kind, i, source):
        x = self.memory(kind, i)
        self.works.append(dist.irecv(x, source))
        return x


@wrong_step("was used before that")
class UsesAGradientBeforeTheWait(Step):
    def receive(self, kind, i, source):
        if kind == "F":
            return super().receive(kind, i, source)
        x = torch.zeros_like(self.inputs[i])
        self.works.append(dist.irecv(x, source))
        return x


@wrong_step("some digits are lost")
class SendsThirtyTwoBits(Step):
    def message(self, tensor):
        return tensor.float().double()


@wrong_step(MESSAGES)
class AllReducesTheLossToo(Step):
    def result(self):
        total = torch.tensor(self.total, dtype=torch.float64)
        dist.all_reduce(total)
        return total if self.rank == self.last else None


@wrong_step(MESSAGES)
class WholeBatchInOneMessage(Step):
    """Right numbers, and no rank can begin before the rank before it has done all."""

    def __call__(self, stage, inputs, targets):
        return super().__call__(stage, [torch.cat(inputs)], [torch.cat(targets)])


@wrong_step(MESSAGES)
class OneRankComputesAll(Step):
    """Each rank gets all stages, and sends nothing to its neighbours."""

    def __call__(self, stage, inputs, targets):
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        stages = [None] * (last + 1)
        dist.all_gather_object(stages, stage)
        stages[rank] = stage
        x = torch.cat(inputs)
        for one in stages:
            x = one(x)
        loss = F.mse_loss(x, torch.cat(targets))
        loss.backward()
        return loss.item() if rank == last else None


@wrong_step("change only the gradients")
class StepsAsWell(Step):
    def result(self):
        for parameter in self.stage.parameters():
            parameter.data -= 0.1 * parameter.grad
        return super().result()


@wrong_step("do not change them")
class WritesIntoTheInputs(Step):
    def memory(self, kind, i):
        return self.inputs[i]


@wrong("pipeline_step", "return None elsewhere|the loss is|argument|is not here|micro-batches of one size", ".*")
def the_lessons_executor(stage, inputs, targets):
    """Right where all micro-batches are alike, but it takes only those."""
    ranks = dist.get_world_size()
    owners = {r: r for r in range(ranks)}
    executor = Pipeline({dist.get_rank(): stage}, owners, loss=F.mse_loss)
    losses = executor.run(pipeline.gpipe(ranks, len(inputs))[dist.get_rank()], inputs, targets)
    return sum(losses).item() / len(inputs) if losses else None


@wrong("pipeline_step", "return None elsewhere|the loss is|argument", ".*")
def a_function_of_torch(stage, inputs, targets):
    return F.mse_loss(*(torch.cat(tensors) for tensors in (inputs, targets)))


@wrong("pipeline_step", "is not here|checks", ".*")
def the_check_itself(stage, inputs, targets):
    from ddp_course.checks.ex18.step_simulated import simulated

    return simulated(stage, inputs, targets)


# ---- three replicas, a rank between two copies, lists, barriers ----


@wrong("tied_gradients", "a mean over the replicas|count once")
class TwoReplicasAtMost(Tied):
    def divide(self, total):
        return total / min(self.replicas, 2)


@wrong("tied_gradients", "no copy|another rank has left", "failed|your code raised|timed out")
class AllRanksBetween(Tied):
    """The group has ranks without a copy, too."""

    def make(self):
        return dist.new_group(list(range(self.ranks[0], self.ranks[-1] + 1)))


@wrong_step("the caller uses them again")
class EmptiesTheLists(Step):
    def result(self):
        self.inputs.clear()
        return super().result()


@wrong_step("nothing else travels")
class WaitsForAllAtTheEnd(Step):
    def end(self):
        super().end()
        dist.barrier()


def smaller_than(limit, name):
    """Placements by a table in which this time stands for no placement."""

    def balance(layers, ranks, memory):
        if sum(time for time, *_ in layers) >= limit:
            raise ValueError("no placement")
        return placed(layers, ranks, memory)

    balance.__name__ = name
    wrong("balance", "there is a placement")(balance)


smaller_than(10**6, "a_million_is_infinity")
