"""A bare state dict loaded into the wrapper

Run:    python lessons/failures/loading_into_the_wrapper.py
Text:   RuntimeError: Error(s) in loading state_dict for DistributedDataParallel: Missing key(s) in
        state_dict: "module.weight", "module.bias".
Text:   Error(s) in loading state_dict for DistributedDataParallel:
Text:   Error(s) in loading state_dict for DataParallel:
Text:   Missing key(s) in state_dict: "module.weight", "module.bias". Unexpected key(s) in
        state_dict: "weight", "bias".
Cause:  The checkpoint was saved from the bare model, as it should be, and is now loaded into the
        wrapper, whose names all begin with `module.`.
Which:  `Missing key(s): "module...."` is this direction. `Unexpected key(s): "module...."` is the
        other one: the wrapper was saved and the bare model loads it (lesson 4).
Fix:    Load before wrapping, `model.load_state_dict(state)` and then
        `DistributedDataParallel(model)`, or load into `ddp.module`. Do not pass `strict=False`: it
        would load nothing, without an error.
Lesson: 4
Source: https://github.com/pytorch/pytorch/issues/3805
"""

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
saved = nn.Linear(2, 2).state_dict()
DistributedDataParallel(nn.Linear(2, 2)).load_state_dict(saved)
