"""Trained parameters in float16

Run:    python lessons/failures/unscale_fp16_gradients.py
Text:   ValueError: Attempting to unscale FP16 gradients.
Cause:  `GradScaler` divides the gradients by the scale, and it refuses gradients in float16, where
        small values are lost. The parameters that are trained are in float16 themselves: the model
        was loaded in float16, or `.half()` was called, and then LoRA adapters or some layers were
        set to train.
Fix:    Keep what is trained in float32 and let autocast choose the precision of the operations.
        With LoRA: `for p in model.parameters(): if p.requires_grad: p.data = p.data.float()`. Or
        train in bfloat16, which needs no GradScaler.
Lesson: 6
Source: https://github.com/huggingface/diffusers/issues/6086
Source: https://github.com/haotian-liu/LLaVA/issues/363
"""

import torch
from torch import nn

model = nn.Linear(2, 2).half()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
scaler.scale(model(torch.randn(2, 2).half()).float().sum()).backward()
scaler.unscale_(optimizer)
