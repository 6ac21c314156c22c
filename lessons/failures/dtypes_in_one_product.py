"""Inputs and weights in different precisions

Run:    python lessons/failures/dtypes_in_one_product.py
Text:   RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16
Text:   RuntimeError: expected mat1 and mat2 to have the same dtype, but got: float != c10::BFloat16
Text:   RuntimeError: expected scalar type Half but found Float
Text:   RuntimeError: expected scalar type BFloat16 but found Float
Text:   RuntimeError: Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor)
        should be the same
Text:   RuntimeError: Input type (float) and bias type (c10::BFloat16) should be the same
Cause:  One side of a product is in float32 and the other in a 16-bit type, and no autocast is
        active there: a model that was loaded in bfloat16 gets float32 inputs, a new layer or an
        adapter is in another type than the rest, or evaluation and generation run outside of
        `torch.autocast`.
Which:  Both names have `cuda` and differ in Half and Float: this page. One is
        `torch.cuda.FloatTensor` and the other `torch.FloatTensor`: they are on two devices.
Fix:    Run the forward, also in evaluation, inside `torch.autocast(device.type, torch.bfloat16)`.
        Or bring both to one type: `model.to(dtype)` after layers were added, `x.to(model.dtype)`.
        With DeepSpeed or FSDP, the engine casts inputs only for the wrapped model: call that one,
        not `.module`.
Lesson: 6
Source: https://github.com/hpcaitech/ColossalAI/issues/6169
Source: https://github.com/THUDM/CogKit/issues/32
Source: https://github.com/Yu-Fangxu/COLD-Attack/issues/20
"""

import torch
from torch import nn

model = nn.Linear(4, 2).to(torch.bfloat16)
model(torch.randn(3, 4))
