"""An extension that was built for another CUDA

Run:    not here: it needs an extension for GPUs
Text:   ImportError: libcudart.so.12: cannot open shared object file: No such file or directory
Text:   ImportError: libcudart.so.11.0: cannot open shared object file: No such file or directory
Text:   OSError: libcudart.so.12: cannot open shared object file: No such file or directory
Cause:  An extension (flash-attn, vLLM, apex) was built for the CUDA whose number is in the name, and
        the environment has only another one: torch for CUDA 13 beside an extension for 12, or the
        other way around.
Which:  `python -c "import torch; print(torch.version.cuda)"` prints torch's; the last frame of the
        traceback names the extension. If the numbers are the same, the library is there and not
        found.
Fix:    Install the extension again, for torch's CUDA: a wheel with the same number, or `pip install
        --no-build-isolation --no-cache-dir --force-reinstall --no-deps flash-attn`. If the numbers
        are the same, import torch before it, or add the folder of libcudart to `LD_LIBRARY_PATH`.
Lesson: 15
Source: https://github.com/Dao-AILab/flash-attention/issues/631
Source: https://github.com/Dao-AILab/flash-attention/issues/208
Source: https://github.com/Dao-AILab/flash-attention/issues/2118
"""
