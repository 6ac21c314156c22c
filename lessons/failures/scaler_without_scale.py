"""A step of GradScaler without a scaled loss

Run:    python lessons/failures/scaler_without_scale.py
Text:   AssertionError: Attempted step but _scale is None. This may indicate your script did not use
        scaler.scale(loss or outputs) earlier in the iteration.
Text:   AssertionError: Attempted unscale_ but _scale is None. This may indicate your script did not
        use scaler.scale(loss or outputs) earlier in the iteration.
Cause:  `scaler.step` was called, and `scaler.scale(loss).backward()` was not: the backward is another
        object's. Accelerate and Trainer have a scaler of their own, so a second one never sees the
        loss.
Fix:    Call `scaler.scale(loss).backward()`. With Accelerate, call `accelerator.backward(loss)` and
        `optimizer.step()`, and no scaler.
Lesson: 6
Source: https://github.com/starrytong/SCNet/issues/7
Source: https://github.com/huggingface/accelerate/issues/357
"""

import torch
from torch import nn

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
model(torch.randn(2, 2)).sum().backward()  # not scaler.scale(loss)
scaler.step(optimizer)
