"""Sharded and ordinary parameters in one norm

Run:    torchrun --nproc_per_node 2 lessons/failures/fsdp_with_ordinary_parameters.py
Text:   RuntimeError: aten._foreach_norm.Scalar got mixed torch.Tensor and DTensor, need to convert
        all torch.Tensor to DTensor before calling distributed operators!
Text:   RuntimeError: aten._foreach_mul_.Tensor got mixed torch.Tensor and DTensor, need to convert
        all torch.Tensor to DTensor before calling distributed operators!
Text:   RuntimeError: aten._foreach_norm.Scalar got mixed torch.Tensor and DTensor, need to convert
        all
Cause:  Some parameters are sharded (DTensor) and others are ordinary tensors: `fully_shard` was
        called for the blocks and not for the root, or adapters, a new head or frozen layers were
        added outside of it. Or tensor parallelism (`parallelize_module`) has cut the linear layers,
        and the norms have stayed ordinary. `clip_grad_norm_` then gets both kinds.
Which:  The name of the operation tells. `_foreach_norm` or `_foreach_mul_` comes from clipping or
        from the optimizer: this page. `aten.embedding`, `aten.mm` or `aten.addmm` means that a
        method other than `forward` used a sharded layer: see A method that is not forward (lesson
        12).
Fix:    Call `fully_shard(model)` for the root as the last step, after all layers have been added,
        so that every parameter is sharded. Create the optimizer afterwards. With tensor
        parallelism, name the norms in the plan as well (`SequenceParallel()`), or replicate them with
        `distribute_module(norm, mesh, input_fn=..., output_fn=...)`, whose functions make a DTensor of
        the input and an ordinary tensor of the output.
Lesson: 12
Source: https://github.com/pytorch/pytorch/issues/170862
Source: https://github.com/meta-pytorch/torchtune/issues/2420
Source: https://github.com/huggingface/accelerate/pull/4219
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))  # the rest stays ordinary
model(torch.randn(4, 8)).sum().backward()
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
