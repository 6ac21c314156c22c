"""The state dict of FSDP in the middle of a step

Run:    python lessons/failures/fsdp_state_dict_in_the_forward.py
Text:   AssertionError: Expects the handle training to be IDLE but got HandleTrainingState.FORWARD
Text:   AssertionError: Expects the handle training to be IDLE but got HandleTrainingState.BACKWARD_PRE
Cause:  FSDP 1 takes its state dict between steps only, and this one was asked for while a part of the
        model was in its forward or backward: in a hook, in a callback inside the loss, or after a
        forward that ended with an exception that was caught.
Fix:    Save after `optimizer.step()`. If a step was given up after an exception, do not save from that
        process: load the last checkpoint.
Lesson: 12
Source: https://github.com/Lightning-AI/lit-llama/issues/434
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
layer, cpu = nn.Linear(2, 2), torch.device("cpu")
model = FullyShardedDataParallel(nn.Sequential(layer, nn.ReLU()), device_id=cpu)
layer.register_forward_hook(lambda *_: model.state_dict())
model(torch.randn(1, 2))
