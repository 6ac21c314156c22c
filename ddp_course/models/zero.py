"""ZeRO-1 and ZeRO-2 by hand: each parameter has an owner, one of the ranks."""

from functools import partial

import torch
import torch.distributed as dist


def deal(sizes, world_size):
    """An owner for each size: the largest goes first, to the rank that has least."""
    load, owners = [0] * world_size, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owners[place] = load.index(min(load))
        load[owners[place]] += sizes[place]
    return owners


class ShardedOptimizer:
    """ZeRO-1: each rank keeps the optimizer's state of its own parameters only.

    All ranks use it together, with gradients that have been averaged. optimizer_class:
    one of torch's whose step() needs no closure; options: what it takes.
    """

    def __init__(self, parameters, optimizer_class, **options):
        self.parameters = list(parameters)
        sizes = [parameter.numel() for parameter in self.parameters]
        self.owners = deal(sizes, dist.get_world_size())
        pairs = zip(self.parameters, self.owners)
        own = [parameter for parameter, owner in pairs if owner == dist.get_rank()]
        self.optimizer = optimizer_class(own or [torch.empty(0)], **options)

    def step(self):
        self.optimizer.step()
        for parameter, owner in zip(self.parameters, self.owners):
            dist.broadcast(parameter.detach(), src=owner)

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None


def reduce_to_owners(parameters, owners):
    """ZeRO-2: during backward, reduce each gradient to its owner, as a mean.

    It is made for one backward per step: a second one would add to a gradient that is
    a mean already.
    """

    def reduce_gradient(owner, parameter):
        parameter.grad /= dist.get_world_size()
        dist.reduce(parameter.grad, dst=owner)
        if owner != dist.get_rank():
            parameter.grad = None

    for parameter, owner in zip(parameters, owners):
        hook = partial(reduce_gradient, owner)
        parameter.register_post_accumulate_grad_hook(hook)
