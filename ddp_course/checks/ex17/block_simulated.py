"""What a rank of a tensor-parallel block computes, right or with faults, in one process."""

import torch
from torch.nn import functional as F

CAUSES = {
    "cut": "the rows of query_key_value are all queries, then all keys, then all values: a rank needs the rows of its own "
    "heads from each of the three",
    "scale": "the attention's scale must be that of one head, head_width ** -0.5, on any number of ranks",
    "bias": "the bias of a row-parallel layer is inside the all-reduce, so it is added n times: add it once, after the sum",
    "enter": "before a column-parallel layer, each rank has only the gradient through its own columns: backward must add "
    "these up",
    "leave": "after a row-parallel layer, each rank has the whole gradient already: adding up gives n times the gradient",
    "divided bias": "this is an n-th of the gradient: add the whole bias on each rank, after the sum",
    "divided": "this is an n-th of the gradient: nothing is to be divided, neither in forward nor in backward",
}
CAUSES |= {f"enter {part}": CAUSES["enter"] for part in ("attention", "mlp")}


def cut(name, value, rank, n):
    """A rank's part of a parameter, or of its gradient, by the name that it has there."""
    if "query_key_value" in name:
        return torch.cat([part.chunk(n)[rank] for part in value.chunk(3)])
    if name in ("output.weight", "contract.weight"):
        return value.chunk(n, dim=1)[rank]
    return value.chunk(n)[rank] if "expand" in name else value


def simulated(block, x, gradient, n, rank, faults):
    """This rank's output and gradients: {'y', 'x', 'output.weight', ...}."""
    whole = {
        name.replace("attention.", "").replace("mlp.", ""): value.detach().clone().requires_grad_()
        for name, value in block.named_parameters()
    }
    x = x.clone().requires_grad_()

    def enter(h, r, part):
        """What rank r reads: without the all-reduce, only its own gradient comes back."""
        return h.detach() if {"enter", f"enter {part}"} & {*faults} and r != rank else h

    def leave(parts, name):
        total = sum(parts)
        if "leave" in faults:
            total = n * total - ((n - 1) * total).detach()
        return total + (n if "bias" in faults else 1) * whole[f"{name}.bias"]

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], whole[f"{name}.weight"], whole[f"{name}.bias"])

    def own(name, r):
        value = whole[name]
        return value.chunk(n)[r] if "cut" in faults and "query_key_value" in name else cut(name, value, r, n)

    def attention(h, r):
        parts = F.linear(h, own("query_key_value.weight", r), own("query_key_value.bias", r)).chunk(3, dim=-1)
        width = parts[0].shape[-1] if "scale" in faults else block.attention.head_width
        heads = [part.unflatten(-1, (-1, block.attention.head_width)).transpose(1, 2) for part in parts]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, scale=width**-0.5)
        return F.linear(mixed.transpose(1, 2).flatten(2), own("output.weight", r))

    def mlp(h, r):
        hidden = F.gelu(F.linear(h, own("expand.weight", r), own("expand.bias", r)))
        return F.linear(hidden, own("contract.weight", r))

    h = norm(x, "norm1")
    middle = x + leave([attention(enter(h, r, "attention"), r) for r in range(n)], "output")
    h = norm(middle, "norm2")
    y = middle + leave([mlp(enter(h, r, "mlp"), r) for r in range(n)], "contract")
    y.backward(gradient)
    return {"y": y.detach(), "x": x.grad} | {name: cut(name, value.grad, rank, n) for name, value in whole.items()}
