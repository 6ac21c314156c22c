"""Counts the work that a program does: ratios of it are the same on any machine."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Work(TorchDispatchMode):
    """Counts in a `with` block: `numbers` that operators made, and `fetched`, how often
    Python waited for a number, as .item() and `if tensor:` do.
    """

    numbers = fetched = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.fetched += function is torch.ops.aten._local_scalar_dense.default
        if not function.is_view:
            tensors = [x for x in tree_leaves(made) if isinstance(x, torch.Tensor)]
            self.numbers += sum(tensor.numel() for tensor in tensors)
        return made
