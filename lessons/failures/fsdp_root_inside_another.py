"""An inner part of FSDP that ran by itself

Run:    python lessons/failures/fsdp_root_inside_another.py
Text:   AssertionError: Non-root FSDP instance's `_is_root` should not have been set yet or should have
        been set to `False`
Text:   RuntimeError: FSDP state has already been lazily initialized for 0 FSDP requires running forward
        through the root module first
Cause:  In FSDP 1, the part whose `forward` or state dict is called first becomes the root. Here a part
        inside the model was called before the whole model: a layer by itself, its state dict, or an
        evaluation of the encoder alone.
Fix:    Run the whole model once, with `forward`, before you touch its parts, and take the state dict of
        the outermost FSDP module. FSDP 2 (`fully_shard`, lesson 12) decides the root in the same way:
        call the root first there, too.
Lesson: 12
Source: https://github.com/pytorch/pytorch/issues/113496
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
cpu = torch.device("cpu")
inner = FullyShardedDataParallel(nn.Linear(2, 2), device_id=cpu)
inner(torch.randn(1, 2))  # before the model that it is a part of
model = nn.Sequential(inner, nn.Linear(2, 2))
FullyShardedDataParallel(model, device_id=cpu)(torch.randn(1, 2))
