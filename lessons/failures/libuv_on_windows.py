"""torchrun on Windows asks for libuv

Run:    not here: it needs Windows
Text:   torch.distributed.DistStoreError: use_libuv was requested but PyTorch was built without
        libuv support, run with USE_LIBUV=0 to disable it.
Text:   RuntimeError: use_libuv was requested but PyTorch was build without libuv support
Cause:  torchrun's store uses libuv by default, and the builds of torch for Windows have been
        without it.
Fix:    `set USE_LIBUV=0` (in PowerShell `$env:USE_LIBUV=0`) before torchrun. If a part of the
        program ignores it, start with `init_process_group("gloo",
        init_method="file:///C:/temp/store", rank=..., world_size=...)`, or use WSL 2.
Lesson: 2
Source: https://github.com/pytorch/pytorch/issues/139990
Source: https://github.com/Nerogar/OneTrainer/issues/1122
"""
