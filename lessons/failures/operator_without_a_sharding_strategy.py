"""An operation that DTensors do not have

Run:    python lessons/failures/operator_without_a_sharding_strategy.py
Text:   NotImplementedError: Operator aten._cdist_forward.default does not have a sharding strategy
        registered.
Text:   NotImplementedError: Operator aten.select.int does not have a sharding strategy registered.
Text:   torch._subclasses.fake_tensor.DynamicOutputShapeException: aten.nonzero.default
Cause:  Each operation on a DTensor needs a rule that says what its result's placement is. torch has
        rules for what networks usually do. The message names an operation without one: one that an
        older torch lacks, one of an own or a compiled kernel, or one whose result has a shape that
        depends on the values (`nonzero`, a mask as an index).
Fix:    Do that operation on ordinary tensors: `x.full_tensor()` if it needs the whole,
        `x.to_local()` if each rank can do its part, and `DTensor.from_local(result, mesh, placements)`
        to go on. In a plan of `parallelize_module`, `use_local_output=True` gives the layer's output
        as an ordinary tensor. A newer torch may have the rule. For your own operation, register one
        with `torch.distributed.tensor.experimental.register_sharding`.
Lesson: 17
Source: https://github.com/pytorch/pytorch/issues/147724
Source: https://github.com/pytorch/pytorch/issues/152249
Source: https://github.com/pytorch/pytorch/issues/124990
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
mesh = init_device_mesh("cpu", (1,))
points = distribute_tensor(torch.randn(4, 2), mesh, [Shard(0)])
torch.cdist(points, points)
