"""Question 1: attention to blocks of keys, merged."""

import torch

from ddp_course.checks.claims import hold
from ddp_course.checks.ex19.merging_cases import described, gradients_that_come, made
from ddp_course.checks.ex19.merging_claims import claims
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question


def observe_merged(merge, cases):
    """Of each case, what the answer returns, what it changes, and the blocks' gradients."""
    seen = []
    for case in cases:
        blocks, before = made(case), made(case)
        listed = list(blocks)
        with trying(described(case)), torch.no_grad():
            got = merge(listed)
        parts = [*got] if isinstance(got, tuple | list) else [got]
        found = {"parts": [part.clone() if isinstance(part, torch.Tensor) else part for part in parts]}
        found["dtypes"] = [str(getattr(part, "dtype", type(part).__name__)) for part in parts]
        found["changed"] = changed(blocks, before) if same_list(listed, blocks) else "the list of blocks"
        if well_formed(parts, blocks) and not found["changed"]:
            blocks = [tuple(part.requires_grad_() for part in block) for block in made(case)]
            with trying(f"{described(case)}, and its backward"):
                found["gradients"] = gradients(merge(list(blocks)), blocks, case)
            found["changed"] = changed(blocks, before)
        seen.append(found)
    return seen


def same_list(listed, blocks):
    return len(listed) == len(blocks) and all(one is other for one, other in zip(listed, blocks))


def changed(blocks, before):
    """What is not as before: a text, empty if nothing is."""
    for number, pair in enumerate(zip(blocks, before)):
        for name, new, old in zip(("output", "logsumexp"), *pair):
            if not ((new == old) | (new.isnan() & old.isnan())).all():
                return f"the {name} of block {number}"
    return ""


def well_formed(parts, blocks):
    fits = lambda part, like: isinstance(part, torch.Tensor) and part.shape == like.shape  # noqa: E731
    return len(parts) == 2 and all(map(fits, parts, blocks[0]))


def gradients(got, blocks, case):
    """Of all outputs, and of all logsumexps: stacked, with 0 where there is none, or None
    where nothing has a gradient.
    """
    pairs = [pair for pair in zip(got, gradients_that_come(case)) if pair[0].requires_grad]
    if not pairs:
        return [None, None]
    leaves = [part for block in blocks for part in block]
    ends, coming = zip(*pairs)
    found = torch.autograd.grad(ends, leaves, coming, allow_unused=True)
    found = [torch.zeros_like(leaf) if one is None else one for one, leaf in zip(found, leaves)]
    return [torch.stack(found[0::2]), torch.stack(found[1::2])]


@question(
    "A block's output is a mean, weighted with exp(score), and its logsumexp is the logarithm of the sum of these weights. "
    "What is the weight of a whole block? What may you subtract from all logsumexps of a row without changing the result? "
    "And what is -inf - (-inf)?",
    "Weights are exp(logsumexp - largest), with the largest logsumexp of the row over all blocks. Where no block has a key, "
    "the largest is -inf: put 0 in its place before you subtract, and 1 in the place of the sum before you divide or take "
    "its logarithm. A NaN that torch.where or masked_fill hides afterwards still comes back in backward, as 0 * inf. And "
    "0 * NaN is NaN: outputs of rows without keys have to be replaced, too.",
    "Stack both. empty = logsumexps == -torch.inf; largest = logsumexps.detach().amax(0); largest = "
    "largest.masked_fill(largest == -torch.inf, 0); weights = (logsumexps - largest).exp(); total = weights.sum(0); nothing "
    "= total == 0; total = total.masked_fill(nothing, 1); output = (weights * outputs.masked_fill(empty, 0)).sum(0) / "
    "total; logsumexp = (largest + total.log()).masked_fill(nothing, -torch.inf).",
)
def check_merge(answer, draw):
    """Output, logsumexp and gradients are those of attention to all keys."""
    simple = {"blocks": 2, "dtype": "float64", "around": 0, "empty": "none", "nan": False, "gaps": False}
    cases = [
        simple | change
        for change in (
            {},
            {"blocks": draw.randrange(4, 8)},
            {"blocks": 1},
            {"blocks": 5, "gaps": True},
            {"blocks": 2, "gaps": "far"},
            {"blocks": 3, "around": 1000},
            {"blocks": 3, "around": -1000},
            {"blocks": draw.randrange(3, 7), "around": "both"},
            {"blocks": 3, "empty": "last"},
            {"blocks": 3, "empty": "first"},
            {"blocks": draw.randrange(4, 7), "empty": "some"},
            {"blocks": 3, "empty": "rows"},
            {"blocks": 2, "empty": "all"},
            {"blocks": 1, "empty": "rows"},
            {"blocks": 4, "empty": "rows", "around": "both"},
            {"blocks": 3, "empty": "rows", "around": -1000},
            {"blocks": 3, "empty": "rows", "nan": True},
            {"blocks": 1, "empty": "rows", "nan": True},
            {"blocks": draw.randrange(3, 6), "dtype": "float32"},
            {"blocks": draw.randrange(3, 6), "dtype": "float32", "empty": "rows", "around": draw.choice([1000, -1000])},
            {"blocks": 3, "queries": 1},
        )
    ]
    for case in cases:
        queries = case.get("queries", draw.randrange(8, 12))
        case |= {"seed": draw.randrange(10**6), "queries": queries, "width": draw.randrange(3, 6)}
    [seen] = answer.on_ranks(observe_merged, cases)
    for case, got in zip(cases, seen):
        hold(claims(case, got))
