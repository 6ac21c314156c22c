"""init_process_group called twice

Run:    python lessons/failures/process_group_twice.py
Text:   ValueError: trying to initialize the default process group twice!
Text:   RuntimeError: trying to initialize the default process group twice!
Cause:  The process has a process group already. A notebook's cell was run again, or two parts of
        the program both start one: your script and Accelerate, Trainer, DeepSpeed or Lightning.
Fix:    Ask first: `if not dist.is_initialized(): dist.init_process_group(...)`. In a notebook,
        start ranks as processes of their own (lesson 2), or call `dist.destroy_process_group()` at
        the end of the cell. Leave the group to the library if you use one.
Lesson: 2
Source: https://github.com/NVIDIA/Megatron-LM/pull/521
"""

import torch.distributed as dist

for _ in range(2):
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
