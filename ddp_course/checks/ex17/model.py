"""The model of question 2, under sequence parallelism. The notebook shows its two classes."""

import inspect

import torch
from torch import nn
from torch.nn import functional as F

from ddp_course.checks.ex17.collectives import all_gather, all_gather_alike, place, reduce_scatter


class Block(nn.Module):
    """Takes and returns this rank's tokens, (batch, tokens / n, width)."""

    def __init__(self, width, heads, head_width, hidden):
        super().__init__()  # heads, hidden: this rank's share
        own = heads * head_width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * own)
        self.query_norm = nn.LayerNorm(head_width)  # the same for all heads
        self.key_norm = nn.LayerNorm(head_width)
        self.output = nn.Linear(own, width)
        self.expand = nn.Linear(width, hidden)
        self.contract = nn.Linear(hidden, width)
        self.shape = heads, head_width

    def forward(self, x, group):
        tokens = all_gather(self.norm1(x), group)  # backward: reduce-scatter
        parts = self.query_key_value(tokens).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, self.shape) for part in parts)
        query, key = self.query_norm(query), self.key_norm(key)
        heads = (part.transpose(1, 2) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        added = reduce_scatter(F.linear(mixed, self.output.weight), group)
        x = x + added + self.output.bias
        tokens = all_gather(self.norm2(x), group)
        hidden = F.gelu(self.expand(tokens))
        added = reduce_scatter(F.linear(hidden, self.contract.weight), group)
        return x + added + self.contract.bias


class Classifier(nn.Module):
    """Takes this rank's tokens; all ranks return the logits of the whole texts."""

    def __init__(self, blocks, width, context, classes):
        super().__init__()
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x, group):
        first = place(group) * x.shape[1]
        x = x + self.positions(torch.arange(first, first + x.shape[1]))
        for block in self.blocks:
            x = block(x, group)
        # backward: each rank keeps the gradient of its own tokens
        tokens = all_gather_alike(self.norm(x), group)
        return self.head(tokens.mean(dim=1))


class Listing(str):
    """A text that a cell shows as it is, if it is the cell's last expression."""

    __repr__ = str.__str__


def listing():
    """The model of question 2, as text."""
    return Listing("\n\n".join(map(inspect.getsource, (Block, Classifier))))
