"""Tokens, experts and ranks on which question 2 tries an answer."""

import torch

WIDTHS = 5, 2  # of a row: in no case a number of ranks, nor of experts per token


def group_and_place(case, rank):
    """The ranks of this rank's group, and its place in it."""
    [ranks] = [ranks for ranks in case["groups"] if rank in ranks]
    return ranks, ranks.index(rank)


def tokens_of(case, rank):
    """(x, chosen, weights) of a rank."""
    generator = torch.Generator().manual_seed(case["seed"] * 8 + rank)
    tokens, experts, k = case["tokens"][rank], len(case["owner"]), case["k"]
    x = torch.randn(tokens, width_of(case), generator=generator, dtype=torch.float64)
    scores = torch.rand(tokens, experts, generator=generator, dtype=torch.float64)
    scores[:, case["never"]] = -1
    chosen = scores.argsort(dim=1, descending=True)[:, :k].contiguous()
    weights = torch.rand(tokens, k, generator=generator, dtype=torch.float64) + 0.1
    return x, chosen, weights * (-1) ** torch.arange(k)


def width_of(case):
    """Of a row."""
    return WIDTHS[case["seed"] % 2]


def expert(number, rows):
    """What an expert computes: each another function."""
    return torch.sin(rows + number) * (number + 2)


def owned(case, place):
    """The experts of a rank of the group, in ascending order."""
    return [number for number, owner in enumerate(case["owner"]) if owner == place]


def order_of(case, rank):
    """The choices of a rank, sorted by the rank of their expert, then by expert."""
    chosen = tokens_of(case, rank)[1].flatten().tolist()
    return sorted(range(len(chosen)), key=lambda choice: (case["owner"][chosen[choice]], chosen[choice]))


def arriving(case, rank, weighted=False):
    """For each rank of the group, what it sends to this one: {expert: rows}."""
    ranks, place = group_and_place(case, rank)
    found = []
    for source in ranks:
        x, chosen, weights = tokens_of(case, source)
        rows = x.repeat_interleave(case["k"], 0) * (weights.flatten()[:, None] if weighted else 1)
        found.append({number: rows[chosen.flatten() == number] for number in owned(case, place)})
    return found


def described(case):
    n, groups = sum(map(len, case["groups"])), len(case["groups"])
    where = f"{n} ranks" if groups == 1 else f"groups {' and '.join(map(str, case['groups']))}"
    words = f"{where} with {case['tokens']} tokens, {case['k']} expert{'s' * (case['k'] > 1)} per token, "
    return words + f"owner={case['owner']}"
