"""A torch that was built without CUDA

Run:    python lessons/failures/torch_without_cuda.py
Text:   AssertionError: Torch not compiled with CUDA enabled
Text:   RuntimeError: No CUDA GPUs are available
Text:   RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA
        GPU and installed a driver from
Text:   RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please
        update your GPU driver
Text:   RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version
Cause:  The program uses a GPU, by `.cuda()`, `device="cuda"` or `device_map`, and there is none for
        it: torch was built for CPUs, the machine has no GPU or no driver, or `CUDA_VISIBLE_DEVICES`
        hides it.
Which:  "not compiled with CUDA" is about the installed torch. "No CUDA GPUs" and "no NVIDIA driver"
        are about the machine, the container or the job: run `nvidia-smi` in the same place. "too
        old" and "insufficient" are about the driver; in a container also when it was started without
        GPUs.
Fix:    On a machine without a GPU choose the device, `torch.accelerator.current_accelerator()` or
        `"cuda" if torch.cuda.is_available() else "cpu"`. Otherwise install the build for your
        driver, give the container its GPUs (`docker run --gpus all`), or ask the scheduler for one
        (`--gres=gpu:1`).
Lesson: 1
Source: https://github.com/facebookresearch/detectron2/issues/460
Source: https://github.com/NVlabs/neuralrgbd/issues/24
Source: https://github.com/NVIDIA/nvidia-docker/issues/400
"""

import torch

torch.ones(2).cuda()
