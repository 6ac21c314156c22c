"""Experts with torch's own parts: DTensors for the experts, FSDP for all parameters, and
one product for all experts of a rank.

torch itself has no style for experts. This one is that of torchtitan, without the
messages, which our layer sends: https://github.com/pytorch/torchtitan
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn import functional as F

from ddp_course.models.expert_parallel import layers_of, of_experts


class ExpertParallel(ParallelStyle):
    """Make DTensors of an Experts module's weights: a rank has some of the experts."""

    def _apply(self, module, mesh):
        return distribute_module(module, mesh, self.cut)

    def cut(self, name, module, mesh):
        for name, value in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(value.detach(), mesh, [Shard(0)])
            whole = nn.Parameter(whole, requires_grad=value.requires_grad)
            module.register_parameter(name, whole)


def shard(network, mesh, divide=True):
    """Share the experts along "expert", and shard all parameters with FSDP, in place:
    the experts along "data", everything else over all ranks.

    divide: tell FSDP by how many ranks to divide the experts' gradients. By itself it
    divides by the ranks that it shards over, and the all-to-all has added up others.
    With one rank along "data", torch 2.15 then divides float64 and float16 twice.
    """
    everyone = mesh["data", "expert"]._flatten()
    for layer in layers_of(network):
        parallelize_module(layer.experts, mesh["expert"], ExpertParallel())
        layer.group = mesh["expert"].get_group()
        fully_shard(layer.experts, mesh=mesh["data"])
        if divide:
            layer.experts.set_gradient_divide_factor(mesh.size())
            if mesh["data"].size() > 1:  # gloo cannot multiply while it adds up
                layer.experts.set_force_sum_reduction_for_comms(True)
    for part in (*network.blocks, network):
        fully_shard(part, mesh=everyone)
    return network


def clip_gradients(network, max_norm):
    """Like nn.utils.clip_grad_norm_, for parameters of two meshes, which that refuses;
    return the norm before, ().
    """
    kinds = of_experts(network)
    norms = [
        nn.utils.get_total_norm([p.grad for p in kind]).full_tensor() for kind in kinds
    ]
    norm = torch.stack(norms).square().sum().sqrt()
    for kind in kinds:
        nn.utils.clip_grads_with_norm_(kind, max_norm, norm)
    return norm


def grouped(experts, rows, counts):
    """What Experts.forward computes, with one operation for all products of a kind.

    In float32, bfloat16 and float16. On a GPU, `counts` need not leave it: offsets may
    be there.
    """
    ends = torch.tensor(counts, device=rows.device).cumsum(0).to(torch.int32)
    inner = F.gelu(F.grouped_mm(rows, experts.up, offs=ends))
    return F.grouped_mm(inner, experts.down, offs=ends)
