"""A GPT as the layers of a pipeline."""

import torch
from torch import nn
from torch.nn import functional as F

from ddp_course.models.gpt import Block


class Embedding(nn.Module):
    """A GPT's first layer: int64 (batch, tokens) to float (batch, tokens, width)."""

    def __init__(self, vocabulary, context, width):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.tokens(tokens) + self.positions(places)


class Head(nn.Sequential):
    """The last layer of a GPT, not tied to the embedding, which is on another rank."""

    def __init__(self, vocabulary, width):
        super().__init__(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))


def layers_of_gpt(vocabulary, context, layers, heads, width):
    """A GPT's layers, in order, as (class, its arguments ...): nothing is built yet."""
    first, last = (Embedding, vocabulary, context, width), (Head, vocabulary, width)
    return [first, *[(Block, width, heads, 0.0)] * layers, last]


def token_loss(logits, targets):
    """Mean cross entropy of float (batch, tokens, vocabulary), int64 (batch, tokens)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
