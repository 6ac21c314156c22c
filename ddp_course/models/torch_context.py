"""What torch's `context_parallel` needs to run on CPU ranks: it is an experimental API
whose table of attention kernels has those of CUDA only (torch 2.15).
"""

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel  # noqa: F401
from torch.distributed.tensor.experimental._attention import (
    _cp_options,
    context_parallel_unshard,  # noqa: F401
    set_rotate_method,  # noqa: F401
)
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

from ddp_course.models.context_parallel import TOKENS


def cpu_forward(operator, args, options):
    """The CPU's flash attention on DTensors, by torch's own ring."""
    mesh, (query, key, value) = args[0].device_mesh, [x.to_local() for x in args[:3]]
    is_causal = args[4] if len(args) > 4 else options.get("is_causal", False)

    def of_a_block(query, key, value, is_causal, **_):
        return operator(query, key, value, 0.0, is_causal)

    parts = query, key, value
    output, logsumexp, *_ = ring._templated_ring_attention(
        mesh.get_group(), TOKENS, of_a_block, *parts, is_causal=is_causal
    )
    return as_dtensors((output, logsumexp), mesh)


def cpu_backward(operator, args, options):
    mesh, is_causal = args[1].device_mesh, args[7]
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    local = {name: x.to_local().contiguous() for name, x in zip(names, args)}

    def of_a_block(is_causal, **parts):
        return operator(*(parts[name].contiguous() for name in names), 0.0, is_causal)

    gradients = ring._templated_ring_attention_backward(
        mesh.get_group(), TOKENS, of_a_block, grad_out_name="grad_out",
        is_causal=is_causal, **local,
    )  # fmt: skip
    return as_dtensors(gradients[:3], mesh)


def as_dtensors(local, mesh):
    cut = [Shard(TOKENS)]
    return tuple(DTensor.from_local(x, mesh, cut, run_check=False) for x in local)


def allow_on_a_cpu():
    """Add the CPU's kernel to torch's table, in this process, and add up in the
    tensors' own precision, where torch's default is 32 bits.
    """
    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    for name, handler in ((kernel, cpu_forward), (f"{kernel}_backward", cpu_backward)):
        ring.custom_ops[getattr(torch.ops.aten, name).default] = handler
    _cp_options.convert_to_f32 = False
