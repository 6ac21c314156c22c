"""Accelerate's warning of an old Linux kernel

Run:    not here: it needs a Linux kernel older than 5.5
Text:   Detected kernel version 4.18.0, which is below the recommended minimum of 5.5.0; this can cause
        the process to hang. It is recommended to upgrade the kernel to the minimum version or higher.
Cause:  Accelerate prints it on every machine whose kernel is older than 5.5, such as that of Red Hat
        Enterprise Linux 8 (4.18) or Ubuntu 20.04 (5.4). It is a warning. If the job hangs, the cause is
        nearly always another one, and the warning is merely the last line before it.
Which:  Let the same program run with 1 rank. If it hangs only with several, lesson 15's method finds
        where each rank waits: `py-spy dump`, or the flight recorder.
Fix:    If nothing hangs, go on. If the ranks hang in nccl inside one machine, try `NCCL_P2P_DISABLE=1` and
        `NCCL_SHM_DISABLE=1`, one at a time, to find out which way between the GPUs is broken. A newer
        kernel helps on some machines.
Lesson: 15
Source: https://github.com/modelscope/ms-swift/issues/283
"""
