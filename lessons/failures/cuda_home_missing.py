"""DeepSpeed compiles, and there is no compiler

Run:    not here: it needs a torch for GPUs
Text:   deepspeed.ops.op_builder.builder.MissingCUDAException: CUDA_HOME does not exist, unable to
        compile CUDA op(s)
Text:   AssertionError: CUDA_HOME does not exist, unable to compile CUDA op(s)
Text:   OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root.
Text:   deepspeed.ops.op_builder.builder.CUDAMismatchException: >- DeepSpeed Op Builder: Installed
        CUDA version 12.1 does not match the version torch was compiled with 11.8, unable to compile
        cuda/cpp extensions without a matching cuda version.
Text:   RuntimeError: Error building extension 'fused_adam'
Text:   RuntimeError: Ninja is required to load C++ extensions
Text:   AttributeError: 'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'
Cause:  DeepSpeed compiles its CUDA operations when they are first used, and needs the CUDA toolkit
        (`nvcc`) for that, of the version that torch was built with. The driver and torch's own
        libraries are not enough.
Which:  `ds_opt_adam` is a consequence: an optimizer that was not built is cleaned up. The reason is
        in the lines before it: another CUDA version, no `nvcc`, no `Python.h` (`apt-get install
        python3-dev`), no ninja.
Fix:    Install the toolkit of that version (`conda install -c nvidia cuda-toolkit=12.8`, or a
        module of the cluster) and set `CUDA_HOME`; `ds_report` shows what is found. Or do without
        the operations: `"torch_adam": true` in the optimizer's configuration, and no offload.
Lesson: 13
Source: https://github.com/deepspeedai/DeepSpeed/issues/2772
Source: https://github.com/whittle-org/whittle/issues/153
Source: https://github.com/deepspeedai/DeepSpeed/issues/1846
Source: https://github.com/deepspeedai/DeepSpeed/issues/3223
"""
