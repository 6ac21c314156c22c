"""Activation checkpointing that recomputes something else

Run:    python lessons/failures/recomputation_differs.py
Text:   torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: A different number of
        tensors was saved during the original forward and recomputation.
Text:   torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: Recomputed values for the
        following tensors have different metadata than during the forward pass.
Cause:  With activation checkpointing the backward runs the layer again, and the second run did not
        do the same: a cache or counter was changed in between, a branch depends on chance or on
        autocast, the layer was compiled, or the parameters were sharded at that time (FSDP around
        the checkpoint in the wrong order, ZeRO-3 with frozen parameters).
Which:  `recomputed metadata: {'shape': torch.Size([0])...` means sharded parameters. Another dtype
        means autocast. Another number of tensors means another branch.
        `set_checkpoint_debug_enabled(True)` prints both runs.
Fix:    Make the layer's forward depend on its inputs only: `use_cache=False`, no counters, and
        random numbers from torch's own generator. The order is: checkpoint each block, compile
        it, then call `fully_shard` on it.
Lesson: 12
Source: https://github.com/pytorch/pytorch/issues/144035
Source: https://github.com/pytorch/torchtitan/issues/1117
"""

import torch
from torch.utils.checkpoint import checkpoint

runs = []


def layer(x):
    runs.append(1)
    return x.sin().sin() if len(runs) == 1 else x.sin()  # a branch on a counter


x = torch.ones(2, requires_grad=True)
checkpoint(layer, x, use_reentrant=False).sum().backward()
