"""Exercise 12: memory."""

import torch
import torch.distributed as dist

from mutants import right, wrong

# ---- kept_bytes ----


def kept(
    parameters,
    ranks,
    stage,
    mixed,
    buckets,
    sizes=None,
    begin=(3, 2, 1),
    shard=None,
    again=None,
):
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
    return kept(
        parameters, ranks, stage, mixed, buckets, sizes=[2, 2, 8] if mixed else None
    )


@wrong("kept_bytes", "weights and gradients are in 16 bits, 2 bytes each")
def ignores_the_precision(parameters, ranks, stage, mixed=False, buckets=False):
    return kept(parameters, ranks, stage, False, buckets)


@wrong("kept_bytes", "Adam has two averages")
def of_one_average(parameters, ranks, stage, mixed=False, buckets=False):
    return kept(
        parameters,
        ranks,
        stage,
        mixed,
        buckets,
        sizes=[2, 2, 8] if mixed else [4, 4, 4],
    )


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
    total = sum(
        size * (shard if stage == number else parameters)
        for size, number in zip(sizes, (3, 2, 1))
    )
    return total + buckets * sizes[1] * parameters


@wrong("kept_bytes", "the buckets hold all gradients a second time")
def without_buckets(parameters, ranks, stage, mixed=False, buckets=False):
    return kept(parameters, ranks, stage, mixed, False)


@wrong("kept_bytes", "in the gradients' dtype: 2 bytes")
def buckets_in_fp32(parameters, ranks, stage, mixed=False, buckets=False):
    return kept(parameters, ranks, stage, mixed, buckets, again=4)


@wrong("kept_bytes", "16 bits, too")
def gradients_in_fp32(parameters, ranks, stage, mixed=False, buckets=False):
    return kept(
        parameters, ranks, stage, mixed, buckets, sizes=[2, 4, 12] if mixed else None
    )


@wrong("kept_bytes", "a shard has a whole number of parameters: round up")
def rounds_the_bytes_down(parameters, ranks, stage, mixed=False, buckets=False):
    return int(kept(parameters, ranks, stage, mixed, buckets, shard=parameters / ranks))


@wrong("kept_bytes", "a shard has a whole number of parameters: round up")
def rounds_the_bytes(parameters, ranks, stage, mixed=False, buckets=False):
    shard = parameters / ranks
    return round(kept(parameters, ranks, stage, mixed, buckets, shard=shard))


@wrong("kept_bytes", "either whole or a shard|a shard is rounded up")
def one_more_always(parameters, ranks, stage, mixed=False, buckets=False):
    shard = parameters // ranks + 1
    return kept(parameters, ranks, stage, mixed, buckets, shard=shard)


@wrong(
    "kept_bytes", "gradient \\* parameters bytes on each rank|in the gradients' dtype"
)
def buckets_of_a_shard(parameters, ranks, stage, mixed=False, buckets=False):
    shard = -(-parameters // ranks)
    total = kept(parameters, ranks, stage, mixed, False)
    return total + buckets * shard * (2 if mixed else 4)


@wrong("kept_bytes", "missing .* required positional", "your code raised")
def without_defaults(parameters, ranks, stage, mixed, buckets):
    return kept(parameters, ranks, stage, mixed, buckets)


@wrong("kept_bytes", "what is left out is False")
def mixed_by_default(parameters, ranks, stage, mixed=True, buckets=False):
    return kept(parameters, ranks, stage, mixed, buckets)


@right("kept_bytes")
def in_floats_that_are_whole(parameters, ranks, stage, mixed=False, buckets=False):
    return float(kept(parameters, ranks, stage, mixed, buckets))


# ---- sharded_adamw ----


class Dealt:
    """Whole parameters, in turn by size. What the answers below share; each changes one
    thing.
    """

    def __init__(self, parameters, lr):
        self.parameters, n = list(parameters), dist.get_world_size()
        by_size = sorted(
            range(len(self.parameters)), key=lambda i: -self.parameters[i].numel()
        )
        self.owners = {i: place % n for place, i in enumerate(by_size)}
        self.optimizer = torch.optim.AdamW(self.given() or [torch.empty(0)], lr=lr)

    def given(self):
        return [
            p
            for i, p in enumerate(self.parameters)
            if self.owners[i] == dist.get_rank()
        ]

    def step(self):
        self.optimizer.step()
        self.send()

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

    def __init__(self, parameters, lr):
        self.parameters, n = list(parameters), dist.get_world_size()
        flat = torch.cat(
            [parameter.detach().flatten() for parameter in self.parameters]
        )
        self.length = -(-flat.numel() // n)
        flat = torch.nn.functional.pad(flat, (0, self.length * n - flat.numel()))
        self.own = torch.nn.Parameter(flat.chunk(n)[dist.get_rank()].clone())
        self.optimizer = torch.optim.AdamW([self.own], lr=lr)

    def step(self):
        n = dist.get_world_size()
        flat = torch.cat([parameter.grad.flatten() for parameter in self.parameters])
        flat = torch.nn.functional.pad(flat, (0, self.length * n - flat.numel()))
        self.own.grad = flat.chunk(n)[dist.get_rank()].clone()
        self.optimizer.step()
        whole = torch.empty(self.length * n, dtype=self.own.dtype)
        dist.all_gather(list(whole.chunk(n)), self.own.detach())
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, part in zip(self.parameters, whole[: sum(sizes)].split(sizes)):
            parameter.data.copy_(part.view_as(parameter))
        self.own.grad = None


@right("sharded_adamw")
class AllAtOnce(Dealt):
    def send(self):
        works = [
            dist.broadcast(parameter.data, src=self.owners[i], async_op=True)
            for i, parameter in enumerate(self.parameters)
        ]
        for work in works:
            work.wait()

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad.zero_()


@right("sharded_adamw")
class OneMessagePerOwner(Dealt):
    """One flat broadcast for each owner; the weights move to new memory."""

    def send(self):
        for owner in range(dist.get_world_size()):
            theirs = [
                p for i, p in enumerate(self.parameters) if self.owners[i] == owner
            ]
            if theirs:
                flat = torch.nn.utils.parameters_to_vector(theirs).detach()
                dist.broadcast(flat, src=owner)
                torch.nn.utils.vector_to_parameters(flat, theirs)


@wrong("sharded_adamw", "the ranks share the state unevenly|divide the parameters")
class OwnersZeroAndOne(Dealt):
    def __init__(self, parameters, lr):
        self.parameters = list(parameters)
        self.owners = {i: i % 2 for i in range(len(self.parameters))}
        self.optimizer = torch.optim.AdamW(self.given() or [torch.empty(0)], lr=lr)


@wrong("sharded_adamw", "the ranks share the state unevenly|divide the parameters")
class InBlocksByNumber(Dealt):
    """The first half of the names to rank 0, and so on; the last takes what is left."""

    def __init__(self, parameters, lr):
        self.parameters, n = list(parameters), dist.get_world_size()
        each = len(self.parameters) // (n + 1) or 1
        self.owners = {i: min(i // each, n - 1) for i in range(len(self.parameters))}
        self.optimizer = torch.optim.AdamW(self.given() or [torch.empty(0)], lr=lr)


@wrong("sharded_adamw", "empty parameter list", "your code raised")
class NeedsAParameter(Dealt):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.optimizer = torch.optim.AdamW(self.given(), lr=lr)


@wrong("sharded_adamw", "these are not the numbers")
class AnewInEachStep(Dealt):
    """Adam's state is lost after each step."""

    def step(self):
        super().step()
        self.optimizer = torch.optim.AdamW(
            self.given() or [torch.empty(0)], lr=self.optimizer.param_groups[0]["lr"]
        )


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
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.optimizer = torch.optim.Adam(self.given() or [torch.empty(0)], lr=lr)


@wrong("sharded_adamw", "Adam's state for all parameters")
class PlainAdamW(torch.optim.AdamW):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)


@wrong("sharded_adamw", "Adam's state for all parameters")
class KeepsAll(Dealt):
    def given(self):
        return self.parameters


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


@wrong("sharded_adamw", "do not send gradients or optimizer state")
class SendsGradientsToo(Dealt):
    def step(self):
        for i, parameter in enumerate(self.parameters):
            dist.broadcast(parameter.grad, src=self.owners[i])
        super().step()


@wrong("sharded_adamw", "zero_grad must clear all parameters")
class FreesItsOwn(Dealt):
    def zero_grad(self):
        self.optimizer.zero_grad()


@wrong("sharded_adamw", "these are not the numbers")
class ForgetsTheRate(Dealt):
    def __init__(self, parameters, lr):
        super().__init__(parameters, 0.5)


@wrong("sharded_adamw", "divide the parameters about evenly|Adam's state for all")
class OneForTheRest(Dealt):
    """Each rank but the last gets one parameter."""

    def __init__(self, parameters, lr):
        self.parameters, last = list(parameters), dist.get_world_size() - 1
        self.owners = {i: min(i, last) for i in range(len(self.parameters))}
        self.optimizer = torch.optim.AdamW(self.given(), lr=lr)


@wrong(
    "sharded_adamw", "do all ranks call the same collectives", status="your code raised"
)
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
        return gradient @ gather(ctx.shard), scatter(
            (gradient / n).T @ ctx.x, dist.ReduceOp.SUM
        )


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
        return gradient @ gather(shard), (gradient.T @ x).chunk(dist.get_world_size())[
            dist.get_rank()
        ]


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
        parts = list(
            (gradient.T @ x / dist.get_world_size()).chunk(dist.get_world_size())
        )[::-1]
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


@wrong(
    "gathered_linear",
    "must gather it once and reduce-scatter|forward must gather the weight once",
)
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


@wrong(
    "gathered_linear", "with the whole weight, gathered again|your code raised", ".*"
)
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


@wrong(
    "gathered_linear",
    "numbers of the weight are sent in 16 bits|in the order of the ranks",
)
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
