"""An output that the next call overwrites

Run:    not here: it needs a GPU
Text:   RuntimeError: Error: accessing tensor output of CUDAGraphs that has been overwritten by a
        subsequent run.
Text:   To prevent overwriting, clone the tensor outside of torch.compile() or call
        torch.compiler.cudagraph_mark_step_begin() before each model invocation.
Cause:  `torch.compile(mode="reduce-overhead")` (and `max-autotune`) records CUDA graphs, which write
        their results to the same memory in each run. An output of an earlier call was still in use: a
        list of losses or logits, a cache, two forward passes before one backward.
Which:  The message's `Stack trace` names the operation that made the tensor, in your own code, and the
        traceback the place that reads it too late.
Fix:    `.clone()` what you keep, outside of the compiled function. `cudagraph_mark_step_begin()` at the
        start of each step says where a step begins; it does not keep older outputs, so it does not
        help if you still need them. Or compile without CUDA graphs: leave `mode` out.
Lesson: 16
Source: https://github.com/pytorch/pytorch/issues/170604
Source: https://github.com/pytorch/pytorch/issues/148439
Source: https://github.com/pytorch/pytorch/pull/177192
"""
