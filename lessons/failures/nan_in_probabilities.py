"""Sampling from probabilities that are nan

Run:    python lessons/failures/nan_in_probabilities.py
Text:   RuntimeError: probability tensor contains either `inf`, `nan` or element < 0
Cause:  The logits are nan or infinite before sampling: float16 overflowed, a model that was trained
        in bfloat16 runs in float16, the weights are damaged or were not all loaded, or a training
        step has made them nan.
Which:  `torch.isfinite(logits).all()` for a prompt without padding. Only with padding: the
        attention mask, or padding on the right side. On one GPU right and on several wrong:
        the transfers between the GPUs, so try
        fewer. After training: look at the loss, and at lesson 15's NanGuard.
Fix:    Load in bfloat16 or float32. Check that no key was missing while loading. Stop training at
        the first nan rather than saving it.
Lesson: 15
Source: https://github.com/lm-sys/FastChat/issues/2577
Source: https://github.com/togethercomputer/OpenChatKit/issues/86
"""

import torch

logits = torch.tensor([70000.0, 1.0]).half()  # infinite in float16
torch.multinomial(logits.float().softmax(-1), num_samples=1)
