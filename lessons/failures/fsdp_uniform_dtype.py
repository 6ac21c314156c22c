"""Two dtypes in one FlatParameter

Run:    python lessons/failures/fsdp_uniform_dtype.py
Text:   ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32
Text:   ValueError: `FlatParameter` requires uniform dtype but got torch.float16 and torch.float32
Text:   ValueError: Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`
Text:   ValueError: Cannot flatten integer dtype tensors
Cause:  FSDP 1 puts all parameters of a wrapped module into one flat tensor, so they must have one
        type. A model in bfloat16 got adapters, norms or a new head in float32, or a quantized layer
        is among them.
Fix:    Bring all parameters to one type before wrapping, `model.to(torch.float32)` or
        `.to(torch.bfloat16)`, and let FSDP's mixed precision cast. With QLoRA set
        `bnb_4bit_quant_storage` to the adapters' type. For frozen and trained parameters together
        pass `use_orig_params=True`. FSDP 2 (`fully_shard`) says it per block: see Two dtypes in one
        block (lesson 12).
Lesson: 12
Source: https://github.com/huggingface/trl/issues/1723
Source: https://github.com/axolotl-ai-cloud/axolotl/issues/1494
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
model = nn.Sequential(nn.Linear(2, 2).to(torch.bfloat16), nn.Linear(2, 2))
FullyShardedDataParallel(model, device_id=torch.device("cpu"))
