"""Two dtypes, or frozen and trained parameters, in one FlatParameter

Run:    python lessons/failures/fsdp_uniform_dtype.py
Text:   ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32
Text:   ValueError: `FlatParameter` requires uniform dtype but got torch.float16 and torch.float32
Text:   ValueError: Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`
Text:   ValueError: Cannot flatten integer dtype tensors
Cause:  FSDP 1 puts all parameters of a wrapped module into one flat tensor, so they must have one
        type, and all are trained or none. `uniform dtype`: bfloat16 beside adapters, norms or a head
        in float32. `integer dtype`: quantized weights; those in 4 bits are stored as uint8. `uniform
        requires_grad`: frozen and trained parameters in one module, as with LoRA.
Fix:    For `requires_grad`: `use_orig_params=True`, in Accelerate `fsdp_use_orig_params: true`, or
        peft's `fsdp_auto_wrap_policy`, which wraps the adapters alone. For the dtype: one type
        before wrapping, `model.to(torch.float32)` or `.to(torch.bfloat16)`, and FSDP's mixed
        precision casts; with QLoRA, `bnb_4bit_quant_storage` in the adapters' type. FSDP 2
        (`fully_shard`) says it per block: see Two dtypes in one block (lesson 12).
Lesson: 12
Source: https://github.com/huggingface/trl/issues/1723
Source: https://github.com/axolotl-ai-cloud/axolotl/issues/1494
Source: https://github.com/huggingface/peft/issues/1432
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
model = nn.Sequential(nn.Linear(2, 2).to(torch.bfloat16), nn.Linear(2, 2))
FullyShardedDataParallel(model, device_id=torch.device("cpu"))
