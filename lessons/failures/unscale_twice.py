"""unscale_ called twice in one step

Run:    python lessons/failures/unscale_twice.py
Text:   RuntimeError: unscale_() has already been called on this optimizer since the last update().
Text:   RuntimeError: unscale_() is being called after step().
Text:   RuntimeError: step() has already been called since the last update().
Cause:  The gradients of one optimizer may be unscaled once per step. With accumulation, the loop
        unscales and clips after each micro-batch; or a library clips, and your code does, too
        (Accelerate's `clip_grad_norm_` unscales by itself).
Fix:    Unscale, clip, step and update only where the step is made, behind the same condition. With
        Accelerate, clip inside `if accelerator.sync_gradients:`.
Lesson: 6
Source: https://github.com/huggingface/transformers/issues/23905
Source: https://github.com/espnet/espnet/pull/2362
"""

import torch
from torch import nn

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
for _ in range(2):
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)  # belongs behind the loop
