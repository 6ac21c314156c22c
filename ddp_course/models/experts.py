"""A mixture of experts: a router sends each token to a few of many MLPs.

N. Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated
Mixture-of-Experts Layer", 2017. With a group, each of its ranks has some of the experts,
and an all-to-all takes the tokens there and back: D. Lepikhin et al., "GShard", 2020.
Without a group it is the same layer in one process. See expert_parallel.py for a GPT.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

# ---- the router ----


class Choice(NamedTuple):
    """What the router has chosen for some tokens."""

    scores: torch.Tensor  # float (tokens, experts): a softmax over the experts
    experts: torch.Tensor  # int64 (tokens, top): the numbers of the chosen ones
    weights: torch.Tensor  # float (tokens, top): of their results


def choose(logits, top, bias=None):
    """The Choice of the `top` experts with the highest scores, for each token.

    bias: float (experts,), is added for choosing only: L. Wang et al., "Auxiliary-Loss-
    Free Load Balancing Strategy for Mixture-of-Experts", 2024. The weights of a token
    have the sum 1; with one expert the weight is its score, as in Switch Transformers,
    because a weight that is always 1 would leave the router without a gradient.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    chosen = (scores if bias is None else scores + bias).topk(top).indices
    weights = scores.gather(-1, chosen)
    if top > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    return Choice(scores, chosen, weights)


def load_of(choice):
    """How many tokens have chosen each expert: int64 (experts,)."""
    return torch.bincount(choice.experts.flatten(), minlength=choice.scores.shape[-1])


def balance_loss(choice, group=None):
    """A loss that is 1 for a uniform router, and larger when the experts that are
    chosen most also have the highest scores: W. Fedus et al., "Switch Transformers",
    2021.

    It is a product of means over tokens. Without a group, the means are of this rank's
    tokens. With one, the shares are those of all its ranks, which have equally many
    tokens: then the mean over the ranks, and its gradients, are those of one process.
    """
    load = load_of(choice).to(choice.scores.dtype)  # counts have no gradient
    share = load / choice.experts.numel()
    if group is not None:
        dist.all_reduce(share, group=group)
        share = share / dist.get_world_size(group)
    return len(share) * (share * choice.scores.mean(0)).sum()


def within_capacity(chosen, experts, capacity):
    """Which choices an expert has room for: the first ones, in the order of the tokens.

    chosen: int64 (choices,), numbers of experts; the result is bool (choices,).
    """
    place = F.one_hot(chosen, experts).cumsum(0).gather(1, chosen[:, None])[:, 0]
    return place <= capacity


# ---- the way to the experts and back ----


class AllToAll(torch.autograd.Function):
    """Send some rows to each rank. Backward, the gradients take the same way back.

    rows: float (rows, width), those for rank 0 first; send, receive: lists of how many
    go to each rank of the group, and come from it.
    """

    @staticmethod
    def forward(ctx, rows, send, receive, group):
        ctx.way = send, receive, group
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
        return received

    @staticmethod
    def backward(ctx, gradient):
        send, receive, group = ctx.way
        returned = gradient.new_empty(sum(send), *gradient.shape[1:])
        gradient = gradient.contiguous()
        dist.all_to_all_single(returned, gradient, send, receive, group=group)
        return returned, None, None, None


class Way(NamedTuple):
    """How the rows of a rank travel to the experts' ranks."""

    send: list  # rows to each rank
    receive: list  # rows from each rank
    by_expert: torch.Tensor  # int64 (received rows,): the order that the experts want
    own: list  # rows for each expert of this rank


def find_way(counts, group):
    """The Way of rows that are sorted by expert. counts: int64 (experts,), how many
    this rank has for each. The ranks tell each other, which is the first all-to-all.
    """
    ranks = dist.get_world_size(group)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    to_ranks, from_ranks = counts.view(ranks, -1), theirs.view(ranks, -1)
    # they arrive by rank, and from each rank by expert
    experts = torch.arange(from_ranks.shape[1], device=counts.device).repeat(ranks)
    by_expert = experts.repeat_interleave(theirs).argsort(stable=True)
    # as lists: here a CPU waits for its GPU
    send, receive = to_ranks.sum(1).tolist(), from_ranks.sum(1).tolist()
    return Way(send, receive, by_expert, from_ranks.sum(0).tolist())


# ---- the layer ----


class Experts(nn.Module):
    """Some MLPs of the same shape: up is (experts, width, inner), down is
    (experts, inner, width).
    """

    def __init__(self, experts, width, inner):
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, width, inner))
        self.down = nn.Parameter(torch.empty(experts, inner, width))

    def forward(self, rows, counts):
        """rows: float (rows, width), those of the first expert first; counts: how many
        each has. An expert without rows has a gradient of zeros.
        """
        up, down = (  # of DTensors, this rank's experts
            value.to_local() if hasattr(value, "to_local") else value
            for value in (self.up, self.down)
        )
        parts = rows.split(counts)
        return torch.cat([F.gelu(x @ a) @ b for x, a, b in zip(parts, up, down)])


class MixtureOfExperts(nn.Module):
    """In place of a GPT's MLP: takes and returns float (batch, tokens, width).

    capacity: None, and each token goes to `top` experts (dropless); or a factor: in
    training, an expert takes at most so many times its fair share of *this rank's*
    choices, and others are dropped. shared: a module that computes all tokens, too.
    group: of the ranks that share the experts; None: this rank has all of them.
    `load` and `dropped` add up, over training, the choices per expert, int64; a block
    that is recomputed counts twice.
    """

    def __init__(self, experts, width, inner, top, capacity=None, shared=None):
        super().__init__()
        if not 1 <= top <= experts:
            raise ValueError(f"a token cannot choose {top} of {experts} experts")
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width, inner)
        self.shared, self.group = shared, None
        self.top, self.capacity = top, capacity
        self.register_buffer("bias", torch.zeros(experts))
        for name in ("load", "dropped"):
            counts = torch.zeros(experts, dtype=torch.long)
            self.register_buffer(name, counts, persistent=False)
        self.choice = None  # of the last forward, for the loss

    def forward(self, x):
        tokens = x.flatten(0, -2)
        choice = self.choice = choose(self.router(tokens), self.top, self.bias)
        chosen = choice.experts.flatten()
        order = self.kept_by_expert(chosen)
        counts = torch.bincount(chosen[order], minlength=len(self.bias))
        if self.training:
            self.load += load_of(choice)
            self.dropped += load_of(choice) - counts
        token = order // self.top  # of each choice
        results = self.compute(tokens[token], counts)
        results = results * choice.weights.flatten()[order, None]
        mixed = torch.zeros_like(tokens).index_add(0, token, results.to(tokens.dtype))
        if self.shared is not None:
            mixed = mixed + self.shared(tokens)
        return mixed.view_as(x)

    def kept_by_expert(self, chosen):
        """The numbers of the choices, sorted by expert, without those for which there
        is no room.
        """
        order = chosen.argsort(stable=True)
        if self.capacity is None or not self.training:
            return order
        experts = len(self.bias)
        room = math.ceil(self.capacity * len(chosen) / experts)
        return order[within_capacity(chosen, experts, room)[order]]

    def compute(self, rows, counts):
        """The experts' results for rows that are sorted by expert, in this order."""
        if self.group is None:
            return self.experts(rows, counts.tolist())
        way = find_way(counts, self.group)
        received = AllToAll.apply(rows, way.send, way.receive, self.group)
        results = self.experts(received[way.by_expert], way.own)
        as_they_came = torch.empty_like(results).index_copy(0, way.by_expert, results)
        return AllToAll.apply(as_they_came, way.receive, way.send, self.group)
