"""A CPU tensor in a group for GPUs

Run:    python lessons/failures/cpu_tensor_in_a_group_for_gpus.py
Text:   RuntimeError: No backend type associated with device type cpu
Text:   RuntimeError: No backend type associated with device type mps
Text:   RuntimeError: Tensors must be CUDA and dense
Cause:  The process group has a backend for GPUs only, which is what `init_process_group("nccl")`
        makes, and a collective got a tensor that is on the CPU: a count, a metric, a loss that was
        moved to the CPU, or a batch that nobody moved. gloo takes such tensors, so a program that
        ran with gloo fails with nccl.
Fix:    Create the tensor on the rank's device, `torch.tensor(x, device=device)`, or move it there
        with `.to(device)` before the collective. If you need CPU tensors as well, make a group with
        a backend for each: `init_process_group("cpu:gloo,cuda:nccl")`, or leave the backend out. On
        Apple's mps there is no backend at all: move tensors to the CPU.
Lesson: 2
Source: https://github.com/Lightning-AI/torchmetrics/issues/2477
Source: https://github.com/pytorch/pytorch/issues/75619
"""

import torch
import torch.distributed as dist

# gloo for GPUs only: as nccl, it has nothing for a CPU tensor
dist.init_process_group("cuda:gloo", rank=0, world_size=1, store=dist.HashStore())
dist.all_reduce(torch.tensor(3.0))
