"""no_sync under ZeRO 2 and 3

Run:    torchrun --nproc_per_node 2 lessons/failures/zero_and_no_sync.py
Text:   AssertionError: no_sync context manager is incompatible with gradient partitioning logic of
        ZeRO stage 3
Text:   AssertionError: no_sync context manager is incompatible with gradientpartitioning logic of
        ZeRo stage 2
Text:   AssertionError: It is illegal to call Engine.step() inside no_sync context manager
Cause:  `no_sync` postpones the reduction of gradients. From stage 2 on each rank keeps only its
        part of the gradients, so it must reduce them in each backward. DeepSpeed 0.16.0 raises
        here, and 0.15.4 did not. Trainer and Accelerate called it for accumulation.
Fix:    Update transformers and accelerate, which leave `no_sync` out under ZeRO. In a loop of your
        own, call `engine.backward` and `engine.step` for each micro-batch, and let
        `gradient_accumulation_steps` of the configuration count. Or use ZeRO 1.
Lesson: 13
Source: https://github.com/deepspeedai/DeepSpeed/issues/6793
Source: https://github.com/huggingface/transformers/pull/35157
"""

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

# or it compiles collectives of its own, for a minute; gloo has them already
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
configuration = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "zero_optimization": {"stage": 2},
}
engine, *_ = deepspeed.initialize(model=nn.Linear(8, 8), config=configuration)
with engine.no_sync():
    engine.backward(engine(torch.ones(1, 8)).sum())
