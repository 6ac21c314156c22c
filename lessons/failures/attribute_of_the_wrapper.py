"""The wrapper hides the model's own attributes

Run:    python lessons/failures/attribute_of_the_wrapper.py
Text:   AttributeError: 'DistributedDataParallel' object has no attribute 'config'
Text:   AttributeError: 'DataParallel' object has no attribute 'config'
Text:   AttributeError: 'FullyShardedDataParallel' object has no attribute 'generate'
Text:   AttributeError: 'DeepSpeedEngine' object has no attribute 'config'
Text:   AttributeError: 'OptimizedModule' object has no attribute 'encoder'
Text:   'DistributedDataParallel' object has no attribute '…'
Cause:  DDP, DataParallel and the others are modules of their own, with the model inside. They pass on
        `forward`, and not the model's other methods and attributes.
Fix:    Ask the model inside: `model.module.config`, or `accelerator.unwrap_model(model).config`, and
        keep the plain model in a variable of its own. In training call the wrapper, never
        `model.module(...)`, or the gradients are not averaged. A method that computes a loss has to
        become a part of `forward`.
Lesson: 4
Source: https://github.com/huggingface/peft/issues/1296
"""

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Linear):
    config = {"hidden": 2}


dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
print(DistributedDataParallel(Model(2, 2)).config)
