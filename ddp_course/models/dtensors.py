"""A GPT that torch cuts inside its layers: its parameters become DTensors on a mesh."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,  # noqa: F401
    parallelize_module,
)
from torch.nn import functional as F

TOKENS, ALL = Shard(1), Replicate()  # of activations (batch, tokens, width)
THREE = ("query", "key", "value")


class Separate(nn.Module):
    """Queries, keys and values from three layers, in place of a fused one.

    Torch cuts each layer into neighbouring rows, and the fused layer's first rows are
    all queries.
    """

    def __init__(self, fused):
        super().__init__()
        outputs, inputs = fused.weight.shape
        parts = fused.weight.chunk(3), fused.bias.chunk(3)
        for name, weight, bias in zip(THREE, *parts):
            layer = nn.Linear(inputs, outputs // 3, device="meta")
            layer.weight = nn.Parameter(weight.detach().clone())
            layer.bias = nn.Parameter(bias.detach().clone())
            self.add_module(name, layer)

    def forward(self, x):
        return torch.cat([self.query(x), self.key(x), self.value(x)], dim=-1)


def plan(sequence):
    """What becomes of the layers of a block, {name: style}."""
    between = TOKENS if sequence else ALL  # the layers that are cut
    return {
        "attention": PrepareModuleInput(
            input_layouts=(between,), desired_input_layouts=(ALL,)
        ),
        **{f"attention.query_key_value.{name}": ColwiseParallel() for name in THREE},
        "attention.output": RowwiseParallel(output_layouts=between),
        "mlp.expand": ColwiseParallel(input_layouts=between),
        "mlp.contract": RowwiseParallel(output_layouts=between),
    } | ({"norm1": SequenceParallel(), "norm2": SequenceParallel()} if sequence else {})


def parallelize(network, mesh, sequence=True):
    """Cut a GPT for the ranks of a mesh of one dimension, in place, and return it.

    Without `sequence`, norms and positions stay plain tensors, which nn.utils refuses
    to clip together with the others. Raises ValueError with dropout: the plan hands out
    plain tensors, whose masks do not follow a placement.
    """
    if network.dropout.p:
        raise ValueError("a GPT with dropout is not cut here")
    for block in network.blocks:
        block.attention.query_key_value = Separate(block.attention.query_key_value)
        parallelize_module(block, mesh, plan(sequence))
    between = TOKENS if sequence else ALL
    embedding = RowwiseParallel(input_layouts=ALL, output_layouts=between)
    head = ColwiseParallel(
        input_layouts=between, output_layouts=Shard(-1), use_local_output=False
    )
    outer = {"token_embedding": embedding, "head": head}
    if sequence:
        positions = RowwiseParallel(input_layouts=ALL, output_layouts=Shard(0))
        outer |= {"position_embedding": positions, "norm": SequenceParallel()}
    parallelize_module(network, mesh, outer)
    tie(network)
    return network


def tie(network):
    """Make one parameter of the two that parallelize_module makes of a tied one."""
    network.head.weight = network.token_embedding.weight


def shard_over_data(network, mesh):
    """Shard what tensor ranks have over the ranks with other data: FSDP.

    mesh: of two dimensions, "data" and "tensor".
    """
    mesh["data", "tensor"]._flatten()  # so that a norm over both is one all-reduce
    for part in (*network.blocks, network):
        fully_shard(part, mesh=mesh["data"])
    return network


def loss_of(network, tokens, targets):
    """The mean cross entropy, of logits that stay cut. Call it, and backward, within
    `loss_parallel()`.

    Where the vocabulary is no multiple of 128, GPT's head pads its matrix, and torch
    gathers it for that: see gpt.Head.
    """
    logits = network(tokens)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def sum_gradients(network):
    """Add up the gradients of which each rank has a part: those of norms, with sequence
    parallelism. Call it after backward, on all ranks.

    Operations would do so where they use them, but torch 2.11's clip_grad_norm_ then
    scales a copy, and the gradient itself is not clipped.
    """
    for value in network.parameters():
        if isinstance(value.grad, DTensor):
            value.grad = value.grad.redistribute(placements=value.placements)


def full(value):
    """A DTensor put together on each rank, which all call together; others as they are."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def fused(values):
    """Values by the names of `parallelize`'s GPT, under those of the GPT before."""
    found = dict(values)
    for name in [name for name in found if ".query." in name]:
        three = [found.pop(name.replace("query.", f"{one}.")) for one in THREE]
        found[name.replace(".query.", ".")] = torch.cat(three)
    return found


def whole_parameters(network):
    """All parameters by their names in the GPT before, on all ranks, which call this
    together.
    """
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.unshard()  # along "data"; `full` does the rest
    return fused(
        {name: full(value.detach()) for name, value in network.named_parameters()}
    )
