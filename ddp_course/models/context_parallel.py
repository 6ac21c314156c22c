"""A GPT for texts whose tokens several ranks share: each rank computes all layers for
its own tokens, and only attention sends something.

Ring attention: H. Liu et al., "Ring Attention with Blockwise Transformers for
Near-Infinite Context", 2023. All-to-all: S. Jacobs et al., "DeepSpeed Ulysses", 2023.
Queries, keys and values are float (batch, heads, tokens, head_width), of a rank's
tokens; there may be fewer heads of keys and values. group: None is all ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_course.models.packed import IGNORED

# ---- which tokens a rank has, and what they see ----


def contiguous(tokens, ranks):
    return torch.arange(tokens).chunk(ranks)


def zigzag(tokens, ranks):
    """An early piece and a late one per rank, as in Llama 3 and Megatron."""
    pieces = torch.arange(tokens).chunk(2 * ranks)
    return [torch.cat([pieces[rank], pieces[-1 - rank]]) for rank in range(ranks)]


def striped(tokens, ranks):
    """Every n-th token. W. Brandon et al., "Striped Attention", 2023."""
    return [torch.arange(rank, tokens, ranks) for rank in range(ranks)]


LAYOUTS = {"zigzag": zigzag, "striped": striped, "contiguous": contiguous}


def visible(queries, keys, documents=None):
    """Which keys a query sees: bool (batch or 1, 1, queries, keys).

    queries, keys: their positions in the text. documents: each token's document, int64
    (batch, all tokens), if no token may see another document.
    """
    earlier = (queries[:, None] >= keys)[None, None]
    if documents is None:
        return earlier
    of_queries, of_keys = documents[:, queries, None], documents[:, None, keys]
    return earlier & (of_queries == of_keys)[:, None]


class Sharing:
    """How the ranks of a group share the tokens of a text.

    layout: of LAYOUTS. documents: see visible; None, or set before a forward pass, and
    not changed before its backward where blocks are recomputed.
    """

    documents = None

    def __init__(self, layout, group=None):
        self.layout, self.group = layout, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def places(self, tokens):
        """The positions that each rank has, [int64 (tokens of a rank,)] by rank.

        tokens: of the whole text. Raises ValueError if the ranks do not divide them.
        """
        pieces = self.ranks * (2 if self.layout == "zigzag" else 1)
        if tokens % pieces:
            raise ValueError(f"{tokens} tokens cannot be cut into {pieces} pieces")
        return LAYOUTS[self.layout](tokens, self.ranks)

    def own(self, x, dimension=1):
        """This rank's tokens of x, for example of int64 (batch, tokens)."""
        places = self.places(x.shape[dimension])[self.rank]
        return x.index_select(dimension, places.to(x.device))

    def block(self, step, tokens, documents, device):
        """What this rank computes with the keys that it has in a step of the ring.

        tokens: of a rank; documents: see visible. Returns its queries that see a key,
        the keys that are seen, both as numbers int64 (some,), and which sees which.
        """
        places = [place.to(device) for place in self.places(tokens * self.ranks)]
        of_keys = (self.rank - step) % self.ranks  # they have come `step` ranks far
        allowed = visible(places[self.rank], places[of_keys], documents)
        anywhere = allowed.flatten(0, 1).any(0)
        rows, columns = (anywhere.any(side).nonzero()[:, 0] for side in (1, 0))
        return rows, columns, allowed[:, :, rows][..., columns]


def pairs(layout, tokens, ranks, documents=None):
    """Pairs of a query and a key that are computed, [by rank][by step of the ring].

    documents: see visible.
    """
    places = LAYOUTS[layout](tokens, ranks)
    allowed = lambda own, others: int(visible(own, others, documents).sum())
    return [
        [allowed(own, places[rank - step]) for step in range(ranks)]
        for rank, own in enumerate(places)
    ]


# ---- attention in blocks ----


def at_least_32(x):
    """In 32 bits or more: sums of exponentials do not fit into 16."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def attend(query, key, value, allowed):
    """Attention to some of the keys: the output, and log of the sum of exp(score).

    allowed: bool, see visible. Returns float (batch, heads, queries, head_width) and
    (batch, heads, queries, 1). A query without keys has 0 and -inf.
    """
    scores = at_least_32(query @ key.mT) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~allowed, -torch.inf)
    logsumexp = scores.logsumexp(-1, keepdim=True)
    weights = (scores - logsumexp).exp().masked_fill(~allowed, 0)
    return weights.to(value.dtype) @ value, logsumexp


def merge(output, logsumexp, more, more_logsumexp):
    """Attention to two sets of keys, from attention to each of them."""
    total = torch.logaddexp(logsumexp, more_logsumexp)
    output = output * (logsumexp - total).exp() + more * (more_logsumexp - total).exp()
    return output, total


def attend_backward(query, key, value, allowed, logsumexp, gradient, delta):
    """The gradients of queries, keys and values of one block.

    logsumexp: over *all* keys; delta: the sum of output * gradient, like logsumexp
    (batch, heads, queries, 1). T. Dao et al., "FlashAttention", 2022, appendix B.2.
    """
    scale = query.shape[-1] ** -0.5
    scores = at_least_32(query @ key.mT) * scale
    weights = (scores - logsumexp).exp().masked_fill(~allowed, 0)
    of_scores = weights * (at_least_32(gradient @ value.mT) - delta) * scale
    weights, of_scores = weights.to(key.dtype), of_scores.to(key.dtype)
    return of_scores @ key, of_scores.mT @ query, weights.mT @ gradient


def for_each_head(x, heads):
    """Keys or values for all heads of queries, which may share them."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def of_shared_heads(gradient, heads):
    """The sum over the heads of queries that share keys or values."""
    return gradient.unflatten(1, (heads, -1)).sum(2)


# ---- ring attention ----


def rotate(tensors, group):
    """Begin to send tensors to the next rank, and to receive the previous rank's.

    Returns a function that waits, and returns what came.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if ranks == 1:
        return lambda: tensors
    group = group or dist.group.WORLD
    to, of = (dist.get_global_rank(group, (rank + by) % ranks) for by in (1, -1))
    tensors = [tensor.contiguous() for tensor in tensors]
    arriving, calls = [torch.empty_like(tensor) for tensor in tensors], []
    for tensor, other in zip(tensors, arriving):
        calls.append(dist.P2POp(dist.isend, tensor, to, group))
        calls.append(dist.P2POp(dist.irecv, other, of, group))
    works = dist.batch_isend_irecv(calls)

    def arrived():
        for work in works:
            work.wait()
        return arriving

    return arrived


def ring_steps(query, key, value, sharing, documents):
    """For each step of the ring: the queries that see a key, the keys that are seen,
    which sees which, see Sharing.block; and these keys and values, for all heads.

    While a step is computed, all keys and values are on their way to the next rank.
    """
    heads, tokens = query.shape[1:3]
    for step in range(sharing.ranks):
        is_last = step == sharing.ranks - 1
        arrived = None if is_last else rotate((key, value), sharing.group)
        rows, columns, allowed = sharing.block(step, tokens, documents, query.device)
        keys, values = (for_each_head(x[:, :, columns], heads) for x in (key, value))
        yield rows, columns, allowed, keys, values
        if not is_last:
            key, value = arrived()


class Ring(torch.autograd.Function):
    """Causal attention of a rank's queries to the keys of all ranks."""

    @staticmethod
    def forward(ctx, query, key, value, sharing, documents):
        output = torch.zeros_like(at_least_32(query))
        logsumexp = torch.full_like(output[..., :1], -torch.inf)
        steps = ring_steps(query, key, value, sharing, documents)
        for rows, _, allowed, keys, values in steps:
            if len(rows):
                new = attend(query[:, :, rows], keys, values, allowed)
                old = output[:, :, rows], logsumexp[:, :, rows]
                output[:, :, rows], logsumexp[:, :, rows] = merge(*old, *new)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.sharing, ctx.documents = sharing, documents
        return output

    @staticmethod
    def backward(ctx, gradient):
        """The gradients of keys and values travel with them, and come home last."""
        query, key, value, output, logsumexp = ctx.saved_tensors
        delta = at_least_32(gradient * output).sum(-1, keepdim=True)
        of_query, of_key, of_value = map(torch.zeros_like, (query, key, value))
        steps = ring_steps(query, key, value, ctx.sharing, ctx.documents)
        for rows, columns, allowed, keys, values in steps:
            if len(rows):
                own = (part[:, :, rows] for part in (logsumexp, gradient, delta))
                new = attend_backward(query[:, :, rows], keys, values, allowed, *own)
                of_query[:, :, rows] += new[0]
                of_key[:, :, columns] += of_shared_heads(new[1], key.shape[1])
                of_value[:, :, columns] += of_shared_heads(new[2], key.shape[1])
            of_key, of_value = rotate((of_key, of_value), ctx.sharing.group)()
        return of_query, of_key, of_value, None, None


# ---- all-to-all ----


def swapped(x, cut, joined, group):
    """Cut a dimension of x for the ranks; join one of which each rank has a part."""
    ranks = dist.get_world_size(group)
    parts = torch.stack(x.chunk(ranks, cut))
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=group)
    return torch.cat(arrived.unbind(), joined)


class Swap(torch.autograd.Function):
    """`swapped`, whose backward is the swap back."""

    @staticmethod
    def forward(ctx, x, cut, joined, group):
        ctx.back = joined, cut, group
        return swapped(x, cut, joined, group)

    @staticmethod
    def backward(ctx, gradient):
        return swapped(gradient, *ctx.back), None, None, None


HEADS, TOKENS = 1, 2  # dimensions of queries, keys and values


def ring(query, key, value, sharing):
    return Ring.apply(query, key, value, sharing, sharing.documents)


def ulysses(query, key, value, sharing):
    """Attention of some heads to all tokens, between two all-to-all."""
    query, key, value = (
        Swap.apply(x, HEADS, TOKENS, sharing.group) for x in (query, key, value)
    )
    mask = None
    if sharing.documents is not None:
        places = torch.arange(query.shape[TOKENS], device=query.device)
        mask = visible(places, places, sharing.documents)
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return Swap.apply(output, TOKENS, HEADS, sharing.group)


ATTENTION = {"ring": ring, "ulysses": ulysses}


def check_shared(sharing, attention, heads, tokens):
    """Raise ValueError if the ranks cannot share texts of so many tokens.

    heads: of keys, which may be fewer than those of queries.
    """
    if attention == "ulysses" and sharing.layout != "contiguous":
        raise ValueError(f"ulysses takes the layout contiguous, not {sharing.layout}")
    if attention == "ulysses" and heads % sharing.ranks:
        raise ValueError(f"{heads} heads cannot be cut for {sharing.ranks} ranks")
    sharing.places(tokens)


# ---- a GPT ----


class OwnPositions(nn.Module):
    """The vectors of the positions that this rank's tokens have in the text."""

    def __init__(self, weight, sharing):
        super().__init__()
        self.weight, self.sharing = weight, sharing

    def forward(self, positions):
        tokens = len(positions) * self.sharing.ranks
        places = self.sharing.places(tokens)[self.sharing.rank]
        return F.embedding(places.to(self.weight.device), self.weight)


def share(network, sharing, attention="ring"):
    """Make a GPT one for a rank's tokens, in place, and return it.

    It then takes `sharing.own(tokens)`. Raises ValueError with dropout, and where the
    ranks do not suit the GPT: see check_shared.
    """
    first = network.blocks[0].attention
    keys = getattr(first, "key", first.output)  # a ModernGPT has fewer heads of keys
    heads = keys.out_features // first.head_width
    check_shared(sharing, attention, heads, network.context)
    if network.dropout.p:
        raise ValueError("attention with dropout is not shared here")

    def attend_to_all(query, key, value):
        return ATTENTION[attention](query, key, value, sharing)

    def positions(first, tokens, device):
        return sharing.places(tokens * sharing.ranks)[sharing.rank].to(device)

    for block in network.blocks:
        block.attention.attend = attend_to_all
        block.attention.positions = positions  # of a ModernGPT, which rotates by them
    if hasattr(network, "position_embedding"):
        weight = network.position_embedding.weight
        network.position_embedding = OwnPositions(weight, sharing)
    return network


def loss_of(network, tokens, targets):
    """A rank's part of the mean loss over the tokens of all ranks, times their number.

    So the mean over the ranks, which DDP takes of gradients, is the mean over tokens,
    also where targets are IGNORED, as many as may be on each rank.
    """
    logits = network(tokens).flatten(0, 1)
    total = F.cross_entropy(
        logits, targets.flatten(), reduction="sum", ignore_index=IGNORED
    )
    counted = (targets != IGNORED).sum()
    dist.all_reduce(counted)
    return total * dist.get_world_size() / counted
