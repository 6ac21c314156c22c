"""safetensors with shards in place of tensors

Run:    torchrun --nproc_per_node 2 lessons/failures/storage_of_a_dtensor.py
Text:   RuntimeError: Attempted to access the data pointer on an invalid python storage.
Cause:  The state dict holds DTensors, as `fully_shard` and `parallelize_module` make them, or tensors of
        a TPU. A DTensor has no memory of its own: only its local part has. safetensors, `save_pretrained`
        and others ask for the address.
Which:  `type(next(iter(state.values())))` says `DTensor`. If it is an ordinary tensor, it is on a device
        whose memory has no address for Python, such as "xla".
Fix:    Gather first, on all ranks: `get_model_state_dict(model, options=StateDictOptions(
        full_state_dict=True, cpu_offload=True))`, and let rank 0 save it. One parameter alone:
        `value.full_tensor()`, also on all ranks. Or let each rank write its shards, with
        `torch.distributed.checkpoint`.
Lesson: 12
Source: https://github.com/kvcache-ai/ktransformers/issues/2147
Source: https://github.com/verl-project/verl/issues/1703
Source: https://github.com/huggingface/transformers/issues/27578
"""

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 2)
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
try:
    save_file(model.state_dict(), "model.safetensors")
finally:
    dist.destroy_process_group()
