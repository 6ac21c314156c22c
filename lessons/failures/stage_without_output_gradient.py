"""A pipeline stage that gets no gradient

Run:    torchrun --nproc_per_node 2 lessons/failures/stage_without_output_gradient.py
Text:   Failed to run stage backward: Stage output: ('Tensor(torch.Size([2, 4]), grad=True,
        dtype=torch.float32)',) Output gradient: ('None',) Input: ['Tensor(torch.Size([2, 4]),
        grad=False, dtype=torch.float32)']
Text:   Output gradient: ('None',)
Text:   AssertionError: A GradientEdge root requires a gradient but got <class 'NoneType'>
Text:   RuntimeError: Failed to run stage backward:
Cause:  A stage waits for a gradient of its output only if its metadata say that the output needs one.
        The examples that were given as `input_args` and `output_args` do not: tensors on `meta` are
        made without `requires_grad`. The next stage has computed the gradient, and nobody has received
        it. The neighbour then says `Connection closed by peer`.
Which:  `('None',)` as the output gradient: this page. A gradient of another shape than the output:
        a stage whose output is not what the next one expects, such as a dimension that was squeezed.
Fix:    `torch.empty(2, 4, device="meta").requires_grad_()` for the `output_args` of each stage but the
        last, and for the `input_args` of each but the first. Or leave both out: torch then finds
        the shapes in the first step. An output that needs no gradient, such as a mask, is not
        passed from stage to stage but computed on each.
Lesson: 18
Source: https://github.com/pytorch/pytorch/issues/129732
Source: https://github.com/pytorch/PiPPy/issues/1054
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
rank, example = dist.get_rank(), torch.empty(2, 4, device="meta")
shapes = {"input_args": example, "output_args": example}
stage = PipelineStage(nn.Linear(4, 4), rank, 2, torch.device("cpu"), **shapes)
schedule = Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss)
x = torch.randn(4, 4)
schedule.step(x) if rank == 0 else schedule.step(target=x)
