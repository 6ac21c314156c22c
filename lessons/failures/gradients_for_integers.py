"""Gradients for integers

Run:    python lessons/failures/gradients_for_integers.py
Text:   RuntimeError: Only Tensors of floating point and complex dtype can require gradients
Text:   RuntimeError: only Tensors of floating point dtype can require gradients
Cause:  A tensor of integers was made a parameter or told to require gradients: a quantized layer
        (`nn.Parameter` of int8 or of 4 bits), a whole quantized model in `requires_grad_(True)`, or
        labels that were taken for data. FSDP also makes parameters of what it wraps.
Fix:    `nn.Parameter(weight, requires_grad=False)` for quantized weights, and train adapters beside
        them. Unfreeze by name, or only `if p.is_floating_point()`.
Lesson: 11
Source: https://github.com/pytorch/pytorch/issues/95110
Source: https://github.com/kvcache-ai/ktransformers/issues/2107
"""

import torch
from torch import nn

nn.Parameter(torch.ones(2, dtype=torch.int8))
