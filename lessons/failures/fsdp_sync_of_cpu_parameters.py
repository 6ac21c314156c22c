"""Weights on the CPU, to be sent from rank 0

Run:    python lessons/failures/fsdp_sync_of_cpu_parameters.py
Text:   ValueError: The module has CPU parameters or buffers when `sync_module_states=True`, which
        requires them to be on GPU. Please specify the `device_id` argument or move the module to GPU
        before passing it to FSDP.
Text:   ValueError: Module has CPU parameters, but sync_module_states=True is specified. This only works
        for GPU module, please specify `device_id` argument or move module to GPU before init.
Cause:  With `sync_module_states=True`, FSDP 1 broadcasts rank 0's weights when it wraps the model, and
        nccl sends only what is on a GPU. The model is still on the CPU.
Fix:    Give FSDP `device_id=torch.cuda.current_device()`: it moves each part before it is sent. With
        Accelerate or Trainer, `fsdp_cpu_ram_efficient_loading: true` needs `fsdp_sync_module_states:
        true`, and a model that was loaded inside the distributed run. On a CPU, leave it out.
Lesson: 12
Source: https://github.com/huggingface/transformers/issues/25100
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
options = {"device_id": torch.device("cpu"), "sync_module_states": True}
FullyShardedDataParallel(nn.Linear(2, 2), **options)
