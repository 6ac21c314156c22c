"""A GPT for windows that hold several documents: no token sees another document."""

import torch
from torch.nn import functional as F

from ddp_course.models.gpt import GPT, Attention

IGNORED = -100  # a target that the loss leaves out


def documents_of(tokens, end):
    """The number of each token's document, within its window: int64 (batch, tokens).

    end: the token that ends a document. It belongs to the document that it ends.
    """
    ends = (tokens == end).long()
    return ends.cumsum(1) - ends


def positions_of(documents):
    """The position of each token within its document, int64 (batch, tokens)."""
    places = torch.arange(documents.shape[1], device=documents.device)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - (places * starts).cummax(1).values


def mask_of(documents):
    """Which keys each query sees: bool (batch, 1, tokens, tokens), for all heads."""
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril()[:, None]


def targets_within(tokens, targets, end):
    """The targets without those that cross a border: after the end of a document comes
    the beginning of another one, which no token could tell.
    """
    return targets.masked_fill(tokens == end, IGNORED)


class PackedAttention(Attention):
    """Attention under a mask, which PackedGPT sets before each forward pass."""

    mask = None

    def attend(self, query, key, value):
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=self.mask, dropout_p=dropout
        )


class PackedGPT(GPT):
    """A GPT that reads each document of a window as if it were alone there.

    end: the token that ends a document. It takes and returns what GPT does, and has the
    same parameters, so a GPT with its weights can write text. If it has targets, those
    across a border are left out of the mean.
    """

    def __init__(self, end, *args, **options):
        super().__init__(*args, **options)
        self.end = end
        for block in self.blocks:
            there = block.attention
            heads = there.output.in_features // there.head_width
            block.attention = PackedAttention(
                there.output.in_features, heads, there.dropout
            )
            block.attention.load_state_dict(there.state_dict())

    def forward(self, tokens, targets=None):
        documents = documents_of(tokens, self.end)
        for block in self.blocks:
            block.attention.mask = mask_of(documents)
        positions = self.position_embedding(positions_of(documents))
        x = self.dropout(self.token_embedding(tokens) + positions)
        for block in self.blocks:
            x = block(x)
        if targets is not None:
            targets = targets_within(tokens, targets, self.end)
        return self.head(self.norm(x), targets)
