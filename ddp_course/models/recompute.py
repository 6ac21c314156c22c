"""Activation checkpointing: what forward keeps for backward, and what is recomputed."""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

ATEN = torch.ops.aten
# what takes long to compute: matrix products, and attention on a CPU and on a GPU
KEPT = [
    ATEN.mm.default,
    ATEN.addmm.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_cudnn_attention.default,
]


def recompute(block, what):
    """Let a block keep less of its forward pass, and recompute the rest in backward.

    what: "none"; "full", then it keeps its input only; or "selective", then it keeps
    the results of KEPT as well, so that no matrix product is computed again. Call it
    before the block is compiled and sharded. The names of its parameters do not change.
    """
    if what == "none":
        return
    options = {"use_reentrant": False}
    if what == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, KEPT)
    forward = block.forward

    def recomputed(*inputs):  # no functools.partial: the compiler skips that, silently
        return checkpoint(forward, *inputs, **options)

    block.forward = recomputed
