"""A parameter that was replaced inside FSDP

Run:    python lessons/failures/fsdp_writeback.py
Text:   RuntimeError: Cannot writeback when the parameter shape changes Expects torch.Size([64]) but got
        torch.Size([128])
Text:   RuntimeError: Cannot writeback when the parameter shape changes
Text:   RuntimeError: Cannot writeback when the gradient shape changes
Cause:  `FullyShardedDataParallel` keeps all parameters of a unit in one flat tensor, and each parameter
        is a view of it. Something has put another tensor in its place: a vocabulary that was resized,
        weights assigned or cast after wrapping, `.data = ...`. With a single rank
        (`NO_SHARD`), older versions of torch also say so where nothing is wrong with your code:
        accelerate casts the parameters to float32.
Fix:    Resize, load and cast before wrapping, and only copy into parameters afterwards
        (`parameter.copy_(...)` under `no_grad`). With one GPU, leave FSDP off, load the model in
        float32, or update torch. `fully_shard` (FSDP2) has no flat tensor.
Lesson: 12
Source: https://github.com/pytorch/pytorch/issues/151223
Source: https://github.com/Lightning-AI/litgpt/issues/491
Source: https://github.com/LeapLabTHU/JustGRPO/issues/3
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
cpu = torch.device("cpu")
model = FullyShardedDataParallel(nn.Linear(8, 8), use_orig_params=True, device_id=cpu)
model.module.weight = nn.Parameter(torch.zeros(16, 8))
model(torch.randn(2, 8))
