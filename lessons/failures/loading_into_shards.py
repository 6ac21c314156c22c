"""Weights loaded into a model that ZeRO-3 has divided

Run:    python lessons/failures/loading_into_shards.py
Text:   RuntimeError: Error(s) in loading state_dict for Linear: size mismatch for weight: copying a param
        with shape torch.Size([4, 2]) from checkpoint, the shape in current model is torch.Size([0]).
Text:   size mismatch for weight: copying a param with shape torch.Size([4, 2]) from checkpoint, the shape
        in current model is torch.Size([0]).
Cause:  Under ZeRO-3, each parameter of the model is an empty tensor while it is not in use.
        `load_state_dict` of the module compares with that.
Which:  Size([0]) is in the model here. Size([0]) in the checkpoint is the other direction: one
        rank's part was saved as if it were the model (lesson 13).
Fix:    Load before `deepspeed.initialize`, or with `from_pretrained`, which gathers. Afterwards use
        `engine.load_checkpoint`, or `with
        deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):` around the
        loading on rank 0.
Lesson: 13
Source: https://github.com/deepspeedai/DeepSpeed/issues/3574
Source: https://github.com/deepspeedai/DeepSpeed/issues/7501
"""

import torch
from torch import nn

saved = nn.Linear(2, 4).state_dict()
model = nn.Linear(2, 4)
for parameter in model.parameters():
    parameter.data = torch.empty(0)  # as ZeRO-3 leaves them
model.load_state_dict(saved)
