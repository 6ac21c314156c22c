"""nccl on a machine without GPUs

Run:    python lessons/failures/nccl_without_gpus.py
Text:   RuntimeError: Distributed package doesn't have NCCL built in
Text:   ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!
Text:   RuntimeError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!
Text:   RuntimeError: nccl2 requires at least one CUDA device
Cause:  The program asks for nccl, and this torch cannot provide it: a build for CPUs, Windows or
        macOS ("doesn't have NCCL built in"), or a build for GPUs that sees none ("no GPUs found").
Which:  `python -c "import torch; print(torch.__version__, torch.cuda.is_available(),
        torch.cuda.device_count())"`: `+cpu` means the wrong build. False with a GPU build means a
        driver that is too old for it, an empty `CUDA_VISIBLE_DEVICES`, or a job or container
        without GPUs (`nvidia-smi` there).
Fix:    Choose the backend by what is there: `"nccl" if torch.cuda.is_available() else "gloo"`. On
        Windows use gloo, or WSL 2. Install the build for your driver's CUDA version if there are
        GPUs.
Lesson: 2
Source: https://github.com/FangyunWei/SLRT/issues/65
Source: https://github.com/OptimalScale/LMFlow/issues/143
"""

import torch.distributed as dist

dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
