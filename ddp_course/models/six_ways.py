"""Six ways to train one network with less and less memory per rank.

Each takes a network and a device, and returns a model, its optimizer, and a function
that all ranks call together to get all parameters by name. groups: what the optimizer
gets of a network, its parameters or groups of them; adam: options of AdamW.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from ddp_course import UsageError
from ddp_course.models.sharded import Sharded, whole_parameters
from ddp_course.models.zero import ShardedOptimizer, reduce_to_owners

ADAM = {"lr": 1e-3, "fused": True}


def ddp(network, device, groups=nn.Module.parameters, **adam):
    gpu = [device] if device.type == "cuda" else None
    model = DistributedDataParallel(
        network, device_ids=gpu, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.AdamW(groups(network), **ADAM | adam)
    return model, optimizer, network.state_dict


def zero1(
    network,
    device,
    groups=nn.Module.parameters,
    sharded=ZeroRedundancyOptimizer,
    **adam,
):
    model, *_ = ddp(network, device)
    optimizer = sharded(groups(network), torch.optim.AdamW, **ADAM | adam)
    return model, optimizer, network.state_dict


def zero1_by_hand(network, device):
    return zero1(network, device, sharded=ShardedOptimizer)


def zero2_by_hand(network, device):
    for parameter in network.parameters():
        dist.broadcast(parameter.detach(), src=0)
    optimizer = ShardedOptimizer(network.parameters(), torch.optim.AdamW, **ADAM)
    reduce_to_owners(optimizer.parameters, optimizer.owners)
    return network, optimizer, network.state_dict


def fsdp_by_hand(network, device):
    for number, block in enumerate(network.blocks):
        network.blocks[number] = Sharded(block)
    model = Sharded(network)  # what is left: embeddings and the last norm
    shards = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(shards, **ADAM), partial(whole_parameters, model)


def full_parameters(model):
    """The whole parameters by name, on all ranks, which call this together."""
    options = StateDictOptions(full_state_dict=True)
    return get_model_state_dict(model, options=options)


def mesh_of(device, replicas=1):
    """The ranks as fully_shard takes them: in a row; with several replicas of the
    model, HSDP, a row for each. Raises UsageError where the rows would not be equally long.
    """
    ranks = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh(device.type, (ranks,))
    if ranks % replicas:
        raise UsageError(f"--replicas {replicas} does not divide {ranks} ranks")
    rows, names = (replicas, ranks // replicas), ("replicate", "shard")
    return init_device_mesh(device.type, rows, mesh_dim_names=names)


def fsdp(network, device, groups=nn.Module.parameters, mesh=None, policies=(), **adam):
    mesh = mesh or mesh_of(device)
    for part in (*network.blocks, network):
        fully_shard(part, mesh=mesh, **dict(policies))
    optimizer = torch.optim.AdamW(groups(network), **ADAM | adam)  # of shards: only now
    return network, optimizer, partial(full_parameters, network)


ALL_WAYS = (ddp, zero1_by_hand, zero1, zero2_by_hand, fsdp_by_hand, fsdp)
WAYS = {way.__name__.replace("_", "-"): way for way in ALL_WAYS}
