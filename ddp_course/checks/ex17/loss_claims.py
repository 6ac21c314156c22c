"""What question 1 claims of a loss on a rank."""

from functools import partial

from torch.nn import functional as F

from ddp_course.checks.claims import Between, Claim
from ddp_course.checks.ex17.loss_cases import IGNORED, columns, described, made, second
from ddp_course.checks.ex17.loss_causes import causes_of_gradient, causes_of_loss
from ddp_course.checks.ex17.meshes import barrier_or

SIZE = 8  # bytes of a number in float64
ROOM = 8  # bytes, for one number, such as a count


def in_one_process(case, logits, targets):
    """The loss, and the gradient of the whole logits."""
    logits = logits.clone().requires_grad_()
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum") / max(1, (targets >= 0).sum())
    (case["factor"] * loss).backward()
    return loss.detach(), logits.grad


def claims(case, rank, of_ranks):
    seen, words = of_ranks[rank], described(case)
    [(number, place)] = [(i, ranks.index(rank)) for i, ranks in enumerate(case["groups"]) if rank in ranks]
    (logits, targets), other = made(case, number), partial(second, case, number)
    loss, gradient = in_one_process(case, logits, targets)
    causes = partial(causes_of_loss, case, logits, targets, columns(case, place))
    yield Claim(f"{words}: the loss", seen["value"], loss, *causes(seen["value"]), scale=1.0)
    causes = partial(causes_of_gradient, case, logits, targets, columns(case, place), other)
    expected = gradient[:, columns(case, place)]
    scale = 1e-3  # of all -100, the gradient is 0
    yield Claim(
        f"{words}, (loss * {case['factor']:g}).backward(): the gradient", seen["gradient"], expected,
        *causes(seen["gradient"]), scale=scale, told=None if seen["gradient"] is not None else "a gradient",
    )  # fmt: skip
    yield Claim(
        f"{words}: what the function changes", seen["changed"], [], "leave logits and targets as they are: copy first",
    )  # fmt: skip
    yield Claim(
        f"{words}: what backward changes", seen["changed_in_backward"], [],
        "leave logits and targets as they are, also in backward: detach() and .data are no copies",
    )  # fmt: skip
    if case["same"]:
        expected = in_one_process(case, *other())[1][:, columns(case, place)]
        yield Claim(
            f"{words}, two losses with the same {case['same']} before the first backward: the gradient of the second",
            seen["second"], expected,
            "each loss keeps its own numbers for backward: in ctx, and not in what the two share", scale=scale,
        )  # fmt: skip
    yield Claim(
        f"{words}: communication outside the group", seen["outside"], [],
        "all communication is inside the given group: each collective needs group=group, a barrier, too",
        told="none", shown=", ".join(seen["outside"]),
    )  # fmt: skip
    most = 3 * case["tokens"] * SIZE
    yield Claim(
        f"{words}: bytes that a rank gives to collectives in forward", seen["forward"], Between(0, most + ROOM),
        "three numbers per token are enough: the largest logit, the sum of the exponentials, the chosen logit",
        [(Between(SIZE * case["tokens"] * sum(case["widths"]) // len(case["widths"]), 10**9),
          "whole columns of the logits travel: send numbers per token only, never the logits")],
        told=f"at most {most}", shown=f"{seen['forward']}, by {', '.join(seen['names'])}",
    )  # fmt: skip
    yield Claim(
        f"{words}: collectives in backward", seen["backward"], [],
        barrier_or(seen["backward"], "nothing has to travel in backward: keep in forward what the softmax of the own "
                   "columns needs"),
        told="none", shown=", ".join(seen["backward"]),
    )  # fmt: skip
