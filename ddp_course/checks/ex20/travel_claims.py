"""What question 2 claims of tokens that travel, and what likely mistakes give."""

import torch

from ddp_course.checks.claims import Between, Claim, OneOf, agree
from ddp_course.checks.ex20.explained import explaining
from ddp_course.checks.ex20.travel_cases import (
    arriving,
    described,
    expert,
    group_and_place,
    order_of,
    owned,
    tokens_of,
    width_of,
)

SIZE = 8  # bytes of a number in float64 and int64
COUNTS = ("alltoall", "allgather", "allgather_into_tensor_coalesced", "allgather_coalesced")


def results_of(case, rank, of_rows=lambda x, weights: x[:, None]):
    """float (tokens, k, width): of each choice, without its weight."""
    x, chosen, weights = tokens_of(case, rank)
    rows = of_rows(x, weights).expand(*chosen.shape, width_of(case))
    return expert(chosen[..., None], rows)


def right(case, rank):
    return (results_of(case, rank) * tokens_of(case, rank)[2][..., None]).sum(1)


def weighted(change):
    """The result with other weights."""
    return lambda case, rank: (results_of(case, rank) * change(tokens_of(case, rank)[2])[..., None]).sum(1)


def in_order(weights_sorted, tokens_sorted):
    """The result where weights, or tokens, are taken for sorted ones and are not."""

    def mistake(case, rank):
        x, _, weights = tokens_of(case, rank)
        order = torch.tensor(order_of(case, rank), dtype=torch.int64)
        plain = torch.arange(len(order))
        rows = results_of(case, rank).flatten(0, 1)[order] * weights.flatten()[plain if weights_sorted else order, None]
        return torch.zeros_like(x).index_add(0, (plain if tokens_sorted else order) // case["k"], rows)

    return mistake


def permuted_again(case, rank):
    order = torch.tensor(order_of(case, rank), dtype=torch.int64)
    weights = tokens_of(case, rank)[2]
    home = results_of(case, rank).flatten(0, 1)[order][order]
    return (home.view(*weights.shape, width_of(case)) * weights[..., None]).sum(1)


def sent_home(wrongly):
    """The result where the experts' results leave in another order: wrongly(results, order
    by which the rows were sorted by expert).
    """

    def mistake(case, rank):
        ranks, place = group_and_place(case, rank)
        home = []
        for number in range(len(ranks)):
            parts = arriving(case, ranks[number])
            rows = [expert(mine, part[mine]) for part in parts for mine in part]  # sorted by source rank, by expert
            numbers = [torch.full((len(part[mine]),), mine) for part in parts for mine in part]
            rows = torch.cat([torch.empty(0, width_of(case), dtype=torch.float64), *rows])
            order = torch.cat([torch.empty(0, dtype=torch.int64), *numbers]).argsort(stable=True)
            sizes = [sum(map(len, part.values())) for part in parts]
            home.append(wrongly(rows[order], order).split(sizes)[place])
        x, _, weights = tokens_of(case, rank)
        order = torch.tensor(order_of(case, rank), dtype=torch.int64)
        return torch.zeros_like(x).index_add(0, order // case["k"], torch.cat(home) * weights.flatten()[order, None])

    return mistake


def one_choice(which):
    return lambda case, rank: results_of(case, rank)[:, which] * tokens_of(case, rank)[2][:, which, None]


def last_written(case, rank):
    """What `out[token] = ...` leaves, in the order of the sorted choices."""
    x, _, weights = tokens_of(case, rank)
    rows, found = results_of(case, rank).flatten(0, 1) * weights.flatten()[:, None], torch.zeros_like(x)
    for choice in order_of(case, rank):
        found[choice // case["k"]] = rows[choice]
    return found


MISTAKES = {
    "the weights are missing: multiply each result by the weight of its choice": weighted(torch.ones_like),
    "this is the plain mean of the results: multiply each by the weight of its choice, and add them up": weighted(
        lambda weights: torch.full_like(weights, 1 / weights.shape[1])
    ),
    "the weights are divided by their sum: take them as they are": weighted(
        lambda weights: weights / weights.sum(1, keepdim=True)
    ),
    "the sum is divided by the number of experts per token: add up the weighted results": weighted(
        lambda weights: weights / weights.shape[1]
    ),
    "the weights are applied twice": weighted(torch.square),
    "the weights lose their sign: take them as they are, also where they are below 0": weighted(torch.abs),
    "the results come home in the sorted order, and the weights are still in the order of the tokens: weights.flatten()"
    "[order]": in_order(True, False),
    "the results come home in the sorted order: number i belongs to token order[i] // k, and not to i // k": in_order(
        False, True
    ),
    "the results come home in the sorted order: neither the tokens nor the weights are in it yet": in_order(True, True),
    "the results were sorted once more instead of back: use the inverse, out[order] = results": permuted_again,
    "only the first choice of each token counts here: add up all of them": one_choice(0),
    "only the last choice of each token counts here: add up all of them": one_choice(-1),
    "out[token] = ... keeps one of the results of a token, and += with an index does, too: use index_add": last_written,
    "the results leave for home sorted by expert: undo this sorting first, back[by_expert] = results": sent_home(
        lambda results, order: results
    ),
    "the results were sorted once more before the way home: use the inverse, back[by_expert] = results": sent_home(
        lambda results, order: results[order]
    ),
    "a softmax was taken of the weights: take them as they are": weighted(lambda weights: weights.softmax(1)),
    "the weight of a token's first choice is used for all its choices: each has its own": weighted(
        lambda weights: weights[:, :1].expand_as(weights)
    ),
    "the result is right to a few digits only: keep weights and results in float64": weighted(
        lambda weights: weights.float().double()
    ),
    "x is added: return the experts' part only": lambda case, rank: right(case, rank) + tokens_of(case, rank)[0],
    "these are zeros: nothing came home": lambda case, rank: 0 * right(case, rank),
}


def causes_of(cases, seen):
    """The mistakes that explain all results: a list of causes."""
    return explaining(MISTAKES, cases, seen, right)


def claims_of_the_way(case, rank, of_ranks):
    """What comes before the result: on all ranks, as one rank's result needs the others."""
    seen, words = of_ranks[rank], described(case)
    yield Claim(
        f"{words}: what the function changes", seen["changed"], [], "leave the arguments as they are: copy first"
    )
    yield Claim(
        f"{words}: communication outside of the group", seen["outside"], [], "pass group=group to every collective",
    )  # fmt: skip
    yield Claim(
        f"{words}: calls of compute", len(seen["calls"]), 1, "call compute once on each rank, also without rows",
    )  # fmt: skip
    yield from of_experts(case, words, rank, seen["calls"][0])


def claims_of_results(case, causes, rank, of_ranks):
    seen, words = of_ranks[rank], described(case)
    expected = right(case, rank)
    yield Claim(
        f"{words}: the dtype of the result", seen["dtype"], "torch.float64", "return a tensor like x, in float64"
    )
    yield Claim(
        f"{words}: the result", seen["got"], expected,
        "each expert got its rows, so the mistake comes after compute: in the order in which the results go home, in which "
        "token each belongs to, or in the weights",
        [(seen["got"], cause) for cause in causes],
    )  # fmt: skip
    yield from traffic(case, words, rank, seen["sent"])


def of_experts(case, words, rank, call):
    """Claims of the rows that the experts of this rank got."""
    ranks, place = group_and_place(case, rank)
    parts, numbers = arriving(case, rank), owned(case, place)
    counts = [sum(len(part[number]) for part in parts) for number in numbers]
    own = [len(parts[place][number]) for number in numbers]
    by_rank = [sum(map(len, part.values())) for part in parts]
    every = [sum((tokens_of(case, r)[1] == number).sum().item() for r in ranks) for number in range(len(case["owner"]))]
    yield Claim(
        f"{words}: what compute gets as counts", call["kind"], "list of int",
        "counts is a list of ints: tensor.tolist() makes one", told="a list of int", shown=f"a {call['kind']}",
    )  # fmt: skip
    n, total = len(ranks), len(case["owner"])
    in_order = [every[number] for number in range(total) if number * n // total == place]
    yield Claim(
        f"{words}: the counts for compute, of experts {numbers}", call["counts"], counts,
        "how many rows arrive for each expert of this rank, in ascending order, from all ranks together",
        [(own, "these are only the rank's own rows: rows come from the other ranks, too"),
         (by_rank, "this is how many rows come from each rank: compute needs how many there are for each expert"),
         (every, "these are the counts of all experts: compute needs those of this rank's experts"),
         (counts[::-1], "the experts of a rank come in ascending order"),
         (in_order, "these are the counts for experts that are spread evenly, in order: `owner` says where they are")],
    )  # fmt: skip
    yield Claim(
        f"{words}: how many rows compute gets", list(call["rows"].shape), [sum(counts), width_of(case)],
        "each choice travels to its expert, once: the rows for compute are all that arrive",
    )  # fmt: skip
    rows, got = call["rows"], list(call["rows"].split(counts)) if counts else []
    expected = [torch.cat([part[number] for part in parts]) for number in numbers]
    scaled = [torch.cat([part[number] for part in arriving(case, rank, weighted=True)]) for number in numbers]
    cause = of_rows(rows, parts, expected)
    for number, mine, right_rows, by_weight in zip(numbers, got, expected, scaled):
        yield Claim(
            f"{words}: the rows of expert {number}, sorted", sorted_rows(mine), sorted_rows(right_rows),
            "rows of other experts have arrived, or rows of other tokens: sort the choices by the rank of their expert, "
            "owner[expert], and among these by expert. Expert numbers alone are not in the order of the ranks. And choice c "
            "is of token c // k",
            [(sorted_rows(right_rows), "these rows are right to a few digits only: send them in float64, like x"),
             (sorted_rows(by_weight), "these rows have been multiplied by their weights: experts get tokens as they are, "
              "and the weights are for the results"),
             (sorted_rows(mine) if cause else None, cause)],
        )  # fmt: skip


def of_rows(rows, parts, expected):
    """The cause of the right rows in a wrong order, or None."""
    if not expected or not same_rows(rows, torch.cat(expected)):
        return None
    arrived = [part[number] for part in parts for number in part]
    if all(map(same_rows, rows.split([len(part) for part in arrived]), arrived)):
        return (
            "the right rows have arrived, but are not sorted by expert: they come sorted by their source rank, and only "
            "from each rank by expert"
        )
    backwards = expected[::-1]
    enough = min(map(len, expected)) > 1  # with fewer rows, this may be by chance
    if enough and all(map(same_rows, rows.split([len(part) for part in backwards]), backwards)):
        return "the experts of a rank come in ascending order of their numbers, and here they come in descending order"
    return "the right rows have arrived, but are not sorted by expert: what compute gets has to be"


def same_rows(rows, others):
    return agree(sorted_rows(rows), sorted_rows(others))


def sorted_rows(rows):
    return rows[rows[:, 0].argsort()]


def traffic(case, words, rank, sent):
    ranks, place = group_and_place(case, rank)
    names, sizes = [name for name, _ in sent], [size for _, size in sent]
    yield Claim(
        f"{words}: collectives", names, OneOf([[first, "alltoall", "alltoall"] for first in COUNTS]),
        "one exchange of counts, one all-to-all there, and one back, on each rank, also without tokens. A barrier would be "
        "one more",
        told="counts, all-to-all, all-to-all", shown=", ".join(names)[:80] or "none",
    )  # fmt: skip
    choices = case["tokens"][rank] * case["k"]
    arrived = sum(len(rows) for part in arriving(case, rank) for rows in part.values())
    most = [len(case["owner"]) * len(ranks) * SIZE, choices * width_of(case) * SIZE, arrived * width_of(case) * SIZE]
    for what, size, limit in zip(("for the counts", "on the way there", "on the way back"), sizes, most):
        yield Claim(
            f"{words}: bytes that this rank brings {what}", size, Between(0, limit),
            "one row per choice there and one back, and for the counts at most one number per expert and rank",
            [(size if size > 0 and size * width_of(case) == limit * (width_of(case) + 1) and "way" in what else None,
              "each row has one more number: the weights stay at home, and are for the results that come back")],
            told=f"at most {limit}",
        )  # fmt: skip
