"""A torch without torch.distributed

Run:    not here: this torch has it
Text:   AttributeError: module 'torch.distributed' has no attribute 'is_initialized'
Text:   AttributeError: module 'torch.distributed' has no attribute 'init_process_group'
Text:   AttributeError: module 'torch.distributed' has no attribute 'ReduceOp'
Text:   RuntimeError: torch.distributed is not available
Cause:  This build of torch was compiled without `torch.distributed`: some packages of conda-forge for
        the Mac and old builds for Windows are. Or a file or folder of yours is called `torch` or
        `distributed` and is imported instead.
Which:  `python -c "import torch; print(torch.__file__, torch.distributed.is_available())"`.
Fix:    Install torch from pip, or from pytorch.org's index. Until then, programs on one process can ask
        `torch.distributed.is_available()` before `is_initialized()`.
Lesson: 2
Source: https://github.com/huggingface/transformers/issues/17590
Source: https://github.com/nlp-with-transformers/notebooks/issues/51
"""
