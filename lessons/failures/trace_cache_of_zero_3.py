"""ZeRO-3's note that its trace does not fit

Run:    torchrun --nproc_per_node 2 lessons/failures/trace_cache_of_zero_3.py
Text:   Invalidate trace cache @ step 0: expected module 0, but got module 6
Text:   Invalidate trace cache @ step 10: expected module 11, but got module 19
Text:   Invalidate trace cache @ step 0 and module 740: cache has only 0 modules
Cause:  ZeRO-3 records in which order the modules run, to fetch their weights ahead. This step ran others:
        evaluation or generation between training steps, a second model, experts, a branch that depends on
        the data. DeepSpeed records anew, so results are right; it only fetches later.
Which:  It is an error only if the job hangs afterwards: then the ranks ran different modules, and each
        waits in a gather that the others never join. The next step's loss is printed: no error.
Fix:    If nothing hangs, ignore it: newer versions of DeepSpeed print it only with
        `"log_trace_cache_warnings": true`, as the program here sets it. Or use ZeRO-2 where the model
        fits. If it hangs, let all ranks run
        the same modules in each step, and name modules with such branches (experts) to
        `deepspeed.utils.set_z3_leaf_modules`. For generation, pass `synced_gpus=True`.
Lesson: 13
Source: https://github.com/deepspeedai/DeepSpeed/issues/6870
Source: https://github.com/deepspeedai/DeepSpeed/issues/5006
Source: https://github.com/deepspeedai/DeepSpeed/issues/5662
Source: https://github.com/huggingface/open-r1/issues/387
"""

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402


class Network(nn.Module):
    """Its layers run in another order once it says so, as a branch in a model may do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.backwards = False

    def forward(self, x):
        for layer in self.layers[::-1] if self.backwards else self.layers:
            x = layer(x)
        return x.sum()


zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
configuration = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "zero_optimization": zero | {"log_trace_cache_warnings": True},
}
# or it compiles collectives of its own, for a minute; gloo has them already
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
network = Network()
engine, *_ = deepspeed.initialize(model=network, config=configuration)
for step in range(5):
    network.backwards = step == 4
    engine.backward(engine(torch.ones(1, 8)))
    engine.step()
torch.distributed.destroy_process_group()
