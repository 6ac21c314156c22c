"""What question 2 claims of the gradients on a rank, and of what was sent."""

from ddp_course.checks.claims import Between, Claim, OneOf, agree
from ddp_course.checks.ex17.gradient_cases import cut, described
from ddp_course.checks.ex17.gradient_causes import in_part, otherwise_of, reason
from ddp_course.checks.ex17.meshes import barrier_or

SIZE = 8  # bytes of a number in float64

NOT_WRITTEN = (
    "an all-reduce was seen, and no gradient has changed: the sum is not written back. flatten and cat may make copies, so "
    "copy the parts of the sum to the gradients"
)


def not_written(seen):
    """Whether something was summed, and all gradients are what they were."""
    same = (agree(seen["after"][name], own, digits=15) for name, own in seen["before"].items() if own is not None)
    return any(name.startswith("allreduce") for name in seen["names"]) and all(same)


def claims(case, wanted, rank, of_ranks):
    seen, words, needed = of_ranks[rank], described(case), 0
    [(number, ranks)] = [(i, ranks) for i, ranks in enumerate(case["groups"]) if rank in ranks]
    n, place = len(ranks), ranks.index(rank)
    yield Claim(f"{words}: parameters that the function changes", seen["moved"], [], "change only parameter.grad")
    yield Claim(
        f"{words}: all-reduces without a wait()", seen["forgotten"], 0, "async_op=True only starts it: wait for the work",
    )  # fmt: skip
    for name, whole in wanted[number].items():
        own, got = seen["before"][name], seen["after"][name]
        if whole is None:
            yield Claim(
                f"{words}: the gradient of {name}, which is frozen", got, None, "leave it without a gradient (None)"
            )
            continue
        expected, partly = cut(name, whole, place, n), name.endswith(tuple(in_part()))
        needed += partly * whole.numel() * SIZE
        total = sum(of_ranks[r]["before"][name] for r in ranks)
        everybody = sum(seen["before"][name] for seen in of_ranks)
        mistakes = [
            (expected, "some digits are lost: keep the dtype of the gradients, float64 here"),
            (own if partly and not_written(seen) else None, NOT_WRITTEN),
            (own, f"this is still what backward left: {reason(name)}"),
            (total / n, "this is a mean: each rank has a part of the sum, so add them up and do not divide"
             if partly else reason(name)),
            (total * n, f"this was added up twice, or is shared and was taken once for each block: {reason(name)}"),
            (total, reason(name)),
            (total * n ** (case["blocks"] - 1), "a shared parameter is in several blocks: add its gradient up once"),
            (everybody, "this is a sum over all ranks: add up inside the group, with group=group"),
        ]  # fmt: skip
        yield Claim(f"{words}: the gradient of {name}", got, expected, otherwise_of(got, name), mistakes, scale=1e-3)
    few = OneOf([["allreduce"], ["allreduce_coalesced"]] if needed else [[]])
    yield Claim(
        f"{words}: collectives", seen["names"], few,
        barrier_or(seen["names"], "put the gradients that need a sum into one flat tensor, and all-reduce that once"
                   if needed else "nothing needs a sum here, so nothing has to be sent"),
        told="one all-reduce" if needed else "none", shown=f"{len(seen['names'])}: {', '.join(seen['names'])[:60]}",
    )  # fmt: skip
    yield Claim(
        f"{words}: bytes in the all-reduce", seen["bytes"], Between(0, needed),
        "more is sent than what needs a sum: each such number once, in the gradients' dtype, and nothing else",
        told=f"at most {needed}",
    )  # fmt: skip
