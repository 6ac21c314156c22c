"""A layer of an FSDP model that ran by itself

Run:    torchrun --nproc_per_node 2 lessons/failures/layer_outside_its_fsdp_module.py
Text:   RuntimeError: The tensor has a non-zero number of elements, but its data is not allocated yet.
Text:   RuntimeError: The tensor has a non-zero number of elements, but its data is not allocated yet.
        Caffe2 uses a lazy allocation, so you will need to call mutable_data() or raw_mutable_data() to
        actually allocate memory.
Text:   If you're using torch.compile/export/fx, it is likely that we are erroneously tracing into a
        custom kernel. To fix this, please wrap the custom kernel into an opaque custom op.
Cause:  FSDP 1 gathers a wrapped module's parameters in its `forward`, and frees them afterwards. Here
        a layer inside it was called in another way: `model.module.encoder(x)`, `generate`, or any
        method that is not `forward`. Its parameters are then empty.
Which:  The last line of your own in the traceback names the layer. torch.compile is rarely involved,
        although the message names it.
Fix:    Call the outermost model, and let its `forward` do what is needed. For `generate` and the like:
        `with FSDP.summon_full_params(model):` on all ranks. Or wrap the layer in FSDP itself. With
        `fully_shard`, `register_fsdp_forward_method(model, "generate")` gathers for other methods, too.
Lesson: 12
Source: https://github.com/pytorch/pytorch/issues/82461
Source: https://github.com/pytorch/pytorch/issues/109385
Source: https://github.com/RLinf/RLinf/issues/267
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo")
layers = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
model = FullyShardedDataParallel(layers, device_id=torch.device("cpu"))
try:
    model(torch.randn(4, 8)).sum().backward()
    model.module[1](torch.randn(4, 8))
finally:
    dist.destroy_process_group()
