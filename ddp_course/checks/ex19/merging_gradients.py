"""What question 1 claims of the gradients of merged blocks."""

import torch

from ddp_course.checks.claims import Claim
from ddp_course.checks.ex19.merging_cases import gradients_that_come
from ddp_course.checks.ex19.merging_mistakes import digits_lost

HIDDEN = (
    "the output is right, but its gradient is not finite: torch.where and masked_fill hide a NaN or inf in forward only, in "
    "backward it comes back as 0 * inf. Replace -inf and 0 before you subtract, divide, or take a logarithm"
)
NAN_OUTPUT = (
    "the output of a row without keys may be NaN, and 0 * NaN is NaN: replace it before you multiply by its weight"
)
FLOW = "gradients have to flow through all that you compute: use no detach(), .data, .item() or no_grad() on the way"
ZERO = (
    "where a row sees no key of a block, the gradients of that block are 0. Here some gradient gets there: a where or "
    "masked_fill passes it on, or such a row has a weight that is not 0"
)
OTHER = (
    "what is merged is right in forward, but not in backward. An output's gradient is its weight times that of the merged "
    "output. A logsumexp changes the weights of all blocks of its row, and the merged logsumexp"
)


def of_gradients(words, digits, case, got, blocks, weights, right):
    """blocks: (outputs, logsumexps), with 0 for the outputs that are not seen."""
    outputs, logsumexps = blocks
    of_output, of_logsumexp = (part.double() for part in gradients_that_come(case))
    own = weights * (outputs * of_output).sum(-1, keepdim=True)
    from_output = own - weights * (right * of_output).sum(-1, keepdim=True)
    from_logsumexp = weights * of_logsumexp
    expected = [weights * of_output, from_output + from_logsumexp]
    divided = (
        "the sum of the weights, by which the output is divided, depends on the logsumexps as well: its part is missing. Is "
        "it detached, or forgotten in a backward of your own?"
    )
    mistakes = [
        [],
        [
            (from_logsumexp, f"the output's part is missing, since the weights depend on the logsumexps: {FLOW}"),
            (from_output, f"the merged logsumexp's part is missing: {FLOW}"),
            (own + from_logsumexp, divided), (own, f"the merged logsumexp's part is missing; and {divided}"),
        ],
    ]  # fmt: skip
    for name, one, value, more in zip(("outputs", "logsumexps"), got, expected, mistakes):
        one = 0 * value if one is None and case["empty"] == "all" else one  # a constant has no gradient
        otherwise = OTHER
        if isinstance(one, torch.Tensor):
            one = one.double()
            empty = logsumexps == -torch.inf
            more = [*more, (value, digits_lost(one, case["dtype"])), (torch.where(empty, one, value), ZERO)]
            if not one.isfinite().all():
                otherwise = f"{HIDDEN}. And {NAN_OUTPUT}" if case["nan"] else HIDDEN
        yield Claim(
            f"{words}: the gradient of the blocks' {name}", one, value, otherwise,
            [*more, (0 * value, FLOW), (None, FLOW)], digits, scale=1.0, told=None if one is not None else "a gradient",
        )  # fmt: skip
