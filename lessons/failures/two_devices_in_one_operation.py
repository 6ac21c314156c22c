"""Tensors on two devices

Run:    python lessons/failures/two_devices_in_one_operation.py
Text:   RuntimeError: Expected all tensors to be on the same device, but found at least two devices,
        cuda:0 and cuda:1!
Text:   RuntimeError: Expected all tensors to be on the same device, but found at least two devices,
        cuda:0 and cpu! (when checking argument for argument mat1 in method wrapper_addmm)
Text:   RuntimeError: Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should
        be the same or input should be a MKLDNN tensor and weight is a dense tensor
Text:   RuntimeError: Tensor on device cpu is not on the expected device meta!
Cause:  An operation got tensors on different devices: a batch that was not moved, a tensor that the
        forward creates without `device=`, a plain attribute instead of a buffer, or a model whose
        layers are on several GPUs.
Which:  The devices tell. `cuda:0 and cpu`: something was not moved. `cuda:0 and cuda:1`: each rank
        has its own GPU, and something is always on GPU 0 (`.cuda()` or `"cuda"` before
        `torch.cuda.set_device`, a checkpoint without `map_location`), or the model was loaded with
        `device_map="auto"`.
Fix:    Set the device first, `torch.cuda.set_device(local_rank)`, and create tensors like others:
        `torch.zeros(n, device=x.device)`. Register constants with `self.register_buffer`. In a
        distributed run, load with `device_map={"": local_rank}`.
Lesson: 4
Source: https://github.com/Tencent-Hunyuan/Hunyuan3D-2.1/issues/36
Source: https://github.com/NVIDIA-Merlin/Transformers4Rec/issues/494
"""

import torch
from torch import nn

# a machine without a GPU has a second device, too, that of tensors without data
nn.Linear(2, 2)(torch.ones(1, 2, device="meta"))
