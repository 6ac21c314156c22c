"""The prefix of the wrapper in a state dict, missing or too much

Run:    python lessons/failures/loading_into_the_wrapper.py
Text:   RuntimeError: Error(s) in loading state_dict for DistributedDataParallel: Missing key(s) in
        state_dict: "module.weight", "module.bias".
Text:   Error(s) in loading state_dict for DistributedDataParallel:
Text:   Error(s) in loading state_dict for DataParallel:
Text:   Missing key(s) in state_dict: "weight", "bias". Unexpected key(s) in state_dict:
        "module.weight", "module.bias".
Text:   Missing key(s) in state_dict: "module.weight", "module.bias". Unexpected key(s) in
        state_dict: "weight", "bias".
Cause:  In the wrapper, DDP or DataParallel, all names begin with `module.`; in the bare model none
        does. The checkpoint was saved from one of them and is loaded into the other.
Which:  `Missing key(s): "module...."`: the bare model was saved, as it should be, and the wrapper
        loads it. `Unexpected key(s): "module...."`: the wrapper was saved, and the bare model loads
        it (lesson 4).
Fix:    Missing: load before wrapping, `model.load_state_dict(state)` and then
        `DistributedDataParallel(model)`, or load into `ddp.module`. Unexpected: first
        `torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")`, and from
        now on save `ddp.module.state_dict()`. Do not pass `strict=False`: it would load nothing,
        without an error.
Lesson: 4
Source: https://github.com/pytorch/pytorch/issues/3805
"""

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
saved = nn.Linear(2, 2).state_dict()
DistributedDataParallel(nn.Linear(2, 2)).load_state_dict(saved)
