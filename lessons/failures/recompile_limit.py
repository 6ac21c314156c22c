"""A compiled model that compiles again and again

Run:    python lessons/failures/recompile_limit.py
Text:   torch._dynamo hit config.recompile_limit (8)
Text:   torch._dynamo hit config.cache_size_limit (8)
Text:   torch._dynamo.exc.FailOnRecompileLimitHit: recompile_limit reached with fullgraph=True.
        Excessive recompilations can degrade performance due to the compilation overhead of each
        recompilation.
Cause:  The compiled function met something new in each call: a size, a Python number such as the
        step, another module or flag. After eight versions it gives up and runs uncompiled, slowly.
        In a distributed run the ranks then compile at different times, and wait for each other.
Which:  "last reason" in the next line names what differed.
Fix:    Pass changing numbers as tensors, pad batches to few sizes, or `torch.compile(model,
        dynamic=True)`; `drop_last=True` for the last, smaller batch. `TORCH_LOGS=recompiles` prints
        every reason.
Lesson: 16
Source: https://github.com/pytorch/pytorch/issues/167504
Source: https://github.com/microsoft/dion/issues/23
"""

import torch


@torch.compile(backend="eager", dynamic=False)
def scaled(x, step):
    return x * step


for step in range(20):
    scaled(torch.ones(2), step)
