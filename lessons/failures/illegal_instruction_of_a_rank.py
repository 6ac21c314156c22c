"""A rank that ended with an illegal instruction

Run:    torchrun --nproc_per_node 2 lessons/failures/illegal_instruction_of_a_rank.py
Text:   traceback : Signal 4 (SIGILL) received by PID 4242
Text:   exitcode  : -4 (pid: 4242)
Text:   failed (exitcode: -4) local_rank: 0 (pid: 4242) of binary: /usr/bin/python3
Text:   exits with return code = -4
Text:   died with <Signals.SIGILL: 4>
Text:   ProcessExitedException: process 0 terminated with signal SIGILL
Text:   Illegal instruction (core dumped)
Text:   Fatal Python error: Illegal instruction
Cause:  Compiled code used an instruction that this processor does not have, such as AVX2 or AVX-512. An
        old machine, a virtual machine that hides instructions, or an extension that was compiled on
        another machine: on a cluster, on the login node, or on a node of another generation.
Which:  `PYTHONFAULTHANDLER=1` prints the Python line: the import or the call that is too new. Compare
        `lscpu | grep Flags` on two machines. In the program here, the rank sends itself the signal.
Fix:    Build the extension on the machine that runs it, in a folder for each kind of machine
        (`TORCH_EXTENSIONS_DIR`), or take the ready-made wheel. For torch itself,
        `ATEN_CPU_CAPABILITY=default` leaves out its newer instructions. In a virtual machine, let the
        processor through (`host-passthrough`).
Lesson: 15
Source: https://github.com/pytorch/pytorch/issues/12112
Source: https://github.com/pytorch/pytorch/issues/22338
Source: https://github.com/pytorch/pytorch/issues/15010
"""

import os
import signal

if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGILL)
