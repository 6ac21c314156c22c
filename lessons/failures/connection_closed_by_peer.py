"""Another rank has left

Run:    torchrun --nproc_per_node 2 lessons/failures/connection_closed_by_peer.py
Text:   RuntimeError: Connection closed
        by peer [127.0.0.1]:4242
Text:   RuntimeError: Read error [127.0.0.1]:4242: Connection reset by peer
Text:   Connection reset by peer. This is typically caused by a remote worker hanging or bugs in the
        application. Check the logs of the remote worker before reporting an error.
Text:   RuntimeError: Broken pipe
Text:   RuntimeError: Connection reset by peer
Cause:  The rank at the other end has ended while this one waited for it. Who complains is healthy:
        the error of the rank that ended comes first, or it has none, because it was killed or it
        simply finished (one batch less).
Which:  An error of another rank earlier in the log is the cause. A rank killed by a signal has no
        traceback: torchrun's table names it (-9: memory). No error at all: the other rank had fewer
        batches, or left its loop early (lesson 3).
Fix:    Fix the first rank that ended; give the whole log to `ddp-course diagnose`. Without another
        error, give all ranks the same number of steps.
Lesson: 15
Source: https://github.com/pytorch/pytorch/issues/38174
Source: https://github.com/Lightning-AI/pytorch-lightning/issues/9851
"""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    os._exit(0)  # as if it had run out of batches
try:
    dist.all_reduce(torch.ones(1))
finally:
    time.sleep(1)
