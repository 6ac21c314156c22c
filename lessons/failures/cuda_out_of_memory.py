"""A GPU without enough memory

Run:    not here: it needs a GPU
Text:   torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 132.00 MiB. GPU 0 has a total
        capacity of 23.64 GiB of which 67.06 MiB is free. Including non-PyTorch memory, this process
        has 22.90 GiB memory in use.
Text:   torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 86.00 MiB (GPU 1; 15.78
        GiB total capacity; 14.92 GiB already allocated; 80.19 MiB free; 15.00 GiB reserved in total
        by PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb to avoid
        fragmentation. See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF
Text:   RuntimeError: CUDA error: out of memory
Text:   Process 250345 has 662.00 MiB memory in use.
Cause:  Weights, gradients, optimizer and activations do not fit. In a distributed program also: DDP
        keeps all of the model on each GPU, and buckets as large as the gradients besides; all ranks
        use GPU 0; or an earlier run still holds memory.
Which:  `nvidia-smi` first. Several of your processes on GPU 0: a missing
        `torch.cuda.set_device(local_rank)`, or `torch.load` without `map_location`. Somebody else's
        process, or one of a run that ended: end it. At the start: the model itself (`ddp-course
        memory`). At the first backward or step: gradients and optimizer. Only after some time:
        something keeps graphs (`total += loss`), or longer batches. "reserved" far above
        "allocated": fragmentation.
Fix:    A smaller micro-batch with accumulation, bfloat16, activation checkpointing, then FSDP or
        ZeRO (lesson 12). More GPUs with DDP do not help. For fragmentation,
        `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
Lesson: 12
Source: https://github.com/huggingface/diffusers/issues/7757
Source: https://github.com/MIC-DKFZ/nnUNet/issues/593
"""
