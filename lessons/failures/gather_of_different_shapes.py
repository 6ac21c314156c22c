"""A gather of tensors with different shapes

Run:    torchrun --nproc_per_node 2 lessons/failures/gather_of_different_shapes.py
Text:   accelerate.utils.operations.DistributedOperationException: Cannot apply desired operation
        due to shape mismatches. All shapes across devices must be valid.
Text:   Operation: `accelerate.utils.operations.gather` Input shapes:
Text:   - Process 0: [2, 350, 32256] - Process 1: [2, 658, 32256]
Cause:  The ranks give tensors of different shapes to `accelerator.gather`: the batches are padded to
        the longest sample of each rank, or the last batch of one rank is smaller. The check comes
        from `ACCELERATE_DEBUG_MODE=1` (`debug: true` in the configuration). Without it, gloo aborts
        with `Received data size doesn't match expected size`, and nccl hangs or mixes up values.
Fix:    `accelerator.pad_across_processes(tensor, dim=1, pad_index=-100)` before `gather`, for each
        dimension that differs, or pad all batches to one length in the collate function. For an
        evaluation, `accelerator.gather_for_metrics` also drops the repeated samples of the last
        batch. Gather the correct ones and their number, where you need no more: these are scalars.
Lesson: 7
Source: https://github.com/huggingface/trl/issues/2882
Source: https://github.com/huggingface/lighteval/issues/204
Source: https://github.com/charent/ChatLM-mini-Chinese/issues/36
"""

import os

import torch
from accelerate import Accelerator

os.environ["ACCELERATE_DEBUG_MODE"] = "1"
accelerator = Accelerator(cpu=True)
logits = torch.randn(8 - accelerator.process_index, 10)
accelerator.gather(logits)
