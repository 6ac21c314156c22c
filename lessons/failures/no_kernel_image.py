"""A torch that is not built for this GPU

Run:    not here: it needs a GPU
Text:   RuntimeError: CUDA error: no kernel image is available for execution on the device
Text:   NVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with the current
        PyTorch installation. The current PyTorch install supports CUDA capabilities sm_50 sm_60
        sm_70 sm_75 sm_80 sm_86 sm_90.
Text:   torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device
Cause:  torch, or an extension that you compiled, has no code for this generation of GPUs: the GPU
        is newer than the build, or older than what it still supports.
Which:  `python -c "import torch; print(torch.cuda.get_arch_list(),
        torch.cuda.get_device_capability())"`. If torch's list has the GPU, an extension is the
        cause (flash-attn, bitsandbytes, DeepSpeed, apex).
Fix:    Install a torch for a CUDA version that knows the GPU. Rebuild the extension with
        `TORCH_CUDA_ARCH_LIST` set to its capability.
Lesson: 15
Source: https://github.com/facebookresearch/detectron2/issues/235
Source: https://github.com/thomasbrandon/mish-cuda/issues/10
"""
