"""What question 3 claims of the copies of a tied matrix on a rank."""

import torch

from ddp_course.checks.claims import Between, Claim
from ddp_course.checks.ex18.tied_cases import described, own_gradients, shape_of

SIZE = 8  # bytes of a number in float64


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
            yield Claim(
                f"{call}: whether all copies have the same bits", same_bits(got, first), True,
                "the copies were added up in another order on another rank, so they drift apart: let all ranks get the "
                "result of one all-reduce",
            )  # fmt: skip
        yield Claim(f"{call}: what is sent in square()", seen["later"], 0, "square() has to send nothing")
        whole = shape_of(case)[0] * shape_of(case)[1] * SIZE
        most = whole if len(ranks) > 1 and rank in ranks else 0
        yield Claim(
            f"{call}: bytes that this rank gives to communication", seen["bytes"], Between(0, most),
            "one rank has all copies: nothing has to be sent" if len(ranks) == 1 else
            "this rank has no copy: nothing has to be sent from it" if not most else
            "the sum over the stages and the mean over the replicas need one all-reduce, of one matrix: one group of all "
            "ranks with copies, and a division at the end",
            [(3 * whole, "a rank with two copies adds them up first, and sends the sum")], told=f"at most {most}",
            shown=f"{seen['bytes']} in {', '.join(seen['names'])[:60]}",
        )  # fmt: skip
        yield Claim(
            f"{call}: process groups made in sum_gradients()", seen["groups"], 0,
            "make the group once, in __init__: a new one for each update costs time and is never freed",
        )  # fmt: skip
        yield from squares(call, expected, case, rank, [seen[step]["square"] for seen in of_ranks])


def same_bits(got, other):
    return isinstance(got, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(got, other)


def squares(call, expected, case, rank, of_ranks):
    square, copies = expected.pow(2).sum().item(), 2 * len(case["ends"])
    yield Claim(
        f"{call}: square()", isinstance(of_ranks[rank], float), True, "return a number on each rank: 0 where no copy is",
        shown=of_ranks[rank],
    )  # fmt: skip
    if rank > 0:
        return  # the gradients of all ranks come before the sum of their squares
    members = len({rank for pair in case["ends"] for rank in pair})
    often = "each rank counts the whole square: the parts of all ranks together have to give it once"
    yield Claim(
        f"{call}: the sum of square() over all ranks", sum(of_ranks), square,
        "the parts of all ranks have to add up to the square of the whole gradient, once, after sum_gradients()",
        [(members * square, often), (copies * square, often), (len(case["ends"]) * square, "each replica counts it: divide "
          "by the number of all ranks that have a copy"), (square**0.5, "this is the norm: return the square")],
    )  # fmt: skip


def mistakes(case, rank, name, own, step):
    total, replicas = sum(own.values()), len(case["ends"])
    pairs = [pair for pair in case["ends"] if rank in pair]
    of_pair = sum(own[end] for end in own if end[0] in pairs[0])
    here = sum(value for end, value in own.items() if end[0] == rank)
    alike = sum(value for end, value in own.items() if end[1] == name) / replicas
    # one rank with both stages in one parameter has counted it before
    twice = sum(value * sum(other[0] == end[0] for other in own) for end, value in own.items())
    last = own_gradients(case, 0)
    found = [
        (total / replicas, "some digits are lost: keep the dtype of the gradients, float64 here"),
        (own[rank, name], "this is still what backward left"),
        (of_pair, "this is the sum over the stages of one replica: the mean over the replicas is missing"),
        (here, "this is what the rank's own stages give: what other ranks have is missing"),
        (total, "the replicas are added up: their gradients are averaged"),
        (total / replicas / 2, "this is a mean over the stages: their gradients are added up, since one process uses the "
         "matrix twice"),
        (alike, "this is a mean over the replicas: the sum over the stages is missing"),
        (twice / replicas, "a rank with both stages has one parameter here, whose gradient is already the sum of both uses: "
         "it must count once"),
        (twice, "a rank with both stages has one parameter here, whose gradient must count once; and replicas are averaged"),
        (0 * total, "this gradient is lost"),
    ]  # fmt: skip
    if step:
        found.append((sum(last.values()) / replicas, "this is the gradient of the update before: parameter.grad is another "
                      "tensor after zero_grad(), so read it anew each time"))  # fmt: skip
    return found
