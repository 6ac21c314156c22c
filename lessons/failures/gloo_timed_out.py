"""A rank that does not come

Run:    torchrun --nproc_per_node 2 lessons/failures/gloo_timed_out.py
Text:   RuntimeError: Timed out
        waiting 2000ms for recv operation to complete
Text:   RuntimeError: Timed out
        waiting 2000ms for send operation to complete
Text:   RuntimeError: Application timeout caused pair closure
Cause:  A collective waited for a rank that is alive and elsewhere. The rank that complains is
        healthy.
Which:  Where is the other rank? In another collective, because of `if rank == 0` or of collectives
        in different orders. Out of batches, in a barrier or at the end. Evaluating or saving alone,
        through the DDP wrapper or an FSDP model. Still preparing data, so the limit is too short.
        Between stages of a pipeline, `send` waits until the other rank receives: two neighbours
        that both send first wait for each other, at any size. Lesson 15 shows how py-spy and
        `TORCH_DISTRIBUTED_DEBUG=DETAIL` answer that; the other causes listed on this page show each
        case.
Fix:    Let all ranks call each collective, in the same order and equally often. Decide on one rank
        and broadcast the decision. Evaluate with `ddp.module` on one rank, or with all ranks. Send
        with `isend`, and wait for it after the own `recv`.
Lesson: 15
Source: https://github.com/pytorch/pytorch/issues/33148
Source: https://github.com/pytorch/pytorch/issues/54059
Source: https://github.com/facebookresearch/detectron2/issues/3243
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=2))
if dist.get_rank() == 1:
    time.sleep(4)  # evaluates, saves, prepares data ...
dist.all_reduce(torch.ones(1))
