"""SyncBatchNorm inside DDP on a CPU

Run:    python lessons/failures/syncbatchnorm_in_ddp_on_a_cpu.py
Text:   ValueError: SyncBatchNorm layers only work with GPU modules
Cause:  torch's SyncBatchNorm works on GPUs only, and DDP checks it while wrapping. The model is
        still on the CPU because `.to(device)` was forgotten, or the machine has no GPU.
Which:  The lesson's other error, `SyncBatchNorm expected input tensor to be on GPU`, comes from a
        forward without DDP.
Fix:    `model.to(device)` before wrapping. To try a program on a CPU, convert only on a GPU, `if
        device.type == "cuda": model = nn.SyncBatchNorm.convert_sync_batchnorm(model)`, or use
        lesson 5's own.
Lesson: 5
Source: https://github.com/open-mmlab/mmsegmentation/issues/2147
Source: https://github.com/open-mmlab/mmagic/issues/133
"""

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model))
