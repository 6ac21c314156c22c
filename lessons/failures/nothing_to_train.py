"""A model without parameters to train

Run:    python lessons/failures/nothing_to_train.py
Text:   RuntimeError: DistributedDataParallel is not needed when a module doesn't have any
        parameter that requires a gradient.
Text:   ValueError: optimizer got an empty parameter list
Cause:  None of the model's parameters requires a gradient: all were frozen, the adapters were
        loaded for inference, or the module is a loss or a frozen teacher, which Accelerate's
        `prepare` wraps, too.
Fix:    Wrap only what is trained. For a frozen model use `model.to(device).eval()` and no DDP. With
        peft, load adapters with `PeftModel.from_pretrained(model, path, is_trainable=True)`, and
        look at `model.print_trainable_parameters()` first.
Lesson: 11
Source: https://github.com/huggingface/accelerate/issues/760
Source: https://github.com/pytorch/pytorch/issues/45326
"""

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
DistributedDataParallel(nn.Linear(2, 2).requires_grad_(False))
