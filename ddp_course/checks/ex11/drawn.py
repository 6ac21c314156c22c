"""Random tensors, and the parameters that train."""

import torch


def some(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def trained_of(module):
    return {name: value for name, value in module.named_parameters() if value.requires_grad}
