"""Exercise 18: pipeline parallel."""

import heapq
import math
from itertools import accumulate, combinations

import numpy
import torch
import torch.distributed as dist
from ddp_course.estimates import pipeline

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


@wrong("schedule", "if both are possible, a backward comes first|GPipe in groups|a backward is ready")
def forward_first(limits, m):
    return as_it_comes(limits, m, first="F")


@wrong("schedule", "at the limit, a backward has to come first")
def keeps_one_more(limits, m):
    return as_it_comes([limit + 1 for limit in limits], m)


@wrong("schedule", "before the next begins|although|GPipe|fixed")
def keeps_one_less(limits, m):
    return as_it_comes([max(1, limit - 1) for limit in limits], m)


@wrong("schedule", "before the next begins|although|GPipe|fixed")
def takes_the_smallest_limit_for_all(limits, m):
    return as_it_comes([min(limits)] * len(limits), m)


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


@wrong(
    "balance", "one micro-batch here|activations play no part|memory plays no part|not ranks - 1 - rank|does not fit"
)
def of_one_micro_batch(*args):
    return placed(*args, kept=lambda rank, ranks: 1)


@wrong(
    "balance", "activations play no part|memory plays no part|one micro-batch here|not ranks - 1 - rank|does not fit"
)
def of_weights_only(*args):
    return placed(*args, kept=lambda rank, ranks: 0)


@wrong("balance", "not ranks - 1 - rank|activations play no part|memory plays no part|no placement fits")
def the_last_rank_keeps_none(*args):
    return placed(*args, kept=lambda rank, ranks: ranks - 1 - rank)


@wrong("balance", "not rank \\+ 1|does not fit|no part|one micro-batch|no placement|faster")
def the_other_way_round(*args):
    return placed(*args, kept=lambda rank, ranks: rank + 1)


@wrong("balance", "all ranks keep as many|one micro-batch too many|faster|memory plays|rank \\+ 1")
def all_keep_as_many_as_the_first(*args):
    return placed(*args, kept=lambda rank, ranks: ranks)


@wrong("balance", "one micro-batch too many|all ranks keep|faster|rank \\+ 1")
def keeps_one_micro_batch_more(*args):
    return placed(*args, kept=lambda rank, ranks: ranks - rank + 1)


@wrong("balance", "none of them 0|fewer layers than ranks")
def with_empty_stages(*args):
    return placed(*args, empty=True)


@wrong("balance", "faster|does not fit|no placement|memory plays no part")
def equally_many(layers, ranks, memory):
    if len(layers) < ranks:
        raise ValueError
    return [len(layers) // ranks + (rank < len(layers) % ranks) for rank in range(ranks)]


@wrong("balance", "faster|keep|there is a placement|no part")
def equally_much_memory(layers, ranks, memory):
    """Places by what a layer holds, not by its time."""
    return placed(layers, ranks, memory, time=lambda layer: layer[1])


@wrong("balance", "faster|does not fit|none of them 0|each layer has to be|no part|there is a placement|keep")
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


@wrong("balance", "say so with a ValueError|memory plays no part")
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


@wrong("balance", "there is a placement|no placement|keeps|keep|faster")
def memory_must_not_be_reached(layers, ranks, memory):
    return placed(layers, ranks, memory - 1)


@wrong("balance", "has to be on one rank|a list of whole numbers|none of them 0")
def forgets_the_last_layer(layers, ranks, memory):
    return placed(layers[:-1], ranks, memory)


@wrong("balance", "faster|no part|fit|not rank \\+ 1")
def reversed_placement(*args):
    return placed(*args)[::-1]


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
    """Adds into the first copy's gradient; the other gets the same tensor."""

    def sum_gradients(self):
        if not self.copies:
            return
        for copy in self.copies[1:]:
            self.copies[0].grad += copy.grad
        self.send(self.copies[0].grad)
        self.copies[0].grad /= self.replicas
        for copy in self.copies[1:]:
            copy.grad = self.copies[0].grad


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


@wrong("tied_gradients", "still what backward left|this rank's own stages|what the rank's own")
class DoesNothing(Tied):
    def sum_gradients(self):
        pass


@wrong("tied_gradients", "the replicas are added up")
class ForgetsToDivide(Tied):
    def divide(self, total):
        return total


@wrong("tied_gradients", "a mean over the stages")
class MeanOfAll(Tied):
    def divide(self, total):
        return total / (2 * self.replicas)


@wrong("tied_gradients", "a mean over the stages|did each copy|replicas")
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


@wrong("tied_gradients", "must count once|did each copy|still")
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


@wrong("tied_gradients", "counts the whole square|have to give it once")
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


@wrong("tied_gradients", "have to add up to|this is the norm|once")
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
