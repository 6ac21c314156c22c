"""Batches on which question 3 tries an answer: the same choices, on any number of ranks."""

import torch

from ddp_course.checks.ex20.travel_cases import group_and_place

WEIGHTS = {
    "different": "",
    "few values": ", many of equal weight",
    "equal": ", all of equal weight",
    "zeros": ", many with the weight 0",
    **{
        f"near {about}": f", weights around {about} that differ in their last digits only"
        for about in (0.5, 0.3, 0.0001)
    },
    "large": ", weights up to 1e6",
    "falling": ", the largest weights on rank 0",
    "rising": ", the largest weights on the last rank",
}


def batch(case, number):
    """(chosen, weights) of the whole batch of a group."""
    generator = torch.Generator().manual_seed(case["seed"] * 4 + number)
    shape, k = (sum(sizes_of(case, number)), case["experts"]), case["k"]
    scores = torch.rand(shape, generator=generator, dtype=torch.float64)
    if case["popular"] is not None:
        scores[:, case["popular"]] += 1
    chosen = scores.argsort(dim=1, descending=True)[:, :k].contiguous()
    weights = torch.rand(shape[0], k, generator=generator, dtype=torch.float64) * 0.9 + 0.05
    return chosen, with_kind(weights, case["weights"])


def with_kind(weights, kind):
    if kind == "few values":
        return (weights * 3).ceil() / 4
    if kind == "equal":
        return torch.full_like(weights, 0.5)
    if kind == "zeros":
        return weights * (weights > 0.6)
    if kind.startswith("near"):
        # neighbours in float64, from an uneven number on: a later choice has a larger weight
        about = torch.tensor(float(kind.split()[1]), dtype=torch.float64).view(torch.int64) // 2 * 2 + 1
        return (about + torch.arange(weights.numel()).view(weights.shape)).view(torch.float64)
    if kind == "large":
        return weights * 1e6
    if kind in ("falling", "rising"):
        return weights.flatten().sort(descending=kind == "falling").values.view(weights.shape)
    return weights


def sizes_of(case, number):
    """How many tokens each rank of a group has."""
    return case["tokens"][number]


def part_of(case, rank, values):
    """This rank's rows of something that the whole batch of its group has."""
    ranks, place = group_and_place(case, rank)
    return values.split(sizes_of(case, case["groups"].index(ranks)))[place]


def number_of(case, rank):
    return case["groups"].index(group_and_place(case, rank)[0])


def described(case):
    n, groups = sum(map(len, case["groups"])), case["groups"]
    where = f"{n} rank{'s' * (n > 1)}" if len(groups) == 1 else f"groups {' and '.join(map(str, groups))}"
    words = f"{where} with {sum(case['tokens'], [])} tokens, {case['k']} of {case['experts']} experts per token, "
    return words + f"capacity {case['capacity']}{WEIGHTS[case['weights']]}"
