"""What question 3 claims of the copies of a tied matrix on a rank."""

import torch

from ddp_course.checks.claims import Between, Claim, agree
from ddp_course.checks.ex18.tied_cases import described, own_gradients, shape_of
from ddp_course.checks.ex18.tied_mistakes import mistakes

SIZE = 8  # bytes of a number in float64
DIGITS = 6  # of the square, which may be a number in 32 bits


def claims(case, rank, of_ranks):
    replicas, ranks = len(case["ends"]), sorted({rank for pair in case["ends"] for rank in pair})
    for step, words in enumerate(("", ", in the second update")):
        seen, call = of_ranks[rank][step], described(case) + words
        own = own_gradients(case, step)
        expected = sum(own.values()) / replicas
        yield Claim(
            f"{call}: calls of dist.new_group", seen["calls"], max(of[step]["calls"] for of in of_ranks),
            "all ranks of the job have to call new_group, in the same order, also those that are not in the group: torch "
            "names groups by counting them, and later ones would not match",
        )  # fmt: skip
        yield Claim(f"{call}: the parameters", seen["moved"], False, "change only the gradients", shown="changed")
        yield Claim(
            f"{call}: all-reduces without a wait()", seen["forgotten"], 0, "async_op=True only starts it: wait for the work",
        )  # fmt: skip
        for name, got in seen["gradients"].items():
            yield Claim(
                f"{call}: the gradient of the {name}", got, expected,
                "did each copy count once, in a sum over the stages and a mean over the replicas, and get the result?",
                lambda name=name, own=own, step=step: mistakes(case, rank, name, own, step), scale=0.1,
            )  # fmt: skip
            first = next(iter(of_ranks[ranks[0]][step]["gradients"].values()))
            if agree(first, expected, scale=0.1):  # or else it is told of that rank
                yield Claim(
                    f"{call}: whether all copies have the same bits", same_bits(got, first), True,
                    "the copies were added up in another order on another rank, so they drift apart: let all ranks get the "
                    "result of one all-reduce",
                )  # fmt: skip
        yield Claim(
            f"{call}: whether the two gradients share their memory", seen["shared"], False,
            "both parameters have one gradient tensor: what scales gradients in place, as clipping does, then scales it "
            "twice. Give each parameter a tensor of its own: .clone() or .copy_()",
        )  # fmt: skip
        yield Claim(
            f"{call}: the gradients after square()", seen["squared"], False,
            "square() must not change them: methods that end in _, such as square_(), write into their tensor",
            told="as before", shown="changed",
        )  # fmt: skip
        yield Claim(
            f"{call}: operations of this rank in square()", seen["later"], 0,
            "square() has to send nothing, nor to wait for others, as in a barrier",
        )  # fmt: skip
        yield from traffic(case, call, rank, ranks, seen["names"], seen["bytes"])
        yield Claim(
            f"{call}: process groups made in sum_gradients()", seen["groups"], 0,
            "make the group once, in __init__: a new one for each update costs time and is never freed",
        )  # fmt: skip
        yield from squares(call, expected, case, rank, [seen[step]["square"] for seen in of_ranks])


def same_bits(got, other):
    return isinstance(got, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(got, other)


def traffic(case, call, rank, ranks, names, size):
    """names: of the operations to which this rank has brought something."""
    alone, whole = len(ranks) == 1, shape_of(case)[0] * shape_of(case)[1] * SIZE
    if alone or rank not in ranks:
        yield Claim(
            f"{call}: operations of this rank in sum_gradients()", len(names), 0,
            "one rank has all copies: nothing has to be sent, and nobody has to wait" if alone else
            "this rank has no copy: it has to send nothing, nor to wait for others, as in a barrier",
            shown=f"{len(names)}: {', '.join(names)[:60]}",
        )  # fmt: skip
    yield Claim(
        f"{call}: bytes that this rank brings to communication", size, Between(0, whole),
        "the sum over the stages and the mean over the replicas need one all-reduce, of one matrix: one group of all "
        "ranks with copies, and a division at the end",
        [(3 * whole, "a rank with two copies adds them up first, and sends the sum")], told=f"at most {whole}",
        shown=f"{size} in {', '.join(names)[:60]}",
    )  # fmt: skip


def squares(call, expected, case, rank, of_ranks):
    square, own = expected.pow(2).sum().item(), of_ranks[rank]
    yield Claim(
        f"{call}: square()", isinstance(own, float), True, "return a number on each rank: 0 where no copy is",
        told="a number, or a tensor of one number", shown=own,
    )  # fmt: skip
    if rank > 0:
        return  # the gradients of all ranks come before the sum of their squares
    members = len({rank for pair in case["ends"] for rank in pair})
    often = "this is {} times the square of the whole gradient: the parts of all ranks together have to give it once"
    yield Claim(
        f"{call}: the sum of square() over all ranks", sum(of_ranks), square,
        "the parts of all ranks have to add up to the square of the whole gradient, once, after sum_gradients()",
        [((members * square) ** 0.5, "this is the norm: return the square"),
         *[(times * square, often.format(times)) for times in range(2, 9)]], digits=DIGITS,
    )  # fmt: skip
