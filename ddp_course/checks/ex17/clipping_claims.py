"""What question 5 claims of the norm and the gradients on a rank."""

import torch

from ddp_course.checks.claims import Claim
from ddp_course.checks.ex17.clipping_cases import described, norm_of, pieces
from ddp_course.checks.ex17.meshes import barrier_or

SIZE = 8  # bytes of the number that travels, at most


def claims(case, rank, of_ranks):
    seen, words, n, norm = of_ranks[rank], described(case), len(of_ranks), norm_of(case, len(of_ranks))
    mistakes = [
        (norm_of(case, n, ranks=[rank], weight=lambda replicas: 1), "this is the norm of this rank's gradients only"),
        (norm_of(case, n, lambda replicas: 1), "a gradient that several ranks have is counted by each of them"),
        (norm_of(case, n, lambda replicas: replicas == 1), "only what one rank alone has is counted: replicas count once"),
        (norm_of(case, n, lambda replicas: replicas < n), "what all ranks have is missing: count it once"),
        (norm_of(case, n, lambda replicas: 1 / replicas**2), "divide the square by replicas, and not the gradient"),
        (norm_of(case, n, lambda replicas: 1 / n), "this is a mean over the ranks: what only one rank has counts in full"),
        (norm**2, "this is the square of the norm: take the root"),
        (min(norm, case["max_norm"]), "return the norm before clipping"),
    ]  # fmt: skip
    asked = "the norm over all gradients of all ranks, each once: the root of the sum of all squares"
    got = seen["norm"]
    if not isinstance(got, torch.Tensor):
        asked = "return the norm, a float or a tensor with one number"
    as_tensor = [(torch.tensor(value, dtype=torch.float64), cause) for value, cause in mistakes]
    yield Claim(f"{words}: the norm", got, torch.tensor(norm, dtype=torch.float64), asked, as_tensor, digits=6)
    factor = min(1.0, case["max_norm"] / norm)
    expected = [pair for pair in pieces(case, rank) if not (case["without"] and pair[0] is None)]
    for number, (got, (gradient, replicas)) in enumerate(zip(seen["gradients"], expected)):
        name = f"{words}: gradient {number}, on {replicas} rank{'s' * (replicas > 1)}"
        if gradient is None:
            yield Claim(name, got, None, "a frozen parameter has no gradient: leave it without one (None)")
            continue
        causes = [
            (gradient, "the gradient is not clipped: multiply it by max_norm / norm, in place"),
            (gradient * case["max_norm"] / norm, "the norm is below max_norm: leave gradients as they are (clamp(max=1))"),
            (factor * gradient / replicas, "each replica keeps its whole gradient: divide the square only"),
            (factor**2 * gradient, "clipped twice"),
        ]  # fmt: skip
        asked = "multiply each gradient by min(1, max_norm / norm), with the same norm on all ranks"
        yield Claim(name, got, factor * gradient, asked, causes, digits=5)
        for r, other in enumerate(of_ranks):
            if replicas > 1 and is_copy(case, number, rank, r) and not case["without"]:
                yield Claim(
                    f"{name}, here and on rank {r}, bit for bit", bits(other["gradients"][number]) == bits(got), True,
                    "replicas must stay the same in all bits: use the norm from the all-reduce on all ranks",
                )  # fmt: skip
    yield Claim(f"{words}: parameters", seen["moved"], False, "change only parameter.grad", shown="changed")
    yield Claim(f"{words}: collectives", seen["names"], ["allreduce"],
                barrier_or(seen["names"], "one all-reduce of one number is enough, over all ranks, on each rank just once"),
                told="one all-reduce", shown=", ".join(seen["names"]) or "none")  # fmt: skip
    yield Claim(f"{words}: bytes in the all-reduce", seen["bytes"] <= SIZE, True,
                "send one number: the sum of the squares", told=f"{SIZE}", shown=f"{seen['bytes']}")  # fmt: skip


def is_copy(case, number, rank, other):
    same = pieces(case, rank)[number][0], pieces(case, other)[number][0]
    return same[0] is not None and same[0].shape == same[1].shape and torch.equal(*same)


def bits(gradient):
    return None if gradient is None else gradient.tolist()
