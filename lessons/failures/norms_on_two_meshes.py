"""Parameters on two meshes in one norm

Run:    python lessons/failures/norms_on_two_meshes.py
Text:   RuntimeError: All operands in aten.stack.default must have the same mesh, but got
        DeviceMesh((data=1, tensor=1), 'cpu', stride=((), ())) and DeviceMesh((tensor=1), 'cpu', stride=((),)).
Text:   ValueError: All operands in aten.stack.default must have the same mesh, but got
        DeviceMesh('cuda', [1, 3], mesh_dim_names=('dp_shard_cp',)) and DeviceMesh('cuda', [[0, 1], [2,
        3]], mesh_dim_names=('dp_shard_cp', 'tp')).
Cause:  `clip_grad_norm_` stacks the norms of all gradients, and stacking needs one mesh. Here some
        parameters are DTensors on one mesh and others on another: after `fully_shard`, layers that
        tensor parallelism has cut are on `data` x `tensor`, and layers that it has left out (norms, a
        router, the embedding) are on `data` alone; or experts have a mesh of their own.
Fix:    Bring every parameter onto the `tensor` mesh before `fully_shard`: `SequenceParallel()` for the
        norms, or `distribute_module(layer, mesh["tensor"], input_fn=..., output_fn=...)`, which
        replicates a layer; its functions make a DTensor of the input (`DTensor.from_local`), and an
        ordinary tensor of the output (`to_local`). Where two meshes are on purpose, as with experts,
        take a norm per mesh with `nn.utils.get_total_norm`, make each whole with `.full_tensor()`, add
        up their squares, and clip each mesh's with `nn.utils.clip_grads_with_norm_`.
Lesson: 17
Source: https://github.com/pytorch/torchtitan/issues/1325
Source: https://github.com/pytorch/pytorch/pull/180501
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
distribute_module(model[0], mesh["tensor"])
distribute_module(model[1], mesh)
for parameter in model.parameters():
    parameter.grad = torch.zeros_like(parameter)
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
