"""What question 3 claims of a rank's weights, and what it sends for them."""

import torch

from ddp_course.checks.claims import Claim, OneOf, agree
from ddp_course.checks.ex19.batch_cases import described, places_of
from ddp_course.checks.ex19.batch_claims import whole

BARRIER = "leave out the barrier: an all-reduce waits for all ranks, and nothing else is called"
DIGITS = "some digits are lost: is a part computed in float32, or an epsilon added?"


def claims_of_weights(case, rank, of_ranks):
    """They depend on the targets of all ranks, so these come first."""
    seen, words = of_ranks[rank], described(case)
    own = [(whole(case, other // case["context"]), places_of(case, other)) for other in range(case["n"])]
    counted = [one["counts"][places].sum().item() for one, places in own]
    text, places = own[rank]
    expected = text["counts"][places].double() * case["n"] / max(1, sum(counted))
    weights, otherwise = seen["got"][4], expectation(case, sum(counted))
    causes = explaining([of_weights(case, other, own, counted) for other in range(case["n"])], of_ranks)[rank]
    yield Claim(
        f"{words}: the shape of the weights", list(weights.shape), [len(places)], "return one weight per own token",
        told=f"({len(places)},)", shown=tuple(weights.shape),
    )  # fmt: skip
    yield Claim(f"{words}: the dtype of the weights", str(weights.dtype), "torch.float64", "weights are float64")
    yield Claim(f"{words}: the weights", weights, expected, otherwise, causes, digits=12, scale=1e-3)
    yield Claim(
        f"{words}: what is called", seen["names"], OneOf([["allreduce"], []]), BARRIER if "barrier" in seen["names"] else
        "all ranks add up one number with one all-reduce, and nothing else travels", told="one all-reduce at most",
        shown=", ".join(seen["names"]),
    )  # fmt: skip
    yield Claim(
        f"{words}: bytes of the all-reduce", seen["bytes"], range(0, 9), "one number is enough: how many own targets count",
        told="at most 8",
    )  # fmt: skip
    yield Claim(
        f"{words}: all-reduces without a wait()", seen["forgotten"], 0, "async_op=True only starts it: wait for the work",
    )  # fmt: skip


def expectation(case, total):
    if not total:
        return "no token counts, so all weights are 0: do not divide by 0"
    if case["kind"] == "long":
        return (
            f"is the number of all counted tokens, {total}, exact on its way? A dtype of 8 or 16 bits may not hold it"
        )
    return "a counted token weighs (number of all ranks) / (number of counted tokens on all ranks), any other one 0"


def explaining(mistakes, of_ranks):
    """Of the mistakes of each rank, those that explain what all ranks got."""
    fits = [
        all(agree(seen["got"][4], value, 5, 1e-3) for (value, _), seen in zip(those, of_ranks))
        for those in zip(*mistakes)
    ]
    return [[mistake for mistake, fit in zip(of_rank, fits) if fit] for of_rank in mistakes]


def of_weights(case, rank, own, counted):
    text, places = own[rank]
    counts, n, context = text["counts"][places].double(), case["n"], case["context"]
    total, mine = max(1, sum(counted)), max(1, counted[rank])
    first = rank // context * context
    of_text = max(1, sum(counted[first : first + context]))
    tokens = sum(len(places) for _, places in own)
    means = (
        "this is a mean of means: ranks count different numbers of tokens, so all ranks have to add up their numbers"
    )
    divided = "DDP divides by the number of ranks: multiply the weights by it"
    texts = (
        "the texts count different numbers of tokens: add up the numbers of all ranks, not of those that share a text"
    )
    ignored = "divide by the number of tokens that count, and not by the number of all tokens"
    alone = [  # one text: two mistakes give the same
        (counts / total, f"{divided}. Or has each rank counted the whole text? Count the own targets only"),
    ]  # fmt: skip
    several = [
        (counts * n / of_text, texts), (counts * context / of_text, texts), (counts / of_text, texts),
        (counts / total, divided), (counts * context / total, "the mean is over all ranks of the world: multiply by their "
         "number, not by that of the ranks that share a text"),
        (counts * n / total / context, "each rank has counted the whole text: count the own targets only, or divide"),
        (counts / total / context, f"each rank has counted the whole text; and {divided}"),
    ]  # fmt: skip
    found = [
        (counts / mine, means), (counts * n / mine, means), *(alone if n == context else several),
        (counts * n / tokens, ignored), (counts / tokens, ignored), (counts / len(places), ignored),
        (counts / len(text["tokens"]), ignored), (counts, "the sum of all losses has to be divided by the counted tokens"),
        (torch.full_like(counts, n / total), "the weight of a token whose target is -100 is 0"),
        (torch.full_like(counts, 1 / total), f"the weight of a token whose target is -100 is 0; and {divided}"),
    ]  # fmt: skip
    zero = [(one["counts"] & (one["following"] != 0))[places] for one, places in own]
    without = sum(some.sum().item() for some in zero)
    found.append((zero[rank].double() * n / max(1, without), "the token 0 is a token like any other: it counts, too"))
    return [(counts * n / total, DIGITS), *found]
