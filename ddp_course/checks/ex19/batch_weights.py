"""What question 3 claims of a rank's weights, and what it sends for them."""

import torch

from ddp_course.checks.claims import Claim, OneOf
from ddp_course.checks.ex19.batch_cases import described, places_of
from ddp_course.checks.ex19.batch_claims import whole


def claims_of_weights(case, rank, of_ranks):
    """They depend on the targets of all ranks, so these come first."""
    seen, words = of_ranks[rank], described(case)
    own = [(whole(case, other // case["context"]), places_of(case, other)) for other in range(case["n"])]
    counted = [one["counts"][places].sum().item() for one, places in own]
    text, places = own[rank]
    expected = text["counts"][places].double() * case["n"] / max(1, sum(counted))
    causes, otherwise = of_weights(case, rank, own, counted)
    yield Claim(f"{words}: the weights", seen["got"][4], expected, otherwise, causes, digits=6, scale=1e-3)
    yield Claim(
        f"{words}: what is sent", seen["names"], OneOf([["allreduce"], []]),
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
    right = counts * n / total
    kept = [(value, cause) for value, cause in found if not torch.allclose(value, right)]
    if not sum(counted):
        return kept, "no token counts, so all weights are 0: do not divide by 0"
    return (
        kept,
        "a counted token weighs (number of all ranks) / (number of counted tokens on all ranks), any other one 0",
    )
