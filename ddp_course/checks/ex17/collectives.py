"""All-gather and reduce-scatter along the tokens, with their backward, in plain torch.

Where the group is None, one process has all tokens.
"""

import torch
import torch.distributed as dist


class AllGather(torch.autograd.Function):
    """Along the tokens, dim 1. Backward: a reduce-scatter."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return own_sum(gradient, ctx.group), None


class ReduceScatter(torch.autograd.Function):
    """Along the tokens, dim 1. Backward: an all-gather."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return own_sum(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gathered(gradient, ctx.group), None


class AllGatherAlike(torch.autograd.Function):
    """Along the tokens. Backward: each rank keeps the gradient of its own tokens."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(size(ctx.group), dim=1)[place(ctx.group)], None


def place(group):
    """This rank's place in a group; None is one process."""
    return 0 if group is None else dist.get_rank(group)


def size(group):
    return 1 if group is None else dist.get_world_size(group)


def gathered(x, group):
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size(group))]
    if group is None:
        return x
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def own_sum(x, group):
    total = x.clone(memory_format=torch.contiguous_format)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.chunk(size(group), dim=1)[place(group)].contiguous()


def all_gather(x, group):
    return AllGather.apply(x, group)


def reduce_scatter(x, group):
    return ReduceScatter.apply(x, group)


def all_gather_alike(x, group):
    return AllGatherAlike.apply(x, group)
