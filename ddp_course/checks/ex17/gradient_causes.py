"""Why a gradient of question 2 needs a sum, or none."""

import torch

PARTS = {  # what each rank has whole, but uses in part
    ("query_norm.weight", "query_norm.bias", "key_norm.weight", "key_norm.bias"):
        "each rank has used this norm on all tokens, but in its own heads only, so its gradient needs a sum",
    ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "norm.weight", "norm.bias"):
        "each rank has this norm whole, but has used it on its own tokens only, so its gradient needs a sum",
    ("positions.weight",): "each rank has used the positions of its own tokens only, so the gradient needs a sum",
    ("output.bias", "contract.bias"):
        "this bias is added after the reduce-scatter, to this rank's tokens only, so its gradient needs a sum",
}  # fmt: skip


def in_part():
    """The ends of the names of parameters whose gradients need a sum."""
    return [name for names in PARTS for name in names]


def reason(name):
    for names, text in PARTS.items():
        if name.endswith(names):
            return text
    if name.startswith("head"):
        return (
            "each rank has computed the head from all tokens, alike, so its gradient is already whole: it must not be "
            "added up"
        )
    return (
        "each rank has other rows or columns of this layer and has used them on all tokens, so its gradient is complete: "
        "it must not be added up"
    )


def otherwise_of(got, name):
    if not isinstance(got, torch.Tensor):
        return "keep a gradient for each parameter that had one"
    return f"are the parts of a flat tensor copied back in the same order, each in its shape? {reason(name)}"
