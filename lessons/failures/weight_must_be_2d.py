"""A layer that ZeRO-3 has not gathered

Run:    python lessons/failures/weight_must_be_2d.py
Text:   RuntimeError: 'weight' must be 2-D
Text:   RuntimeError: mat2 must be a matrix, got 1-D tensor
Text:   RuntimeError: size mismatch, got input (4), mat (4x8), vec (0)
Text:   RuntimeError: The size of tensor a (0) must match the size of tensor b (4096) at non-singleton
        dimension 1
Cause:  ZeRO-3 and FSDP keep a slice of each parameter per rank, and gather the whole one when the
        wrapped module runs. Here a layer ran without that, so it had an empty or flat tensor: a
        second model (teacher, reference, text encoder) that was loaded under `zero3_init` and not
        given to the engine, a call of `model.module`, `generate` on the inner model, or an
        embedding that is used outside of the wrapped forward.
Fix:    Give the second model to `deepspeed.initialize` or `accelerator.prepare`, too, or load it
        outside of ZeRO-3's init. Call the engine and not `.module`. To read a parameter, use `with
        deepspeed.zero.GatheredParameters(...)`, on all ranks.
Lesson: 13
Source: https://github.com/huggingface/trl/issues/600
Source: https://github.com/hiyouga/LlamaFactory/issues/2081
Source: https://github.com/arcee-ai/DistillKit/issues/3
"""

import torch
from torch.nn import functional

sharded = torch.empty(0)  # what ZeRO-3 leaves of an embedding that is not in use
functional.embedding(torch.tensor([1, 2]), sharded)
