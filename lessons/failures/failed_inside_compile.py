"""A failure inside torch.compile

Run:    python lessons/failures/failed_inside_compile.py
Text:   torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found in
        torch._inductor.config.cpp.cxx: (None, 'no-such-compiler')
Text:   torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:
Text:   torch._dynamo.exc.BackendCompilerFailed: backend='compile_fn' raised:
Text:   RuntimeError: Cannot find a working triton installation. Either the package is not installed
        or it is too old.
Text:   RuntimeError: Found NVIDIA GeForce GTX 1070 which is too old to be supported by the triton
        GPU compiler, which is used as the backend. Triton only supports devices of CUDA Capability
        >= 7.0
Text:   You can suppress this exception and fall back to eager by setting:
        torch._dynamo.config.suppress_errors = True
Text:   Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace (please do this especially if you're
        reporting a bug to PyTorch). For even more developer context, set TORCH_LOGS="+dynamo"
Cause:  `torch.compile` translates the model when it is first called, and this translation failed:
        no C++ compiler, no Triton of the version that this torch needs, a GPU that is too old for
        Triton, or an operation that the backend cannot translate. The line below `raised:` names
        which. `compile_fn` is DDP's: it divides the graph at the edges of DDP's buckets first.
Which:  Run without `torch.compile` (or with `TORCH_COMPILE_DISABLE=1`). If the error stays, it is
        the model's own. If `torch.compile(model, backend="eager")` works, the backend is at fault.
        If it works on one process and fails under DDP, try
        `torch._dynamo.config.optimize_ddp = False`.
Fix:    Install a compiler (`apt install g++`) and the Triton that belongs to this torch: `pip install
        --force-reinstall torch` brings it. Update torch: several of these failures were bugs of
        2.0 and 2.1. Or compile the blocks that work, and leave the others in eager mode.
Lesson: 16
Source: https://github.com/pytorch/pytorch/issues/99067
Source: https://github.com/triton-lang/triton/issues/3708
Source: https://github.com/huggingface/distil-whisper/issues/71
"""

import os

import torch

os.environ["CXX"] = "no-such-compiler"
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # or nothing is compiled
torch.compile(lambda x: x.relu() + 1)(torch.randn(3, 2))
