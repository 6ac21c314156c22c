"""A GPT that is cut inside its layers: each rank of a group computes some heads, some of
the MLP's inner numbers, and some of the vocabulary, for the same tokens.

M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using
Model Parallelism", 2019. With `sequence`, each rank also has only some of the tokens
between these layers: V. Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022. group: of the ranks that share the model; None: all ranks.
"""

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_course.models.recompute import recompute

# ---- what is sent: x is float (batch, tokens, width) ----


def unchanged(x, group):
    return x.view_as(x)


def summed(x, group, operation=dist.ReduceOp.SUM):
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, operation, group)
    return x


def gathered(x, group):
    """From some of the tokens on each rank to all tokens."""
    ranks = dist.get_world_size(group)
    parts = x.new_empty(ranks * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(parts, x.contiguous(), group)
    return torch.cat(parts.chunk(ranks), dim=1)


def scattered(x, group):
    """The sum over the ranks, of which each gets its tokens: a reduce-scatter."""
    ranks = dist.get_world_size(group)
    if x.shape[1] % ranks:
        raise ValueError(f"{x.shape[1]} tokens cannot be cut for {ranks} ranks")
    parts = torch.cat(x.chunk(ranks, dim=1))
    own = parts.new_empty(len(x), x.shape[1] // ranks, *x.shape[2:])
    dist.reduce_scatter_tensor(own, parts, group=group)
    return own


class Pair(torch.autograd.Function):
    """One of the functions above in forward, and another one in backward."""

    @staticmethod
    def forward(ctx, x, group, forward, backward):
        ctx.group, ctx.of_gradients = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.of_gradients(gradient, ctx.group), None, None, None


def passages(group, sequence=False):
    """The functions before a layer that is cut, and after it: each is the other one
    backwards. They are called f and g by Shoeybi et al.
    """
    first, second = (gathered, scattered) if sequence else (unchanged, summed)
    enter = lambda x: Pair.apply(x, group, first, second)
    leave = lambda x: Pair.apply(x, group, second, first)
    return enter, leave


# ---- layers ----


def own_part(parameter, dimension, places):
    """A parameter with some rows (dimension 0) or columns (1) of another one.

    places: their numbers, int64 (some,). Its attribute `cut` has both and the shape of
    the whole, which can then be put together again. A deepcopy does not have it.
    """
    part = nn.Parameter(parameter.detach().index_select(dimension, places))
    part.cut = dimension, places, parameter.shape
    return part


class ColumnLinear(nn.Module):
    """A linear layer that computes some of its outputs, each of them whole.

    In formulas these are columns of the matrix, y = xA; torch keeps them as rows.
    """

    def __init__(self, layer, places, enter):
        super().__init__()
        self.weight = own_part(layer.weight, 0, places)
        self.bias = own_part(layer.bias, 0, places)
        self.enter = enter

    def forward(self, x):
        return F.linear(self.enter(x), self.weight, self.bias)


class RowLinear(nn.Module):
    """A linear layer that gets some of its inputs, so that outputs are parts of a sum.
    The bias is added once, to the sum.
    """

    def __init__(self, layer, places, leave):
        super().__init__()
        self.weight, self.bias = own_part(layer.weight, 1, places), layer.bias
        self.leave = leave

    def forward(self, x):
        return self.leave(F.linear(x, self.weight)) + self.bias


def own_numbers(tokens, rows):
    """Where a rank finds tokens in its rows of the vocabulary, and which it has.

    rows: their numbers, neighbours; tokens: int64 of any shape. Both results are of this
    shape; a token that the rank does not have becomes 0.
    """
    is_own = (tokens >= rows[0]) & (tokens <= rows[-1])
    return (tokens - rows[0]).where(is_own, 0), is_own


class VocabularyEmbedding(nn.Module):
    """The vectors of a rank's tokens, and zeros for all others: their sum is whole."""

    def __init__(self, weight, leave):
        super().__init__()
        self.weight, self.leave = weight, leave

    def forward(self, tokens):
        numbers, is_own = own_numbers(tokens, self.weight.cut[1])
        return self.leave(F.embedding(numbers, self.weight) * is_own[..., None])


class OwnPositions(nn.Module):
    """With `sequence`: the vectors of the positions that this rank has."""

    def __init__(self, weight, group):
        super().__init__()
        self.weight, self.group = weight, group

    def forward(self, positions):
        parts = positions.chunk(dist.get_world_size(self.group))
        return F.embedding(parts[dist.get_rank(self.group)], self.weight)


class VocabularyLoss(torch.autograd.Function):
    """The mean cross entropy, in nats, of logits whose columns the ranks share.

    logits: float (batch, tokens, some of the vocabulary); targets: int64 (batch,
    tokens), all of them in the vocabulary: -100 is not left out. Three numbers per
    token are sent: the highest logit, the sum of the exponentials, and the target's
    logit. Backward sends nothing.
    """

    @staticmethod
    def forward(ctx, logits, targets, rows, group):
        highest = summed(logits.amax(-1), group, dist.ReduceOp.MAX)
        shares = (logits - highest[..., None]).exp()
        total = summed(shares.sum(-1), group)
        numbers, is_own = own_numbers(targets, rows)
        chosen = logits.gather(-1, numbers[..., None])[..., 0] * is_own
        chosen = summed(chosen, group)
        ctx.save_for_backward(shares.div_(total[..., None]), numbers, is_own)
        return (total.log() + highest - chosen).mean()

    @staticmethod
    def backward(ctx, gradient):
        """Of a logit: its probability, less 1 for the target, over the tokens."""
        shares, numbers, is_own = ctx.saved_tensors
        ones = is_own[..., None].to(shares.dtype)
        of_logits = shares.scatter_add(-1, numbers[..., None], -ones)
        return of_logits * (gradient / is_own.numel()), None, None, None


class VocabularyHead(nn.Module):
    """A GPT's head with some of the vocabulary: its logits, or the loss of targets."""

    def __init__(self, weight, group, enter):
        super().__init__()
        self.weight, self.group, self.enter = weight, group, enter
        self.out_features = weight.cut[2][0]

    def forward(self, features, targets=None):
        _, rows, (vocabulary, _) = self.weight.cut
        logits = F.linear(self.enter(features), self.weight)
        if targets is None:  # all logits, on each rank: for generating text
            padding = int(rows[0]), vocabulary - 1 - int(rows[-1])
            return Pair.apply(F.pad(logits, padding), self.group, summed, unchanged)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return VocabularyLoss.apply(logits, targets, rows, self.group)


# ---- a GPT ----


def cut(network, group=None, sequence=False):
    """Make a GPT this rank's part of it, in place, and return it.

    All ranks have the same GPT before. Raises ValueError where the ranks do not divide
    the heads, and with dropout, which needs other random numbers for each rank's heads
    and the same ones for what all ranks have.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    attention, device = network.blocks[0].attention, network.norm.weight.device
    width = attention.output.in_features
    heads = width // attention.head_width
    if heads % ranks:
        raise ValueError(f"{heads} heads cannot be cut for {ranks} ranks")
    if network.dropout.p:
        raise ValueError("a GPT with dropout is not cut here")
    numbers = lambda size: torch.arange(size, device=device)
    own = lambda numbers: numbers.tensor_split(ranks)[rank]
    of_width, inner = own(numbers(width)), own(numbers(4 * width))
    # some heads of each: of queries, of keys and of values
    three = torch.cat([own(part) for part in numbers(3 * width).chunk(3)])

    enter, leave = passages(group, sequence)
    for block in network.blocks:
        attention, mlp = block.attention, block.mlp
        attention.query_key_value = ColumnLinear(
            attention.query_key_value, three, enter
        )
        attention.output = RowLinear(attention.output, of_width, leave)
        mlp.expand = ColumnLinear(mlp.expand, inner, enter)
        mlp.contract = RowLinear(mlp.contract, inner, leave)
    whole = network.token_embedding.weight
    vocabulary = own_part(whole, 0, own(numbers(len(whole))))  # tied: used twice
    network.token_embedding = VocabularyEmbedding(vocabulary, leave)
    network.head = VocabularyHead(vocabulary, group, enter)
    if sequence:
        positions = network.position_embedding.weight
        network.position_embedding = OwnPositions(positions, group)
    return network


def gather_again(network):
    """With `sequence`: keep what comes before an all-gather, and gather again in
    backward, as Megatron does. A checkpoint stops recomputing when backward has what it
    needs, so no product is repeated.
    """
    for block in network.blocks:
        for layer in (block.attention.query_key_value, block.mlp.expand):
            recompute(layer, "full")


def is_cut(parameter):
    return hasattr(parameter, "cut")


def sum_gradients(network, group=None):
    """With `sequence`, after backward: add up the gradients of what each rank has
    whole, because each has seen only its own tokens. One all-reduce.
    """
    of_all = [value for value in network.parameters() if not is_cut(value)]
    gradients = [value.grad for value in of_all if value.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(total.view_as(gradient))


def clip_gradients(network, max_norm, group=None):
    """Like nn.utils.clip_grad_norm_, over the ranks; return the norm before, ().

    What is cut is added up over the ranks, and what each rank has whole counts once.
    """
    squares = network.norm.weight.new_zeros(2)  # of what is whole, of what is cut
    for parameter in network.parameters():
        if parameter.grad is not None:
            squares[int(is_cut(parameter))] += parameter.grad.square().sum()
    norm = (squares[0] + summed(squares[1], group)).sqrt()
    nn.utils.clip_grads_with_norm_(network.parameters(), max_norm, norm)
    return norm


def copied_parts(network, group=None):
    """The names of the matrices of which two ranks have equal parts, as after drawing
    them with one seed. All ranks of the group call it together.
    """
    of_ranks = [None] * dist.get_world_size(group)
    own = {
        name: hash_of(value)
        for name, value in network.named_parameters()
        if is_cut(value) and value.dim() > 1  # vectors may be all zeros, or all ones
    }
    dist.all_gather_object(of_ranks, own, group)
    return [name for name in own if len({of[name] for of in of_ranks}) < len(of_ranks)]


def hash_of(value):
    values = value.detach().cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(values).hexdigest()


def whole(parameter, group=None, value=None):
    """A parameter of which the ranks have parts, put together on each rank; or a value
    of its shape, such as its gradient. All ranks of the group call it together.
    """
    value = parameter.detach() if value is None else value
    if not is_cut(parameter):
        return value.clone()
    dimension, places, shape = parameter.cut
    together = value.new_zeros(shape).index_copy(dimension, places, value)
    dist.all_reduce(together, group=group)  # to each number, all others add zeros
    return together


def whole_parameters(network, group=None):
    """All parameters by their names in the GPT before, on all ranks of the group."""
    return {name: whole(value, group) for name, value in network.named_parameters()}
