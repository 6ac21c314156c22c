"""What may come home from a rank: plain values, and no code."""

import numpy as np
import torch


def plain(value):
    """A copy of a value that consists of tensors, numbers, texts, lists, tuples and
    dicts, without any code.
    """

    def copy(value):  # it calls itself: a module's name could be given another meaning
        if value is None or type(value) is bool:
            return value
        for kind in (int, float, str):
            if isinstance(value, kind):
                return kind(value)
        if isinstance(value, np.generic):  # np.int64(3), which is no int
            return copy(value.item())
        if isinstance(value, torch.Tensor):
            detached = torch.Tensor.clone(torch.Tensor.detach(value))
            if detached.layout != torch.strided:  # such as a sparse one
                return f"a tensor with the layout {detached.layout}"
            return detached.as_subclass(torch.Tensor)
        if isinstance(value, list | tuple):
            return [copy(item) for item in value]
        if isinstance(value, dict):
            return {copy(name): copy(item) for name, item in value.items()}
        return f"a {type(value).__name__}"

    return copy(value)
