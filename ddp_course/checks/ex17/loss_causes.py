"""What likely mistakes with a vocabulary-parallel loss give, and what is then told."""

import torch

TOKEN = (
    "the loss of a token is largest + log(sum of exp(logit - largest)) - chosen logit: the largest and the sum over all "
    "columns of the group, the chosen logit from the rank that has column `target`, at target - first"
)

DTYPE = "the dtype of the logits, float64 here: a whole number divided by another is a float32"


def causes_of_loss(case, logits, targets, own, got):
    """(the cause of anything else, pairs of a wrong loss and its cause)."""
    counted, n = targets >= 0, len(case["widths"])
    count, log_sum = max(1, int(counted.sum())), logits.logsumexp(1)
    chosen = logits.gather(1, targets.clamp(0)[:, None])[:, 0] * counted
    of_token = (log_sum - chosen) * counted
    total = of_token.sum()
    ignored = "a token whose target is -100 does not count: neither in the sum nor in the number of tokens"
    mine = logits[:, own]
    here = (targets >= own.start) & (targets < own.stop)
    one_group = "the mean is over tokens: all ranks of the group have the same ones, so there is nothing to divide by n"
    mistakes = [
        (total / count, f"some digits are lost: compute in {DTYPE}"),
        (total if count > 1 else None, "this is the sum over the tokens: return the mean over those that count"),
        (total / len(targets), ignored),
        ((log_sum - chosen).sum() / count, ignored),
        ((log_sum - chosen).sum() / len(targets), ignored),
        ((log_sum - logits.gather(1, targets.clamp(0)[:, None])[:, 0]).mean(), ignored),
        (total / count / n, one_group),
        (n * total / count, "this is n times the loss: each rank has all tokens, so the losses are not added up"),
        (((mine.logsumexp(1) - chosen) * counted).sum() / count,
         "the exponentials of this rank's columns only are summed: all-reduce the sum"),
        (((log_sum - chosen * here) * counted).sum() / count,
         "the chosen logit is missing where another rank has it: all-reduce it (SUM), with 0 where it is not here"),
        ((log_sum * counted).sum() / count, "the chosen logit is missing: one rank has it, in column target - first"),
    ]  # fmt: skip
    return otherwise_of_loss(case, got), mistakes


def otherwise_of_loss(case, got):
    if not isinstance(got, torch.Tensor):
        return "return the loss, a tensor with one number"
    if got.dim():
        return "return one number, of shape (), the mean over the tokens"
    if not got.isfinite() and case["ignored"] == "all":
        return "no token counts, so the sum is 0: divide it by 1, and not by 0"
    if case["around"] and (not got.isfinite() or case["around"] in ("tokens", "ranks")):
        return (
            "exp of such a logit is inf, or all are 0: subtract the largest logit of the token first, over all ranks of the "
            "group: not that of other tokens, of other groups, or of one rank"
        ) + (", so the MAX needs group=group, too" if len(case["groups"]) > 1 else "")
    if len(case["groups"]) > 1:
        return f"is every collective in the given group, with group=group? {TOKEN}"
    return TOKEN


def causes_of_gradient(case, logits, targets, own, other, got):
    counted, n, factor = targets >= 0, len(case["widths"]), case["factor"]
    count = max(1, int(counted.sum()))

    def of(logits, targets, rows=None):
        """softmax, and the ones at the targets, of the own columns."""
        ones = torch.zeros_like(logits)
        places = (targets >= 0).nonzero()[:, 0]
        ones[places, targets[places]] = 1
        rows = (targets >= 0)[:, None] if rows is None else rows
        return (logits.softmax(1)[:, own] * rows, ones[:, own])

    softmax, ones = of(logits, targets)
    right = factor * (softmax - ones) / count
    not_ignored = of(logits, targets, 1)[0]
    last, last_ones = of(*other())
    last_count = max(1, int((other()[1] >= 0).sum()))
    local, elsewhere = logits[:, own].softmax(1) * counted[:, None], torch.zeros_like(right)
    away = counted & ~((targets >= own.start) & (targets < own.stop))
    elsewhere[away, 0] = 1
    ignored = "a token whose target is -100 has a gradient of 0"
    mean = "the loss is the mean over the tokens that count: the gradient is divided by their number"
    mistakes = [
        (right, f"some digits are lost: compute in {DTYPE}"),
        (right / factor, "the gradient that comes to the loss is ignored: multiply by backward's argument"),
        (n * right, "this is n times the gradient: the loss is one number that all ranks have, so backward sums nothing"),
        (right / n, "divided by the number of ranks, which have the same tokens: nothing is to be averaged"),
        (right * count, mean),
        (right * count / len(targets), mean),
        (factor * softmax / count, "1 has to be subtracted from the softmax at the target"),
        (factor * (not_ignored - ones) / count, ignored),
        (factor * (not_ignored - ones) / len(targets), ignored),
        (-right, "it has the wrong sign: softmax - 1 at the target"),
        (factor * (local - ones) / count, "the softmax is over all columns of the group: divide by the sum of all ranks"),
        (factor * (softmax - ones - elsewhere) / count,
         "where another rank has the target, no column of this rank gets the - 1"),
        (factor * (last - last_ones) / last_count,
         "this is the gradient of a loss that was computed later: keep what backward needs in ctx"),
        (None, "the loss has no gradient: is it made by a torch.autograd.Function, or by operations on logits?"),
    ]  # fmt: skip
    otherwise = (
        "the gradient of the own columns is (softmax - 1 at the target) / tokens that count, 0 for ignored tokens"
    )
    if isinstance(got, torch.Tensor) and not got.isfinite().all():
        otherwise = "NaN or inf: is the largest logit subtracted before exp, and 0 / 0 avoided where no token counts?"
    return otherwise, mistakes
