"""A batch of another shape in a pipeline

Run:    torchrun --nproc_per_node 2 lessons/failures/pipeline_with_another_shape.py
Text:   torch.distributed.pipelining._utils.PipeliningMetadataError: Stage 0 forward inputs[0]: shape
        mismatch: torch.Size([2, 5, 4]) vs torch.Size([2, 6, 4]); stride mismatch: (20, 4, 1) vs (24,
        4, 1)
Text:   torch.distributed.pipelining._utils.PipeliningShapeError: Stage 0 forward inputs has a shape
        mismatch: expected torch.Size([2, 5, 4]) actual torch.Size([2, 6, 4])
Cause:  The stages have allocated what they receive for the shape of the first batch. This one has
        another: longer texts, or a last batch with fewer samples. With
        `TORCH_DISTRIBUTED_DEBUG=DETAIL`, or an older torch, the first stage says so. Without it,
        gloo aborts with `Received data size doesn't match expected size`; nccl hangs or mixes values.
Fix:    Pad all batches to one length, and use `drop_last=True`. For an evaluation with other shapes,
        build another schedule and stage around the same module. Micro-batches of one batch must be
        alike, too: let the number of samples be a multiple of their number.
Lesson: 18
Source: https://github.com/pytorch/pytorch/issues/136363
Source: https://github.com/pytorch/pytorch/issues/126600
"""

import os

os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"  # read when torch is imported
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank = dist.get_rank()
stage = PipelineStage(nn.Linear(4, 4), rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
for tokens in (5, 6):
    x = torch.randn(4, tokens, 4)
    schedule.step(x) if rank == 0 else schedule.step(target=x)
