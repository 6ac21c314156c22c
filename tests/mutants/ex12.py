"""Exercise 12: memory."""

import fractions
import math
from collections import OrderedDict
from contextlib import nullcontext
from functools import partial

import numpy
import torch
import torch.distributed as dist
from ddp_course.estimates import memory
from ddp_course.models.sharded import Sharded, whole_parameters
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from mutants import right, wrong

# ---- kept_bytes ----


def kept(parameters, ranks, stage, mixed, buckets, sizes=None, begin=(3, 2, 1), shard=None, again=None):
    shard = (parameters + ranks - 1) // ranks if shard is None else shard
    sizes = sizes or ([2, 2, 12] if mixed else [4, 4, 8])
    total = 0
    for size, first in zip(sizes, begin):
        total += size * (shard if stage >= first else parameters)
    return total + buckets * parameters * (sizes[1] if again is None else again)


@right("kept_bytes")
def by_a_loop(parameters, ranks, stage, mixed=False, buckets=False):
    return kept(parameters, ranks, stage, mixed, buckets)


@right("kept_bytes")
def by_cases(parameters, ranks, stage, mixed=False, buckets=False):
    shard = -(-parameters // ranks)
    if stage == 0:
        total = 16 * parameters
    elif stage == 1:
        total = (4 * parameters + 12 * shard) if mixed else 8 * (parameters + shard)
    elif stage == 2:
        total = (2 * parameters + 14 * shard) if mixed else 4 * parameters + 12 * shard
    else:
        total = 16 * shard
    return total + ((2 if mixed else 4) * parameters if buckets else 0)


@wrong("kept_bytes", "a shard is rounded up")
def rounds_down(parameters, ranks, stage, mixed=False, buckets=False):
    return kept(parameters, ranks, stage, mixed, buckets, shard=parameters // ranks)


@wrong("kept_bytes", "a shard has a whole number of parameters: round up")
def divides(parameters, ranks, stage, mixed=False, buckets=False):
    return kept(parameters, ranks, stage, mixed, buckets, shard=parameters / ranks)


@wrong("kept_bytes", "also has the master weights in fp32")
def forgets_the_copy(parameters, ranks, stage, mixed=False, buckets=False):
    return kept(parameters, ranks, stage, mixed, buckets, sizes=[2, 2, 8] if mixed else None)


@wrong("kept_bytes", "weights and gradients are in 16 bits, 2 bytes each")
def ignores_the_precision(parameters, ranks, stage, mixed=False, buckets=False):
    return kept(parameters, ranks, stage, False, buckets)


@wrong("kept_bytes", "Adam has two averages")
def of_one_average(parameters, ranks, stage, mixed=False, buckets=False):
    return kept(parameters, ranks, stage, mixed, buckets, sizes=[2, 2, 8] if mixed else [4, 4, 4])


@wrong("kept_bytes", "sharded too early or too late")
def a_stage_too_late(parameters, ranks, stage, mixed=False, buckets=False):
    return kept(parameters, ranks, stage - 1, mixed, buckets)


@wrong("kept_bytes", "but not the gradients; stage 2 shards them, too")
def gradients_first(parameters, ranks, stage, mixed=False, buckets=False):
    return kept(parameters, ranks, stage, mixed, buckets, begin=(3, 1, 2))


@wrong("kept_bytes", "a stage adds to the one before")
def one_thing_a_stage(parameters, ranks, stage, mixed=False, buckets=False):
    shard = -(-parameters // ranks)
    sizes = [2, 2, 12] if mixed else [4, 4, 8]
    total = sum(size * (shard if stage == number else parameters) for size, number in zip(sizes, (3, 2, 1)))
    return total + buckets * sizes[1] * parameters


@wrong("kept_bytes", "the buckets hold all gradients a second time")
def without_buckets(parameters, ranks, stage, mixed=False, buckets=False):
    return kept(parameters, ranks, stage, mixed, False)


@wrong("kept_bytes", "in the gradients' dtype: 2 bytes")
def buckets_in_fp32(parameters, ranks, stage, mixed=False, buckets=False):
    return kept(parameters, ranks, stage, mixed, buckets, again=4)


@wrong("kept_bytes", "16 bits, too")
def gradients_in_fp32(parameters, ranks, stage, mixed=False, buckets=False):
    return kept(parameters, ranks, stage, mixed, buckets, sizes=[2, 4, 12] if mixed else None)


@wrong("kept_bytes", "a shard has a whole number of parameters: round up")
def rounds_the_bytes_down(parameters, ranks, stage, mixed=False, buckets=False):
    return int(kept(parameters, ranks, stage, mixed, buckets, shard=parameters / ranks))


@wrong("kept_bytes", "a shard has a whole number of parameters: round up")
def rounds_the_bytes(parameters, ranks, stage, mixed=False, buckets=False):
    shard = parameters / ranks
    return round(kept(parameters, ranks, stage, mixed, buckets, shard=shard))


@wrong("kept_bytes", "only where something is left over")
def one_more_on_several_ranks(parameters, ranks, stage, mixed=False, buckets=False):
    shard = parameters // ranks + 1 if ranks > 1 else parameters
    return kept(parameters, ranks, stage, mixed, buckets, shard=shard)


@wrong("kept_bytes", "a shard has a whole number of parameters: round up")
def rounds_the_bytes_up(parameters, ranks, stage, mixed=False, buckets=False):
    shard = parameters / ranks
    return math.ceil(kept(parameters, ranks, stage, mixed, buckets, shard=shard))


@wrong("kept_bytes", "only where something is left over")
def one_more_always(parameters, ranks, stage, mixed=False, buckets=False):
    shard = parameters // ranks + 1
    return kept(parameters, ranks, stage, mixed, buckets, shard=shard)


@wrong("kept_bytes", "gradient \\* parameters bytes on each rank|in the gradients' dtype")
def buckets_of_a_shard(parameters, ranks, stage, mixed=False, buckets=False):
    shard = -(-parameters // ranks)
    total = kept(parameters, ranks, stage, mixed, False)
    return total + buckets * shard * (2 if mixed else 4)


@wrong("kept_bytes", "a shard has a whole number of parameters: round up")
def states_of_the_lesson(parameters, ranks, stage, mixed=False, buckets=False):
    precision = "master" if mixed else "fp32"
    state = memory.states(parameters, ranks, stage, precision)
    return sum(state) + (parameters * (2 if mixed else 4) if buckets else 0)


@wrong("kept_bytes", "missing .* required positional", "your code raised")
def without_defaults(parameters, ranks, stage, mixed, buckets):
    return kept(parameters, ranks, stage, mixed, buckets)


@wrong("kept_bytes", "what is left out is False")
def mixed_by_default(parameters, ranks, stage, mixed=True, buckets=False):
    return kept(parameters, ranks, stage, mixed, buckets)


@right("kept_bytes")
def in_floats_that_are_whole(parameters, ranks, stage, mixed=False, buckets=False):
    return float(kept(parameters, ranks, stage, mixed, buckets))


# ---- update_bytes ----


def an_update(blocks, rest, ranks, micro_batches, sync_each, gathers=2, of_rest=1, scatters=None):
    """(kept, sent), the right numbers unless told otherwise."""
    total = sum(blocks) + rest
    scatters = scatters or (micro_batches if sync_each else 1)
    kept = total * 12 / ranks + total * 4 / (ranks if sync_each else 1)
    gathered = micro_batches * (gathers * sum(blocks) + of_rest * rest)
    return kept, 4 * (gathered + scatters * total) * (ranks - 1) / ranks


@right("update_bytes")
def in_whole_numbers(blocks, rest, ranks, micro_batches, sync_each):
    total = sum(blocks) + rest
    shard = total // ranks
    kept = 16 * shard if sync_each else 12 * shard + 4 * total
    sent = 0
    for number in range(micro_batches):
        sent += 2 * 4 * sum(blocks) + 4 * rest  # forward, backward; the rest
        if sync_each or number == micro_batches - 1:
            sent += 4 * total
    return kept, sent * (ranks - 1) // ranks


@right("update_bytes")
def block_by_block(blocks, rest, ranks, micro_batches, sync_each):
    """As a list, each block as the others' bytes that this rank gets."""

    def ring(numbers):
        return 4 * numbers / ranks * (ranks - 1)

    gathers = sum(2 * ring(block) for block in blocks) + ring(rest)
    scatter = ring(sum(blocks) + rest)
    sent = micro_batches * gathers + (micro_batches if sync_each else 1) * scatter
    total = sum([*blocks, rest])
    state = {"weights": 4 * total / ranks, "adam": 8 * total / ranks}
    state["gradients"] = 4 * total / ranks if sync_each else 4 * total
    return [sum(state.values()), sent]


@right("update_bytes")
def in_tensors(blocks, rest, ranks, micro_batches, sync_each):
    pair = an_update(blocks, rest, ranks, micro_batches, sync_each)
    return torch.tensor(pair, dtype=torch.float64)


@wrong("update_bytes", "gradients that have not been reduced are whole")
def of_the_lesson(blocks, rest, ranks, micro_batches, sync_each):
    total = sum(blocks) + rest
    return sum(memory.states(total, ranks, 3)), memory.sent(total, ranks, 3)


@wrong("update_bytes", "what a step of its own sends, once for each micro-batch")
def of_the_lesson_for_each(blocks, rest, ranks, micro_batches, sync_each):
    total = sum(blocks) + rest
    kept, _ = an_update(blocks, rest, ranks, micro_batches, sync_each)
    return kept, micro_batches * memory.sent(total, ranks, 3)


@wrong("update_bytes", "each backward leaves shards of gradients")
def whole_gradients_always(blocks, rest, ranks, micro_batches, sync_each):
    total = sum(blocks) + rest
    sent = an_update(blocks, rest, ranks, micro_batches, sync_each)[1]
    return 12 * total / ranks + 4 * total, sent


@wrong("update_bytes", "taken for its opposite")
def the_other_way_round(*case):
    return an_update(*case[:4], not case[4])


@right("update_bytes")
def in_an_array(*case):
    return numpy.array(an_update(*case))


@wrong("update_bytes", "the averages exist already")
def without_adam(blocks, rest, ranks, micro_batches, sync_each):
    total = sum(blocks) + rest
    kept, sent = an_update(blocks, rest, ranks, micro_batches, sync_each)
    return kept - 8 * total / ranks, sent


@wrong("update_bytes", "two averages, 8 bytes")
def with_momentum_only(blocks, rest, ranks, micro_batches, sync_each):
    total = sum(blocks) + rest
    kept, sent = an_update(blocks, rest, ranks, micro_batches, sync_each)
    return kept - 4 * total / ranks, sent


@wrong("update_bytes", "shards of weights and of Adam's averages")
def as_ddp_keeps_it(blocks, rest, ranks, micro_batches, sync_each):
    sent = an_update(blocks, rest, ranks, micro_batches, sync_each)[1]
    return 16 * (sum(blocks) + rest), sent


@wrong("update_bytes", "it is gathered once per micro-batch")
def gathers_the_rest_twice(*case):
    return an_update(*case, of_rest=2)


@wrong("update_bytes", "gathers each block twice")
def gathers_once(*case):
    return an_update(*case, gathers=1)


@wrong("update_bytes", "4 bytes per parameter and \\(ranks - 1\\) / ranks")
def forgets_the_rest(*case):
    return an_update(*case, of_rest=0)


@wrong("update_bytes", "reduce-scattered only in the last")
def scatters_each_time(*case):
    return an_update(*case, scatters=case[3])


@wrong("update_bytes", "every micro-batch reduce-scatters")
def scatters_once(*case):
    return an_update(*case, scatters=1)


@wrong("update_bytes", "so each gathers them anew")
def gathers_in_the_first_only(blocks, rest, ranks, micro_batches, sync_each):
    kept, _ = an_update(blocks, rest, ranks, micro_batches, sync_each)
    scatters = micro_batches if sync_each else 1
    return kept, an_update(blocks, rest, ranks, 1, sync_each, scatters=scatters)[1]


@wrong("update_bytes", "and so does its reduce-scatter")
def sends_it_whole(*case):
    kept, sent = an_update(*case)
    return kept, sent * case[2] / (case[2] - 1)


@wrong("update_bytes", "what all ranks send together")
def of_all_ranks(*case):
    kept, sent = an_update(*case)
    return kept, sent * case[2]


@wrong("update_bytes", "half of an all-reduce")
def as_an_all_reduce(*case):
    return an_update(*case, scatters=2 * (case[3] if case[4] else 1))


@wrong("update_bytes", "return two numbers")
def kept_only(*case):
    return an_update(*case)[0]


@wrong("update_bytes", "half of the bytes|shards of weights and of Adam's averages")
def swapped(*case):
    return an_update(*case)[::-1]


# ---- sharded_adamw ----


def deal(parameters):
    """Whole parameters, in turn by size: {place: owner}."""
    by_size = sorted(range(len(parameters)), key=lambda i: -parameters[i].numel())
    return {i: place % dist.get_world_size() for place, i in enumerate(by_size)}


class Dealt:
    """What the answers below share; each changes one thing."""

    def __init__(self, parameters, lr, max_norm):
        self.parameters, self.max_norm, self.lr = list(parameters), max_norm, lr
        self.owners = self.deal()
        self.optimizer = self.adamw()

    def deal(self):
        return deal(self.parameters)

    def adamw(self):
        return torch.optim.AdamW(self.own() or [torch.empty(0)], lr=self.lr)

    def own(self):
        return [p for i, p in enumerate(self.parameters) if self.owners[i] == dist.get_rank()]

    def step(self):
        self.average()
        self.clip()
        self.optimizer.step()
        self.send()

    def average(self):
        for i, parameter in enumerate(self.parameters):
            parameter.grad /= dist.get_world_size()
            dist.reduce(parameter.grad, dst=self.owners[i])

    def clip(self):
        squares = sum((p.grad.pow(2).sum() for p in self.own()), torch.zeros(()))
        dist.all_reduce(squares)
        self.shorten(squares.sqrt())

    def shorten(self, norm):
        for parameter in self.own():
            parameter.grad *= min(1, self.max_norm / float(norm))

    def send(self):
        for i, parameter in enumerate(self.parameters):
            dist.broadcast(parameter.data, src=self.owners[i])

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None


@right("sharded_adamw")
class InTurn(Dealt):
    pass


@right("sharded_adamw")
class OfFlatParts(Dealt):
    """Parts of one flat tensor, as FSDP has them: no parameter has an owner."""

    def __init__(self, parameters, lr, max_norm):
        self.parameters, self.max_norm = list(parameters), max_norm
        n = dist.get_world_size()
        flat = torch.cat([value.detach().flatten() for value in self.parameters])
        self.length = -(-flat.numel() // n)
        own = self.padded(flat).chunk(n)[dist.get_rank()]
        self.own = torch.nn.Parameter(own.clone())
        self.optimizer = torch.optim.AdamW([self.own], lr=lr)

    def padded(self, flat):
        whole = self.length * dist.get_world_size()
        return torch.nn.functional.pad(flat, (0, whole - flat.numel()))

    def step(self):
        n = dist.get_world_size()
        flat = torch.cat([parameter.grad.flatten() for parameter in self.parameters])
        self.own.grad = torch.empty_like(self.own)
        parts = list(self.padded(flat / n).chunk(n))
        dist.reduce_scatter(self.own.grad, parts)
        squares = self.own.grad.pow(2).sum()
        dist.all_reduce(squares)
        self.own.grad *= (self.max_norm / squares.sqrt()).clamp(max=1)
        self.optimizer.step()
        self.own.grad = None
        whole = torch.empty(self.length * n)
        dist.all_gather(list(whole.chunk(n)), self.own.detach())
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, part in zip(self.parameters, whole[: sum(sizes)].split(sizes)):
            parameter.data.copy_(part.view_as(parameter))


@right("sharded_adamw")
class AllAtOnce(Dealt):
    """All broadcasts at once, and torch's own clipping of what is shared."""

    def clip(self):
        own = [parameter.grad for parameter in self.own()]
        norm = torch.nn.utils.get_total_norm(own) if own else torch.zeros(())
        norms = [torch.zeros(()) for _ in range(dist.get_world_size())]
        dist.all_gather(norms, norm)
        total = torch.nn.utils.get_total_norm(norms)
        torch.nn.utils.clip_grads_with_norm_(self.own(), self.max_norm, total)

    def send(self):
        works = [
            dist.broadcast(parameter.data, src=self.owners[i], async_op=True)
            for i, parameter in enumerate(self.parameters)
        ]
        for work in works:
            work.wait()


@right("sharded_adamw")
class OneMessagePerOwner(Dealt):
    """One flat broadcast for each owner; the weights move to new memory."""

    def send(self):
        for owner in range(dist.get_world_size()):
            theirs = [p for i, p in enumerate(self.parameters) if self.owners[i] == owner]
            if theirs:
                flat = torch.nn.utils.parameters_to_vector(theirs).detach()
                dist.broadcast(flat, src=owner)
                torch.nn.utils.vector_to_parameters(flat, theirs)


def sharded_by(kind, parameters, lr):
    """An optimizer that is there already: lesson 12's, or torch's."""
    if kind == "lesson":
        from ddp_course.models.zero import ShardedOptimizer as Optimizer
    else:
        from torch.distributed.optim import ZeroRedundancyOptimizer as Optimizer
    return Optimizer(parameters, torch.optim.AdamW, lr=lr)


class Given:
    """An optimizer that is there already. It wants gradients that have been averaged."""

    kind = "torch"

    def __init__(self, parameters, lr, max_norm):
        self.parameters, self.max_norm = list(parameters), max_norm
        self.optimizer = sharded_by(self.kind, self.parameters, lr)

    def step(self):
        self.prepare()
        self.optimizer.step()

    def prepare(self):
        pass

    def zero_grad(self):
        self.optimizer.zero_grad()


@wrong("sharded_adamw", "the gradients of rank \\d alone")
class OfTheLesson(Given):
    kind = "lesson"


@wrong("sharded_adamw", "the gradients of rank \\d alone")
class OfTorch(Given):
    pass


@wrong("sharded_adamw", "the gradients of rank \\d alone")
class OfTorchThatClips(Given):
    def prepare(self):
        torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm)


@wrong("sharded_adamw", "an all_reduce sends everything twice")
class OfTheLessonAfterAnAllReduce(Given):
    """As DDP: averages on all ranks, and clips there."""

    kind = "lesson"

    def prepare(self):
        for parameter in self.parameters:
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm)


@wrong("sharded_adamw", "so look at the norm")
class NormOfItsShare(Dealt):
    def clip(self):
        squares = sum((p.grad.pow(2).sum() for p in self.own()), torch.zeros(()))
        self.shorten(squares.sqrt())


@wrong("sharded_adamw", "so look at the norm")
class SumOfNorms(Dealt):
    """Adds up the norms of the shares, and not their squares."""

    def clip(self):
        squares = sum((p.grad.pow(2).sum() for p in self.own()), torch.zeros(()))
        norm = squares.sqrt()
        dist.all_reduce(norm)
        self.shorten(norm)


@wrong("sharded_adamw", "so look at the norm")
class ForgetsTheRoot(Dealt):
    def shorten(self, norm):
        super().shorten(norm**2)


@wrong("sharded_adamw", "clipping only shortens")
class AlwaysToTheNorm(Dealt):
    """Also lengthens what is shorter than max_norm."""

    def shorten(self, norm):
        for parameter in self.own():
            parameter.grad *= self.max_norm / float(norm)


@wrong("sharded_adamw", "as if no gradient had been clipped")
class NeverClips(Dealt):
    def clip(self):
        pass


@wrong("sharded_adamw", "or all by the same factor: each step has a norm of its own")
class ByTheNormOfTheFirstStep(Dealt):
    norm = None

    def shorten(self, norm):
        self.norm = norm if self.norm is None else self.norm
        super().shorten(self.norm)


@wrong("sharded_adamw", "so look at the norm")
class LargestNorm(Dealt):
    def clip(self):
        squares = sum((p.grad.pow(2).sum() for p in self.own()), torch.zeros(()))
        dist.all_reduce(squares, dist.ReduceOp.MAX)
        self.shorten(squares.sqrt())


@right("sharded_adamw")
class DropsTheOthersGradients(Dealt):
    def clip(self):
        own = {id(parameter) for parameter in self.own()}
        for parameter in self.parameters:
            if id(parameter) not in own:
                parameter.grad = None
        super().clip()


@wrong("sharded_adamw", "each parameter was clipped alone")
class ClipsEachAlone(Dealt):
    def clip(self):
        for parameter in self.own():
            torch.nn.utils.clip_grad_norm_([parameter], self.max_norm)


@wrong("sharded_adamw", "first take the mean, then clip it")
class ClipsFirst(Dealt):
    def step(self):
        torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm)
        self.average()
        self.optimizer.step()
        self.send()


@wrong("sharded_adamw", "are a sum over the ranks")
class SumsGradients(Dealt):
    def average(self):
        for i, parameter in enumerate(self.parameters):
            dist.reduce(parameter.grad, dst=self.owners[i])


@wrong("sharded_adamw", "the ranks share the state unevenly|divide the parameters")
class OwnersZeroAndOne(Dealt):
    def deal(self):
        return {i: i % 2 for i in range(len(self.parameters))}


@wrong("sharded_adamw", "the ranks share the state unevenly|divide the parameters")
class InBlocksByNumber(Dealt):
    """Equally many in a row for each rank; the last takes what is left."""

    def deal(self):
        n = dist.get_world_size()
        each = len(self.parameters) // (2 * n) or 1
        return {i: min(i // each, n - 1) for i in range(len(self.parameters))}


@wrong("sharded_adamw", "divide the parameters about evenly, by their sizes")
class ByTheirNumber(Dealt):
    """Equally many in turn: one rank has the matrices, the other the vectors."""

    def deal(self):
        n = dist.get_world_size()
        return {i: i % n for i in range(len(self.parameters))}


@wrong("sharded_adamw", "divide the parameters about evenly, by their sizes")
class EquallyManyInARow(Dealt):
    def deal(self):
        many, n = len(self.parameters), dist.get_world_size()
        return {i: i * n // many for i in range(many)}


@right("sharded_adamw")
class InARowBySize(Dealt):
    """Each to the rank in whose part of the numbers it begins."""

    def deal(self):
        sizes = [parameter.numel() for parameter in self.parameters]
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        n = dist.get_world_size()
        return {i: begin * n // sum(sizes) for i, begin in enumerate(begins)}


@right("sharded_adamw")
class GathersToOwners(Dealt):
    """Each gradient goes to its owner, which takes the mean."""

    def average(self):
        for i, parameter in enumerate(self.parameters):
            owner, parts = self.owners[i], None
            if owner == dist.get_rank():
                n = dist.get_world_size()
                parts = [torch.empty_like(parameter) for _ in range(n)]
            dist.gather(parameter.grad, parts, dst=owner)
            if parts:
                parameter.grad = torch.stack(parts).mean(0)


@right("sharded_adamw")
class SendsToOwners(Dealt):
    """Each gradient in a message to its owner."""

    def average(self):
        n, rank = dist.get_world_size(), dist.get_rank()
        for i, parameter in enumerate(self.parameters):
            if self.owners[i] != rank:
                dist.send(parameter.grad, self.owners[i])
                continue
            for other in set(range(n)) - {rank}:
                got = torch.empty_like(parameter.grad)
                dist.recv(got, other)
                parameter.grad += got
            parameter.grad /= n


@wrong("sharded_adamw", "each weight once from its owner")
class SendsWeightsTwice(Dealt):
    """The all_reduce of the norm is not to blame."""

    def send(self):
        super().send()
        super().send()


@wrong("sharded_adamw", "zeros take as much memory as gradients")
class LeavesZeros(Dealt):
    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad.zero_()


@wrong("sharded_adamw", "empty parameter list", "your code raised")
class NeedsAParameter(Dealt):
    def adamw(self):
        return torch.optim.AdamW(self.own(), lr=self.lr)


@wrong("sharded_adamw", "these are not the numbers")
class AnewInEachStep(Dealt):
    """Adam's state is lost after each step."""

    def step(self):
        super().step()
        self.optimizer = self.adamw()


@wrong("sharded_adamw", "these are not the numbers")
class InHalfPrecision(Dealt):
    """Sends the weights in 16 bits."""

    def send(self):
        for i, parameter in enumerate(self.parameters):
            short = parameter.detach().bfloat16()
            dist.broadcast(short, src=self.owners[i])
            parameter.data.copy_(short)


@wrong("sharded_adamw", "these are not the numbers")
class WithAdam(Dealt):
    def adamw(self):
        return torch.optim.Adam(self.own() or [torch.empty(0)], lr=self.lr)


@wrong("sharded_adamw", "these are not the numbers")
class ForgetsTheRate(Dealt):
    def adamw(self):
        return torch.optim.AdamW(self.own() or [torch.empty(0)], lr=0.5)


@wrong("sharded_adamw", "Adam's state for all parameters")
class KeepsAll(Dealt):
    """An AdamW of everything, which steps everything on each rank."""

    def adamw(self):
        return torch.optim.AdamW(self.parameters, lr=self.lr)


@wrong("sharded_adamw", "its owner must broadcast it")
class SendsNothing(Dealt):
    def send(self):
        pass


@wrong("sharded_adamw", "its owner must broadcast it")
class SendsFromZero(Dealt):
    def send(self):
        for parameter in self.parameters:
            dist.broadcast(parameter.data, src=0)


@wrong("sharded_adamw", "it has grown: it is a sum")
class AddsUp(Dealt):
    def send(self):
        for parameter in self.parameters:
            dist.all_reduce(parameter.data)


@wrong("sharded_adamw", "it is a mean of the owner's updated value")
class TakesTheMean(Dealt):
    def send(self):
        for parameter in self.parameters:
            dist.all_reduce(parameter.data, dist.ReduceOp.AVG)


@wrong("sharded_adamw", "an all_reduce sends everything twice")
class SumsWithZeros(Dealt):
    """The numbers are right: all but the owner give zeros."""

    def send(self):
        for i, parameter in enumerate(self.parameters):
            if self.owners[i] != dist.get_rank():
                parameter.data.zero_()
            dist.all_reduce(parameter.data)


@wrong("sharded_adamw", "zero_grad must clear all parameters")
class FreesItsOwn(Dealt):
    def zero_grad(self):
        self.optimizer.zero_grad()


@wrong("sharded_adamw", "do all ranks call the same collectives", status="your code raised")
class OnlyOwnersSend(Dealt):
    def send(self):
        for i, parameter in enumerate(self.parameters):
            if self.owners[i] == dist.get_rank():
                dist.broadcast(parameter.data, src=self.owners[i])
        dist.barrier()


# ---- gathered_linear ----


def gather(shard):
    rows = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, shard)
    return torch.cat(rows)


def scatter(of_weight, op=dist.ReduceOp.AVG):
    own = torch.empty_like(of_weight.chunk(dist.get_world_size())[0])
    dist.reduce_scatter(own, list(of_weight.chunk(dist.get_world_size())), op)
    return own


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard):
        ctx.save_for_backward(x, shard)
        return x @ gather(shard).T

    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        return gradient @ gather(shard), scatter(gradient.T @ x)


@right("gathered_linear")
class WithAverage(Linear):
    pass


@right("gathered_linear")
class InOneTensor(Linear):
    @staticmethod
    def forward(ctx, x, shard):
        ctx.x, ctx.shard = x, shard
        whole = shard.new_empty(dist.get_world_size() * len(shard), shard.shape[1])
        dist.all_gather(list(whole.chunk(dist.get_world_size())), shard)
        return torch.nn.functional.linear(x, whole)

    @staticmethod
    def backward(ctx, gradient):
        n = dist.get_world_size()
        return gradient @ gather(ctx.shard), scatter((gradient / n).T @ ctx.x, dist.ReduceOp.SUM)


@right("gathered_linear")
class ByReduces(Linear):
    """A reduce to each rank in turn: as many bytes as a reduce_scatter."""

    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        parts = (gradient.T @ x / dist.get_world_size()).chunk(dist.get_world_size())
        for rank, part in enumerate(parts):
            dist.reduce(part, dst=rank)
        return gradient @ gather(shard), parts[dist.get_rank()].clone()


class FlatShard:
    """What lesson 12's Gathered wants to know of its module."""

    again = None


@wrong("gathered_linear", "the whole weight is still in memory")
class OfLesson12:
    """Lesson 12's Gathered, and a product that autograd saves the weight for."""

    @staticmethod
    def apply(x, shard):
        from ddp_course.models.sharded import Gathered

        whole = Gathered.apply(shard.flatten(), FlatShard())
        return x @ whole.view(-1, x.shape[1]).T


@wrong("gathered_linear", "this is the sum over ranks")
class OfTorchsCollectives:
    """torch's all_gather with a gradient."""

    @staticmethod
    def apply(x, shard):
        from torch.distributed.nn.functional import all_gather

        return x @ torch.cat(all_gather(shard)).T


@wrong("gathered_linear", "the whole weight is still in memory")
class SavesTheWeight(Linear):
    @staticmethod
    def forward(ctx, x, shard):
        weight = gather(shard)
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, scatter(gradient.T @ x)


@wrong("gathered_linear", "the sum over ranks: divide")
class Sums(Linear):
    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        return gradient @ gather(shard), scatter(gradient.T @ x, dist.ReduceOp.SUM)


@wrong("gathered_linear", "of this rank's batch only")
class OfItsOwnBatch(Linear):
    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        return gradient @ gather(shard), (gradient.T @ x).chunk(dist.get_world_size())[dist.get_rank()]


@wrong("gathered_linear", "reduce_scatter sends half of that")
class ByAllReduce(Linear):
    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        of_weight = gradient.T @ x / dist.get_world_size()
        dist.all_reduce(of_weight)
        own = of_weight.chunk(dist.get_world_size())[dist.get_rank()].clone()
        return gradient @ gather(shard), own


@wrong("gathered_linear", "must not be averaged")
class AveragesX(Linear):
    @staticmethod
    def backward(ctx, gradient):
        of_x, of_shard = Linear.backward(ctx, gradient)
        dist.all_reduce(of_x, dist.ReduceOp.AVG)
        return of_x, of_shard


@wrong("gathered_linear", "only the weight's is divided")
class DividesX(Linear):
    @staticmethod
    def backward(ctx, gradient):
        of_x, of_shard = Linear.backward(ctx, gradient)
        return of_x / dist.get_world_size(), of_shard


@wrong("gathered_linear", "another rank's rows")
class ScattersBackwards(Linear):
    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        parts = list((gradient.T @ x / dist.get_world_size()).chunk(dist.get_world_size()))[::-1]
        own = torch.empty_like(shard)
        dist.reduce_scatter(own, [part.contiguous() for part in parts])
        return gradient @ gather(shard), own


@wrong("gathered_linear", "in the order of the ranks")
class OfItsOwnRows(Linear):
    @staticmethod
    def forward(ctx, x, shard):
        ctx.save_for_backward(x, shard)
        return (x @ shard.T).repeat(1, dist.get_world_size())


@wrong("gathered_linear", "it is zero")
class ScattersElsewhere(Linear):
    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        scatter(gradient.T @ x)
        return gradient @ gather(shard), torch.zeros_like(shard)


@wrong("gathered_linear", "gathering all ranks' gradients sends n times")
class GathersGradients(Linear):
    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        n = dist.get_world_size()
        everybodys = gather(gradient.T @ x).chunk(n)
        mean = sum(everybodys) / n
        return gradient @ gather(shard), mean.chunk(n)[dist.get_rank()].clone()


@wrong("gathered_linear", "tensors of different sizes|n times as much", status="your code raised|failed")
class GathersBatches(Linear):
    """All ranks' x and gradients, which need not be equally long."""

    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        n = dist.get_world_size()
        rows = gather(gradient).chunk(n, dim=1)[dist.get_rank()]
        return gradient @ gather(shard), rows.T @ gather(x) / n


@right("gathered_linear")
class GathersRowsToTheirRank(Linear):
    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        n, rank = dist.get_world_size(), dist.get_rank()
        for place, part in enumerate((gradient.T @ x).chunk(n)):
            parts = None
            if place == rank:
                own = parts = [torch.empty_like(part) for _ in range(n)]
            dist.gather(part, parts, dst=place)
        return gradient @ gather(shard), torch.stack(own).mean(0)


@wrong("gathered_linear", "must gather it once and reduce-scatter|forward must gather the weight once")
class GathersTwice(Linear):
    @staticmethod
    def forward(ctx, x, shard):
        gather(shard)
        return Linear.forward(ctx, x, shard)


@right("gathered_linear")
class WithWorks(Linear):
    """Starts to gather, and computes the weight's gradient meanwhile."""

    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        rows = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        work = dist.all_gather(rows, shard, async_op=True)
        of_weight = gradient.T @ x
        work.wait()
        return gradient @ torch.cat(rows), scatter(of_weight)


@right("gathered_linear")
class InOnePieceEach(Linear):
    """With the functions that take one tensor for all ranks."""

    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        n = dist.get_world_size()
        whole, own = shard.new_empty(n * len(shard), shard.shape[1]), shard.clone()
        dist.all_gather_into_tensor(whole, shard)
        dist.reduce_scatter_tensor(own, gradient.T @ x / n)
        return gradient @ whole, own


@wrong("gathered_linear", "with the whole weight, gathered again|your code raised", ".*")
class KeepsXInTheClass(Linear):
    """What forward saves is in the class, so another layer overwrites it."""

    @staticmethod
    def forward(ctx, x, shard):
        KeepsXInTheClass.saved = x, shard
        return x @ gather(shard).T

    @staticmethod
    def backward(ctx, gradient):
        x, shard = KeepsXInTheClass.saved
        return gradient @ gather(shard), scatter(gradient.T @ x)


@wrong("gathered_linear", "more for backward than necessary")
class SavesItInHalfPrecision(Linear):
    @staticmethod
    def forward(ctx, x, shard):
        weight = gather(shard)
        ctx.save_for_backward(x, shard)
        ctx.spare = weight.bfloat16()
        return x @ weight.T


@wrong("gathered_linear", "numbers of the weight are sent in 16 bits|in the order of the ranks")
class GathersInHalfPrecision(Linear):
    @staticmethod
    def forward(ctx, x, shard):
        ctx.save_for_backward(x, shard)
        return x @ gather(shard.bfloat16()).float().T


@wrong("gathered_linear", "the mean over ranks of gradient.T @ x")
class WritesIntoTheGradient(Linear):
    """Divides the gradient by the ranks, in place, after using it for x."""

    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        of_x = gradient @ gather(shard)
        gradient = gradient / dist.get_world_size() ** 2
        return of_x, scatter(gradient.T @ x, dist.ReduceOp.SUM)


@wrong("gathered_linear", "in the order of the ranks")
class BiggestRankFirst(Linear):
    @staticmethod
    def forward(ctx, x, shard):
        ctx.save_for_backward(x, shard)
        return x @ torch.cat(list(gather(shard).chunk(dist.get_world_size()))[::-1]).T


@wrong("gathered_linear", "no gradient|None|must be the mean over ranks", ".*")
class NoGradientForTheShard(Linear):
    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        scatter(gradient.T @ x)
        return gradient @ gather(shard), None


# ---- further answers ----


@wrong("kept_bytes", "gradient \\* parameters bytes on each rank")
def no_buckets_on_one_rank(parameters, ranks, stage, mixed=False, buckets=False):
    return kept(parameters, ranks, stage, mixed, buckets and ranks > 1)


@wrong("kept_bytes", "each either whole or a shard|sharded too early or too late")
def everything_from_stage_1(parameters, ranks, stage, mixed=False, buckets=False):
    return kept(parameters, ranks, stage, mixed, buckets, begin=(1, 1, 1))


@wrong("kept_bytes", "each either whole or a shard")
def gradients_in_fp32_for_the_optimizer(parameters, ranks, stage, mixed=False, buckets=False):
    """As some frameworks do: a copy of the gradients in fp32, besides."""
    return kept(parameters, ranks, stage, mixed, buckets, sizes=[2, 2, 16] if mixed else None)


@wrong("kept_bytes", "each either whole or a shard")
def in_gibibytes(parameters, ranks, stage, mixed=False, buckets=False):
    return kept(parameters, ranks, stage, mixed, buckets) / 2**30


@wrong("kept_bytes", "ends without a return statement")
def prints_it(parameters, ranks, stage, mixed=False, buckets=False):
    print(kept(parameters, ranks, stage, mixed, buckets))


@right("kept_bytes")
def by_divmod(parameters, ranks, stage, mixed=False, buckets=False):
    shard, rest = divmod(parameters, ranks)
    shard += bool(rest)
    of = lambda size, first: size * [parameters, shard][stage >= first]
    weight, gradient, state = (2, 2, 12) if mixed else (4, 4, 8)
    return of(weight, 3) + of(gradient, 2) + of(state, 1) + gradient * parameters * buckets


@right("kept_bytes")
def with_numpy(parameters, ranks, stage, mixed=False, buckets=False):
    shard = numpy.ceil(numpy.int64(parameters) / ranks).astype(numpy.int64)
    sizes = numpy.array([2, 2, 12] if mixed else [4, 4, 8])
    counts = numpy.where(numpy.array([3, 2, 1]) <= stage, shard, parameters)
    return (sizes * counts).sum() + (sizes[1] * parameters if buckets else 0)


@wrong("update_bytes", "gradients that have not been reduced are whole")
def gradients_of_one_block(blocks, rest, ranks, micro_batches, sync_each):
    """As if no gradient were left: shards, as after the last micro-batch."""
    total = sum(blocks) + rest
    return 16 * total / ranks, an_update(blocks, rest, ranks, micro_batches, sync_each)[1]


@wrong("update_bytes", "4 bytes per parameter and")
def first_block_stays(blocks, rest, ranks, micro_batches, sync_each):
    """One block stays gathered, besides the rest."""
    kept, sent = an_update(blocks, rest, ranks, micro_batches, sync_each)
    return kept, sent - 4 * micro_batches * blocks[-1] * (ranks - 1) / ranks


@wrong("update_bytes", "shards of weights and of Adam's averages")
def counts_the_gathered_rest(blocks, rest, ranks, micro_batches, sync_each):
    kept, sent = an_update(blocks, rest, ranks, micro_batches, sync_each)
    return kept + 4 * rest * (ranks - 1) / ranks, sent


@wrong("update_bytes", "return two numbers")
def as_texts(*case):
    return tuple(f"{number:,.0f}" for number in an_update(*case))


@wrong("update_bytes", "4 bytes per parameter and")
def sends_16_bits(*case):
    kept, sent = an_update(*case)
    return kept, sent / 2


@right("update_bytes")
def in_fractions(blocks, rest, ranks, micro_batches, sync_each):
    share, total = fractions.Fraction(1, ranks), sum(blocks) + rest
    kept = 12 * total * share + 4 * total * (share if sync_each else 1)
    gathered = micro_batches * (2 * sum(blocks) + rest)
    return kept, 4 * (1 - share) * (gathered + (micro_batches if sync_each else 1) * total)


@wrong("sharded_adamw", "also if no step came before")
class ClearsItsOwnAfterDroppingTheOthers(Dealt):
    """step() drops the others' gradients, so after a step there is nothing left."""

    def step(self):
        super().step()
        own = set(map(id, self.own()))
        for parameter in self.parameters:
            if id(parameter) not in own:
                parameter.grad = None

    def zero_grad(self):
        self.optimizer.zero_grad()


@wrong("sharded_adamw", "also if no step came before")
class ClearsInStep(Dealt):
    def step(self):
        super().step()
        super().zero_grad()

    def zero_grad(self):
        pass


@right("sharded_adamw")
class ClearsTwice(Dealt):
    def step(self):
        super().step()
        self.zero_grad()


@wrong("sharded_adamw", "zeros take as much memory")
class KeepsTheGradientsMemory(Dealt):
    def zero_grad(self):
        torch.optim.SGD(self.parameters).zero_grad(set_to_none=False)


@wrong("sharded_adamw", "so look at the norm")
class SharesTheLimit(Dealt):
    """Each rank may have its part of max_norm."""

    def shorten(self, norm):
        super().shorten(norm * dist.get_world_size() ** 0.5)


@wrong("sharded_adamw", "the gradients of rank \\d alone|so look at the norm|not the numbers")
class ReducesToRank0(Dealt):
    def average(self):
        for parameter in self.parameters:
            parameter.grad /= dist.get_world_size()
            dist.reduce(parameter.grad, dst=0)


@wrong("sharded_adamw", "these are not the numbers")
class WithoutWeightDecay(Dealt):
    def adamw(self):
        return torch.optim.AdamW(self.own() or [torch.empty(0)], lr=self.lr, weight_decay=0)


@right("sharded_adamw")
class ByHand(Dealt):
    """Adam's formula, for this rank's own parameters."""

    def adamw(self):
        self.steps, self.states = 0, [(torch.zeros_like(p.data), torch.zeros_like(p.data)) for p in self.own()]
        return self

    def step(self):
        self.average()
        self.clip()
        self.steps += 1
        for parameter, (first, second) in zip(self.own(), self.states):
            first.lerp_(parameter.grad, 0.1)
            second.mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
            scale = (second / (1 - 0.999**self.steps)).sqrt_().add_(1e-8)
            parameter.data.mul_(1 - 0.01 * self.lr).addcdiv_(first / (1 - 0.9**self.steps), scale, value=-self.lr)
        self.send()


@wrong("gathered_linear", "the mean over ranks of gradient.T @ x|sum over ranks")
class WeighsByLength(Linear):
    """As if the loss were a mean over all samples of all ranks."""

    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        total = torch.tensor(float(len(x)))
        dist.all_reduce(total)
        return gradient @ gather(shard), scatter(gradient.T @ x * len(x) / total, dist.ReduceOp.SUM)


@wrong("gathered_linear", "more for backward than necessary")
class CopiesItsShard(Linear):
    @staticmethod
    def forward(ctx, x, shard):
        ctx.save_for_backward(x, shard.clone())
        return x @ gather(shard).T


@wrong("gathered_linear", "of which this rank gets its rows|must be gradient @ weight|your code raised", ".*")
class ForgetsToTranspose(Linear):
    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        return gradient @ gather(shard), scatter((x.T @ gradient).reshape(-1, x.shape[1]))


@wrong("gathered_linear", "of which this rank gets its rows|another rank's rows")
class ScattersColumns(Linear):
    """Equally many numbers, but of all rows."""

    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        return gradient @ gather(shard), scatter((gradient.T @ x).T.reshape(-1, x.shape[1]))


@wrong("gathered_linear", "must gather it once and reduce-scatter its gradient once")
class ScattersTwice(Linear):
    @staticmethod
    def backward(ctx, gradient):
        of_x, of_shard = Linear.backward(ctx, gradient)
        return of_x, (of_shard + scatter(gradient.T @ ctx.saved_tensors[0])) / 2


@right("gathered_linear")
class PieceByPiece(Linear):
    """Each rank sends its rows in turn, and no rank ever has the whole weight."""

    @staticmethod
    def pieces(shard):
        for rank in range(dist.get_world_size()):
            rows = shard.detach().clone() if rank == dist.get_rank() else torch.empty_like(shard)
            dist.broadcast(rows, src=rank)
            yield rows

    @staticmethod
    def forward(ctx, x, shard):
        ctx.save_for_backward(x, shard)
        return torch.cat([x @ rows.T for rows in PieceByPiece.pieces(shard)], dim=1)

    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        columns = gradient.chunk(dist.get_world_size(), dim=1)
        of_x = sum(part @ rows for part, rows in zip(columns, PieceByPiece.pieces(shard)))
        return of_x, scatter(torch.cat([part.T @ x for part in columns]))


@right("gathered_linear")
class WithEinsum(Linear):
    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        of_weight = torch.einsum("bo,bi->oi", gradient, x) / dist.get_world_size()
        return torch.einsum("bo,oi->bi", gradient, gather(shard)), scatter(of_weight, dist.ReduceOp.SUM)


# ---- master_shards ----


class Masters:
    """What the answers below share: all right."""

    def __init__(self, parameters, lr):
        self.parameters, self.lr = list(parameters), lr
        self.n, self.rank = dist.get_world_size(), dist.get_rank()
        whole = self.joined([parameter.detach() for parameter in self.parameters]).float()
        self.size = self.of_one(len(whole))
        self.own = slice(self.rank * self.size, (self.rank + 1) * self.size)
        self.master = self.kept(whole[self.own])
        self.velocity = torch.zeros_like(self.master)

    def of_one(self, numbers):
        return numbers // self.n

    def joined(self, tensors):
        vector = torch.cat([tensor.flatten() for tensor in tensors])
        return torch.nn.functional.pad(vector, (0, -len(vector) % self.n))

    def kept(self, shard):
        return shard.clone()

    @torch.no_grad()
    def step(self):
        self.remember(self.mean(self.joined([parameter.grad for parameter in self.parameters])))
        weights = self.joined(self.parameters)
        self.refresh(weights)
        self.master -= self.lr * self.velocity
        self.gather(weights)
        begin = 0
        for parameter in self.parameters:
            end = begin + parameter.numel()
            self.give(parameter, weights[begin:end].view_as(parameter))
            begin = end

    def remember(self, mean):
        self.velocity.mul_(0.9).add_(mean)

    def mean(self, gradients):
        mean = torch.empty_like(self.master)
        parts = gradients.float().split(self.size)
        dist.reduce_scatter(mean, list(parts[: self.n]))
        return mean / self.n

    def refresh(self, weights):
        pass

    def gather(self, weights):
        dist.all_gather(list(weights[: self.n * self.size].chunk(self.n)), self.master.bfloat16())

    def give(self, parameter, new):
        parameter.copy_(new)


def masters_with(*faults):
    """A repaired optimizer with some of the given faults left."""

    class Rest(Masters):
        def joined(self, tensors):
            return torch.cat([tensor.flatten() for tensor in tensors]) if "rest" in faults else super().joined(tensors)

        def kept(self, shard):
            return shard if "view" in faults else super().kept(shard)

        def refresh(self, weights):
            if "rounded" in faults:
                self.master.copy_(weights[self.own])

    return Rest


NO_SHARD, A_VIEW, ROUNDED = "these numbers belong to no shard", "A slice is a view", "rounded in each step"


@right("master_shards")
class MastersRepaired(Masters):
    pass


@wrong("master_shards", NO_SHARD)
class MastersAsGiven(masters_with("rest", "view", "rounded")):
    pass


@wrong("master_shards", NO_SHARD)
class MastersWithoutTheRestAndWithAView(masters_with("rest", "view")):
    pass


@wrong("master_shards", NO_SHARD)
class MastersWithoutTheRestAndRounded(masters_with("rest", "rounded")):
    pass


@wrong("master_shards", ROUNDED)
class MastersOfAViewRounded(masters_with("view", "rounded")):
    pass


@wrong("master_shards", NO_SHARD)
class MastersWithoutTheRest(masters_with("rest")):
    pass


@wrong("master_shards", A_VIEW)
class MastersOfAView(masters_with("view")):
    pass


@wrong("master_shards", ROUNDED)
class MastersRounded(masters_with("rounded")):
    pass


@wrong("master_shards", ROUNDED)
class MastersRoundedAfterwards(Masters):
    def gather(self, weights):
        self.master.copy_(self.master.bfloat16())
        super().gather(weights)


@wrong("master_shards", "rounded|some digits are lost")
class MastersInBf16(Masters):
    def kept(self, shard):
        return shard.bfloat16()

    def mean(self, gradients):
        mean = torch.empty(self.size)
        dist.reduce_scatter(mean, list(gradients.float().split(self.size)))
        return (mean / self.n).bfloat16()


@right("master_shards")
class MastersInOneShortShard(Masters):
    """The last shard is shorter, and padded only to be sent."""

    def joined(self, tensors):
        return torch.cat([tensor.flatten() for tensor in tensors])

    def of_one(self, numbers):
        return -(-numbers // self.n)

    def padded(self, vector, numbers):
        return torch.cat([vector, vector.new_zeros(numbers - len(vector))])

    def mean(self, gradients):
        parts = self.padded(gradients.float(), self.n * self.size).chunk(self.n)
        mean = torch.empty_like(parts[0])
        dist.reduce_scatter(mean, list(parts))
        return mean[: len(self.master)] / self.n

    def gather(self, weights):
        shards = [weights.new_empty(self.size) for _ in range(self.n)]
        dist.all_gather(shards, self.padded(self.master.bfloat16(), self.size))
        weights.copy_(torch.cat(shards)[: len(weights)])


@right("master_shards")
class MastersThatGiveNewMemory(Masters):
    def give(self, parameter, new):
        parameter.data = new.clone()


@right("master_shards")
class MastersThatDivideFirst(Masters):
    def mean(self, gradients):
        mean = torch.empty_like(self.master)
        dist.reduce_scatter(mean, [part / self.n for part in gradients.float().split(self.size)])
        return mean

    def remember(self, mean):
        self.velocity = 0.9 * self.velocity + mean


@right("master_shards")
class MastersReducedOneByOne(Masters):
    """A reduce to each owner, and a broadcast from it."""

    def mean(self, gradients):
        parts = [part.clone() for part in gradients.float().split(self.size)]
        for owner, part in enumerate(parts):
            dist.reduce(part, owner)
        return parts[self.rank] / self.n

    def gather(self, weights):
        parts = weights.chunk(self.n)
        parts[self.rank].copy_(self.master)
        for owner, part in enumerate(parts):
            dist.broadcast(part, owner)


@right("master_shards")
class MastersTakenFromBf16(Masters):
    """float() of a view in bf16 is a copy."""

    def joined(self, tensors):
        return super().joined(tensors)

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.master = self.joined([parameter.detach() for parameter in self.parameters])[self.own].float()


@wrong("master_shards", "their mean is needed")
class MastersOfSums(Masters):
    def mean(self, gradients):
        return super().mean(gradients) * self.n


@wrong("master_shards", "divided by the number of ranks twice")
class MastersOfMeansOfMeans(Masters):
    def mean(self, gradients):
        return super().mean(gradients) / self.n


@wrong("master_shards", "of its own rank only")
class MastersOfOwnGradients(Masters):
    def mean(self, gradients):
        return gradients.float()[self.own]


@wrong("master_shards", "this is plain SGD")
class MastersWithoutMomentum(Masters):
    def remember(self, mean):
        self.velocity = mean


@wrong("master_shards", "adds up all gradients")
class MastersWithoutDecay(Masters):
    def remember(self, mean):
        self.velocity += mean


@wrong("master_shards", "the weights go up")
class MastersUphill(Masters):
    def remember(self, mean):
        super().remember(-mean)


@wrong("master_shards", "some digits are lost")
class MastersOfGradientsInBf16(Masters):
    def mean(self, gradients):
        mean = torch.empty_like(self.master, dtype=torch.bfloat16)
        dist.reduce_scatter(mean, list(gradients.split(self.size)))
        return mean.float() / self.n


@wrong("master_shards", "some digits are lost")
class MastersWithVelocityInBf16(Masters):
    def remember(self, mean):
        self.velocity = (0.9 * self.velocity + mean).bfloat16().float()


@wrong("master_shards", "nothing else needs to travel")
class MastersGatheredInFp32(Masters):
    def gather(self, weights):
        shards = [torch.empty_like(self.master) for _ in range(self.n)]
        dist.all_gather(shards, self.master)
        weights.copy_(torch.cat(shards))


@wrong("master_shards", "nothing else needs to travel")
class MastersAllReduced(Masters):
    def mean(self, gradients):
        whole = gradients.float()
        dist.all_reduce(whole)
        return whole[self.own] / self.n


@wrong("master_shards", "8 bytes for each of its parameters")
class MastersThatKeepGradients(Masters):
    def remember(self, mean):
        super().remember(mean)
        self.gradient = mean


@wrong("master_shards", "keeps a whole vector in fp32")
class MastersOnEachRank(Masters):
    """The velocity is a shard, the master weights are whole."""

    def kept(self, shard):
        self.whole = self.joined([parameter.detach() for parameter in self.parameters]).float()
        return self.whole[self.own]


@wrong("master_shards", "and nothing else of them")
class MastersThatMakeFp32(Masters):
    def give(self, parameter, new):
        parameter.data = new.float()


# ---- train_large ----


def filled(values, initial):
    """Fill the values of a state dict, whole ones and shards."""
    for name, value in values.items():
        whole = initial(name)
        if isinstance(value, DTensor):
            whole = distribute_tensor(whole, value.device_mesh, value.placements)
        value.copy_(whole)


def shard(model, blocks=True, root=True, **options):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*(model.blocks if blocks else ()), *([model] if root else ())):
        fully_shard(part, mesh=mesh, **options)


def shard_and_fill(model, initial, **options):
    shard(model, **options)
    model.to_empty(device="cpu")
    filled(model.state_dict(), initial)


def clip(model, max_norm):
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def updates(model, batches, max_norm, optimizer=None, clip=clip):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        clip(model, max_norm)
        optimizer.step()


def gathered(model, cpu_offload=True):
    options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
    return get_model_state_dict(model, options=options)


def save(state, path):
    if dist.get_rank() == 0:
        torch.save(state, path)


@right("train_large")
def with_its_own_parts(model, initial, batches, max_norm, path):
    """No distribute_tensor: a shard is a chunk of rows."""
    shard(model)
    model.to_empty(device="cpu")
    for name, value in model.state_dict().items():
        if isinstance(value, DTensor):
            rows = initial(name).chunk(dist.get_world_size())
            if dist.get_rank() < len(rows):
                value.to_local().copy_(rows[dist.get_rank()])
        else:
            value.copy_(initial(name))
    updates(model, batches, max_norm)
    save(gathered(model), path)


@right("train_large")
def gathers_one_by_one(model, initial, batches, max_norm, path):
    shard_and_fill(model, initial)
    updates(model, batches, max_norm)
    state = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if dist.get_rank() == 0:
            state[name] = whole
    save(state, path)


@right("train_large")
def sends_shards_as_objects(model, initial, batches, max_norm, path):
    shard_and_fill(model, initial)
    updates(model, batches, max_norm)
    parts = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    own = {name: value.to_local() for name, value in model.state_dict().items() if isinstance(value, DTensor)}
    dist.gather_object(own, parts)
    if dist.get_rank() == 0:
        state = {name: torch.cat([part[name] for part in parts]) for name in own}
        torch.save({"scale": model.scale} | state, path)


@right("train_large")
def filled_by_rank_0(model, initial, batches, max_norm, path):
    shard(model)
    model.to_empty(device="cpu")
    whole = {name: initial(name) for name in model.state_dict()} if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)
    del whole
    updates(model, batches, max_norm)
    save(gathered(model), path)


@right("train_large")
def filled_before_sharding(model, initial, batches, max_norm, path):
    """One block after the other gets memory and values, and is cut."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for number, block in enumerate(model.blocks):
        block.to_empty(device="cpu")
        for name, value in block.state_dict().items():
            value.copy_(initial(f"blocks.{number}.{name}"))
        fully_shard(block, mesh=mesh)
    for name, part in (("first", model.first), ("last", model.last)):
        part.to_empty(device="cpu")
        for own, value in part.state_dict().items():
            value.copy_(initial(f"{name}.{own}"))
    model.scale = initial("scale")
    fully_shard(model, mesh=mesh)
    updates(model, batches, max_norm)
    save(gathered(model), path)


@right("train_large")
def built_whole(model, initial, batches, max_norm, path):
    """The initial weights are whole on each rank for a moment: once the model, not twice."""
    model.to_empty(device="cpu")
    filled(model.state_dict(), initial)
    shard(model)
    updates(model, batches, max_norm)
    save(gathered(model), path)


@right("train_large")
def by_hand(model, initial, batches, max_norm, path):
    """The course's own FSDP, a clip by hand, and names without its wrappers."""
    state = {}
    for number, block in enumerate(model.blocks):
        block.to_empty(device="cpu")
        for name, value in block.state_dict().items():
            value.copy_(initial(f"blocks.{number}.{name}"))
        model.blocks[number] = Sharded(block)
    for name, part in (("first", model.first), ("last", model.last)):
        part.to_empty(device="cpu")
        for own, value in part.state_dict().items():
            value.copy_(initial(f"{name}.{own}"))
    model.scale = initial("scale")
    whole = Sharded(model)
    shards = [parameter for parameter in whole.parameters() if parameter.requires_grad]

    def clip_shards(*_):
        squares = sum(parameter.grad.pow(2).sum() for parameter in shards)
        dist.all_reduce(squares)
        for parameter in shards:
            parameter.grad *= (max_norm / (squares.sqrt() + 1e-6)).clamp(max=1)

    updates(whole, batches, max_norm, torch.optim.AdamW(shards, lr=0.01), clip_shards)
    for name, value in whole_parameters(whole).items():
        if dist.get_rank() == 0:
            state[name] = value.clone()
    save(state | {"scale": model.scale}, path)


@right("train_large")
def with_its_own_adam(model, initial, batches, max_norm, path):
    shard_and_fill(model, initial)
    averages = {
        parameter: (torch.zeros_like(parameter), torch.zeros_like(parameter)) for parameter in model.parameters()
    }
    for step, (inputs, targets) in enumerate(batches, 1):
        model.zero_grad()
        (model(inputs) - targets).pow(2).mean().backward()
        norm = sum(parameter.grad.pow(2).sum().full_tensor() for parameter in model.parameters()).sqrt()
        with torch.no_grad():
            for parameter, (first, second) in averages.items():
                gradient = parameter.grad.to_local() * min(1.0, max_norm / (norm.item() + 1e-6))
                own, first, second = parameter.to_local(), first.to_local(), second.to_local()
                first.mul_(0.9).add_(0.1 * gradient)
                second.mul_(0.999).add_(0.001 * gradient**2)
                own *= 1 - 0.01 * 0.01
                root = (second / (1 - 0.999**step)).sqrt() + 1e-8
                own -= 0.01 * first / (1 - 0.9**step) / root
    save(gathered(model), path)


@right("train_large")
def fused_and_recomputed(model, initial, batches, max_norm, path):
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    shard_and_fill(model, initial, reshard_after_forward=True)
    updates(model, batches, max_norm, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))
    save(gathered(model), path)


@right("train_large")
def with_foreach(model, initial, batches, max_norm, path):
    shard_and_fill(model, initial)
    updates(model, batches, max_norm, torch.optim.AdamW(list(model.parameters()), lr=0.01, foreach=True))
    save({name: value.clone() for name, value in gathered(model).items()}, path)


@right("train_large")
def keeps_its_gradients(model, initial, batches, max_norm, path):
    """zero_grad fills gradients with zeros: they stay in use."""
    shard_and_fill(model, initial)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.zero_grad = partial(optimizer.zero_grad, set_to_none=False)
    updates(model, batches, max_norm, optimizer)
    save(gathered(model), path)


@right("train_large")
def with_lists(model, initial, batches, max_norm, path):
    """Offloading policy, a mesh with a name, SUM and a division by hand."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ranks",))
    for part in (*model.blocks, model.first, model.last):
        fully_shard(part, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    filled(model.state_dict(), initial)
    updates(model, list(batches), max_norm)
    with open(path, "wb") if dist.get_rank() == 0 else nullcontext() as file:
        state = gathered(model)
        if file:
            torch.save(OrderedDict(state), file)


@right("train_large")
def without_the_averages(model, initial, batches, max_norm, path):
    """They are free when `updates` returns: then each rank has room for a whole model."""
    shard_and_fill(model, initial)
    updates(model, batches, max_norm)
    save(gathered(model, cpu_offload=False), path)


# ---- wrong: the bytes ----


def whole_model(model, initial):
    model.to_empty(device="cpu")
    filled(model.state_dict(), initial)


@wrong("train_large", "as with DDP: shard them")
def replicas(model, initial, batches, max_norm, path):
    whole_model(model, initial)
    updates(nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), batches, max_norm)
    save(model.state_dict(), path)


@wrong("train_large", "call fully_shard for each block")
def only_the_root(model, initial, batches, max_norm, path):
    shard_and_fill(model, initial, blocks=False)
    updates(model, batches, max_norm)
    save(gathered(model), path)


@wrong("train_large", "a gathered weight is freed")
def stays_gathered(model, initial, batches, max_norm, path):
    shard_and_fill(model, initial, reshard_after_forward=False)
    updates(model, batches, max_norm)
    save(gathered(model), path)


@wrong("train_large", "Adam's averages are all sharded")
def zero_1(model, initial, batches, max_norm, path):
    whole_model(model, initial)
    replica = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    updates(replica, batches, max_norm, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01))
    save(model.state_dict(), path)


@wrong("train_large", "only rank 0 needs the whole values")
def whole_on_all_ranks(model, initial, batches, max_norm, path):
    shard_and_fill(model, initial)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    updates(model, batches, max_norm, optimizer)
    save(gathered(model, cpu_offload=False), path)


@wrong("train_large", "only rank 0 needs the whole values")
def full_tensors_on_all_ranks(model, initial, batches, max_norm, path):
    shard_and_fill(model, initial)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    updates(model, batches, max_norm, optimizer)
    state = {name: value.full_tensor() for name, value in model.named_parameters()}
    save({name: value.detach() for name, value in state.items()} | {"scale": model.scale}, path)


@wrong("train_large", "shard them|are all sharded")
def all_on_rank_0(model, initial, batches, max_norm, path):
    """The others send it their batches."""
    for pair in batches:
        for part in pair:
            parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
            dist.gather(part, parts if dist.get_rank() == 0 else None)
            if dist.get_rank() == 0:
                part.set_(torch.cat(parts))
    if dist.get_rank() == 0:
        whole_model(model, initial)
        updates(model, batches, max_norm)
        save(model.state_dict(), path)


# ---- wrong: the file ----


def save_other(change, **options):
    def train(model, initial, batches, max_norm, path):
        shard_and_fill(model, initial)
        updates(model, batches, max_norm)
        save(change(gathered(model, **options)), path)

    return train


@wrong("train_large", "those of a wrapper")
def with_a_prefix(model, initial, batches, max_norm, path):
    save_other(lambda state: {f"module.{name}": value for name, value in state.items()})(
        model, initial, batches, max_norm, path
    )


@wrong("train_large", "not a dict that contains it")
def in_a_dict(model, initial, batches, max_norm, path):
    save_other(lambda state: {"model": state})(model, initial, batches, max_norm, path)


@wrong("train_large", "keep the dtype")
def saved_in_fp32(model, initial, batches, max_norm, path):
    save_other(lambda state: {name: value.float() for name, value in state.items()})(
        model, initial, batches, max_norm, path
    )


@wrong("train_large", "the buffer is missing")
def without_the_buffer(model, initial, batches, max_norm, path):
    save_other(lambda state: {name: value for name, value in state.items() if name != "scale"})(
        model, initial, batches, max_norm, path
    )


@wrong("train_large", "a dict of tensors")
def as_a_list(model, initial, batches, max_norm, path):
    save_other(lambda state: list(state.values()))(model, initial, batches, max_norm, path)


@wrong("train_large", "some values are missing")
def only_the_blocks(model, initial, batches, max_norm, path):
    save_other(lambda state: {name: value for name, value in state.items() if "blocks" in name})(
        model, initial, batches, max_norm, path
    )


@wrong("train_large", "names must be those of the state_dict")
def with_numbers_for_names(model, initial, batches, max_norm, path):
    save_other(lambda state: {str(n): value for n, value in enumerate(state.values())})(
        model, initial, batches, max_norm, path
    )


@wrong("train_large", "shard of one rank")
def its_own_shard(model, initial, batches, max_norm, path):
    shard_and_fill(model, initial)
    updates(model, batches, max_norm)
    state = model.state_dict()
    save({name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()}, path)


@wrong("train_large", "a DTensor needs the ranks")
def saves_dtensors(model, initial, batches, max_norm, path):
    shard_and_fill(model, initial)
    updates(model, batches, max_norm)
    save(model.state_dict(), path)


@wrong("train_large", "attribute lookup FSDPNetwork", "your code raised")
def saves_the_module(model, initial, batches, max_norm, path):
    shard_and_fill(model, initial)
    updates(model, batches, max_norm)
    save(model, path)


@wrong("train_large", "only rank 0 writes a file")
def all_write(model, initial, batches, max_norm, path):
    shard_and_fill(model, initial)
    updates(model, batches, max_norm)
    torch.save(gathered(model), path)


@wrong("train_large", "leave nothing else beside it")
def writes_twice(model, initial, batches, max_norm, path):
    shard_and_fill(model, initial)
    updates(model, batches, max_norm)
    state = gathered(model)
    save(state, path)
    save(state, path.with_name("again.pt"))


@wrong("train_large", "nothing was saved")
def saves_nothing(model, initial, batches, max_norm, path):
    shard_and_fill(model, initial)
    updates(model, batches, max_norm)


@wrong("train_large", "do all ranks call the same|waits for another", "your code raised|timed out")
def only_rank_0_gathers(model, initial, batches, max_norm, path):
    shard_and_fill(model, initial)
    updates(model, batches, max_norm)
    if dist.get_rank() == 0:
        torch.save(gathered(model), path)


# ---- wrong: the values ----


def trained(model, initial, batches, max_norm, path, **more):
    shard_and_fill(model, initial)
    updates(model, batches, max_norm, **more)
    save(gathered(model), path)


@wrong("train_large", "create the optimizer after it")
def optimizer_first(model, initial, batches, max_norm, path):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trained(model, initial, batches, max_norm, path, optimizer=optimizer)


@wrong("train_large", "to_empty\\(\\) gives a buffer memory")
def buffer_left_empty(model, initial, batches, max_norm, path):
    shard(model)
    model.to_empty(device="cpu")
    model.scale.fill_(0.5)  # whatever was in memory
    filled({name: value.detach() for name, value in model.named_parameters()}, initial)
    updates(model, batches, max_norm)
    save(gathered(model), path)


@wrong("train_large", "summed over the ranks")
def summed(model, initial, batches, max_norm, path):
    def summing(model, max_norm):
        for parameter in model.parameters():
            parameter.grad *= dist.get_world_size()
        clip(model, max_norm)

    trained(model, initial, batches, max_norm, path, clip=summing)


@wrong("train_large", "the norm of all gradients together is not clipped")
def not_clipped(model, initial, batches, max_norm, path):
    trained(model, initial, batches, max_norm, path, clip=lambda model, max_norm: None)


@wrong("train_large", "the norm of its own shards|all gradients together is not clipped")
def clipped_by_the_shard(model, initial, batches, max_norm, path):
    def own_norm(model, max_norm):
        own = [parameter.grad.to_local() for parameter in model.parameters()]
        norm = torch.cat([gradient.flatten() for gradient in own]).norm()
        for gradient in own:
            gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)

    trained(model, initial, batches, max_norm, path, clip=own_norm)


@wrong("train_large", "all gradients together is not clipped|it is the norm of all of them")
def clipped_numbers(model, initial, batches, max_norm, path):
    def clip(model, max_norm):
        for parameter in model.parameters():
            parameter.grad.to_local().clamp_(-max_norm, max_norm)

    trained(model, initial, batches, max_norm, path, clip=clip)


@wrong("train_large", "each parameter is clipped alone|all gradients together is not clipped")
def clipped_one_by_one(model, initial, batches, max_norm, path):
    def clip(model, max_norm):
        for parameter in model.parameters():
            nn.utils.clip_grad_norm_([parameter], max_norm)

    trained(model, initial, batches, max_norm, path, clip=clip)


def each_with_its_own(combine):
    """Whole models, whose gradients each rank combines as it likes."""

    def train(model, initial, batches, max_norm, path):
        whole_model(model, initial)
        updates(model, batches, max_norm, clip=combine)
        save(model.state_dict(), path)

    return train


@wrong("train_large", "first take the mean over the ranks, then clip")
def clips_before_the_mean(model, initial, batches, max_norm, path):
    def combine(model, max_norm):
        clip(model, max_norm)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    each_with_its_own(combine)(model, initial, batches, max_norm, path)


@wrong("train_large", "the weights of rank 0 alone")
def alone(model, initial, batches, max_norm, path):
    each_with_its_own(clip)(model, initial, batches, max_norm, path)


@wrong("train_large", "rank 0 are divided, and not summed")
def divided_alone(model, initial, batches, max_norm, path):
    def combine(model, max_norm):
        for parameter in model.parameters():
            parameter.grad /= dist.get_world_size()
        clip(model, max_norm)

    each_with_its_own(combine)(model, initial, batches, max_norm, path)


@wrong("train_large", "the last batch is left out")
def one_batch_less(model, initial, batches, max_norm, path):
    trained(model, initial, batches[:-1], max_norm, path)


@wrong("train_large", "weight decay of 0.01")
def with_adam(model, initial, batches, max_norm, path):
    shard_and_fill(model, initial)
    updates(model, batches, max_norm, torch.optim.Adam(model.parameters(), lr=0.01))
    save(gathered(model), path)


@wrong("train_large", "0.001 is the default")
def with_the_default_rate(model, initial, batches, max_norm, path):
    shard_and_fill(model, initial)
    updates(model, batches, max_norm, torch.optim.AdamW(model.parameters()))
    save(gathered(model), path)


@wrong("train_large", "gradients are never cleared")
def never_cleared(model, initial, batches, max_norm, path):
    shard_and_fill(model, initial)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.zero_grad = lambda: None
    updates(model, batches, max_norm, optimizer)
    save(gathered(model), path)


@wrong("train_large", "digits are lost")
def rounds_gradients(model, initial, batches, max_norm, path):
    def rounded(model, max_norm):
        clip(model, max_norm)
        for parameter in model.parameters():
            gradient = parameter.grad.to_local()
            gradient.copy_(gradient.half())

    trained(model, initial, batches, max_norm, path, clip=rounded)


@wrong("train_large", "far from where they begin")
def starts_anywhere(model, initial, batches, max_norm, path):
    """Each rank with weights of its own."""
    torch.manual_seed(dist.get_rank())
    shard(model)
    model.to_empty(device="cpu")
    for value in model.state_dict().values():
        (value.to_local() if isinstance(value, DTensor) else value).normal_()
    model.scale.copy_(initial("scale"))
    updates(model, batches, max_norm)
    save(gathered(model), path)


@wrong("train_large", "far from where they begin")
def fills_the_first_rows(model, initial, batches, max_norm, path):
    """On all ranks: they are those of rank 0."""
    shard(model)
    model.to_empty(device="cpu")
    for name, value in model.state_dict().items():
        own = value.to_local() if isinstance(value, DTensor) else value
        own.copy_(initial(name)[: len(own)])
    updates(model, batches, max_norm)
    save(gathered(model), path)


@wrong("train_large", "not the weights of one process")
def in_another_order(model, initial, batches, max_norm, path):
    trained(model, initial, batches[::-1], max_norm, path)


@wrong("train_large", "some numbers are not finite")
def diverges(model, initial, batches, max_norm, path):
    def spoil(model, max_norm):
        for parameter in model.parameters():
            parameter.grad.to_local().div_(0)

    trained(model, initial, batches, max_norm, path, clip=spoil)


# ---- what is given stays as it is; a first layer; a rank without samples ----


@wrong("gathered_linear", "leave what you are given as it is")
class WritesIntoTheShard(Linear):
    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        of_x, own = gradient @ gather(shard), scatter(gradient.T @ x)
        shard.data.copy_(own)
        return of_x, own


@wrong("gathered_linear", "leave what you are given as it is")
class DividesWhatComes(Linear):
    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        of_x, n = gradient @ gather(shard), dist.get_world_size()
        gradient /= n
        return of_x, n * scatter(gradient.T @ x)


@wrong("gathered_linear", "it must be the mean over ranks")
class NothingWhereXNeedsNothing(Linear):
    @staticmethod
    def backward(ctx, gradient):
        return Linear.backward(ctx, gradient) if ctx.needs_input_grad[0] else (None, None)


@wrong("gathered_linear", "more for backward than necessary")
class KeepsACopyOfX(Linear):
    @staticmethod
    def forward(ctx, x, shard):
        ctx.x = x.detach().clone()
        return Linear.forward(ctx, x, shard)


@wrong("gathered_linear", ".", "your code raised")
class NeedsASample(Linear):
    @staticmethod
    def backward(ctx, gradient):
        assert gradient.abs().max() < torch.inf
        return Linear.backward(ctx, gradient)


@wrong("kept_bytes", "stage 3")
def nothing_for_few_parameters(parameters, ranks, stage, mixed=False, buckets=False):
    shard = 0 if parameters < ranks else -(-parameters // ranks)
    return kept(parameters, ranks, stage, mixed, buckets, shard=shard)
