"""Counts the work that a program does: ratios of it are the same on any machine."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# what waits for a GPU: methods, and operators (.item() and `if tensor:` are the first)
METHODS = ["tolist", "numpy", "cpu"]
OPERATORS = ["_local_scalar_dense", "equal", "nonzero", "masked_select"]


class Work(TorchDispatchMode):
    """Counts in a `with` block: `operators` that compute, the `numbers` that they made,
    and `fetched`, how often Python waited for numbers, as .item(), .tolist() and
    `if tensor:` do.
    """

    operators = numbers = fetched = 0

    def __enter__(self):
        self.originals = {name: getattr(torch.Tensor, name) for name in METHODS}
        for name, method in self.originals.items():
            setattr(torch.Tensor, name, self.counted(method))
        return super().__enter__()

    def __exit__(self, *error):
        for name, method in self.originals.items():
            setattr(torch.Tensor, name, method)
        return super().__exit__(*error)

    def counted(self, method):
        def counting(tensor, *args, **kwargs):
            self.fetched += 1
            return method(tensor, *args, **kwargs)

        return counting

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.fetched += function._opname in OPERATORS or has_mask(function, args)
        if not function.is_view:
            self.operators += 1
            tensors = [x for x in tree_leaves(made) if isinstance(x, torch.Tensor)]
            self.numbers += sum(tensor.numel() for tensor in tensors)
        return made


def has_mask(function, args):
    """Whether an operator is labels[mask], whose length only the GPU knows."""
    return function._opname == "index" and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )
