"""Two versions of nccl in one environment

Run:    not here: it needs a torch for GPUs
Text:   ImportError: libtorch_cuda.so: undefined symbol:
        ncclCommRegister
Text:   ImportError: libtorch_cuda.so: undefined symbol: ncclCommResume
Text:   NCCL WARN Invalid config blocking attribute value -2147483648
Text:   Invalid config blocking attribute value -2147483648
Text:   ImportError: libnccl.so.2: cannot open shared object file: No such file or directory
Cause:  torch loads another libnccl than the one that it was built for: an older one from
        `LD_LIBRARY_PATH`, from the system, or from another package such as `nvidia-nccl-cu12`
        beside `nvidia-nccl-cu13`. `Invalid config blocking`: torch was built for nccl 2.17 or later,
        and an older one runs.
Fix:    `pip list | grep -i nccl` must show one, of the version that torch wants: remove the others
        and reinstall torch in a new environment. Try with `LD_LIBRARY_PATH` unset; `ldd
        .../libtorch_cuda.so | grep nccl` shows what is loaded.
Lesson: 15
Source: https://github.com/pytorch/pytorch/issues/119932
Source: https://github.com/NVIDIA/nccl/issues/1180
Source: https://github.com/axolotl-ai-cloud/axolotl/issues/1158
Source: https://github.com/vllm-project/vllm/issues/1726
Source: https://github.com/pytorch/pytorch/issues/186591
"""
