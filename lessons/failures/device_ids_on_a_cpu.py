"""device_ids for a model that is not on one GPU

Run:    python lessons/failures/device_ids_on_a_cpu.py
Text:   ValueError: DistributedDataParallel device_ids and output_device arguments only work with
        single-device/multiple-device GPU modules or CPU modules, but got device_ids [0],
        output_device None, and module parameters {device(type='cpu')}.
Cause:  `device_ids=[local_rank]` was given for a model whose parameters are on the CPU, on the meta
        device, or on several devices.
Which:  The end of the line has the devices. `cpu` on a GPU machine: `.to(device)` was forgotten.
        Several GPUs: the model was loaded with `device_map="auto"`.
Fix:    Move the model first, `model.to(device)`, and pass `device_ids` only on a GPU:
        `device_ids=[local_rank] if device.type == "cuda" else None`.
Lesson: 4
Source: https://github.com/facebookresearch/detectron2/issues/5146
Source: https://github.com/yuanzhoulvpi2017/zero_nlp/issues/115
"""

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
DistributedDataParallel(nn.Linear(2, 2), device_ids=[0])
