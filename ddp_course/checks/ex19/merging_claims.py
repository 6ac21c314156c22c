"""What question 1 claims of merged blocks, and what likely mistakes give."""

import torch

from ddp_course.checks.claims import Claim
from ddp_course.checks.ex19.merging_cases import described, gradients_that_come, made

FORM = "return two tensors, output and logsumexp, with the shapes that they have in a block"
NOT_A_NUMBER = (
    "a row without keys has the logsumexp -inf, and -inf - (-inf) is NaN: put 0 in the place of a largest logsumexp of -inf "
    "before you subtract it"
)
HIDDEN = (
    "the output is right, but its gradient is not finite: torch.where and masked_fill hide a NaN or inf in forward only, in "
    "backward it comes back as 0 * inf. Replace -inf and 0 before you subtract, divide, or take a logarithm"
)
OVERFLOW = (
    "exp of such a logsumexp is inf, or 0, and a clamped one is another number: subtract the largest logsumexp of the row, "
    "over all blocks, before exp"
)
WEIGHTS = "the weight of a block is exp(its logsumexp), divided by the sum over all blocks"
NAN_OUTPUT = (
    "the output of a row without keys may be NaN, and 0 * NaN is NaN: replace it before you multiply by its weight"
)
NO_KEYS = "this row sees no key of any block: its output is 0, and its logsumexp is -inf"


def claims(case, seen):
    words, digits = described(case), digits_of(case)
    blocks = [[part.double() for part in block] for block in made(case)]
    outputs, logsumexps = map(torch.stack, zip(*blocks))
    empty = logsumexps == -torch.inf
    outputs = outputs.masked_fill(empty, 0)
    total = logsumexps.logsumexp(0)
    none = (total == -torch.inf)[..., 0]  # rows without any key
    weights = (logsumexps - total.masked_fill(none[..., None], 0)).exp()
    right = (weights * outputs).sum(0)
    shapes = [list(part.shape) if isinstance(part, torch.Tensor) else str(part)[:40] for part in seen["parts"]]
    yield Claim(f"{words}: the shapes of what is returned", shapes, [list(right.shape), list(total.shape)], FORM)
    yield Claim(f"{words}: the dtypes", seen["dtypes"], [f"torch.{case['dtype']}"] * 2, "keep the dtype of the blocks")
    output, logsumexp = (part.double() for part in seen["parts"])
    yield Claim(
        f"{words}: the output of rows that see no key", output[none], right[none], cause_of_none(case, output[none]),
    )  # fmt: skip
    yield Claim(
        f"{words}: the logsumexp of rows that see no key", bool((logsumexp[none] == -torch.inf).all()), True,
        NO_KEYS, told="-inf", shown=logsumexp[none],
    )  # fmt: skip
    bad = lambda got, rest: rest if got.isfinite().all() else not_finite(case)  # noqa: E731
    otherwise = last_word(case, f"{WEIGHTS}, and the output is the sum of the weighted outputs")
    yield Claim(
        f"{words}: the output", output[~none], right[~none], bad(output[~none], lost(case, output[~none], otherwise)),
        likely(case, none, of_output(outputs, logsumexps, weights)), digits, scale=1.0,
    )  # fmt: skip
    yield Claim(
        f"{words}: the logsumexp", logsumexp[~none], total[~none],
        bad(logsumexp[~none], last_word(case, "the merged logsumexp is log(sum of exp(logsumexp)) over all blocks")),
        likely(case, none, of_logsumexp(logsumexps)), digits, scale=1.0,
    )  # fmt: skip
    yield Claim(
        f"{words}: what the function changes", seen["changed"], "",
        "leave the blocks and their list as they are: copy first", told="nothing",
    )  # fmt: skip
    yield from of_gradients(words, digits, case, seen["gradients"], outputs, weights, right)


def digits_of(case):
    """In 32 bits, a logsumexp of 1000 has four digits after the point."""
    return 10 if case["dtype"] == "float64" else 3 if case["around"] else 5


def not_finite(case):
    if case["nan"]:
        return f"{NAN_OUTPUT}; and {NOT_A_NUMBER}"
    if case["empty"] != "none":
        return NOT_A_NUMBER + (f". {OVERFLOW}" if case["around"] else "")
    return OVERFLOW if case["around"] else WEIGHTS


def last_word(case, text):
    if case["around"]:
        return f"{OVERFLOW}. {text}"
    return text + (". A row that sees no key of a block gets nothing from it" if case["empty"] != "none" else "")


def cause_of_none(case, got):
    return NO_KEYS if got.isfinite().all() else f"{NO_KEYS}. {not_finite(case)}"


def lost(case, output, otherwise):
    """The cause where rows are 0 that see some key."""
    if case["around"] or not (output == 0).all(-1).any():
        return otherwise
    return (
        "the output is 0 in a row that sees keys of some blocks: one block without keys must not remove what others gave. "
        "nan_to_num does not bring it back"
    )


def likely(case, none, mistakes):
    """The mistakes in the rows that see a key. Around 1000 or -1000, only digits can tell:
    what overflows may look like another mistake.
    """
    return [(value[~none], cause) for value, cause in mistakes[: 1 if case["around"] else None]]


def of_output(outputs, logsumexps, weights):
    seen = (logsumexps > -torch.inf).double()
    number = seen.sum(0).clamp(min=1)
    two = (logsumexps[:2] - logsumexps[:2].logsumexp(0)).exp().nan_to_num(0)
    return [
        ((weights * outputs).sum(0), "some digits are lost: compute in the dtype of the blocks"),
        (outputs.mean(0), f"this is the plain mean of the outputs: {WEIGHTS}"),
        ((outputs * seen).sum(0) / number, f"this is the plain mean of the outputs: {WEIGHTS}"),
        (outputs.sum(0), f"this is the sum of the outputs: {WEIGHTS}"),
        ((logsumexps.exp() * outputs).sum(0), "the sum of the weighted outputs is not divided by the sum of the weights"),
        ((weights * outputs).mean(0), "the weighted outputs are added up: their weights already have the sum 1"),
        (((-logsumexps).softmax(0) * outputs).sum(0), "the weights have the wrong sign: exp(logsumexp - largest)"),
        ((two * outputs[:2]).sum(0), "these are two of the blocks only: merge all of them"),
        (outputs[0], "this is the output of the first block"), (outputs[-1], "this is the output of the last block"),
    ]  # fmt: skip


def of_logsumexp(logsumexps):
    total, number = logsumexps.logsumexp(0), torch.tensor(len(logsumexps)).double()
    largest = logsumexps.amax(0)
    return [
        (total, "some digits are lost: compute in the dtype of the blocks"),
        (largest, "this is the largest logsumexp: the logarithm of the sum of the weights has to be added"),
        (total - largest, "the largest logsumexp was subtracted before exp: add it again after the logarithm"),
        (logsumexps.sum(0), "these are sums of logarithms: add up exp(logsumexp), and take the logarithm of the sum"),
        (logsumexps.mean(0), "this is a mean of logarithms: add up exp(logsumexp), and take the logarithm of the sum"),
        (total - number.log(), "this is the logarithm of a mean over the blocks: the blocks' sums are added up"),
        (total.exp(), "this is the sum of the weights: take its logarithm"),
        (logsumexps[0], "this is the logsumexp of the first block"), (logsumexps[-1], "this is that of the last block"),
    ]  # fmt: skip


def of_gradients(words, digits, case, got, outputs, weights, right):
    of_output, of_logsumexp = (part.double() for part in gradients_that_come(case))
    from_output = weights * ((outputs - right) * of_output).sum(-1, keepdim=True)
    from_logsumexp = weights * of_logsumexp
    expected = [weights * of_output, from_output + from_logsumexp]
    flow = (
        "gradients have to flow through all that you compute: use no detach(), .data, .item() or no_grad() on the way"
    )
    mistakes = [
        [],
        [
            (from_logsumexp, f"the output's part is missing, since the weights depend on the logsumexps: {flow}"),
            (from_output, f"the merged logsumexp's part is missing: {flow}"),
        ],
    ]
    for name, one, value, more in zip(("outputs", "logsumexps"), got, expected, mistakes):
        one = 0 * value if one is None and case["empty"] == "all" else one  # a constant has no gradient
        otherwise = flow
        if isinstance(one, torch.Tensor) and not one.isfinite().all():
            otherwise = f"{HIDDEN}. And {NAN_OUTPUT}" if case["nan"] else HIDDEN
        yield Claim(
            f"{words}: the gradient of the blocks' {name}", one, value, otherwise,
            [*more, (0 * value, flow), (None, flow)], digits, scale=1.0, told=None if one is not None else "a gradient",
        )  # fmt: skip
