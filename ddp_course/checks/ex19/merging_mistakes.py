"""What likely mistakes in question 1 give, and how many bits a result has."""

import torch

WEIGHTS = "the weight of a block is exp(its logsumexp), divided by the sum over all blocks"
SMALL = "A block counts, however small its weight"
LEFT_OUT = f"blocks are left out whose logsumexp is far below the largest one of the row. {SMALL}"
DIGITS = (
    "some digits are lost: is an epsilon added to a sum, a difference clamped, a block left out, or a part computed in "
    f"fewer bits? {SMALL}"
)


def digits_lost(got, dtype):
    """The cause of a result that is right in its first digits only."""
    return fewer_bits(got, dtype) or DIGITS


def fewer_bits(got, dtype):
    """The cause of numbers that a smaller dtype holds exactly; None for any others."""
    if not got.isfinite().all() or got.unique().numel() < 9:
        return None
    for small in [torch.bfloat16, torch.float16, *([torch.float32] if dtype == "float64" else [])]:
        if torch.equal(got.to(small).double(), got):
            name = str(small).removeprefix("torch.")
            return f"all these numbers have the digits of {name} only: compute in the dtype of the blocks, {dtype}"
    return None


def left_out(logsumexps, gap):
    """The logsumexps without those far below the largest one of their row."""
    return logsumexps.masked_fill(logsumexps < logsumexps.amax(0) - gap, -torch.inf)


def of_output(outputs, logsumexps, weights, digits):
    seen = (logsumexps > -torch.inf).double()
    number = seen.sum(0).clamp(min=1)
    two = (logsumexps[:2] - logsumexps[:2].logsumexp(0)).exp().nan_to_num(0)
    return [
        ((weights * outputs).sum(0), digits),
        (outputs.mean(0), f"this is the plain mean of the outputs: {WEIGHTS}"),
        ((outputs * seen).sum(0) / number, f"this is the plain mean of the outputs: {WEIGHTS}"),
        (outputs.sum(0), f"this is the sum of the outputs: {WEIGHTS}"),
        ((logsumexps.exp() * outputs).sum(0), "the sum of the weighted outputs is not divided by the sum of the weights"),
        ((weights * outputs).mean(0), "the weighted outputs are added up: their weights already have the sum 1"),
        (((-logsumexps).softmax(0) * outputs).sum(0), "the weights have the wrong sign: exp(logsumexp - largest)"),
        ((two * outputs[:2]).sum(0), "these are two of the blocks only: merge all of them"),
        (outputs[0], "this is the output of the first block"), (outputs[-1], "this is the output of the last block"),
        *[((left_out(logsumexps, gap).softmax(0).nan_to_num(0) * outputs).sum(0), LEFT_OUT) for gap in (5, 10)],
    ]  # fmt: skip


def of_logsumexp(logsumexps, digits):
    total, number = logsumexps.logsumexp(0), torch.tensor(len(logsumexps)).double()
    largest = logsumexps.amax(0)
    return [
        (total, digits),
        (largest, "this is the largest logsumexp: the logarithm of the sum of the weights has to be added"),
        (total - largest, "the largest logsumexp was subtracted before exp: add it again after the logarithm"),
        (logsumexps.sum(0), "these are sums of logarithms: add up exp(logsumexp), and take the logarithm of the sum"),
        (logsumexps.mean(0), "this is a mean of logarithms: add up exp(logsumexp), and take the logarithm of the sum"),
        (total - number.log(), "this is the logarithm of a mean over the blocks: the blocks' sums are added up"),
        (total.exp(), "this is the sum of the weights: take its logarithm"),
        (logsumexps[0], "this is the logsumexp of the first block"), (logsumexps[-1], "this is that of the last block"),
    ]  # fmt: skip
