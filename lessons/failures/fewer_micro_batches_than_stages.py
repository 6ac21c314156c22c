"""Micro-batches that do not suit a pipeline's schedule

Run:    torchrun --nproc_per_node 2 lessons/failures/fewer_micro_batches_than_stages.py
Text:   ValueError: Number of microbatches (2) must be greater than or equal to the number of stages (4).
Text:   ValueError: DualPipeV requires at least as many microbatches as stages, but got 4 microbatches
        and 8 stages.
Text:   ValueError: Interleaved 1F1B requires the number of microbatches to be a multiple of the number
        of rounds (2), but got 5.
Text:   ValueError: Zero bubble requires the number of microbatches to be a multiple of the number of
        rounds (2), but got 5.
Text:   ValueError: Expecting 4 arg_mbs but got 2
Text:   AssertionError: Tensor size 2 is smaller than num_chunks
Cause:  A schedule is a fixed order of micro-batches, and not each number of them fits. 1F1B needs
        one per stage at least. With two stages per rank there are twice as many stages as ranks, and
        DualPipeV counts these. The interleaved ones take micro-batches in rounds, which must be full.
        The last two texts mean that the batch has fewer samples than it should have micro-batches.
Fix:    Give the schedule as many micro-batches as there are stages (ranks times stages per rank), or
        better four times as many: a pipeline idles (n - 1) / (m + n - 1) of the time. Let the batch per
        data-parallel rank be a multiple of the number of micro-batches, with `drop_last=True`. GPipe
        takes any number. Older versions of torch hang instead of raising an error.
Lesson: 18
Source: https://github.com/pytorch/torchtitan/issues/775
Source: https://github.com/pytorch/pytorch/pull/144702
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
stage = PipelineStage(nn.Linear(4, 4), dist.get_rank(), 2, torch.device("cpu"))
Schedule1F1B(stage, 1, loss_fn=nn.functional.mse_loss)
