"""A rank that the system killed

Run:    torchrun --nproc_per_node 2 lessons/failures/killed_by_sigkill.py
Text:   traceback : Signal 9 (SIGKILL) received by PID 4242
Text:   exitcode  : -9 (pid: 4242)
Text:   torch.distributed.elastic.multiprocessing.api: failed (exitcode: -9) local_rank: 0 (pid:
        4242) of binary: /usr/bin/python3
Text:   slurmstepd: error: Detected 1 oom-kill event(s) in StepId=191.batch cgroup. Some of your
        processes may have been killed by the cgroup out-of-memory handler.
Text:   slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0. Some of the step tasks
        have been OOM Killed.
Text:   srun: error: node107: task 0: Out Of Memory
Text:   slurmstepd: error: Exceeded job memory limit
Text:   exits with return code = -9
Text:   died with <Signals.SIGKILL: 9>
Text:   ProcessExitedException: process 0 terminated with signal SIGKILL
Cause:  The kernel or the scheduler killed the rank without asking it, so there is no traceback.
        Almost always the host's memory ran out, not the GPU's: each rank loads the whole model on
        the CPU first, the data set is in memory once per worker, or the job's or container's limit
        is lower than the machine.
Which:  "Loading checkpoint shards" as the last line: the model, once per rank. A steady growth: the
        data loader (the page of a DataLoader worker that ran out of memory). At a save: a full
        state dict is gathered. `dmesg | grep -i "out of memory"`, `sacct -j JOB -o MaxRSS,State`,
        or `oom-kill` in the log confirm it.
Fix:    Load with `low_cpu_mem_usage=True` or on the meta device, one rank per machine at a time;
        fewer workers; sharded checkpoints instead of full ones. Ask for more: `--mem` of SLURM, the
        container's limit.
Lesson: 15
Source: https://github.com/hpcaitech/ColossalAI/issues/3514
Source: https://github.com/TuragaLab/flyvis/issues/13
"""

import os
import signal

if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)  # what the kernel does
