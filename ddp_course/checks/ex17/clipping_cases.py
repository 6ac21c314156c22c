"""The gradients on which question 5 tries an answer."""

import torch


def pieces(case, rank):
    """[gradient or None, replicas] of each parameter on this rank of a (data, tensor) mesh.

    Which ranks have the same numbers: "all" of them, those with the same "tensor" rank,
    or with the same "data" rank, or none but "this" one.
    """
    data, tensor = divmod(rank, case["shape"][1])
    ranks = {"all": 0, "tensor": 1 + tensor, "data": 100 + data, "this": 1000 + rank}
    replicas = {
        "all": case["shape"][0] * case["shape"][1],
        "tensor": case["shape"][0],
        "data": case["shape"][1],
        "this": 1,
    }
    found = []
    for number, kind in enumerate(case["kinds"]):
        generator = torch.Generator().manual_seed(case["seed"] + 10_000 * number + ranks[kind])
        size = 4 + number + 3 * (ranks[kind] if kind in ("tensor", "this") else 0) % 7
        gradient = case["length"] * torch.randn(size, generator=generator, dtype=torch.float64)
        missing = number in case["frozen"] or (kind == "this" and rank in case["without"])
        found.append([None if missing else gradient, replicas[kind]])
    return found


def described(case):
    data, tensor = case["shape"]
    words = f"{data} × {tensor} ranks (data × tensor), max_norm {case['max_norm']:.4g}"
    words += ", some frozen" if case["frozen"] else ""
    return words + (f", no gradients on rank {case['without'][0]}" if case["without"] else "")


def norm_of(case, n, weight=lambda replicas: 1 / replicas, ranks=None):
    """The norm over these ranks' gradients, each square times its weight."""
    found = [pair for rank in ranks or range(n) for pair in pieces(case, rank) if pair[0] is not None]
    return float(sum(weight(replicas) * gradient.pow(2).sum() for gradient, replicas in found)) ** 0.5
