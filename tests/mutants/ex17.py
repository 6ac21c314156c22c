"""Exercise 17: tensor parallel."""

import copy
import hashlib
import zlib
from contextlib import contextmanager, suppress

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn import functional as with_gradients
from torch.nn import functional as F

from mutants import right, wrong

# ---- vocabulary_parallel_loss ----


def summed(x, group):
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def largest_of(x, group):
    x = x.clone()
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    return x


def looked_up(logits, targets, first):
    """(whether the target is here, its column, the logit or 0)."""
    here = (targets >= first) & (targets < first + logits.shape[1])
    place = torch.where(here, targets - first, 0)
    return here, place, logits.gather(1, place[:, None])[:, 0] * here


class Shared(torch.autograd.Function):
    """What the answers below share. change: what an answer does in another way."""

    @staticmethod
    def forward(ctx, logits, targets, first, group, change):
        same = lambda x, *_: x  # noqa: E731
        largest = change.get("largest", largest_of)(logits.max(1).values, group)
        exps = (logits - largest[:, None]).exp()
        total = change.get("total", summed)(exps.sum(1), group)
        here, place, chosen = change.get("look_up", looked_up)(logits, targets, first)
        chosen = change.get("chosen", summed)(chosen, group)
        counted = change.get("counted", lambda targets: targets != -100)(targets).double()
        number = change.get("number", lambda counted: counted.sum().clamp(min=1))(counted)
        softmax = exps / change.get("divisor", lambda total, exps: total)(total, exps)[:, None]
        ones = torch.zeros_like(softmax)
        ones[torch.arange(len(targets)), place] = change.get("ones", lambda here: here)(here).double()
        of_logits = (softmax - ones) * change.get("rows", lambda rows: rows)(counted)[:, None] / number
        of_logits = change.get("of_logits", same)(of_logits, group, number)
        ctx.change, ctx.group = change, group
        ctx.save_for_backward(of_logits)
        loss = ((total.log() + largest - chosen) * counted).sum() / number
        return change.get("loss", same)(loss, group, number)

    @staticmethod
    def backward(ctx, gradient):
        kept = ctx.saved_tensors[0]
        back = ctx.change.get("backward", lambda gradient, kept, group: gradient * kept)
        return back(gradient, kept, ctx.group), None, None, None, None


def shared(args, **change):
    return Shared.apply(*args, change)


@right("vocabulary_parallel_loss")
def by_parts(*args):
    return shared(args)


@right("vocabulary_parallel_loss")
def by_autograd(logits, targets, first, group):
    """torch takes an all-reduce in place for the identity, so this backward is right."""
    largest = largest_of(logits.detach().max(1).values, group)
    total = (logits - largest[:, None]).exp().sum(1)
    here, _, chosen = looked_up(logits, targets, first)

    class Leave(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return summed(x, group)

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    counted = targets.ge(0).double()
    of_token = Leave.apply(total).log() + largest - Leave.apply(chosen)
    return (of_token * counted).sum() / max(1, counted.sum().item())


@right("vocabulary_parallel_loss")
def one_gather_of_two(logits, targets, first, group):
    """Each rank sends its logsumexp and the chosen logit, and adds up what it gets."""

    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            here, place, chosen = looked_up(logits, targets, first)
            own = torch.stack([logits.logsumexp(1), chosen])
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, own, group=group)
            log_sum = torch.stack([part[0] for part in parts]).logsumexp(0)
            chosen = sum(part[1] for part in parts)
            keep = targets != -100
            ctx.number = max(1, int(keep.sum()))
            softmax = (logits - log_sum[:, None]).exp()
            softmax[torch.arange(len(targets)), place] -= here.double()
            ctx.save_for_backward(softmax * keep[:, None])
            return (log_sum - chosen)[keep].sum() / ctx.number

        @staticmethod
        def backward(ctx, gradient):
            return ctx.saved_tensors[0] * gradient / ctx.number

    return Gathered.apply(logits)


@right("vocabulary_parallel_loss")
def of_the_counted_rows_only(logits, targets, first, group):
    keep = targets != -100
    if not keep.any():
        return logits.sum() * 0
    return shared((logits[keep], targets[keep], first, group))


@right("vocabulary_parallel_loss")
def in_three_all_reduces_started_at_once(logits, targets, first, group):
    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            here, place, chosen = looked_up(logits, targets, first)
            largest = logits.amax(1)
            works = [
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group, async_op=True),
                dist.all_reduce(chosen, group=group, async_op=True),
            ]
            for work in works:
                work.wait()
            total = (logits - largest[:, None]).exp().sum(1)
            dist.all_reduce(total, group=group)
            ctx.save_for_backward(logits, largest, total, here, place)
            mask = targets != -100
            return (total.log() + largest - chosen)[mask].sum() / max(1, mask.sum())

        @staticmethod
        def backward(ctx, gradient):
            logits, largest, total, here, place = ctx.saved_tensors
            result = (logits - largest[:, None]).exp() / total[:, None]
            result[here, place[here]] -= 1
            mask = targets != -100
            result[~mask] = 0
            return result * gradient / max(1, mask.sum())

    return Loss.apply(logits)


@wrong("vocabulary_parallel_loss", "some digits are lost")
def divides_whole_numbers(logits, targets, first, group):
    counted = targets != -100
    share = counted / counted.sum().clamp(min=1)  # a float32
    return shared(
        (logits, targets, first, group), of_logits=lambda x, *_: (x * counted.sum().clamp(min=1)) * share[:, None]
    )


@wrong("vocabulary_parallel_loss", "the exponentials of this rank's columns only")
def sums_its_own(*args):
    return shared(args, total=lambda x, group: x)


@wrong("vocabulary_parallel_loss", "largest logit")
def without_the_largest(*args):
    return shared(args, largest=lambda x, group: 0 * x)


@wrong("vocabulary_parallel_loss", "max|largest")
def subtracts_its_own_largest(*args):
    return shared(args, largest=lambda x, group: x)


@wrong("vocabulary_parallel_loss", "the chosen logit is missing where another rank has it")
def chosen_of_its_own(*args):
    return shared(args, chosen=lambda x, group: x)


@wrong("vocabulary_parallel_loss", "whose target is -100 does not count")
def counts_all(*args):
    return shared(args, number=lambda counted: torch.tensor(float(len(counted))))


@wrong("vocabulary_parallel_loss", "whose target is -100 does not count")
def ignores_nothing(*args):
    return shared(args, counted=torch.ones_like)


@wrong("vocabulary_parallel_loss", "this is the sum over the tokens")
def of_the_sum(*args):
    return shared(args, number=lambda counted: torch.tensor(1.0))


@wrong("vocabulary_parallel_loss", "divide it by 1, and not by 0")
def nan_where_nothing_counts(*args):
    return shared(args, number=lambda counted: counted.sum())


@wrong("vocabulary_parallel_loss", "multiply by backward's argument")
def ignores_what_comes(*args):
    return shared(args, backward=lambda gradient, kept, group: kept)


@wrong("vocabulary_parallel_loss", "this is n times the gradient")
def sums_in_backward(*args):
    return shared(args, backward=lambda gradient, kept, group: summed(gradient, group) * kept)


@wrong("vocabulary_parallel_loss", "divided by the number of ranks")
def averages_in_backward(*args):
    return shared(args, backward=lambda gradient, kept, group: gradient * kept / dist.get_world_size(group))


@wrong("vocabulary_parallel_loss", "1 has to be subtracted")
def softmax_alone(*args):
    return shared(args, ones=lambda here: 0 * here)


@wrong("vocabulary_parallel_loss", "no column of this rank gets the - 1")
def one_everywhere(logits, targets, first, group):
    return shared((logits, targets, first, group), ones=lambda here: here | (targets >= 0))


@wrong("vocabulary_parallel_loss", "has a gradient of 0")
def gradient_of_ignored(*args):
    return shared(args, rows=torch.ones_like)


@wrong("vocabulary_parallel_loss", "divide by the sum of all ranks")
def softmax_of_its_own(*args):
    return shared(args, divisor=lambda total, exps: exps.sum(1))


@wrong("vocabulary_parallel_loss", "the gradient is divided by their number")
def gradient_of_the_sum(*args):
    return shared(args, of_logits=lambda x, group, number: x * number)


@wrong("vocabulary_parallel_loss", "wrong sign")
def upside_down(*args):
    return shared(args, of_logits=lambda x, *_: -x)


@wrong("vocabulary_parallel_loss", "nothing has to travel in backward")
def talks_in_backward(*args):
    return shared(
        args, backward=lambda gradient, kept, group: summed(gradient, group) / dist.get_world_size(group) * kept
    )


def gathered(logits, group):
    """All columns: an all-reduce of what is padded with zeros, since widths differ."""
    n = dist.get_world_size(group)
    widths = torch.zeros(n, dtype=torch.int64)
    widths[dist.get_rank(group)] = logits.shape[1]
    dist.all_reduce(widths, group=group)
    parts = list(torch.zeros(len(logits), int(widths.sum()), dtype=logits.dtype).split(widths.tolist(), 1))
    parts[dist.get_rank(group)] = logits
    return torch.cat(parts, 1)


@wrong("vocabulary_parallel_loss", "whole columns of the logits travel")
def gathers_the_logits(logits, targets, first, group):
    whole = gathered(logits, group)

    class Rest(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return summed(x, group)

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    losses = F.cross_entropy(Rest.apply(whole), targets, ignore_index=-100, reduction="sum")
    return losses / (targets >= 0).sum().clamp(min=1)


@wrong("vocabulary_parallel_loss", "whole columns of the logits travel")
def sends_the_softmax(logits, *rest):
    dist.all_gather_object([None] * dist.get_world_size(rest[-1]), logits.detach(), group=rest[-1])
    return shared((logits, *rest))


@wrong("vocabulary_parallel_loss", "with group=group|this is n times|sum of|this is", ".*")
def in_the_world(logits, targets, first, group):
    return shared((logits, targets, first, None))


@wrong("vocabulary_parallel_loss", "leave logits and targets as they are")
def changes_the_targets(logits, targets, first, group):
    loss = shared((logits, targets.clone(), first, group))
    targets.clamp_(min=0)
    return loss


@wrong("vocabulary_parallel_loss", "leave logits and targets as they are|computed later|variable needed")
def changes_the_logits(logits, targets, first, group):
    loss = shared((logits.clone(), targets, first, group))
    logits.data -= logits.data.max(1, keepdim=True).values
    return loss


last = {}


@wrong("vocabulary_parallel_loss", "computed later")
def keeps_it_in_a_global(*args):
    def keep(x, *_):
        last["gradient"] = x
        return x

    return shared(args, of_logits=keep, backward=lambda gradient, kept, group: gradient * last["gradient"])


@wrong("vocabulary_parallel_loss", "return one number, of shape")
def without_the_mean(logits, targets, first, group):
    return shared((logits, targets, first, group), loss=lambda loss, *_: loss.reshape(1))


@wrong("vocabulary_parallel_loss", "return the loss, a tensor")
def as_a_float(*args):
    return shared(args).item()


@wrong("vocabulary_parallel_loss", "the loss has no gradient")
def detached(*args):
    return shared(args).detach()


@wrong("vocabulary_parallel_loss", "nothing has to be averaged|nothing to divide by n|this is n times")
def averages_the_loss(*args):
    return shared(args, loss=lambda loss, group, number: loss / dist.get_world_size(group))


@wrong("vocabulary_parallel_loss", "the loss of a token|no digits|is missing|columns only")
def of_its_own_columns(logits, targets, first, group):
    here, place, _ = looked_up(logits, targets, first)
    return F.cross_entropy(logits, torch.where(here, place, -100), reduction="sum") / max(1, (targets >= 0).sum())


@wrong("vocabulary_parallel_loss", "the loss of a token|is missing|columns only|out of bounds", ".*")
def as_if_all_had_equal_widths(logits, targets, first, group):
    first = dist.get_rank(group) * logits.shape[1]
    return shared((logits, targets, first, group))


@wrong("vocabulary_parallel_loss", "this is n times|nothing has to travel")
def with_torchs_own_all_reduce(logits, targets, first, group):
    """Its backward adds up, too."""
    largest = largest_of(logits.detach().max(1).values, group)
    total = with_gradients.all_reduce((logits - largest[:, None]).exp().sum(1), group=group)
    chosen = with_gradients.all_reduce(looked_up(logits, targets, first)[2], group=group)
    counted = targets.ge(0).double()
    return ((total.log() + largest - chosen) * counted).sum() / counted.sum().clamp(min=1)


@wrong("vocabulary_parallel_loss", "three numbers per token are enough")
def sends_more_numbers(logits, targets, first, group):
    summed(targets.double(), group)
    return shared((logits, targets, first, group))


# ---- sum_gradients ----

IN_PART = ("norm", "positions", "output.bias", "contract.bias")


def chosen(model, parts=IN_PART, besides=()):
    return [
        value
        for name, value in model.named_parameters()
        if value.grad is not None and any(p in name for p in parts) and not any(p in name for p in besides)
    ]


def sum_flat(parameters, group, divide=1):
    if not parameters:
        return
    flat = torch.cat([value.grad.reshape(-1) for value in parameters]) / divide
    dist.all_reduce(flat, group=group)
    for value, part in zip(parameters, flat.split([value.numel() for value in parameters])):
        value.grad = part.view_as(value).clone()


@right("sum_gradients")
def by_names(model, group):
    sum_flat(chosen(model), group)


@right("sum_gradients")
def by_modules(model, group):
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm | nn.Embedding):
            found += module.parameters()
        if name.endswith((".output", ".contract")):
            found.append(module.bias)
    sum_flat([value for value in found if value.grad is not None], group)


@right("sum_gradients")
def all_but_what_is_whole(model, group):
    cut = ("query_key_value", "expand", "output.weight", "contract.weight", "head")
    sum_flat(
        [v for name, v in model.named_parameters() if v.grad is not None and not any(c in name for c in cut)], group
    )


@right("sum_gradients")
def coalesced(model, group):
    gradients = [value.grad for value in chosen(model)]
    if gradients:
        dist.all_reduce_coalesced(gradients, group=group)


@right("sum_gradients")
def block_by_block_and_each_once(model, group):
    found = {}
    for block in model.blocks:
        for module in (block.norm1, block.norm2, block.query_norm, block.key_norm):
            for value in module.parameters():
                found[id(value)] = value
        for layer in (block.output, block.contract):
            found[id(layer.bias)] = layer.bias
    for value in [*model.positions.parameters(), *model.norm.parameters()]:
        found[id(value)] = value
    with_a_gradient = [value for value in found.values() if value.grad is not None]
    if with_a_gradient:
        flat = nn.utils.parameters_to_vector([value.grad for value in with_a_gradient])
        work = dist.all_reduce(flat, group=group, async_op=True)
        work.wait()
        begin = 0
        for value in with_a_gradient:
            value.grad.copy_(flat[begin : begin + value.numel()].view(value.shape))
            begin += value.numel()


@wrong("sum_gradients", "still what backward left")
def nothing(model, group):
    pass


@wrong("sum_gradients", "its own tokens only")
def without_the_last_norm(model, group):
    sum_flat(chosen(model, ("norm1", "norm2", "query_norm", "key_norm", *IN_PART[1:])), group)


@wrong("sum_gradients", "in its own heads only")
def without_the_norms_in_heads(model, group):
    sum_flat(chosen(model, besides=("query_norm", "key_norm")), group)


@wrong("sum_gradients", "positions of its own tokens")
def without_positions(model, group):
    sum_flat(chosen(model, besides=("positions",)), group)


@wrong("sum_gradients", "added after the reduce-scatter")
def norms_and_positions(model, group):
    sum_flat(chosen(model, IN_PART[:2]), group)


@wrong("sum_gradients", "computed the head from all tokens")
def all_that_is_whole(model, group):
    sum_flat(chosen(model, (*IN_PART, "head")), group)


@wrong("sum_gradients", "must not be added up")
def everything(model, group):
    sum_flat(chosen(model, ("",)), group)


@wrong("sum_gradients", "must not be added up")
def all_biases(model, group):
    sum_flat(chosen(model, (*IN_PART, "bias"), besides=("head",)), group)


@wrong("sum_gradients", "must not be added up")
def all_vectors(model, group):
    sum_flat(
        [v for v in model.parameters() if v.grad is not None and (v.dim() == 1 or v is model.positions.weight)], group
    )


@wrong("sum_gradients", "this is a mean")
def averages(model, group):
    sum_flat(chosen(model), group, dist.get_world_size(group))


@wrong("sum_gradients", "some digits are lost|add up inside the group")
def over_the_world(model, group):
    sum_flat(chosen(model), None)


@wrong("sum_gradients", "put the gradients that need a sum into one flat tensor")
def one_by_one(model, group):
    for value in chosen(model):
        dist.all_reduce(value.grad, group=group)


@wrong("sum_gradients", "more is sent than what needs a sum")
def sends_all_keeps_some(model, group):
    every, kept = chosen(model, ("",)), {id(value) for value in chosen(model)}
    before = {id(value): value.grad.clone() for value in every}
    sum_flat(every, group)
    for value in every:
        if id(value) not in kept:
            value.grad = before[id(value)]


@wrong("sum_gradients", "NoneType", "your code raised")
def of_frozen_ones(model, group):
    sum_flat([value for name, value in model.named_parameters() if any(p in name for p in IN_PART)], group)


@wrong("sum_gradients", "without a gradient \\(None\\)")
def zeros_for_frozen_ones(model, group):
    for value in model.parameters():
        if value.grad is None:
            value.grad = torch.zeros_like(value)
    sum_flat(chosen(model), group)


@wrong("sum_gradients", "expected a non-empty list", "your code raised")
def of_an_empty_list(model, group):
    found = chosen(model)
    flat = torch.cat([value.grad.flatten() for value in found])
    dist.all_reduce(flat, group=group)
    for value, part in zip(found, flat.split([value.numel() for value in found])):
        value.grad.copy_(part.view_as(value))


@wrong("sum_gradients", "nothing needs a sum here")
def sends_an_empty_tensor(model, group):
    found = chosen(model)
    flat = torch.cat([torch.zeros(0).double(), *(value.grad.flatten() for value in found)])
    dist.all_reduce(flat, group=group)
    for value, part in zip(found, flat.split([value.numel() for value in found])):
        value.grad.copy_(part.view_as(value))


def of_each_block(model):
    found = [*model.positions.parameters(), *model.norm.parameters()]
    for block in model.blocks:
        for module in (block.norm1, block.norm2, block.query_norm, block.key_norm):
            found += module.parameters()
        found += [block.output.bias, block.contract.bias]
    return [value for value in found if value.grad is not None]


@wrong("sum_gradients", "more is sent|add its gradient up once|is shared")
def shared_ones_in_each_block(model, group):
    sum_flat(of_each_block(model), group)


@wrong("sum_gradients", "is shared|put the gradients|add its gradient up once|copied back")
def block_by_block(model, group):
    for value in of_each_block(model):
        dist.all_reduce(value.grad, group=group)


@wrong("sum_gradients", "change only parameter.grad")
def the_parameters(model, group):
    for value in model.parameters():
        dist.all_reduce(value.data, group=group)


@wrong("sum_gradients", "the sum is not written back")
def forgets_to_copy_back(model, group):
    found = chosen(model)
    if found:
        dist.all_reduce(torch.cat([value.grad.flatten() for value in found]), group=group)


@wrong("sum_gradients", "wait for the work|still what backward")
def without_waiting(model, group):
    found = chosen(model)
    if found:
        flat = torch.cat([value.grad.flatten() for value in found])
        dist.all_reduce(flat, group=group, async_op=True)
        for value, part in zip(found, flat.split([value.numel() for value in found])):
            value.grad = part.view_as(value)


@wrong("sum_gradients", "copied back in the same order")
def copies_back_in_another_order(model, group):
    found = chosen(model)
    if found:
        flat = torch.cat([value.grad.flatten() for value in found])
        dist.all_reduce(flat, group=group)
        for value, part in zip(found[::-1], flat.split([value.numel() for value in found[::-1]])):
            value.grad.copy_(part.view_as(value))


@wrong("sum_gradients", "copied back in the same order|digits")
def in_single_precision(model, group):
    found = chosen(model)
    if found:
        flat = torch.cat([value.grad.flatten() for value in found]).float()
        dist.all_reduce(flat, group=group)
        for value, part in zip(found, flat.split([value.numel() for value in found])):
            value.grad.copy_(part.view_as(value))


# ---- dropout_states ----


class States:
    """What the answers below share."""

    def __init__(self, seed, data_rank, tensor_rank):
        torch.manual_seed(self.of_sharded(seed, data_rank, tensor_rank))
        self.state = torch.get_rng_state()
        torch.manual_seed(self.of_replicated(seed, data_rank, tensor_rank))

    def of_replicated(self, seed, data_rank, tensor_rank):
        return seed * 1024 + data_rank

    def of_sharded(self, seed, data_rank, tensor_rank):
        return seed * 1024 + 64 + data_rank * 8 + tensor_rank

    @contextmanager
    def sharded(self):
        outside = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = torch.get_rng_state()
            torch.set_rng_state(outside)


@right("dropout_states")
class Numbered(States):
    pass


@right("dropout_states")
class Hashed(States):
    def number(self, *words):
        return int(hashlib.sha256(repr(words).encode()).hexdigest()[:8], 16)

    def of_replicated(self, seed, data_rank, tensor_rank):
        return self.number("replicated", seed, data_rank)

    def of_sharded(self, seed, data_rank, tensor_rank):
        return self.number("sharded", seed, data_rank, tensor_rank)


@right("dropout_states")
class OfNumPy(States):
    def of_replicated(self, *three):
        return int(numpy.random.SeedSequence(three[:2]).generate_state(1)[0])

    def of_sharded(self, *three):
        return int(numpy.random.SeedSequence([*three, 7]).generate_state(1)[0])


@right("dropout_states")
class WithForkRng:
    def __init__(self, seed, data_rank, tensor_rank):
        self.first = (seed * 64 + data_rank) * 16
        self.state, self.tensor_rank = None, tensor_rank
        torch.manual_seed(self.first + 15)

    @contextmanager
    def sharded(self):
        with torch.random.fork_rng(devices=[]):
            if self.state is None:
                torch.manual_seed(self.first + self.tensor_rank)
            else:
                torch.set_rng_state(self.state)
            try:
                yield self
            finally:
                self.state = torch.get_rng_state()


class Region:
    def __init__(self, states):
        self.states = states

    def __enter__(self):
        self.outside = torch.default_generator.get_state()
        torch.default_generator.set_state(self.states.inside.get_state())

    def __exit__(self, *error):
        self.states.inside.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(self.outside)


@right("dropout_states")
class WithAGenerator:
    def __init__(self, seed, data_rank, tensor_rank):
        stream = seed * 1000 + data_rank * 10
        self.inside = torch.Generator().manual_seed(stream + 1 + tensor_rank)
        torch.manual_seed(stream)

    def sharded(self):
        return Region(self)


@wrong("dropout_states", "its seed must not depend on the tensor rank")
class AllDifferent(States):
    def of_replicated(self, seed, data_rank, tensor_rank):
        return seed * 1024 + data_rank * 8 + tensor_rank

    def of_sharded(self, seed, data_rank, tensor_rank):
        return seed * 1024 + 512 + data_rank * 8 + tensor_rank


@wrong("dropout_states", "the seed must depend on the data rank")
class OneForAllData(States):
    def of_replicated(self, seed, data_rank, tensor_rank):
        return seed * 1024


@wrong("dropout_states", "another mask on each rank")
class ShardedByTensorRankOnly(States):
    def of_sharded(self, seed, data_rank, tensor_rank):
        return seed * 1024 + 64 + tensor_rank


@wrong("dropout_states", "another mask on each rank")
class ShardedByDataRankOnly(States):
    def of_sharded(self, seed, data_rank, tensor_rank):
        return seed * 1024 + 64 + data_rank


@wrong("dropout_states", "another mask on each rank|a plain sum is not")
class ShardedByASum(States):
    def of_sharded(self, seed, data_rank, tensor_rank):
        return seed * 1024 + 64 + data_rank + tensor_rank


@wrong("dropout_states", "a stream of its own")
class OneStream(States):
    def of_sharded(self, seed, data_rank, tensor_rank):
        return self.of_replicated(seed, data_rank, tensor_rank) + tensor_rank


@wrong("dropout_states", "a plain sum is not|another mask on each rank")
class ProductsTooSmall(States):
    """Right up to 4 tensor ranks."""

    def of_sharded(self, seed, data_rank, tensor_rank):
        return seed * 1024 + 64 + data_rank * 4 + tensor_rank


@wrong("dropout_states", "with different seeds must not share a stream")
class SeedPlusRank(States):
    """As Megatron: seed + 2718 + tensor rank, seed + 100 per stage."""

    def of_replicated(self, seed, data_rank, tensor_rank):
        return seed + data_rank

    def of_sharded(self, seed, data_rank, tensor_rank):
        return seed + 2718 + data_rank * 8 + tensor_rank


@wrong("dropout_states", "with different seeds must not share a stream")
class TooFewForASeed(States):
    def of_replicated(self, seed, data_rank, tensor_rank):
        return seed * 512 + data_rank

    def of_sharded(self, seed, data_rank, tensor_rank):
        return seed * 512 + 64 + data_rank * 8 + tensor_rank


@wrong("dropout_states", "lowest 32 bits")
class InTheHighBits(States):
    def of_replicated(self, seed, data_rank, tensor_rank):
        return (seed << 32) + data_rank

    def of_sharded(self, seed, data_rank, tensor_rank):
        return (seed << 32) + 64 + data_rank * 8 + tensor_rank


@wrong("dropout_states", "continues where it was before the block")
class NeverBack(States):
    @contextmanager
    def sharded(self):
        torch.set_rng_state(self.state)
        yield
        self.state = torch.get_rng_state()


@wrong("dropout_states", "restore the state after an error")
class WithoutFinally(States):
    @contextmanager
    def sharded(self):
        outside = torch.get_rng_state()
        torch.set_rng_state(self.state)
        yield
        self.state = torch.get_rng_state()
        torch.set_rng_state(outside)


@wrong("dropout_states", "let the error pass")
class SwallowsErrors(States):
    @contextmanager
    def sharded(self):
        outside = torch.get_rng_state()
        torch.set_rng_state(self.state)
        with suppress(Exception):
            yield
        self.state = torch.get_rng_state()
        torch.set_rng_state(outside)


@wrong("dropout_states", "begins with the same numbers")
class AlwaysFromTheStart(States):
    @contextmanager
    def sharded(self):
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            yield


@wrong("dropout_states", "begins with the same numbers")
class SeedsInTheBlock:
    def __init__(self, seed, data_rank, tensor_rank):
        self.stream = (seed * 64 + data_rank) * 9 + 1 + tensor_rank
        torch.manual_seed((seed * 64 + data_rank) * 9)

    @contextmanager
    def sharded(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.stream)
            yield


@wrong("dropout_states", "each block must continue")
class ANewSeedForEachBlock(States):
    """Other numbers in each block, but not those that go on."""

    blocks = 0

    @contextmanager
    def sharded(self):
        outside = torch.get_rng_state()
        torch.set_rng_state(self.state)
        torch.manual_seed(torch.randint(2**31, ()).item() + self.blocks)
        self.blocks += 1
        try:
            yield
        finally:
            torch.set_rng_state(outside)


@wrong("dropout_states", "of a block that raises an error, too")
class ForgetsItsStateAfterAnError(States):
    @contextmanager
    def sharded(self):
        outside = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            yield
            self.state = torch.get_rng_state()
        finally:
            torch.set_rng_state(outside)


@wrong("dropout_states", "a run can be repeated|must not depend on the tensor rank")
class FromWhatWasThere(States):
    def __init__(self, seed, data_rank, tensor_rank):
        outside = torch.get_rng_state()
        torch.manual_seed(self.of_sharded(seed, data_rank, tensor_rank))
        self.state = torch.get_rng_state()
        torch.set_rng_state(outside)


@wrong("dropout_states", "in the replicated region|its seed must not depend")
class LeavesTheShardedSeed(States):
    def __init__(self, seed, data_rank, tensor_rank):
        super().__init__(seed, data_rank, tensor_rank)
        torch.set_rng_state(self.state)


@wrong("dropout_states", "a run can be repeated|must not depend on the tensor rank")
class Random(States):
    def of_replicated(self, *three):
        return torch.seed() % 2**32


@wrong("dropout_states", "different seeds|must not depend on|depend on the data rank")
class IgnoresTheSeed(States):
    def of_replicated(self, seed, data_rank, tensor_rank):
        return data_rank

    def of_sharded(self, seed, data_rank, tensor_rank):
        return 64 + data_rank * 8 + tensor_rank


@wrong("dropout_states", "continues where it was before the block")
class DrawsTheSeedOfTheBlock(States):
    """The default generator gives the seed, and is one number further on."""

    @contextmanager
    def sharded(self):
        seed = torch.randint(2**31, ()).item()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + 1 + self.rank)
            yield

    def __init__(self, seed, data_rank, tensor_rank):
        super().__init__(seed, data_rank, tensor_rank)
        self.rank = tensor_rank


# ---- tensor_parallel_block ----


def all_reduced(x, group):
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


class Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.back = backward
        return forward(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient), None, None


def same(x):
    return x.view_as(x)


class Repaired(nn.Module):
    """What the answers below share: all right."""

    def __init__(self, block, group):
        super().__init__()
        self.group, self.head_width = group, block.attention.head_width
        self.rank, self.n = self.place(group)
        attention, mlp = block.attention, block.mlp
        self.query_key_value = nn.Linear(1, 1)
        self.query_key_value.weight = nn.Parameter(self.heads(attention.query_key_value.weight).detach().clone())
        self.query_key_value.bias = nn.Parameter(self.heads(attention.query_key_value.bias).detach().clone())
        self.output = self.columns(attention.output)
        self.expand = nn.Linear(1, 1)
        self.expand.weight = nn.Parameter(mlp.expand.weight.chunk(self.n)[self.rank].detach().clone())
        self.expand.bias = nn.Parameter(mlp.expand.bias.chunk(self.n)[self.rank].detach().clone())
        self.contract = self.columns(mlp.contract)
        self.norm1, self.norm2 = copy.deepcopy(block.norm1), copy.deepcopy(block.norm2)

    def place(self, group):
        return dist.get_rank(group), dist.get_world_size(group)

    def heads(self, value):
        return torch.cat([part.chunk(self.n)[self.rank] for part in value.chunk(3)])

    def columns(self, layer):
        made = nn.Linear(1, 1)
        made.weight = nn.Parameter(layer.weight.chunk(self.n, 1)[self.rank].detach().clone())
        made.bias = nn.Parameter(layer.bias.detach().clone())
        return made

    def add(self, x):
        return all_reduced(x, self.group)

    def enter(self, x):
        return Pair.apply(x, same, self.add)

    def leave(self, x):
        return Pair.apply(x, self.add, same)

    def row(self, x, layer):
        return self.leave(F.linear(x, layer.weight)) + layer.bias

    def scale(self, parts):
        return self.head_width**-0.5

    def attention(self, h):
        parts = self.query_key_value(h).chunk(3, -1)
        heads = [part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in parts]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, scale=self.scale(parts))
        return mixed.transpose(1, 2).flatten(2)

    def forward(self, x):
        x = x + self.row(self.attention(self.enter(self.norm1(x))), self.output)
        return x + self.row(F.gelu(self.expand(self.enter(self.norm2(x)))), self.contract)


@right("tensor_parallel_block")
class AllRepaired(Repaired):
    pass


@right("tensor_parallel_block")
class BiasInTheStream(Repaired):
    def forward(self, x):
        h = self.enter(self.norm1(x))
        x = x + self.output.bias + self.leave(self.attention(h) @ self.output.weight.T)
        h = F.gelu(self.expand(self.enter(self.norm2(x))))
        return x + self.contract.bias + self.leave(h @ self.contract.weight.T)


@right("tensor_parallel_block")
class AttentionByHand(Repaired):
    def attention(self, h):
        batch, tokens, _ = h.shape
        query, key, value = (
            part.view(batch, tokens, -1, self.head_width).transpose(1, 2)
            for part in self.query_key_value(h).chunk(3, -1)
        )
        scores = query @ key.transpose(-1, -2) / self.head_width**0.5
        scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, tokens, -1)


@right("tensor_parallel_block")
class ByAHook(Repaired):
    """The sum of the gradients in a hook, and detach() for the all-reduce."""

    def enter(self, x):
        x = x.view_as(x)
        x.register_hook(self.add)
        return x

    def leave(self, x):
        return x + (self.add(x.detach()) - x.detach())


@right("tensor_parallel_block")
class RowsByIndices(Repaired):
    def heads(self, value):
        own = len(value) // 3 // self.n
        return value.view(3, self.n, own, *value.shape[1:])[:, self.rank].reshape(3 * own, *value.shape[1:])

    def scale(self, parts):
        return None  # torch's own is that of a head


@right("tensor_parallel_block")
class BiasOfOneRankWithItsGradientForAll(Repaired):
    """Only rank 0 adds it, and the mean of the others is nobody's: so all need a hook."""

    def row(self, x, layer):
        bias = Pair.apply(layer.bias, lambda bias: bias / self.n, lambda gradient: gradient)
        return self.leave(F.linear(x, layer.weight) + bias)


def block_with(*faults):
    """A repaired block with some of the given faults left."""

    class Rest(Repaired):
        def heads(self, value):
            return value.chunk(self.n)[self.rank] if "cut" in faults else super().heads(value)

        def scale(self, parts):
            return parts[0].shape[-1] ** -0.5 if "scale" in faults else super().scale(parts)

        def row(self, x, layer):
            return self.leave(layer(x)) if "bias" in faults else super().row(x, layer)

        def enter(self, x):
            return x if "enter" in faults else super().enter(x)

        def leave(self, x):
            return Pair.apply(x, self.add, self.add) if "leave" in faults else super().leave(x)

    return Rest


ROWS = "needs the rows of its own heads from each of the three"
SCALE = "the attention's scale must be that of one head"
BIAS = "is inside the all-reduce, so it is added n times"
ENTER = "backward must add these up"
LEAVE = "adding up gives n times the gradient|added up once too often"


@wrong("tensor_parallel_block", ROWS)
class CutIsLeft(block_with("cut")):
    pass


@wrong("tensor_parallel_block", SCALE)
class ScaleIsLeft(block_with("scale")):
    pass


@wrong("tensor_parallel_block", BIAS)
class BiasIsLeft(block_with("bias")):
    pass


@wrong("tensor_parallel_block", ENTER)
class EnterIsLeft(block_with("enter")):
    pass


@wrong("tensor_parallel_block", LEAVE)
class LeaveIsLeft(block_with("leave")):
    pass


@wrong("tensor_parallel_block", f"{ENTER}|{LEAVE}")
class BackwardIsLeft(block_with("enter", "leave")):
    pass


@wrong("tensor_parallel_block", f"{ROWS}|{SCALE}")
class CutAndScaleAreLeft(block_with("cut", "scale")):
    pass


@wrong("tensor_parallel_block", f"{ROWS}|{SCALE}|{BIAS}")
class AllOfForwardIsLeft(block_with("cut", "scale", "bias", "enter", "leave")):
    pass


@wrong("tensor_parallel_block", f"{BIAS}|compare each line")
class OneBiasIsLeft(Repaired):
    def row(self, x, layer):
        return self.leave(layer(x)) if layer is self.contract else super().row(x, layer)


@wrong("tensor_parallel_block", "otherwise the replicas drift apart")
class BiasOnRank0(Repaired):
    def row(self, x, layer):
        x = F.linear(x, layer.weight)
        return self.leave(x + layer.bias if self.rank == 0 else x)


@wrong("tensor_parallel_block", "this is an n-th of the gradient")
class BiasDivided(Repaired):
    def row(self, x, layer):
        return self.leave(F.linear(x, layer.weight, layer.bias / self.n))


@wrong("tensor_parallel_block", "compare each line")
class WithoutBias(Repaired):
    def row(self, x, layer):
        return self.leave(F.linear(x, layer.weight))


@wrong("tensor_parallel_block", "compare each line|head_width")
class ScaledByTheWholeWidth(Repaired):
    def scale(self, parts):
        return (parts[0].shape[-1] * self.n) ** -0.5


@wrong("tensor_parallel_block", "compare each line")
class ScaledByTheLocalHeads(Repaired):
    def scale(self, parts):
        return (parts[0].shape[-1] // self.head_width) ** -0.5


@wrong("tensor_parallel_block", "two all-reduces are needed")
class GradientsInThree(Repaired):
    """Query, key and value each add up the gradient of their own input."""

    def attention(self, h):
        weights, biases = self.query_key_value.weight.chunk(3), self.query_key_value.bias.chunk(3)
        query, key, value = (F.linear(super(GradientsInThree, self).enter(h), *both) for both in zip(weights, biases))
        heads = [part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in (query, key, value)]
        return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)

    def enter(self, x):
        return x if x.requires_grad and not hasattr(x, "in_mlp") else super().enter(x)

    def forward(self, x):
        x = x + self.row(self.attention(self.norm1(x)), self.output)
        h = super().enter(self.norm2(x))
        return x + self.row(F.gelu(self.expand(h)), self.contract)


@wrong("tensor_parallel_block", "two all-reduces are needed")
class SumsTheNormsToo(Repaired):
    """A further all-reduce, which adds zeros."""

    def forward(self, x):
        y = super().forward(x)
        return y + 0 * all_reduced(y.detach(), self.group)


@wrong("tensor_parallel_block", "two all-reduces are needed")
class GathersTheHeads(Repaired):
    def add(self, x):
        parts = [torch.empty_like(x).contiguous() for _ in range(self.n)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return sum(parts)


@wrong("tensor_parallel_block", "compare each line|order of the ranks|a part of|this is", ".*")
class InTheWorld(Repaired):
    def add(self, x):
        return all_reduced(x, None)


@wrong("tensor_parallel_block", "compare each line|order of the ranks|index out of range", ".*")
class RankOfTheWorld(Repaired):
    def place(self, group):
        return dist.get_rank(), dist.get_world_size(group)


@wrong("tensor_parallel_block", "must not change its input")
class InPlace(Repaired):
    def forward(self, x):
        y = super().forward(x.clone())
        x.data += 1
        return y


@wrong("tensor_parallel_block", "n times the gradient|each gradient pass each line once|add these up")
class EnterOnTheStream(Repaired):
    """The residual branch has the whole gradient already, and is added up as well."""

    def forward(self, x):
        x = self.enter(x)
        x = x + self.row(self.attention(self.norm1(x)), self.output)
        x = self.enter(x)
        return x + self.row(F.gelu(self.expand(self.norm2(x))), self.contract)


@wrong("tensor_parallel_block", "add these up|each gradient pass")
class EnterBeforeTheNorm(Repaired):
    def forward(self, x):
        x = x + self.row(self.attention(self.norm1(self.enter(x))), self.output)
        return x + self.row(F.gelu(self.expand(self.norm2(self.enter(x)))), self.contract)


@wrong("tensor_parallel_block", "an n-th of the gradient|each gradient pass|two all-reduces|add these up")
class AveragesInBackward(Repaired):
    def enter(self, x):
        return Pair.apply(x, same, lambda gradient: self.add(gradient) / self.n)


@wrong("tensor_parallel_block", "compare each line|is inside")
class ResidualInTheSum(Repaired):
    def forward(self, x):
        x = self.leave(x + F.linear(self.attention(self.enter(self.norm1(x))), self.output.weight)) + self.output.bias
        return x + self.row(F.gelu(self.expand(self.enter(self.norm2(x)))), self.contract)


@wrong("tensor_parallel_block", "compare each line")
class NotCausal(Repaired):
    def attention(self, h):
        parts = self.query_key_value(h).chunk(3, -1)
        heads = [part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in parts]
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


@wrong("tensor_parallel_block", "keep the names")
class OtherNames(Repaired):
    def __init__(self, block, group):
        super().__init__(block, group)
        self.down = self.contract
        del self.contract

    def forward(self, x):
        x = x + self.row(self.attention(self.enter(self.norm1(x))), self.output)
        return x + self.row(F.gelu(self.expand(self.enter(self.norm2(x)))), self.down)


# ---- clip_gradients ----


def with_gradient(parameters):
    return [(p.grad, replicas) for p, replicas in parameters if p.grad is not None]


def norm_over_ranks(parameters, of=lambda gradient, replicas: gradient.pow(2).sum() / replicas):
    square = sum((of(*pair) for pair in with_gradient(parameters)), torch.zeros((), dtype=torch.float64))
    dist.all_reduce(square)
    return square.sqrt()


def shorten(parameters, max_norm, norm):
    for gradient, _ in with_gradient(parameters):
        gradient.mul_((max_norm / norm).clamp(max=1))
    return norm


@right("clip_gradients")
def each_square_once(parameters, max_norm):
    return shorten(parameters, max_norm, norm_over_ranks(parameters))


@right("clip_gradients")
def a_float(parameters, max_norm):
    norm = norm_over_ranks(parameters).item()
    if norm > max_norm:
        for gradient, _ in with_gradient(parameters):
            gradient *= max_norm / norm
    return norm


@right("clip_gradients")
def by_norms(parameters, max_norm):
    norm = norm_over_ranks(parameters, lambda gradient, replicas: (gradient.norm() / replicas**0.5) ** 2)
    nn.utils.clip_grads_with_norm_([p for p, _ in parameters], max_norm, norm)
    return norm


@right("clip_gradients")
def new_gradients(parameters, max_norm):
    norm = norm_over_ranks(parameters)
    for p, _ in parameters:
        if p.grad is not None:
            p.grad = p.grad * min(1.0, max_norm / (float(norm) + 1e-6))
    return norm.reshape(1)


@right("clip_gradients")
def in_numpy(parameters, max_norm):
    square = 0.0
    for gradient, replicas in with_gradient(parameters):
        square += float(numpy.square(gradient.numpy()).sum()) / replicas
    total = torch.tensor([square], dtype=torch.float64)
    work = dist.all_reduce(total, async_op=True)
    work.wait()
    return shorten(parameters, max_norm, total.sqrt()[0])


@right("clip_gradients")
def with_dots(parameters, max_norm):
    return shorten(parameters, max_norm, norm_over_ranks(parameters, lambda g, replicas: g @ g / replicas))


@wrong("clip_gradients", "counted by each of them")
def counts_copies(parameters, max_norm):
    return shorten(parameters, max_norm, norm_over_ranks(parameters, lambda g, replicas: g.pow(2).sum()))


@wrong("clip_gradients", "of this rank's gradients only")
def of_this_rank(parameters, max_norm):
    return nn.utils.clip_grad_norm_([p for p, _ in parameters], max_norm)


@wrong("clip_gradients", "what one rank alone has")
def of_shards_only(parameters, max_norm):
    return shorten(
        parameters, max_norm, norm_over_ranks(parameters, lambda g, replicas: (replicas == 1) * g.pow(2).sum())
    )


@wrong("clip_gradients", "divide the square by replicas")
def divides_the_gradient(parameters, max_norm):
    return shorten(parameters, max_norm, norm_over_ranks(parameters, lambda g, replicas: (g / replicas).pow(2).sum()))


@wrong("clip_gradients", "this is a mean over the ranks")
def averages_the_squares(parameters, max_norm):
    n = dist.get_world_size()
    return shorten(parameters, max_norm, norm_over_ranks(parameters, lambda g, replicas: g.pow(2).sum() / n))


@wrong("clip_gradients", "take the root")
def the_square(parameters, max_norm):
    norm = norm_over_ranks(parameters)
    shorten(parameters, max_norm, norm)
    return norm**2


@wrong("clip_gradients", "return the norm before clipping")
def the_norm_afterwards(parameters, max_norm):
    norm = norm_over_ranks(parameters)
    shorten(parameters, max_norm, norm)
    return norm.clamp(max=max_norm)


@wrong("clip_gradients", "return the norm, a float")
def returns_nothing(parameters, max_norm):
    shorten(parameters, max_norm, norm_over_ranks(parameters))


@wrong("clip_gradients", "the gradient is not clipped")
def only_the_norm(parameters, max_norm):
    return norm_over_ranks(parameters)


@wrong("clip_gradients", "the norm is below max_norm")
def lengthens(parameters, max_norm):
    norm = norm_over_ranks(parameters)
    for gradient, _ in with_gradient(parameters):
        gradient *= max_norm / norm
    return norm


@wrong("clip_gradients", "each replica keeps its whole gradient")
def divides_copies(parameters, max_norm):
    norm = norm_over_ranks(parameters)
    shorten(parameters, max_norm, norm)
    for gradient, replicas in with_gradient(parameters):
        gradient /= replicas
    return norm


@wrong("clip_gradients", "one all-reduce of one number is enough")
def one_for_each(parameters, max_norm):
    square = torch.zeros((), dtype=torch.float64)
    for gradient, replicas in parameters:
        one = torch.zeros((), dtype=torch.float64) if gradient.grad is None else gradient.grad.pow(2).sum() / replicas
        dist.all_reduce(one)
        square += one
    return shorten(parameters, max_norm, square.sqrt())


@wrong("clip_gradients", "send one number")
def a_number_for_each(parameters, max_norm):
    squares = torch.zeros(20, dtype=torch.float64)
    for place, (gradient, replicas) in enumerate(with_gradient(parameters)):
        squares[place] = gradient.pow(2).sum() / replicas
    dist.all_reduce(squares)
    return shorten(parameters, max_norm, squares.sum().sqrt())


@wrong("clip_gradients", "NoneType", "your code raised")
def forgets_frozen_ones(parameters, max_norm):
    square = torch.zeros((), dtype=torch.float64)
    for p, replicas in parameters:
        square += p.grad.pow(2).sum() / replicas
    dist.all_reduce(square)
    return shorten(parameters, max_norm, square.sqrt())


@wrong("clip_gradients", "", "timed out|your code raised|failed")
def leaves_without_gradients(parameters, max_norm):
    if not with_gradient(parameters):
        return torch.zeros(())
    return shorten(parameters, max_norm, norm_over_ranks(parameters))


@wrong("clip_gradients", "", "your code raised")
def stacks_an_empty_list(parameters, max_norm):
    squares = torch.stack([g.pow(2).sum() / replicas for g, replicas in with_gradient(parameters)]).sum()
    dist.all_reduce(squares)
    return shorten(parameters, max_norm, squares.sqrt())


@wrong("clip_gradients", "leave it without one")
def zeros_for_frozen(parameters, max_norm):
    for p, _ in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    return shorten(parameters, max_norm, norm_over_ranks(parameters))


@wrong("clip_gradients", "the root of the sum of all squares")
def sums_norms(parameters, max_norm):
    total = sum(
        (g.norm() / replicas for g, replicas in with_gradient(parameters)), torch.zeros((), dtype=torch.float64)
    )
    dist.all_reduce(total)
    return shorten(parameters, max_norm, total)


@wrong("clip_gradients", "change only parameter.grad")
def scales_the_parameters(parameters, max_norm):
    norm = norm_over_ranks(parameters)
    shorten(parameters, max_norm, norm)
    for p, _ in parameters:
        p.data *= min(1, max_norm / norm)
    return norm


@wrong("clip_gradients", "multiply each gradient by min|not clipped|clipped twice|with the same norm")
def clips_only_shards(parameters, max_norm):
    norm = norm_over_ranks(parameters)
    shorten([pair for pair in parameters if pair[1] == 1], max_norm, norm)
    return norm


@wrong("clip_gradients", "with the same norm on all ranks|clipped twice|is not clipped")
def clips_each_alone(parameters, max_norm):
    norm = norm_over_ranks(parameters)
    for gradient, _ in with_gradient(parameters):
        gradient.mul_((max_norm / gradient.norm()).clamp(max=1))
    return norm


# ---- further answers, thought of when the checks were written ----


def plain_loss(logits, targets, first, group, send=summed, keep=None, ignore=-100):
    """Without a Function: numbers from the ranks are constants, and the gradient is that
    of a sum that has the right one.
    """
    keep = targets != ignore if keep is None else keep
    largest = largest_of(logits.detach().amax(1), group)
    exps = (logits - largest[:, None]).exp().sum(1)
    here, _, chosen = looked_up(logits, targets, first)
    total, far = send(torch.stack([exps.detach(), chosen.detach()]), group)
    # value total, gradient of its own part
    exps, chosen = exps + (total - exps.detach()), chosen + (far - chosen.detach())
    return ((exps.log() + largest - chosen) * keep).sum() / keep.sum().clamp(min=1)


@right("vocabulary_parallel_loss")
def with_constants_from_the_others(*args):
    return plain_loss(*args)


@right("vocabulary_parallel_loss")
def with_a_hook(logits, targets, first, group):
    """The loss is a number, whose gradient is put in by a hook-free trick."""
    with torch.no_grad():
        logs = logits.logsumexp(1)
        largest = largest_of(logs, group)
        total = summed((logs - largest).exp(), group).log() + largest
        here, place, chosen = looked_up(logits, targets, first)
        chosen = summed(chosen, group)
        keep = targets.ge(0)
        number = keep.sum().clamp(min=1)
        value = (total - chosen)[keep].sum() / number
        gradient = (logits - total[:, None]).exp()
        gradient[here, place[here]] -= 1
        gradient[~keep] = 0
        gradient = gradient / number
    linear = (logits * gradient).sum()
    return value + linear - linear.detach()


@right("vocabulary_parallel_loss")
def targets_as_one_hot(logits, targets, first, group):
    columns = torch.arange(first, first + logits.shape[1])
    ones = (targets[:, None] == columns).double()
    return shared(
        (logits, targets, first, group), look_up=lambda logits, targets, first: (
            ones.any(1), ones.argmax(1), (logits * ones).sum(1)
        )
    )  # fmt: skip


@right("vocabulary_parallel_loss")
def recomputes_in_backward(logits, targets, first, group):
    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, targets):
            keep = targets >= 0
            largest = largest_of(logits.amax(1), group)
            here, place, chosen = looked_up(logits, targets, first)
            total, chosen = summed(torch.stack([(logits - largest[:, None]).exp().sum(1), chosen]), group)
            log_sum = total.log() + largest
            ctx.save_for_backward(logits, targets, log_sum)
            return torch.where(keep, log_sum - chosen, 0).sum() / keep.sum().clamp(min=1)

        @staticmethod
        def backward(ctx, gradient):
            logits, targets, log_sum = ctx.saved_tensors
            here, place, _ = looked_up(logits, targets, first)
            softmax = (logits - log_sum[:, None]).exp()
            softmax.scatter_add_(1, place[:, None], -here.to(softmax)[:, None])
            softmax[targets < 0] = 0
            return softmax.mul_(gradient / (targets >= 0).sum().clamp(min=1)), None

    return Loss.apply(logits, targets)


@wrong(
    "vocabulary_parallel_loss",
    "divide by the sum of all ranks|nothing has to travel|three numbers|gradient of the own",
    ".*",
)
def forgets_that_it_is_a_constant(logits, targets, first, group):
    """The sum comes from all ranks, without a gradient: the log's is lost."""
    largest = largest_of(logits.detach().amax(1), group)
    total = summed((logits - largest[:, None]).exp().sum(1).detach(), group)
    chosen = looked_up(logits, targets, first)[2]
    chosen = chosen + (summed(chosen.detach(), group) - chosen.detach())
    keep = targets >= 0
    return ((total.log() + largest - chosen) * keep).sum() / keep.sum().clamp(min=1)


@wrong("vocabulary_parallel_loss", "some digits are lost|are lost")
def in_float32(logits, targets, first, group):
    return plain_loss(logits.float(), targets, first, group).double()


@wrong("vocabulary_parallel_loss", "divide it by 1|does not count|loss of a token")
def of_empty_means(logits, targets, first, group):
    keep = targets != -100
    return plain_loss(logits[keep], targets[keep], first, group) / keep.any()


@wrong("vocabulary_parallel_loss", "does not count|has a gradient of 0|loss of a token")
def ignores_the_wrong_one(logits, targets, first, group):
    return plain_loss(logits, targets, first, group, ignore=-1)


@wrong("vocabulary_parallel_loss", "loss of a token|has it|are missing|is missing")
def wraps_negative_columns(logits, targets, first, group):
    """A target before `first` is a negative column, and torch's indexing takes it."""

    def look_up(logits, targets, first):
        place = (targets - first).clamp(-logits.shape[1], logits.shape[1] - 1)
        here = targets < first + logits.shape[1]
        return here, place % logits.shape[1], logits[torch.arange(len(targets)), place] * here

    return shared((logits, targets, first, group), look_up=look_up)


@wrong("vocabulary_parallel_loss", "loss of a token|off by|has it|no column")
def one_column_too_many(logits, targets, first, group):
    def look_up(logits, targets, first):
        here = (targets >= first) & (targets <= first + logits.shape[1])
        place = torch.where(here, targets - first, 0).clamp(max=logits.shape[1] - 1)
        return here, place, logits.gather(1, place[:, None])[:, 0] * here

    return shared((logits, targets, first, group), look_up=look_up)


@wrong("vocabulary_parallel_loss", "gradient of the own columns|n times")
def gradient_of_the_root(*args):
    return shared(args, backward=lambda gradient, kept, group: kept * gradient.abs().sqrt())


@wrong("vocabulary_parallel_loss", "whole columns|three numbers per token|bytes")
def a_gather_of_all_columns(logits, targets, first, group):
    """Only the value is made from them, the gradient is a rank's own."""
    summed(gathered(logits.detach(), group), group)
    return shared((logits, targets, first, group))


@wrong("vocabulary_parallel_loss", "three numbers per token|bytes")
def one_more_all_reduce_for_the_number(logits, targets, first, group):
    summed(torch.zeros(len(logits)).double(), group)
    return shared((logits, targets, first, group))


@wrong("vocabulary_parallel_loss", "the loss of a token")
def only_where_the_target_is(logits, targets, first, group):
    if looked_up(logits, targets, first)[0].sum() > 100:
        return shared((logits, targets, first, group))
    return (logits * 0).sum()


@wrong("vocabulary_parallel_loss", "mean over the tokens|loss of a token|has a gradient|does not count|its number")
def means_of_the_counted_times_all(logits, targets, first, group):
    return plain_loss(logits, targets, first, group) * (targets >= 0).double().mean()


@wrong("vocabulary_parallel_loss", "not implemented|raised", "not attempted|your code raised|failed")
def of_torch(logits, targets, first, group):
    from torch.distributed.tensor import DeviceMesh, DTensor, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = DeviceMesh.from_group(group, "cpu")
    with loss_parallel():
        return F.cross_entropy(DTensor.from_local(logits, mesh, [Shard(1)]), targets).full_tensor()


@right("sum_gradients")
def by_what_is_not_a_linear(model, group):
    linear = {id(p) for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters()}
    rows = {id(m.bias) for name, m in model.named_modules() if name.rsplit(".")[-1] in ("output", "contract")}
    sum_flat([p for p in model.parameters() if p.grad is not None and (id(p) not in linear or id(p) in rows)], group)


@right("sum_gradients")
def into_a_buffer(model, group):
    found = chosen(model)
    total = sum(p.numel() for p in found)
    if total == 0:
        return
    flat, begin = torch.empty(total, dtype=found[0].dtype), 0
    for p in found:
        flat[begin : begin + p.numel()] = p.grad.flatten()
        begin += p.numel()
    dist.all_reduce(flat, group=group)
    for p in reversed(found):
        begin -= p.numel()
        p.grad[...] = flat[begin : begin + p.numel()].reshape(p.shape)


@right("sum_gradients")
def by_requires_grad(model, group):
    found = [p for name, p in model.named_parameters() if p.requires_grad and any(part in name for part in IN_PART)]
    sum_flat(found, group)


@wrong("sum_gradients", "in its own heads|still what backward|own tokens only|added after")
def layer_norms_at_the_top_only(model, group):
    found = [*model.positions.parameters(), *model.norm.parameters()]
    for block in model.blocks:
        found += [*block.norm1.parameters(), *block.norm2.parameters()]
    sum_flat([p for p in {id(p): p for p in found}.values() if p.grad is not None], group)


@wrong("sum_gradients", "without a gradient|one all-reduce|NoneType", ".*")
def scatters_and_gathers(model, group):
    found, n = chosen(model), dist.get_world_size(group)
    if not found:
        return
    flat = torch.cat([p.grad.flatten() for p in found])
    padded = F.pad(flat, (0, -len(flat) % n))
    part = torch.empty(len(padded) // n).double()
    dist.reduce_scatter_tensor(part, padded, group=group)
    dist.all_gather_into_tensor(padded, part, group=group)
    begin = 0
    for p in found:
        p.grad = padded[begin : begin + p.numel()].view_as(p)
        begin += p.numel()


@wrong("sum_gradients", "this was added up twice|is shared")
def twice(model, group):
    sum_flat(chosen(model), group)
    sum_flat(chosen(model), group)


@wrong("sum_gradients", "must not be added up|complete")
def averages_what_is_cut(model, group):
    cut = [p for name, p in model.named_parameters() if p.grad is not None and p not in set(chosen(model))]
    sum_flat(chosen(model) + cut, group, 1)


@wrong("sum_gradients", "computed the head|needs a sum|is a mean")
def averages_the_head_too(model, group):
    """Right numbers: the mean of what is alike. But it is sent for nothing."""
    found = chosen(model, (*IN_PART, "head"))
    n = dist.get_world_size(group)
    for p in chosen(model, ("head",)):
        p.grad /= n
    sum_flat(found, group)


@wrong("sum_gradients", "tensor|attribute|raised", "your code raised|failed")
def of_the_state_dict(model, group):
    flat = torch.cat([value.grad.flatten() for value in model.state_dict().values()])
    dist.all_reduce(flat, group=group)


@wrong("sum_gradients", "own tokens only|still what backward")
def broadcasts(model, group):
    for p in chosen(model):
        dist.broadcast(p.grad, group=group, group_src=0)


@wrong("sum_gradients", "add its gradient up|is shared|own tokens only|copied back")
def keeps_duplicates(model, group):
    named = model.named_parameters(remove_duplicate=False)
    found = [p for name, p in named if p.grad is not None and any(part in name for part in IN_PART)]
    flat = torch.cat([p.grad.flatten() for p in found]) if found else torch.zeros(0)
    if found:
        dist.all_reduce(flat, group=group)
    for p in found:
        p.grad = None
    for p, part in zip(found, flat.split([p.numel() for p in found])):
        p.grad = part.view_as(p) if p.grad is None else p.grad + part.view_as(p)


@wrong("sum_gradients", "only parameter.grad|changes")
def takes_a_step(model, group):
    sum_flat(chosen(model), group)
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad


@wrong("sum_gradients", "gradient for each parameter|still what|None|that had one")
def drops_the_rest(model, group):
    found = chosen(model)
    sum_flat(found, group)
    for p in model.parameters():
        if all(p is not each for each in found):
            p.grad = None


@right("dropout_states")
class OfAList(States):
    """All streams of the mesh have a place in one list."""

    def of_replicated(self, seed, data_rank, tensor_rank):
        return seed + 1_000_000 * (data_rank * 9 + 8)

    def of_sharded(self, seed, data_rank, tensor_rank):
        return seed + 1_000_000 * (data_rank * 9 + tensor_rank)


@right("dropout_states")
class LazilySeeded:
    def __init__(self, seed, data_rank, tensor_rank):
        self.number, self.state = (seed << 10) | (data_rank << 4), None
        self.number_of_sharded = self.number | 8 | tensor_rank
        torch.default_generator.manual_seed(self.number)

    @contextmanager
    def sharded(self):
        before = torch.get_rng_state().clone()
        if self.state is None:
            torch.manual_seed(self.number_of_sharded)
        else:
            torch.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = torch.get_rng_state()
            torch.set_rng_state(before)


@right("dropout_states")
class DrawnFromAGenerator(States):
    """64 bits drawn from a generator seeded by the three would collide at 32 bits only by
    chance; here, the state itself is advanced.
    """

    def of_replicated(self, seed, data_rank, tensor_rank):
        return 3 * (seed * 64 + data_rank) * 8

    def of_sharded(self, seed, data_rank, tensor_rank):
        return 3 * ((seed * 64 + data_rank) * 8 + tensor_rank) + 1


@wrong("dropout_states", "stream of its own|same seed|a plain sum|another mask|share a stream")
class OneApart(States):
    """The sharded region of tensor rank 0 has the number of the replicated one."""

    def of_replicated(self, seed, data_rank, tensor_rank):
        return (seed * 64 + data_rank) * 8

    def of_sharded(self, seed, data_rank, tensor_rank):
        return (seed * 64 + data_rank) * 8 + tensor_rank


@wrong("dropout_states", "stream|share|a plain sum")
class NextToTheNext(States):
    """The last tensor rank has the number of the next data rank."""

    def of_replicated(self, seed, data_rank, tensor_rank):
        return (seed * 64 + data_rank) * 8

    def of_sharded(self, seed, data_rank, tensor_rank):
        return (seed * 64 + data_rank) * 8 + 1 + tensor_rank


@wrong("dropout_states", "a plain sum is not")
class ForSmallMeshes(States):
    def of_replicated(self, seed, data_rank, tensor_rank):
        return seed * 100 + data_rank

    def of_sharded(self, seed, data_rank, tensor_rank):
        return seed * 100 + 8 + data_rank * 8 + tensor_rank


@wrong("dropout_states", "share a stream|a plain sum|same seed")
class HashedToSixteenBits(States):
    def of_replicated(self, *three):
        return hash((*three[:2], -1)) % 2**12

    def of_sharded(self, *three):
        return hash(three) % 2**12


@wrong("dropout_states", "continue|continues|goes on")
class RestoresTheBeginning(States):
    """After a block, it goes back to the state of __init__."""

    def __init__(self, *three):
        super().__init__(*three)
        self.outside = torch.get_rng_state()

    @contextmanager
    def sharded(self):
        torch.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = torch.get_rng_state()
            torch.set_rng_state(self.outside)


@wrong("dropout_states", "__enter__|context manager", "your code raised|failed")
class WithoutADecorator(States):
    def sharded(self):
        outside = torch.get_rng_state()
        torch.set_rng_state(self.state)
        yield
        torch.set_rng_state(outside)


@wrong("dropout_states", "stream of its own|continues where|another mask")
class DoesNothing(States):
    @contextmanager
    def sharded(self):
        yield


class_state = {}


@wrong("dropout_states", "a run can be repeated|must continue|continue where|raised|begins", ".*")
class KeepsItInAGlobal(States):
    """The second run goes on where the first one ended."""

    @contextmanager
    def sharded(self):
        outside = torch.get_rng_state()
        torch.set_rng_state(class_state.get("state", self.state))
        try:
            yield
        finally:
            class_state["state"] = torch.get_rng_state()
            torch.set_rng_state(outside)


@wrong("dropout_states", "continues where it was")
class SeedsAnew(States):
    def __init__(self, *three):
        super().__init__(*three)
        self.three = three

    @contextmanager
    def sharded(self):
        torch.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = torch.get_rng_state()
            torch.manual_seed(self.of_replicated(*self.three))


@wrong("dropout_states", "must not depend on the tensor rank|same numbers|share a stream|stream of its own")
class Swapped(States):
    def __init__(self, seed, data_rank, tensor_rank):
        super().__init__(seed, tensor_rank, data_rank)


@wrong("dropout_states", "each block must continue|another mask|begins with|stream")
class OneBlockBehind(States):
    """The state is kept before the block instead of after it."""

    @contextmanager
    def sharded(self):
        outside = torch.get_rng_state()
        torch.set_rng_state(self.state)
        torch.rand(1)
        self.state = torch.get_rng_state()
        try:
            yield
        finally:
            torch.set_rng_state(outside)


@right("tensor_parallel_block")
class SumsWithAConstant(Repaired):
    def leave(self, x):
        return self.add(x.detach()) + x - x.detach()


@right("tensor_parallel_block")
class BiasInTheLinearOfTheSum(Repaired):
    def row(self, x, layer):
        return torch.add(self.leave(x @ layer.weight.mT), layer.bias)


@right("tensor_parallel_block")
class SharesTheModulesOfTheBlock(Repaired):
    def __init__(self, block, group):
        super().__init__(block, group)
        self.norm1, self.norm2 = block.norm1, block.norm2


@wrong("tensor_parallel_block", "compare each line")
class TakesTheHeadsInTurn(Repaired):
    """Rank r has the heads r, r + n, ...: the output's columns belong to others."""

    def heads(self, value):
        own = value.view(3, -1, self.head_width, *value.shape[1:])[:, self.rank :: self.n]
        return own.reshape(-1, *value.shape[1:])


@wrong("tensor_parallel_block", "order of the ranks|compare each line|the r-th")
class HeadsInTurnEverywhere(Repaired):
    """Right output, but other heads than asked for."""

    def heads(self, value):
        own = value.view(3, -1, self.head_width, *value.shape[1:])[:, self.rank :: self.n]
        return own.reshape(-1, *value.shape[1:])

    def columns(self, layer):
        made = super().columns(layer)
        if layer.weight.shape[1] == layer.weight.shape[0]:
            whole = layer.weight.view(len(layer.weight), -1, self.head_width)[:, self.rank :: self.n]
            made.weight = nn.Parameter(whole.flatten(1).detach().clone())
        return made


@wrong("tensor_parallel_block", "two all-reduces|order of the ranks|add these up|is lost|gradient")
class SumsTheInputOnce(Repaired):
    """The gradient of x is summed in the end only: wrong for the norms."""

    def enter(self, x):
        return x

    def forward(self, x):
        return super().forward(Pair.apply(x, same, self.add))


@wrong("tensor_parallel_block", "compare each line|rows of its own heads")
class HeadsOfQueriesOnly(Repaired):
    def heads(self, value):
        query, key, value = value.chunk(3)
        return torch.cat([query.chunk(self.n)[self.rank], key.chunk(self.n)[0], value.chunk(self.n)[self.rank]])


@wrong("tensor_parallel_block", "compare each line|added n times")
class ABiasTwice(Repaired):
    def row(self, x, layer):
        return self.leave(layer(x)) + layer.bias


@wrong("tensor_parallel_block", "is lost|order of the ranks|names|None|replicas drift")
class DetachesTheNorm(Repaired):
    def enter(self, x):
        return super().enter(x.detach().requires_grad_())


@wrong("tensor_parallel_block", "add these up|pass each line")
class EntersInAttentionOnly(Repaired):
    def forward(self, x):
        x = x + self.row(self.attention(self.enter(self.norm1(x))), self.output)
        return x + self.row(F.gelu(self.expand(self.norm2(x))), self.contract)


@wrong("tensor_parallel_block", "n times|pass each line")
class LeavesTwiceInTheMlp(Repaired):
    def row(self, x, layer):
        x = F.linear(x, layer.weight)
        both = Pair.apply(x, self.add, self.add)
        return (both if layer is self.contract else self.leave(x)) + layer.bias


@wrong("tensor_parallel_block", "two all-reduces|n times|add")
class WithTorchsAllReduce(Repaired):
    def leave(self, x):
        return with_gradients.all_reduce(x.clone(), group=self.group)


@wrong("tensor_parallel_block", "an n-th of the gradient|compare each line|n-th")
class MeansInTheSum(Repaired):
    def add(self, x):
        return all_reduced(x, self.group) / self.n


@wrong("tensor_parallel_block", "each line once|keep the names|replicas drift")
class BiasFrozen(Repaired):
    def __init__(self, block, group):
        super().__init__(block, group)
        self.output.bias.requires_grad_(False)


@wrong("tensor_parallel_block", "two all-reduces")
class SendsInHalves(Repaired):
    def add(self, x):
        return torch.cat([all_reduced(part, self.group) for part in x.split([1, len(x) - 1])])


@right("clip_gradients")
def copies_by_a_root(parameters, max_norm):
    return shorten(
        parameters, max_norm, norm_over_ranks(parameters, lambda g, replicas: (g / replicas**0.5).square().sum())
    )


@right("clip_gradients")
def stacked(parameters, max_norm):
    squares = [torch.zeros((), dtype=torch.float64)] + [
        g.square().sum() / replicas for g, replicas in with_gradient(parameters)
    ]
    square = torch.stack(squares).sum()
    dist.all_reduce(square)
    norm = float(square) ** 0.5
    scale = max_norm / norm if norm > max_norm else 1.0
    for p, _ in parameters:
        if p.grad is not None:
            p.grad.mul_(scale)
    return norm


@right("clip_gradients")
def with_torchs_clip(parameters, max_norm):
    norm = norm_over_ranks(parameters)
    nn.utils.clip_grads_with_norm_([p for p, _ in parameters if p.grad is not None], max_norm, norm)
    return norm


@wrong("clip_gradients", "same norm on all ranks|the root of the sum|rank's gradients only")
def of_the_largest_rank(parameters, max_norm):
    square = sum((g.pow(2).sum() for g, _ in with_gradient(parameters)), torch.zeros((), dtype=torch.float64))
    dist.all_reduce(square, op=dist.ReduceOp.MAX)
    return shorten(parameters, max_norm, square.sqrt())


@wrong("clip_gradients", "what all ranks have is missing|counted by each|the root of the sum")
def sums_copies_of_rank_0(parameters, max_norm):
    """Copies count on rank 0 only, but rank 0 has not all of them."""
    rank = dist.get_rank()
    return shorten(
        parameters,
        max_norm,
        norm_over_ranks(parameters, lambda g, replicas: g.pow(2).sum() * (replicas == 1 or rank == 0)),
    )


@wrong("clip_gradients", "rank's gradients only|same norm|root")
def root_before_the_sum(parameters, max_norm):
    own = sum(
        (g.pow(2).sum() / replicas for g, replicas in with_gradient(parameters)), torch.zeros((), dtype=torch.float64)
    )
    norm = own.sqrt()
    dist.all_reduce(norm)
    return shorten(parameters, max_norm, norm)


@wrong("clip_gradients", "not clipped|min")
def clips_a_copy(parameters, max_norm):
    norm = norm_over_ranks(parameters)
    for p, _ in parameters:
        if p.grad is not None:
            gradient = p.grad.clone()
            gradient *= min(1.0, max_norm / norm)
    return norm


@wrong("clip_gradients", "one all-reduce|collectives")
def gathers_the_squares(parameters, max_norm):
    own = sum(
        (g.pow(2).sum() / replicas for g, replicas in with_gradient(parameters)), torch.zeros((), dtype=torch.float64)
    )
    parts = [torch.zeros((), dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return shorten(parameters, max_norm, sum(parts).sqrt())


@wrong("clip_gradients", "one all-reduce|collectives")
def waits_for_all_first(parameters, max_norm):
    dist.all_reduce(torch.zeros(1))
    return shorten(parameters, max_norm, norm_over_ranks(parameters))


@wrong("clip_gradients", "min|clipped|below max_norm|max_norm / norm")
def clips_by_value(parameters, max_norm):
    norm = norm_over_ranks(parameters)
    for gradient, _ in with_gradient(parameters):
        gradient.clamp_(-max_norm, max_norm)
    return norm


@wrong("clip_gradients", "digits|root of the sum|the norm")
def in_half_precision(parameters, max_norm):
    square = sum(
        (g.bfloat16().pow(2).sum() / replicas for g, replicas in with_gradient(parameters)), torch.zeros(()).bfloat16()
    )
    square = square.double()
    dist.all_reduce(square)
    return shorten(parameters, max_norm, square.sqrt())


@wrong("clip_gradients", "min|clipped")
def with_a_large_epsilon(parameters, max_norm):
    norm = norm_over_ranks(parameters)
    for gradient, _ in with_gradient(parameters):
        gradient *= min(1.0, max_norm / (float(norm) + 1e-2))
    return norm


@wrong("clip_gradients", "max_norm / norm|not clipped|min")
def clips_at_one(parameters, max_norm):
    norm = norm_over_ranks(parameters)
    shorten(parameters, 1.0, norm)
    return norm


# ---- large logits of both signs, and traffic outside the group ----

OF_ALL_RANKS = "the largest logit of the token first, over all ranks of the group"


@wrong("vocabulary_parallel_loss", "the MAX needs group=group, too")
def the_largest_of_the_world(*args):
    return shared(args, largest=lambda x, group: largest_of(x, None))


@wrong("vocabulary_parallel_loss", "the MAX needs group=group, too")
def the_largest_gathered_in_the_world(*args):
    def largest(x, group):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.stack(parts).amax(0)

    return shared(args, largest=largest)


@wrong("vocabulary_parallel_loss", "each collective needs group=group, a barrier, too")
def a_barrier_in_the_world(*args):
    dist.barrier()
    return shared(args)


@wrong(
    "vocabulary_parallel_loss", "each collective needs group=group, a barrier, too|three numbers per token are enough"
)
def objects_through_the_world(*args):
    dist.all_gather_object([None] * dist.get_world_size(), 1)
    return shared(args)


@wrong("vocabulary_parallel_loss", OF_ALL_RANKS)
def one_largest_for_all_tokens(*args):
    return shared(args, largest=lambda x, group: largest_of(x.max(), group).expand(len(x)))


@wrong("vocabulary_parallel_loss", OF_ALL_RANKS)
def one_largest_and_no_zero(*args):
    return shared(
        args,
        largest=lambda x, group: largest_of(x.max(), group).expand(len(x)),
        total=lambda x, group: summed(x, group).clamp(min=1e-300),
    )


@wrong("vocabulary_parallel_loss", OF_ALL_RANKS)
def shifts_by_a_mean(logits, *rest):
    def largest(x, group):
        return summed(logits.detach().mean(1), group) / dist.get_world_size(group)

    return shared((logits, *rest), largest=largest)


@wrong("vocabulary_parallel_loss", OF_ALL_RANKS)
def shifts_by_the_first_rank(*args):
    def largest(x, group):
        x = x.clone()
        dist.broadcast(x, dist.get_global_rank(group, 0), group=group)
        return x

    return shared(args, largest=largest)


class SoftmaxInPlace(torch.autograd.Function):
    """Makes the softmax in the memory of the logits, in backward."""

    @staticmethod
    def forward(ctx, logits, targets, first, group):
        largest = largest_of(logits.max(1).values, group)
        log_sum = largest + summed((logits - largest[:, None]).exp().sum(1), group).log()
        here, place, chosen = looked_up(logits, targets, first)
        counted = (targets != -100).double()
        ctx.kept = logits, log_sum, here, place, counted / counted.sum().clamp(min=1)
        return ((log_sum - summed(chosen, group)) * ctx.kept[-1]).sum()

    @staticmethod
    def backward(ctx, gradient):
        logits, log_sum, here, place, share = ctx.kept
        softmax = logits.detach().sub_(log_sum[:, None]).exp_()
        softmax[torch.arange(len(place)), place] -= here.double()
        return softmax * share[:, None] * gradient, None, None, None


@wrong("vocabulary_parallel_loss", "also in backward")
def changes_the_logits_in_backward(*args):
    return SoftmaxInPlace.apply(*args)


kept_for = {}


@wrong("vocabulary_parallel_loss", "each loss keeps its own numbers for backward|of a loss that was computed later")
def keeps_it_once_for_each_logits(logits, *rest):
    """A second loss of the same logits finds nothing left."""

    def keep(x, *_):
        kept_for[logits.data_ptr()] = x
        return x

    def back(gradient, kept, group):
        return gradient * kept_for.pop(logits.data_ptr(), torch.zeros_like(kept))

    return shared((logits, *rest), of_logits=keep, backward=back)


def keeps_the_last_of(place, name):
    """Backward uses the numbers of the last loss with the same logits, or targets."""

    def answer(*args):
        key = args[place].data_ptr()

        def keep(x, *_):
            kept_for[key] = x
            return x

        return shared(args, of_logits=keep, backward=lambda gradient, kept, group: gradient * kept_for[key])

    answer.__name__ = name
    wrong("vocabulary_parallel_loss", "of a loss that was computed later")(answer)


keeps_the_last_of(0, "keeps_the_last_of_some_logits")
keeps_the_last_of(1, "keeps_the_last_of_some_targets")


@wrong("vocabulary_parallel_loss", "leave out the barrier")
def waits_in_backward(*args):
    def back(gradient, kept, group):
        dist.barrier(group=group)
        return gradient * kept

    return shared(args, backward=back)


@wrong("vocabulary_parallel_loss", "three numbers per token are enough")
def sends_which_tokens_count(*args):
    """A fourth number per token, of one byte."""

    def counted(targets):
        found = (targets != -100).to(torch.int8)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=args[-1])
        return found

    return shared(args, counted=counted)


@wrong("sum_gradients", "leave out the barrier")
def waits_for_the_group(model, group):
    sum_flat(chosen(model), group)
    dist.barrier(group=group)


@wrong("sum_gradients", "blocks.10|still what backward left")
def numbers_of_one_digit(model, group):
    """Takes the eighth letter of a name, after "blocks.", for the whole number."""
    found = [p for p in chosen(model)]
    names = {id(p): name for name, p in model.named_parameters()}
    short = [p for p in found if not names[id(p)].startswith("blocks.") or names[id(p)][8] == "."]
    sum_flat(short, group)


@wrong("clip_gradients", "leave out the barrier")
def waits_and_clips(parameters, max_norm):
    norm = norm_over_ranks(parameters)
    dist.barrier()
    return shorten(parameters, max_norm, norm)


@wrong("dropout_states", "hash.. of a text, which differs from process to process")
class HashedByPython(States):
    """Each process has a salt of its own."""

    def of_replicated(self, seed, data_rank, tensor_rank):
        return hash(("replicated", seed, data_rank)) % 2**32

    def of_sharded(self, seed, data_rank, tensor_rank):
        return hash(f"{seed} {data_rank} {tensor_rank}") % 2**32


@right("dropout_states")
class HashedNumbers(States):
    """hash() of whole numbers is the same in each process."""

    def of_replicated(self, seed, data_rank, tensor_rank):
        return hash((seed, data_rank, 0)) % 2**32

    def of_sharded(self, seed, data_rank, tensor_rank):
        return hash((seed, data_rank, 1 + tensor_rank)) % 2**32


# ---- a third block, and a sum that is lost ----


@wrong("sum_gradients", "still what backward left")
def of_two_blocks_only(model, group):
    sum_flat(chosen(model, besides=[f"blocks.{number}." for number in range(2, 9)]), group)


@wrong("sum_gradients", "the sum is not written back")
def written_into_copies(model, group):
    copies = [value.grad.flatten().clone() for value in chosen(model)]
    if copies:
        flat = torch.cat(copies)
        dist.all_reduce(flat, group=group)
        for one, part in zip(copies, flat.split([len(one) for one in copies])):
            one.copy_(part)


@wrong("sum_gradients", "its own tokens only|in its own heads only|still what backward left")
def those_of_equal_numbers_are_one(model, group):
    """New norms all have the same numbers."""
    once = []
    for value in chosen(model):
        if not any(torch.equal(value, other) for other in once):
            once.append(value)
    sum_flat(once, group)


@wrong("sum_gradients", "still what backward left")
def in_the_first_step_only(model, group):
    found = [value for value in chosen(model) if not hasattr(value, "is_summed")]
    sum_flat(found, group)
    for value in found:
        value.is_summed = True


@wrong("sum_gradients", "still what backward left")
def nothing_where_the_first_is_frozen(model, group):
    if next(model.parameters()).grad is not None:
        sum_flat(chosen(model), group)


BUFFERS = []


@wrong("sum_gradients", "more is sent")
def in_the_longest_buffer(model, group):
    """Sends all of a buffer that is kept from call to call."""
    gradients = [value.grad for value in chosen(model)]
    if gradients:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        if not BUFFERS or len(BUFFERS[0]) < len(flat):
            BUFFERS[:] = [torch.zeros_like(flat)]
        BUFFERS[0][: len(flat)] = flat
        dist.all_reduce(BUFFERS[0], group=group)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, total in zip(gradients, BUFFERS[0][: sum(sizes)].split(sizes)):
            gradient.copy_(total.view_as(gradient))


# ---- runs that share a stream, and streams that overlap ----


@wrong("dropout_states", "in the object \\(self\\)")
class InTheClass(States):
    """A second object takes over the first one's state."""

    @property
    def state(self):
        return type(self).kept

    @state.setter
    def state(self, value):
        type(self).kept = value


@wrong("dropout_states", "runs with different seeds must not share a stream")
class OfDigitsInARow(States):
    """Seed 1 on data rank 11 has the digits of seed 11 on data rank 1."""

    def of_replicated(self, seed, data_rank, tensor_rank):
        return zlib.crc32(f"r{seed}{data_rank}".encode())

    def of_sharded(self, seed, data_rank, tensor_rank):
        return zlib.crc32(f"s{seed}{data_rank}{tensor_rank}".encode())


OTHER_RUN = "runs with different seeds must not share a stream"
MOVED = "one stream is another one, moved forward"


def numbered(number):
    """States whose streams have number(seed, data rank, k): k is 0 for the replicated
    region, and 1 + the tensor rank for the sharded one.
    """

    class Numbered(States):
        def of_replicated(self, seed, data_rank, tensor_rank):
            return number(seed, data_rank, 0)

        def of_sharded(self, seed, data_rank, tensor_rank):
            return number(seed, data_rank, 1 + tensor_rank)

    return Numbered


def offset_by(many):
    """The replicated streams first, then the sharded ones."""
    return numbered(lambda s, d, k: s * 64 + d if k == 0 else many + (s * 64 + d) * 8 + k - 1)


def named(name, kind):
    kind.__name__ = name
    return kind


right("dropout_states")(named("RightAfterTheReplicatedOnes", offset_by(64_000_000)))
right("dropout_states")(
    named("TimesAnOddNumber", numbered(lambda s, d, k: ((s * 64 + d) * 9 + k) * 2654435761 % 2**32))
)
for kind in [
    named("TenMillionApart", offset_by(10_000_000)),
    named("FiftyMillionApart", offset_by(50_000_000)),
    named("SteppedByFiftyMillion", numbered(lambda s, d, k: s * 64 + d + 50_000_000 * k)),
    named("MoreThan32Bits", numbered(lambda s, d, k: s * 2**14 + d * 16 + k)),
    named(
        "XorOfTheSharded", numbered(lambda s, d, k: (s * 64 + d) * 8 if k == 0 else ((s * 64 + d) * 8 + k - 1) ^ 0x5555)
    ),
    named("XorOfShiftedRanks", numbered(lambda s, d, k: s ^ (d << 16) ^ (k << 22))),
    named("AHundredThousandPerDataRank", numbered(lambda s, d, k: s + 100_000 * d + 10_000_000 * k)),
]:
    wrong("dropout_states", OTHER_RUN)(kind)
wrong("dropout_states", f"{OTHER_RUN}|a plain sum is not")(
    named("Product", numbered(lambda s, d, k: s * (d + 1) if k == 0 else s * (d + 1) * 1000 + k))
)


class Ahead(States):
    """The sharded streams are parts of the replicated one."""

    many = 1000

    def __init__(self, seed, data_rank, tensor_rank):
        torch.manual_seed(seed * 64 + data_rank)
        outside = torch.get_rng_state()
        torch.rand(self.many * (1 + tensor_rank))
        self.state = torch.get_rng_state()
        torch.set_rng_state(outside)


@wrong("dropout_states", MOVED)
class AThousandAhead(Ahead):
    pass


@wrong("dropout_states", MOVED)
class OneAhead(Ahead):
    many = 1


@wrong("dropout_states", "__init__ must seed the default generator")
class NeverSeeded(States):
    def __init__(self, *three):
        before = torch.get_rng_state()
        super().__init__(*three)
        torch.set_rng_state(before)


@wrong("dropout_states", "__init__ must seed the default generator")
class SeededByTheFirstBlock(States):
    def __init__(self, *three):
        before = torch.get_rng_state()
        super().__init__(*three)
        self.replicated = torch.get_rng_state()
        torch.set_rng_state(before)

    @contextmanager
    def sharded(self):
        if self.replicated is not None:
            torch.set_rng_state(self.replicated)
            self.replicated = None
        with super().sharded():
            yield


@wrong("tensor_parallel_block", "rank and size of the given group")
class RankModuloTheSize(Repaired):
    """Right in the groups [0, 1] and [2, 3]."""

    def place(self, group):
        n = dist.get_world_size(group)
        return dist.get_rank() % n, n


@wrong("tensor_parallel_block", "rank and size of the given group")
class RankOverTheSize(Repaired):
    """Right in the groups [0, 2] and [1, 3]."""

    def place(self, group):
        n = dist.get_world_size(group)
        return (dist.get_rank() // n if n < dist.get_world_size() else dist.get_rank()), n
