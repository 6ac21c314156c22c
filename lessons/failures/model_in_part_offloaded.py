"""A model of which a part is not on the GPU

Run:    python lessons/failures/model_in_part_offloaded.py
Text:   RuntimeError: You can't move a model that has some modules offloaded to cpu or disk.
Cause:  `device_map="auto"` found too little memory on the GPUs and left layers on the CPU or the disk.
        Then you, Trainer or DeepSpeed called `model.to(device)`, for which there is no room either.
Which:  `model.hf_device_map` names the layers with `cpu` or `disk`. Look at `nvidia-smi` before you
        start: another program, or another rank that loads its model there, takes what is missing.
Fix:    For training, load without `device_map`, in bfloat16, and if it does not fit on one GPU, shard
        it with FSDP or ZeRO-3. For inference, keep `device_map="auto"` and leave out `.to(device)`.
Lesson: 11
Source: https://github.com/01-ai/Yi/issues/302
Source: https://github.com/mlfoundations/rtfm/issues/19
"""

import tempfile

from accelerate import dispatch_model
from torch import nn

model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
places = {"0": "cpu", "1": "disk"}  # what "auto" chooses where the memory is short
model = dispatch_model(model, places, offload_dir=tempfile.mkdtemp())
model.to("cpu")
