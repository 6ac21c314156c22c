"""FSDP by hand: each rank keeps a shard of each parameter, and gathers to compute."""

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from ddp_course import UsageError


def gather(shard):
    """All ranks' shards of a flat tensor, joined: (world_size * len(shard),)."""
    whole = shard.new_empty(dist.get_world_size() * len(shard))
    dist.all_gather(list(whole.chunk(dist.get_world_size())), shard.detach())
    return whole


class Gathered(torch.autograd.Function):
    """Forward: gather the shards. Backward: reduce-scatter the mean gradient."""

    @staticmethod
    def forward(ctx, shard, sharded):
        ctx.sharded = sharded
        return gather(shard)

    @staticmethod
    def backward(ctx, gradient):
        ctx.sharded.again = None  # the module's backward is over: free its weights
        parts = gradient.chunk(dist.get_world_size())
        own = parts[dist.get_rank()].clone()
        dist.reduce_scatter(own, list(parts), dist.ReduceOp.AVG)
        return own, None


class Sharded(nn.Module):
    """FSDP: each rank keeps a shard of a module and gathers it to compute.

    The trainable parameters become one flat tensor, padded with zeros to a multiple of
    the ranks; frozen parameters stay as they are. A Sharded module inside keeps its own
    shards: wrap each block first, then the model.
    """

    def __init__(self, module):
        super().__init__()
        self.module = module
        parts = module.named_modules()
        inside = [f"{name}." for name, part in parts if isinstance(part, Sharded)]
        own = {  # tied parameters come once
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and not name.startswith(tuple(inside))
        }
        if len({parameter.dtype for parameter in own.values()}) > 1:
            raise UsageError("a Sharded module takes parameters of one dtype only")
        self.shapes = {name: parameter.shape for name, parameter in own.items()}
        flat = torch.cat([parameter.detach().flatten() for parameter in own.values()])
        flat = nn.functional.pad(flat, (0, -len(flat) % dist.get_world_size()))
        dist.broadcast(flat, src=0)
        mine = flat.chunk(dist.get_world_size())[dist.get_rank()]
        self.shard = nn.Parameter(mine.clone())
        for parameter in own.values():
            parameter.data = parameter.new_empty(0)  # frees the weights
            parameter.requires_grad = False
        self.again = None  # the weights, gathered once more for backward

    def views(self, flat):
        """The parameters by name, as views of the flat tensor."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = flat[: sum(sizes)].split(sizes)
        named = zip(self.shapes.items(), parts)
        return {name: part.view(shape) for (name, shape), part in named}

    def forward(self, *inputs):
        whole = Gathered.apply(self.shard, self)
        storage = whole.untyped_storage().data_ptr()

        def pack(tensor):
            """Save only the place of a weight in the flat tensor, not the weight."""
            if tensor.untyped_storage().data_ptr() != storage:
                return tensor
            return tensor.size(), tensor.stride(), tensor.storage_offset()

        def unpack(saved):
            if isinstance(saved, torch.Tensor):
                return saved
            if self.again is None:
                self.again = gather(self.shard)
            return self.again.as_strided(*saved)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return functional_call(self.module, self.views(whole), inputs)


def whole_parameters(module, prefix=""):
    """The parameters of all Sharded modules in a model, by name, on all ranks."""
    found = {}
    if isinstance(module, Sharded):
        views = module.views(gather(module.shard))
        found = {prefix + name: value for name, value in views.items()}
        module = module.module
    for name, part in module.named_children():
        found |= whole_parameters(part, f"{prefix}{name}.")
    return found
