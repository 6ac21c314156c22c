"""What question 1 claims of merged blocks, and what likely mistakes give."""

import torch

from ddp_course.checks.claims import Claim
from ddp_course.checks.ex19.merging_cases import described, made
from ddp_course.checks.ex19.merging_gradients import NAN_OUTPUT, of_gradients
from ddp_course.checks.ex19.merging_mistakes import WEIGHTS, digits_lost, fewer_bits, of_logsumexp, of_output

FORM = "return two tensors, output and logsumexp, with the shapes that they have in a block"
NOT_A_NUMBER = (
    "a row without keys has the logsumexp -inf, and -inf - (-inf) is NaN: put 0 in the place of a largest logsumexp of -inf "
    "before you subtract it"
)
OVERFLOW = (
    "exp of such a logsumexp is inf, or 0, and a clamped one is another number: subtract the largest logsumexp of the row, "
    "over all blocks, before exp"
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
    dtype = case["dtype"]
    bad = lambda got, rest: fewer_bits(got, dtype) or rest if got.isfinite().all() else not_finite(case)  # noqa: E731
    otherwise = last_word(case, f"{WEIGHTS}, and the output is the sum of the weighted outputs")
    yield Claim(
        f"{words}: the output", output[~none], right[~none], bad(output[~none], lost(case, output[~none], otherwise)),
        likely(case, none, of_output(outputs, logsumexps, weights, digits_lost(output[~none], dtype))), digits,
        scale=0.0 if case["gaps"] == "far" else 1.0,
    )  # fmt: skip
    yield Claim(
        f"{words}: the logsumexp", logsumexp[~none], total[~none],
        bad(logsumexp[~none], last_word(case, "the merged logsumexp is log(sum of exp(logsumexp)) over all blocks")),
        likely(case, none, of_logsumexp(logsumexps, digits_lost(logsumexp[~none], dtype))), digits, scale=1.0,
    )  # fmt: skip
    yield Claim(
        f"{words}: what the function changes", seen["changed"], "",
        "leave the blocks and their list as they are: copy first", told="nothing",
    )  # fmt: skip
    yield from of_gradients(words, digits, case, seen["gradients"], (outputs, logsumexps), weights, right)


def digits_of(case):
    """In 32 bits, a logsumexp of 1000 has four digits after the point. Small weights show
    in the last digits only.
    """
    if case["gaps"]:
        return 6 if case["gaps"] == "far" else 12
    return 10 if case["dtype"] == "float64" else 3 if case["around"] else 5


def not_finite(case):
    if case["nan"]:
        return f"{NAN_OUTPUT}; and {NOT_A_NUMBER}"
    if case["empty"] != "none":
        return NOT_A_NUMBER + (f". {OVERFLOW}" if case["around"] else "")
    return OVERFLOW if case["around"] else WEIGHTS


def last_word(case, text):
    if case["gaps"] == "far":
        return "a block counts, however small its weight: leave no block out, and clamp no difference of logsumexps"
    if case["around"]:
        return f"{OVERFLOW}. {text}"
    return text + (". A row that sees no key of a block gets nothing from it" if case["empty"] != "none" else "")


def cause_of_none(case, got):
    return NO_KEYS if got.isfinite().all() else f"{NO_KEYS}. {not_finite(case)}"


def lost(case, output, otherwise):
    """The cause where rows are 0 that see some key."""
    if case["around"] or case["gaps"] or not (output == 0).all(-1).any():
        return otherwise
    return (
        "the output is 0 in a row that sees keys of some blocks: one block without keys must not remove what others gave. "
        "nan_to_num does not bring it back"
    )


def likely(case, none, mistakes):
    """The mistakes in the rows that see a key. Around 1000 or -1000, only digits can tell:
    what overflows may look like another mistake.
    """
    return [
        (value[~none], cause) for value, cause in mistakes[: 1 if case["around"] or case["gaps"] == "far" else None]
    ]
