"""A loss with a value for each GPU

Run:    python lessons/failures/loss_with_a_value_per_gpu.py
Text:   RuntimeError: grad can be implicitly created only for scalar outputs
Cause:  `backward()` starts from one number, and this loss has several. With `nn.DataParallel` a model
        that returns its loss returns one per GPU, in a vector. The same program runs with one GPU.
Which:  Print `loss.shape`. The number of GPUs: DataParallel, perhaps from Trainer or another library
        that uses all GPUs it sees. The batch size: a loss with `reduction="none"`.
Fix:    `loss.mean().backward()`. Better, start with torchrun and use DDP: each rank has its own loss,
        a single number. With one GPU: `CUDA_VISIBLE_DEVICES=0`.
Lesson: 4
Source: https://github.com/eriklindernoren/PyTorch-YOLOv3/issues/331
Source: https://github.com/muzairkhattak/PromptSRC/issues/6
Source: https://github.com/frank-xwang/RIDE-LongTailRecognition/issues/13
"""

import torch
from torch import nn

model = nn.Linear(4, 1)
halves = torch.randn(8, 4).chunk(2)  # as DataParallel gives each of two GPUs a half
losses = torch.stack([model(half).pow(2).mean() for half in halves])
losses.backward()
