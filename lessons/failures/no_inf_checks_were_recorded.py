"""A step without gradients under GradScaler

Run:    python lessons/failures/no_inf_checks_were_recorded.py
Text:   AssertionError: No inf checks were recorded for this optimizer.
Cause:  None of the parameters that this optimizer has got a gradient, so `GradScaler` has checked
        nothing. The loss does not reach them (a frozen or detached part), or the optimizer holds
        other tensors than the model: it was created before FSDP wrapped the model, or for another
        copy of it.
Which:  Print `[p.grad is None for group in optimizer.param_groups for p in group["params"]]` before
        the step. If all are None although the model's own parameters have gradients, the optimizer
        holds other tensors.
Fix:    Create the optimizer after wrapping, from the parameters that are trained. If one of two
        optimizers has nothing to do in this step, do not call `scaler.step` for it.
Lesson: 6
Source: https://github.com/huggingface/accelerate/issues/328
Source: https://github.com/huggingface/transformers/issues/24003
"""

import torch
from torch import nn

body, head = nn.Linear(2, 2), nn.Linear(2, 1)
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
loss = body(torch.randn(2, 2)).sum()  # the head is not used
scaler.scale(loss).backward()
scaler.step(optimizer)
