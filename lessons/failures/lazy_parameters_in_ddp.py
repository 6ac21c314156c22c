"""Parameters whose size is not known yet

Run:    python lessons/failures/lazy_parameters_in_ddp.py
Text:   RuntimeError: Modules with uninitialized parameters can't be used with
        `DistributedDataParallel`. Run a dummy forward pass to correctly initialize the modules
Cause:  A `nn.LazyLinear`, `LazyConv2d` or `LazyBatchNorm` makes its parameters in the first forward
        pass, from the shape of the input. DDP sends rank 0's parameters to the others at once, and
        there are none. Quantized weights of some libraries say the same: they are tensors of a class
        of their own.
Which:  `[name for name, p in model.named_parameters() if nn.parameter.is_lazy(p)]` names them.
Fix:    One forward pass of the bare model before DDP, with a batch of the right shape:
        `with torch.no_grad(): model(batch)`. All lazy layers have to run in it. Or write the sizes:
        `nn.Linear(784, 10)`. Create the optimizer afterwards.
Lesson: 3
Source: https://github.com/pyg-team/pytorch_geometric/issues/9692
Source: https://github.com/bghira/SimpleTuner/issues/644
Source: https://github.com/pytorch/pytorch/issues/135511
"""

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
DistributedDataParallel(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)))
