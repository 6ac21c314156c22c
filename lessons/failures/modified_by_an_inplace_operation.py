"""An optimizer's step between forward and backward

Run:    python lessons/failures/modified_by_an_inplace_operation.py
Text:   RuntimeError: one of the variables needed for gradient computation has been modified by an
        inplace operation: [torch.FloatTensor [16, 1]], which is output 0 of AsStrided, is
        at version 2; expected version 1 instead. Hint: enable anomaly detection to find the
        operation that failed to compute its gradient, with torch.autograd.set_detect_anomaly(True).
Cause:  The backward needs a value that has been overwritten since the forward. In training with two
        models (a GAN), it is usually a weight: the discriminator's `optimizer.step()` runs between
        the generator's forward through the discriminator and its backward. With DDP in torch before
        2.13, two forwards before one backward did it too, because DDP copied rank 0's buffers
        (BatchNorm) in place at each forward.
Which:  `[torch.FloatTensor [16, 1]]` is the shape of what was overwritten. A weight's shape: an
        optimizer's step. The length of a BatchNorm layer, or a LongTensor (position ids), and only
        under DDP: the buffers. An activation's shape: an operation such as `x += y` or `relu_`.
        `torch.autograd.set_detect_anomaly(True)` prints the line.
Fix:    Run the forward again after the step, or call each `backward()` before any `step()`. For
        buffers under DDP: `DistributedDataParallel(model, broadcast_buffers=False)`, after which
        each rank keeps its own running statistics; or a newer torch, or one forward on both halves
        joined. For an activation, write `x = x + y`.
Lesson: 4
Source: https://github.com/pytorch/pytorch/issues/175024
Source: https://github.com/pytorch/pytorch/issues/22095
Source: https://github.com/pytorch/pytorch/issues/110363
"""

import torch
from torch import nn

discriminator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(discriminator.parameters(), lr=0.1)
generated = torch.randn(4, 8, requires_grad=True)

generators_loss = -discriminator(generated).mean()
discriminator(generated.detach()).mean().backward()
optimizer.step()  # changes the weights that the next line needs
generators_loss.backward()
