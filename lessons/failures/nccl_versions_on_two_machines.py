"""Machines with different versions of nccl

Run:    not here: it needs two machines with GPUs
Text:   NCCL WARN Mismatched NCCL version detected : rank 0 version 21805 rank 8 version 22005
Text:   RuntimeError: Mismatched NCCL version detected : rank 1 version 22705 rank 0 version 22703
Cause:  All ranks of a group must use one version of nccl, and these do not: the machines have different
        images or environments, or on one of them another libnccl is found first, through
        `LD_LIBRARY_PATH` or `LD_PRELOAD`. torch then says `ncclInvalidUsage`; this line, with
        `NCCL_DEBUG=WARN`, says why. 22005 is 2.20.5.
Fix:    Print `torch.__version__` and `torch.cuda.nccl.version()` on each machine. Both must be the
        same: build the environment from one lock file, or start one image by its digest. Restart
        machines that still run the old container.
Lesson: 14
Source: https://github.com/pytorch/pytorch/issues/122571
Source: https://github.com/verl-project/verl/pull/6621
"""
