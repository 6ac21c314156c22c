"""A GPT's parts as the layers of a pipeline, each built by the rank that needs it."""

from torch import nn
from torch.nn import functional as F

from ddp_course.models import gpt


class Embedding(gpt.Embedding):
    """A GPT's first part, with embeddings of its own."""

    def __init__(self, vocabulary, context, width):
        tables = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        super().__init__(*tables, nn.Dropout(0.0))


class Head(nn.Sequential):
    """A GPT's last part, not tied to the embedding, which is on another rank."""

    def __init__(self, vocabulary, width):
        super().__init__(nn.LayerNorm(width), gpt.Head(width, vocabulary, bias=False))


def layers_of_gpt(vocabulary, context, layers, heads, width):
    """A GPT's parts, in order, as (class, its arguments ...): nothing is built yet."""
    first, last = (Embedding, vocabulary, context, width), (Head, vocabulary, width)
    return [first, *[(gpt.Block, width, heads, 0.0)] * layers, last]


def token_loss(logits, targets):
    """Mean cross entropy of float (batch, tokens, vocabulary), int64 (batch, tokens)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
