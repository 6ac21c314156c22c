"""The GPT of today: rotary positions, RMSNorm, SwiGLU, and grouped queries, as in Llama."""

import torch
from torch import nn
from torch.nn import functional as F

from ddp_course.models.gpt import GPT, Head


def rotated(x, positions, base=10_000.0):
    """Turn each pair of numbers by an angle that grows with the token's position.

    x: float (batch, heads, tokens, head_width), queries or keys; positions: of its
    tokens, int64 (tokens,). The product of a query and a key then depends on the
    distance of their positions only. J. Su et al., "RoFormer", 2021; pairs as in
    Llama's code: number i and number i + head_width / 2.
    """
    half = x.shape[3] // 2
    options = {"device": x.device, "dtype": torch.promote_types(x.dtype, torch.float32)}
    speeds = base ** -(torch.arange(half, **options) / half)
    angles = positions.to(**options)[:, None] * speeds
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class GroupedAttention(nn.Module):
    """Causal attention in which several heads of queries share keys and values.

    Takes and returns float (batch, tokens, width). J. Ainslie et al., "GQA", 2023. With
    a Cache that is not empty, it takes one new token at a time.
    """

    def __init__(self, width, heads, groups, dropout):
        super().__init__()
        if width % heads or heads % groups:
            raise ValueError(f"{heads} heads do not suit {width=}, or {groups} groups")
        self.head_width, self.dropout = width // heads, dropout
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * self.head_width, bias=False)
        self.value = nn.Linear(width, groups * self.head_width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x, cache=None):
        batch, tokens, _ = x.shape
        query, key, value = (
            layer(x).view(batch, tokens, -1, self.head_width).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        positions = self.positions(cache.read if cache else 0, tokens, x.device)
        query, key = rotated(query, positions), rotated(key, positions)
        if cache is not None:
            key, value = cache.extended(self, key, value)
        mixed = self.attend(query, key, value)
        return self.output(mixed.transpose(1, 2).reshape(batch, tokens, -1))

    def positions(self, first, tokens, device):
        return torch.arange(first, first + tokens, device=device)

    def attend(self, query, key, value):
        """Mix the values, of which there are fewer heads than of queries."""
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0,
            is_causal=query.shape[2] == key.shape[2], enable_gqa=True,
        )  # fmt: skip


class SwiGLU(nn.Module):
    """An MLP whose inner numbers are multiplied by a gate, without biases.

    Takes and returns float (batch, tokens, width). It has three matrices, so it is 8/3
    as wide inside. N. Shazeer, "GLU Variants Improve Transformer", 2020.
    """

    def __init__(self, width):
        super().__init__()
        inside = -(-8 * width // (3 * 64)) * 64  # a multiple of 64
        self.gate = nn.Linear(width, inside, bias=False)
        self.expand = nn.Linear(width, inside, bias=False)
        self.contract = nn.Linear(inside, width, bias=False)

    def forward(self, x):
        return self.contract(F.silu(self.gate(x)) * self.expand(x))


class ModernBlock(nn.Module):
    """A layer: attention, then an MLP, on a residual stream, each after an RMSNorm.

    B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", 2019: no mean is
    subtracted, and there is no bias.
    """

    def __init__(self, width, heads, groups, dropout):
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(width, eps=1e-5) for _ in range(2))
        self.attention = GroupedAttention(width, heads, groups, dropout)
        self.mlp = SwiGLU(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, *cache):
        x = x + self.dropout(self.attention(self.norm1(x), *cache))
        return x + self.dropout(self.mlp(self.norm2(x)))


class ModernGPT(GPT):
    """A GPT of this file's parts. It has no position embedding, and its logits are those
    of transformers' Llama. Two heads of queries share keys and values.
    """

    def __init__(
        self, vocabulary=256, context=128, layers=4, heads=4, width=128, dropout=0.0
    ):
        nn.Module.__init__(self)
        self.context, groups = context, max(1, heads // 2)
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            ModernBlock(width, heads, groups, dropout) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = Head(width, vocabulary, bias=False)
        self.head.weight = self.token_embedding.weight
        self.initialise()

    def embed(self, tokens, first):
        return self.token_embedding(tokens)

    def parts(self):
        first = nn.Sequential()  # its names are those of GPT's first part
        first.token_embedding, first.dropout = self.token_embedding, self.dropout
        return [first, *self.blocks, nn.Sequential(self.norm, self.head)]
