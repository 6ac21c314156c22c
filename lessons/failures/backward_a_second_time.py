"""backward twice through one graph

Run:    python lessons/failures/backward_a_second_time.py
Text:   RuntimeError: Trying to backward through the graph a second time (or directly access saved
        tensors after they have already been freed). Saved intermediate values of the graph are
        freed when you call .backward() or autograd.grad(). Specify retain_graph=True if you need to
        backward through the graph a second time or if you need to access saved tensors after
        calling backward.
Cause:  A part of the graph has been through `backward` already: a loss that is added up over
        several steps, a hidden state or an output that is carried into the next step, or one
        forward for two losses.
Fix:    Carry numbers, not graphs: `total += loss.item()`, `state = state.detach()`. For two losses
        of one forward, add them and call `backward` once. `retain_graph=True` is seldom right, and
        under DDP it fails: the second backward averages gradients that have been averaged.
Lesson: 3
Source: https://github.com/pytorch/pytorch/issues/47260
Source: https://github.com/tim-learn/SHOT/issues/41
"""

import torch

weight = torch.ones(2, requires_grad=True)
total = 0
for _ in range(2):
    total = total + (weight * weight).sum()  # .item() is missing
    total.backward()
