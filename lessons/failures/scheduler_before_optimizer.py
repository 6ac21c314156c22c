"""A first step that GradScaler skips

Run:    python lessons/failures/scheduler_before_optimizer.py
Text:   UserWarning: Detected call of `lr_scheduler.step()` before `optimizer.step()`. In PyTorch
        1.1.0 and later, you should call them in the opposite order: `optimizer.step()` before
        `lr_scheduler.step()`. Failure to do this will result in PyTorch skipping the first value of
        the learning rate schedule.
Cause:  `GradScaler` begins with a large scale. If the first gradients overflow, it skips the
        optimizer's step and lowers the scale; the scheduler steps all the same, and notices. The
        same warning comes if the two lines really are in the wrong order.
Which:  Only with GradScaler and only once, at the beginning: an overflow, harmless. Without
        GradScaler: the order.
Fix:    For the overflow, ignore it, or step the scheduler only if the scale has not shrunk: `scale
        = scaler.get_scale(); scaler.update(); if scaler.get_scale() >= scale: scheduler.step()`.
        For the order, call `optimizer.step()` first. In bfloat16 there is no scaler.
Lesson: 6
Source: https://github.com/pytorch/pytorch/issues/44511
Source: https://github.com/pytorch/pytorch/issues/55585
"""

import torch
from torch import nn

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
scaler = torch.amp.GradScaler("cpu")
loss = model(torch.full((1, 2), 1e38)).sum()
scaler.scale(loss).backward()  # infinite gradients
scaler.step(optimizer)  # skipped
scaler.update()
scheduler.step()
