"""channels_last after wrapping

Run:    torchrun --nproc_per_node 2 lessons/failures/grad_strides_do_not_match.py
Text:   UserWarning: Grad strides do not match bucket view strides. This may indicate grad was not
        created according to the gradient layout contract, or that the param's strides changed since
        DDP was constructed. This is not an error, but may impair performance.
Cause:  DDP lays its buckets out as the parameters are laid out when it is constructed. Afterwards
        the layout changed, usually by `model.to(memory_format=torch.channels_last)`, so each
        gradient is copied into the bucket with other strides. The results are right, and each step
        is a little slower. A gradient of a 1 x 1 convolution behind a transpose can cause the same
        warning.
Fix:    Call `model.to(memory_format=torch.channels_last)` before `DistributedDataParallel(model)`.
        If nothing changes the layout, call `.contiguous()` on the input of the layer that the
        warning names, or ignore it.
Lesson: 16
Source: https://github.com/pytorch/pytorch/issues/47163
Source: https://github.com/CompVis/latent-diffusion/issues/281
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = nn.Conv2d(3, 8, 3)
ddp = DistributedDataParallel(model)
model.to(memory_format=torch.channels_last)
for _ in range(2):
    ddp(torch.randn(4, 3, 8, 8)).sum().backward()
