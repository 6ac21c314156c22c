"""The end of a program without destroy_process_group

Run:    not here: only nccl says it
Text:   WARNING: destroy_process_group() was not called before program exit, which can leak
        resources. For more info, please see
        https://pytorch.org/docs/stable/distributed.html#shutdown
Text:   Warning: WARNING: process group has NOT been destroyed before we destruct ProcessGroupNCCL.
        On normal program exit, the application should call destroy_process_group to ensure that any
        pending NCCL operations have finished in this process.
Cause:  The process ended and its nccl group was still open. At a normal end it is harmless. After
        an error it is a consequence of that error: the program left before it came to its last
        line.
Which:  Is there a traceback above it? Then that is the error, and this line is noise.
Fix:    Call `dist.destroy_process_group()` as the last line of `main()`, best in a `finally`.
        Trainer and Accelerate have `accelerator.end_training()`.
Lesson: 15
Source: https://github.com/pytorch/pytorch/issues/126275
Source: https://github.com/unslothai/unsloth/issues/1959
"""
