"""A rank that ended with a segmentation fault

Run:    torchrun --nproc_per_node 2 lessons/failures/segmentation_fault.py
Text:   traceback : Signal 11 (SIGSEGV) received by PID 4242
Text:   exitcode  : -11 (pid: 4242)
Text:   failed (exitcode: -11) local_rank: 0 (pid: 4242) of binary: /usr/bin/python3
Text:   died with <Signals.SIGSEGV: 11>
Text:   Fatal Python error: Segmentation fault
Text:   Segmentation fault (core dumped)
Text:   RuntimeError: DataLoader worker (pid 4242) is killed by signal: Segmentation fault.
Text:   exits with return code = -11
Text:   ProcessExitedException: process 0 terminated with signal SIGSEGV
Cause:  Compiled code read memory that is not its own. In training it is nearly always two libraries
        that do not fit together: an extension built for another torch (flash-attn, apex,
        DeepSpeed's operations), two versions of CUDA, nccl or OpenMP, or a library that is not safe
        after fork in a DataLoader worker.
Which:  `PYTHONFAULTHANDLER=1` prints the Python line on which it happened. In an import: the
        installation. In a collective at the start: nccl or the driver. In a worker: the library
        that reads the data. In the program here, the rank sends itself the signal.
Fix:    A new environment with torch first and extensions built against it. For workers,
        `multiprocessing_context="forkserver"`, or one thread in the library
        (`cv2.setNumThreads(0)`).
Lesson: 15
Source: https://github.com/NVIDIA/Megatron-LM/issues/1880
Source: https://github.com/pytorch/pytorch/issues/61839
"""

import os
import signal

if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSEGV)
