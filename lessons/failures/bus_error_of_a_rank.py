"""A rank that ended with a bus error

Run:    torchrun --nproc_per_node 2 lessons/failures/bus_error_of_a_rank.py
Text:   traceback : Signal 7 (SIGBUS) received by PID 4242
Text:   exitcode  : -7 (pid: 4242)
Text:   failed (exitcode: -7) local_rank: 0 (pid: 4242) of binary: /usr/bin/python3
Text:   exits with return code = -7
Text:   died with <Signals.SIGBUS: 7>
Text:   ProcessExitedException: process 0 terminated with signal SIGBUS
Text:   Fatal Python error: Bus error
Cause:  The rank wrote to memory behind which there was no room: nearly always /dev/shm, which is full.
        nccl and DataLoader workers both use it, and a Docker container has 64 MB. A file that was
        mapped into memory, and was cut or whose disk is full, ends in the same way.
Which:  `df -h /dev/shm` while it runs. If it ends at the first collective, it is nccl's part; after
        some batches, the workers'. In the program here, the rank sends itself the signal.
Fix:    `docker run --shm-size=16g` or `--ipc=host`; in Kubernetes, mount an `emptyDir` with `medium:
        Memory` at /dev/shm. For a mapped file: copy it to a disk with room.
Lesson: 15
Source: https://github.com/tatsu-lab/stanford_alpaca/issues/228
Source: https://github.com/hiyouga/LlamaFactory/issues/2061
"""

import os
import signal

if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGBUS)
