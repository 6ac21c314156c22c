"""A rank that ended with a floating-point exception

Run:    torchrun --nproc_per_node 2 lessons/failures/floating_point_exception_of_a_rank.py
Text:   traceback : Signal 8 (SIGFPE) received by PID 4242
Text:   exitcode  : -8 (pid: 4242)
Text:   failed (exitcode: -8) local_rank: 0 (pid: 4242) of binary: /usr/bin/python3
Text:   exits with return code = -8
Text:   died with <Signals.SIGFPE: 8>
Text:   ProcessExitedException: process 0 terminated with signal SIGFPE
Text:   Floating point exception (core dumped)
Cause:  Compiled code divided an integer by zero. NaN and infinity do not do this. In training it is a
        library: a version of cuBLAS or of an attention kernel that does not know the GPU, or an
        extension with a size of zero, such as an empty batch.
Which:  `PYTHONFAULTHANDLER=1` prints the Python line on which it happened. If it is a matrix product in
        bfloat16, it is cuBLAS. In the program here, the rank sends itself the signal.
Fix:    A newer torch, which brings a newer cuBLAS (`pip show nvidia-cublas-cu12`); extensions built
        again for this torch. Look for an empty batch, or for a rank without samples.
Lesson: 15
Source: https://github.com/haotian-liu/LLaVA/issues/654
"""

import os
import signal

if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGFPE)
