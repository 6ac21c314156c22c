"""A bitsandbytes that does not find CUDA

Run:    not here: it needs a GPU
Text:   RuntimeError: CUDA Setup failed despite GPU being available. Please run the following command
        to get more information: python -m bitsandbytes
Text:   CUDA Setup failed despite GPU being available. Inspect the CUDA SETUP outputs above to fix your
        environment!
Text:   CUDA SETUP: Required library version not found: libbitsandbytes_cuda123.so. Maybe you need to
        compile it from source?
Text:   Inspect the output of the command and see if you can locate CUDA libraries. You might need to
        add them to your LD_LIBRARY_PATH.
Text:   AttributeError: 'NoneType' object has no attribute 'cget_managed_ptr'
Text:   AttributeError: 'NoneType' object has no attribute 'cget_col_row_stats'
Text:   AttributeError: 'NoneType' object has no attribute 'cquantize_blockwise_fp16_nf4'
Text:   Could not find the bitsandbytes CUDA binary at PosixPath('libbitsandbytes_cuda124.so')
Text:   RuntimeError: Attempted to use bitsandbytes native library functionality but it's not available.
Cause:  bitsandbytes is a library for a certain CUDA version. This release has none for the version
        that it found, or does not find the CUDA libraries themselves. Old releases searched the
        system for them, and took a wrong one when several were there.
Which:  `python -m bitsandbytes` prints the version that it looks for. Compare it with
        `python -c "import torch; print(torch.version.cuda)"`.
Fix:    `pip install -U bitsandbytes`: current releases bring libraries for each CUDA version of
        torch. Unset `BNB_CUDA_VERSION`, and remove old CUDA folders from `LD_LIBRARY_PATH`.
Lesson: 11
Source: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1522
Source: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1559
Source: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/492
Source: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/693
"""
