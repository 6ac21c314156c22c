"""A layer that tensor parallelism cannot divide

Run:    python lessons/failures/tensor_parallel_of_another_layer.py
Text:   NotImplementedError: ColwiseParallel currently only support nn.Linear and nn.Embedding!
Text:   NotImplementedError: RowwiseParallel currently only support nn.Linear and nn.Embedding!
Cause:  The plan of `parallelize_module` names a module that is no `nn.Linear` and no `nn.Embedding`:
        an adapter of peft took the layer's place (the linear layer is now `q_proj.base_layer`), a
        quantised layer, a convolution, or a layer of your own.
Fix:    Name the linear layer inside: `"q_proj.base_layer"`, or divide the model first and add the
        adapters afterwards. For a layer of your own, write a `ParallelStyle`, or leave it whole on
        each rank.
Lesson: 12
Source: https://github.com/huggingface/peft/issues/2394
"""

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


class Adapted(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer


dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
model = nn.Sequential(Adapted(nn.Linear(4, 4)))
parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
