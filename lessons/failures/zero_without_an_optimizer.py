"""ZeRO 1 or 2 for a model that is not trained

Run:    torchrun --nproc_per_node 2 lessons/failures/zero_without_an_optimizer.py
Text:   AssertionError: zero stage 2 requires an optimizer
Text:   AssertionError: zero stage 1 requires an optimizer
Cause:  Stages 1 and 2 divide the optimizer's state and the gradients, so `deepspeed.initialize` needs an
        optimizer: from you, or from `"optimizer"` in the configuration. There is none: the model is only
        evaluated, or it is the reference or reward model of DPO or PPO, prepared with the
        configuration of the trained one.
Fix:    For a model that is not trained: stage 0, or no DeepSpeed at all; stage 3 if it does not fit on
        one GPU, as it divides the weights and works without an optimizer. For one that is trained:
        pass `optimizer=`, or add an `"optimizer"` section; with accelerate, prepare the model and the
        optimizer in one call.
Lesson: 13
Source: https://github.com/hiyouga/LlamaFactory/issues/1243
Source: https://github.com/EleutherAI/gpt-neox/issues/987
Source: https://github.com/KyanChen/RSPrompter/issues/110
"""

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed  # noqa: E402
from torch import nn  # noqa: E402

# or it compiles collectives of its own, for a minute; gloo has them already
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
configuration = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2},
}
deepspeed.initialize(model=nn.Linear(8, 8), config=configuration)
