"""Asynchronous tensor parallelism without GPUs

Run:    python lessons/failures/symmetric_memory_without_gpus.py
Text:   RuntimeError: SymmetricMemory does not support device type cpu
Text:   NotImplementedError: Could not run 'symm_mem::fused_all_gather_matmul' with arguments from the
        'CPU' backend.
Text:   RuntimeError: SymmetricMemory does not find allocation backend NVSHMEM
Cause:  Asynchronous tensor parallelism, and other things that are built on
        `torch.distributed._symmetric_memory`, let a GPU read its neighbours' memory while it
        multiplies. There is no such memory on a CPU, and not for every kind of GPU; the last text
        means that this build of torch lacks the backend that `TORCH_SYMMMEM` names.
Fix:    Leave asynchronous tensor parallelism off where there is no GPU: `ColwiseParallel` and
        `RowwiseParallel` compute the same with ordinary collectives. On GPUs, ask
        `torch.distributed._symmetric_memory.is_nvshmem_available()`, and leave `TORCH_SYMMMEM` unset.
Lesson: 17
Source: https://github.com/pytorch/pytorch/issues/157321
Source: https://github.com/pytorch/pytorch/issues/160289
"""

from torch.distributed import _symmetric_memory as symmetric_memory

symmetric_memory.empty(4, device="cpu")
