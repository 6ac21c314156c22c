"""A kernel that read memory that is not its own

Run:    not here: it needs a GPU
Text:   RuntimeError: CUDA error: an illegal memory access was encountered
Text:   torch.AcceleratorError: CUDA error: an illegal memory access was encountered
Text:   [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with exception:
        CUDA error: an illegal memory access was encountered
Text:   CUDA error: misaligned address
Text:   CUDA error: unspecified launch failure
Text:   CUDA error: an illegal instruction was encountered
Cause:  A kernel on the GPU addressed memory wrongly. The Python line is usually not the one: CUDA
        reports it later, and under DDP it is often nccl's watchdog that notices. An index out of
        range, a compiled extension (flash-attn, a custom kernel, bitsandbytes) that does not fit,
        tensors of another GPU that were passed by pointer, or a GPU or driver with a fault.
Which:  `CUDA_LAUNCH_BLOCKING=1` names the right line. `compute-sanitizer python train.py` names the
        kernel. Always the same machine or GPU: hardware, see `dmesg | grep -i xid`.
Fix:    Correct the index, rebuild or leave out the extension. In a multi-GPU program call
        `torch.cuda.set_device(local_rank)` first: many extensions use the current device.
Lesson: 15
Source: https://github.com/NVIDIA/caffe/issues/76
Source: https://github.com/microsoft/TRELLIS.2/issues/90
"""
