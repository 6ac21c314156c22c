"""A LoRA layer by hand, which computes what peft's computes; and 4-bit layers kept as
they are.
"""

import copy
import math

import torch
from torch import nn


class LoRALinear(nn.Module):
    """A frozen linear layer and two thin matrices that learn: W x + b + (α/r) B A x.

    Takes (..., inputs), returns (..., outputs) in the layer's type. A and B have at
    least 32 bits. B starts as zeros, so the layer starts as the one it was. E. J. Hu et
    al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
    """

    def __init__(self, layer, r=8, alpha=32, dropout=0.05):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        dtype = torch.promote_types(layer.weight.dtype, torch.float32)
        new = {"dtype": dtype, "device": layer.weight.device}
        self.A = nn.Parameter(torch.empty(r, layer.in_features, **new))
        self.B = nn.Parameter(torch.zeros(layer.out_features, r, **new))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.scale, self.dropout = alpha / r, nn.Dropout(dropout)

    def forward(self, x):
        output = self.layer(x)
        change = self.dropout(x.to(self.A.dtype)) @ self.A.T @ self.B.T
        return (output + self.scale * change).to(output.dtype)

    @torch.no_grad()
    def merge(self):
        """A new linear layer that computes the same; this one stays as it is."""
        merged = copy.deepcopy(self.layer)
        merged.weight += self.scale * self.B @ self.A
        return merged


def keep_layout(model):
    """Let an evaluation leave packed weights as they are.

    On CPUs with AVX512-BF16, bitsandbytes repacks them at the first evaluation. That
    makes the product faster, but takes away its backward pass: training after it learns
    next to nothing, with one warning.
    """
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
