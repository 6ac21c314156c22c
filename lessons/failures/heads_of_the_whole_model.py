"""A view that counts what other ranks have

Run:    torchrun --nproc_per_node 2 lessons/failures/heads_of_the_whole_model.py
Text:   RuntimeError: shape '[2, 16, 4, 8]' is invalid for input of size 512
Text:   RuntimeError: shape '[1, 8192, -1, 128]' is invalid
Text:   ValueError: Total number of attention heads (28) must be divisible by tensor parallel size (8).
Text:   ValueError: 6 is not divisible by 4
Cause:  Tensor parallelism has cut the columns of the projections, so a rank has its share of the heads,
        and the code still views the result as all of them. Or the number of heads, or of the keys'
        and values' fewer heads, cannot be divided by the number of tensor ranks. Without tensor
        parallelism: a `view` with the global batch size, where this rank has its part of the batch or
        a smaller last one.
Which:  Divide what the shape asks for by the size. The number of tensor ranks: the heads. Anything
        else, or a program with one rank: an ordinary mistake of shapes, see Tensors of different
        sizes in one operation (lesson 7).
Fix:    `view(batch, tokens, -1, head_width)`: the number of heads follows from what is there. Where a
        model does not do so, divide its `n_heads` and `n_kv_heads` by the number of ranks after
        `parallelize_module`. Choose a number of tensor ranks that divides both. With sequence
        parallelism, the input of attention must be gathered first (`PrepareModuleInput`). For a batch,
        `x.shape[0]` instead of a number from the configuration.
Lesson: 17
Source: https://github.com/huggingface/transformers/pull/45109
Source: https://github.com/pytorch/torchtitan/issues/932
Source: https://github.com/THU-KEG/AdaptThink/issues/1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

dist.init_process_group("gloo")
batch, tokens, heads, head_width = 2, 16, 4, 8
attention = nn.Sequential(nn.Linear(32, heads * head_width))
parallelize_module(attention, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
query = attention(torch.randn(batch, tokens, 32))
query.view(batch, tokens, heads, head_width)  # this rank has two of the heads
