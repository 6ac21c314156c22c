"""What question 3 claims of the choices that are kept, and what likely mistakes keep."""

import torch

from ddp_course.checks.claims import Between, Claim
from ddp_course.checks.ex20.capacity_cases import batch, described, number_of, part_of, sizes_of
from ddp_course.checks.ex20.explained import explaining
from ddp_course.checks.ex20.travel_cases import group_and_place

SIZE = 8  # bytes of a number in float64 and int64


def kept(chosen, weights, capacity, order=None):
    """bool: which choices are kept. order: of going through them."""
    flat, room = chosen.flatten().tolist(), {}
    if order is None:
        order = by_weight(weights)
    found = torch.zeros(len(flat), dtype=torch.bool)
    for choice in order:
        room[flat[choice]] = room.get(flat[choice], capacity) - 1
        found[choice] = room[flat[choice]] >= 0
    return found.view(chosen.shape)


def by_weight(weights, last_first=False):
    flat = weights.flatten().tolist()
    sign = -1 if last_first else 1
    return sorted(range(len(flat)), key=lambda choice: (-flat[choice], sign * choice))


def of_whole(function):
    """A mistake that the whole batch shows: function(chosen, weights, case)."""
    return lambda case, rank: part_of(case, rank, function(*batch(case, number_of(case, rank)), case).long())


def of_rank(function):
    """A mistake with this rank's own choices: function(chosen, weights, case, ranks)."""

    def mistake(case, rank):
        number = number_of(case, rank)
        own = [part_of(case, rank, values) for values in batch(case, number)]
        return function(*own, case, len(sizes_of(case, number))).long()

    return mistake


right = of_whole(lambda chosen, weights, case: kept(chosen, weights, case["capacity"]))


def with_capacity(more):
    return of_whole(lambda chosen, weights, case: kept(chosen, weights, case["capacity"] + more))


def of_whole_and_ranks(change):
    def mistake(case, rank):
        number = number_of(case, rank)
        capacity = change(case["capacity"], len(sizes_of(case, number)))
        return part_of(case, rank, kept(*batch(case, number), capacity).long())

    return mistake


def rank_by_rank(case, rank):
    """Sorted on each rank only, and then joined."""
    number = number_of(case, rank)
    chosen, weights = batch(case, number)
    order, start = [], 0
    for part in weights.split(sizes_of(case, number)):
        order += [start + choice for choice in by_weight(part)]
        start += part.numel()
    return part_of(case, rank, kept(chosen, weights, case["capacity"], order).long())


def not_sorted_back(chosen, weights, case):
    order = torch.tensor(by_weight(weights), dtype=torch.int64)
    return kept(chosen, weights, case["capacity"]).flatten()[order].view(chosen.shape)


def of_all_experts(chosen, weights, case):
    return kept(torch.zeros_like(chosen), weights, case["capacity"] * case["experts"])


def first_choices_first(chosen, weights, case):
    order = sorted(by_weight(weights), key=lambda choice: choice % case["k"])
    return kept(chosen, weights, case["capacity"], order)


def in_another_order(order_of):
    """A mistake that goes through the choices in the order of order_of(chosen, weights)."""
    return of_whole(lambda chosen, weights, case: kept(
        chosen, weights, case["capacity"], order_of(chosen.flatten(), weights.flatten()).tolist()))  # fmt: skip


def sorted_by_expert(chosen, weights):
    """By weight, and then by expert with a sort that is not stable."""
    order = weights.argsort(descending=True, stable=True)
    return order[chosen[order].argsort()]


def by_topk(chosen, weights, case):
    """topk for each expert, which does not say which of equal weights it takes."""
    found, flat = torch.zeros(chosen.numel(), dtype=torch.bool), weights.flatten()
    for number in chosen.unique():
        places = (chosen.flatten() == number).nonzero()[:, 0]
        found[places[flat[places].topk(min(case["capacity"], len(places))).indices]] = True
    return found.view(chosen.shape)


def of_threshold(chosen, weights, case):
    """All choices whose weight is at least that of the last one that is kept."""
    found = kept(chosen, weights, case["capacity"])
    for number in chosen[found].unique():
        found |= (chosen == number) & (weights >= weights[found & (chosen == number)].min())
    return found


def per_token(chosen, weights, case):
    shares = (weights / weights.sum(1, keepdim=True)).flatten()
    return kept(chosen, weights, case["capacity"], shares.argsort(descending=True, stable=True).tolist())


def from_the_batch(first_of):
    """A mistake in the order of choices of equal weight: first_of(the place of the rank
    that asks, that of the choice's rank, the number of the choice there, k).
    """

    def mistake(case, rank):
        number = number_of(case, rank)
        chosen, weights = batch(case, number)
        place = group_and_place(case, rank)[1]
        keys = [first_of(place, source, choice, case["k"])
                for source, tokens in enumerate(sizes_of(case, number)) for choice in range(tokens * case["k"])]  # fmt: skip
        flat = weights.flatten().tolist()
        order = sorted(range(len(flat)), key=lambda choice: (-flat[choice], keys[choice], choice))
        return part_of(case, rank, kept(chosen, weights, case["capacity"], order).long())

    return mistake


def first_rows(case, rank):
    number = number_of(case, rank)
    whole = kept(*batch(case, number), case["capacity"])
    return whole[: len(part_of(case, rank, whole))].long()


PLACE = "the first choices in the order of the tokens are kept: an expert keeps those with the largest weights"
MISTAKES = {
    "the capacity is for the whole batch, and not for each rank: what other ranks have chosen takes room, too": of_rank(
        lambda chosen, weights, case, _: kept(chosen, weights, case["capacity"])
    ),
    "the capacity was divided by the number of ranks. But the choices with large weights may all be on one rank": of_rank(
        lambda chosen, weights, case, ranks: kept(chosen, weights, case["capacity"] // ranks)
    ),
    "the capacity was divided by the number of ranks, and rounded up. But the choices with large weights may all be on one "
    "rank": of_rank(lambda chosen, weights, case, ranks: kept(chosen, weights, -(-case["capacity"] // ranks))),
    PLACE: of_whole(lambda chosen, weights, case: kept(chosen, weights, case["capacity"], range(chosen.numel()))),
    f"{PLACE}. And the capacity is for the whole batch": of_rank(
        lambda chosen, weights, case, _: kept(chosen, weights, case["capacity"], range(chosen.numel()))
    ),
    "the choices of rank 0 come first: sort the choices of all ranks together": rank_by_rank,
    "the smallest weights are kept: sort with descending=True": of_whole(
        lambda chosen, weights, case: kept(chosen, weights, case["capacity"], by_weight(-weights))
    ),
    "of equal weights, the last one is kept: the earlier token of the batch comes first": of_whole(
        lambda chosen, weights, case: kept(chosen, weights, case["capacity"], by_weight(weights, last_first=True))
    ),
    "weights that differ have become equal: keep them in float64": of_whole(
        lambda chosen, weights, case: kept(chosen, weights, case["capacity"], by_weight(weights.float()))
    ),
    "an expert keeps one choice too few: places from 1 to capacity are kept": of_whole(
        lambda chosen, weights, case: kept(chosen, weights, max(0, case["capacity"] - 1))
    ),
    "an expert keeps one choice too many: places from 0 are kept below the capacity": with_capacity(1),
    "True is for choices that are kept, and not for those that are dropped": of_whole(
        lambda chosen, weights, case: ~kept(chosen, weights, case["capacity"])
    ),
    "the choices were sorted by weight and not brought back into their order: kept[order] = ...": of_whole(
        not_sorted_back
    ),
    "this is a capacity of all experts together: each has its own": of_whole(of_all_experts),
    "a token's first choice does not come before other tokens' second choices: only the weight counts": of_whole(
        first_choices_first
    ),
    "a token keeps some of its choices, and may lose others: decide for each choice": of_whole(
        lambda chosen, weights, case: kept(chosen, weights, case["capacity"]).all(1, keepdim=True).expand_as(chosen)
    ),
    "a token loses a choice even if others of it are kept: decide for each choice": of_whole(
        lambda chosen, weights, case: kept(chosen, weights, case["capacity"]).any(1, keepdim=True).expand_as(chosen)
    ),
    "these are the first rows of the batch: return those of this rank": first_rows,
    "all choices are kept: an expert has a capacity, which may be 0": of_whole(
        lambda chosen, weights, case: torch.ones_like(chosen, dtype=torch.bool)
    ),
    "the capacity was divided by the number of ranks. It is one for the whole batch": of_whole_and_ranks(
        lambda capacity, ranks: capacity // ranks
    ),
    "the capacity was multiplied by the number of ranks. It is one for the whole batch": of_whole_and_ranks(
        lambda capacity, ranks: capacity * ranks
    ),
    "the experts no longer match the weights: chosen was sorted for each token, and weights were not": of_whole(
        lambda chosen, weights, case: kept(chosen.sort(1).values, weights, case["capacity"])
    ),
    "of equal weights, more than `capacity` are kept: a threshold is not enough, the earlier tokens come first": of_whole(
        of_threshold
    ),
    "of equal weights, this rank's own tokens come first here: the order is that of the ranks, the same for all": (
        from_the_batch(lambda place, source, choice, k: source != place)
    ),
    "the tokens of the ranks are interleaved here: in the whole batch, all tokens of rank 0 come first": (
        from_the_batch(lambda place, source, choice, k: choice // k)
    ),
    "the choices of the ranks are interleaved here: in the whole batch, all tokens of rank 0 come first": (
        from_the_batch(lambda place, source, choice, k: choice)
    ),
    "the sort by weight is not stable, so equal weights lose their order: sort with stable=True": in_another_order(
        lambda chosen, weights: weights.argsort(descending=True)
    ),
    "topk may take any of equal weights, and the earlier tokens come first: sort with stable=True": of_whole(by_topk),
    "the sort by expert is not stable, so the order by weight is lost: sort with stable=True": in_another_order(
        sorted_by_expert
    ),
    "the weights were divided by their sum for each token: compare them as they are": of_whole(per_token),
    "no choice is kept": of_whole(lambda chosen, weights, case: torch.zeros_like(chosen, dtype=torch.bool)),
}


def causes_of(cases, seen):
    """The mistakes that explain all that is kept: a list of causes."""
    return explaining(MISTAKES, cases, seen, right)


def claims(case, causes, rank, of_ranks):
    seen, words, expected = of_ranks[rank], described(case), right(case, rank)
    yield Claim(
        f"{words}: what the function changes", seen["changed"], [], "leave the arguments as they are: copy first"
    )
    yield Claim(
        f"{words}: communication outside of the group", seen["outside"], [], "pass group=group to every collective",
    )  # fmt: skip
    yield Claim(
        f"{words}: the dtype of the result", seen["dtype"], "torch.bool", "return a tensor of bool, like chosen"
    )
    yield Claim(
        f"{words}: the choices that are kept", seen["got"], expected, lambda: otherwise(case),
        [(seen["got"], cause) for cause in causes],
    )  # fmt: skip
    most = max(sizes_of(case, number_of(case, rank))) * case["k"]
    yield Claim(
        f"{words}: bytes that this rank brings to communication", sum(size for _, size in seen["sent"]),
        Between(0, (2 * most + 1) * SIZE),
        "two numbers per choice are enough, its expert and its weight, and one for how many there are, in one gather or "
        "broadcast to all: tensors, padded to the largest number of choices of a rank. Objects that are pickled take more",
        told=f"at most {(2 * most + 1) * SIZE}",
    )  # fmt: skip


def otherwise(case):
    """No cause is known: what is special in this case."""
    words = {
        "few values": "many weights are equal here: the earlier token of the whole batch comes first",
        "equal": "all weights are equal, so the first tokens of the batch are kept, those of rank 0 first",
        "zeros": "a weight of 0 is a choice like others, and padding is none: does padding take room, or come before it?",
        "near": "these weights are neighbours in float64: compare them as they are. What rounds them, such as float32 or "
        "one number made of expert and weight, makes some of them equal",
        "large": "weights may be larger than 1, and than the number of an expert",
    }
    if case["capacity"] == 0:
        return "with a capacity of 0, nothing is kept"
    if (kind := case["weights"].partition(" 0")[0]) in words:
        return words[kind]
    return (
        "each expert keeps the choices with the largest weights of the whole batch, as many as its capacity; the result is "
        "bool (tokens, k), for this rank's tokens in their order"
    )
