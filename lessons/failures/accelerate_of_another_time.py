"""An Accelerate that is missing, or of another time than transformers

Run:    python lessons/failures/accelerate_of_another_time.py
Text:   TypeError: Accelerator.__init__() got an unexpected keyword argument 'dispatch_batches'
Text:   TypeError: Accelerator.__init__() got an unexpected keyword argument 'use_seedable_sampler'
Text:   TypeError: Accelerator.__init__() got an unexpected keyword argument 'logging_dir'
Text:   TypeError: __init__() got an unexpected keyword argument 'dispatch_batches'
Text:   ImportError: Using the `Trainer` with `PyTorch` requires `accelerate>=0.20.1`: Please run `pip
        install transformers[torch]` or `pip install accelerate -U`
Text:   ImportError: accelerate>=0.21.0 is required for a normal functioning of this module, but found
        accelerate==0.20.3.
Text:   NameError: name 'init_empty_weights' is not defined
Cause:  Trainer creates the `Accelerator` itself, and the two packages are of different times: it
        passes an argument that this Accelerate no longer has, or does not have yet.
Which:  `dispatch_batches`, `logging_dir`: transformers, or the program, is the older
        one. `use_seedable_sampler`, or `accelerate>=`: Accelerate is. `init_empty_weights`: it is not
        installed.
Fix:    Bring both to one time: `pip install -U transformers accelerate`. If a program needs its old
        transformers, take an old Accelerate: `pip install "accelerate<1"` has `dispatch_batches`.
        Then restart the notebook: a running one keeps the old package.
Lesson: 8
Source: https://github.com/huggingface/transformers/issues/34714
Source: https://github.com/huggingface/accelerate/issues/2551
Source: https://github.com/huggingface/course/issues/644
Source: https://github.com/huggingface/transformers/issues/37311
"""

from accelerate import Accelerator

Accelerator(cpu=True, dispatch_batches=True)  # as the Trainer of 2023 calls it
