"""Question 2: normalise a joined batch whose samples have weights."""

from functools import partial

import torch

from ddp_course.checks.claims import Claim, on_every_rank
from ddp_course.checks.ex05.parts import (
    LIGHT,
    MANY,
    NARROWED,
    along_samples,
    calls,
    channels_last,
    in_words,
    many_samples,
    parts_of_a_batch,
    seen_with_an_empty_part,
    statistics,
    sums_are_sent,
    weights_of,
    well_behaved,
)
from ddp_course.checks.recording import waited
from ddp_course.judge.question import question
from ddp_course.lesson05 import along_channels, sum_by_channel

# ---- what is drawn ----


def a_forward(draw, parts, without=None, light=False):
    """A case for `calls`: its name, and the arguments of each rank."""
    eps = round(draw.uniform(0.2, 0.6), 2)
    name = f"normalize(x, weights, eps={eps}) with {in_words(parts)}"
    if without is not None:
        name += f", and only weights of 0 on rank {without}"
    weights = weights_of(draw, parts, without, light)
    return name, [{"x": part, "weights": of_part, "eps": eps} for part, of_part in zip(parts, weights)]


def far_from_zero(draw, parts):
    """These parts in 32 bits, with a mean that is thousands of times the deviation."""
    far = torch.tensor([draw.choice([-1, 1]) * draw.uniform(2000, 5000) for _ in range(parts[0].shape[1])])
    return [(part + along_channels(far, part)).float() for part in parts]


# ---- what is claimed ----


def claims_about(call, arguments):
    """For each rank: its results are those of one process on the joined batch."""
    parts, weights = ([of_rank[what] for of_rank in arguments] for what in ("x", "weights"))
    joined, of_all = in_one(parts, weights)
    mean, variance, _ = statistics(joined, of_all)
    eps = arguments[0]["eps"]
    normalized = (joined - along_channels(mean, joined)) / along_channels((variance + eps).sqrt(), joined)
    normalized = normalized.split([len(part) for part in parts])
    weightless = not all(of_part.any() for of_part in weights)
    why_variance = "it is the weighted mean of (x - mean)², over all values of a channel, on all ranks"
    digits = [10, 10, 10]
    if parts[0].dtype == torch.float32:
        digits = [5, 3, 2.5]
        why_variance = (
            "the mean is much larger than the deviation, which the rounding of 32 bits destroys: sum in 64 bits, or "
            "subtract the mean before squaring"
        )  # fmt: skip

    def claims(rank, of_ranks):
        mine = of_ranks[rank]
        yield waited(call, mine)
        yield from three_tensors(call, mine["returned"], parts[rank])
        if weightless:
            yield Claim(
                call, any(tensor.isnan().any().item() for tensor in mine["returned"]), False, "the mean of a part that is "
                "empty or has only weights of 0 is 0/0, which is nan, and adding to nan gives nan: sum over all ranks "
                "first, and then divide", told="numbers", shown="nan",
            )  # fmt: skip
        yield Claim(
            f"the mean from {call}", mine["returned"][1], mean, "on all ranks, sum the values of a channel times the "
            "weights of their samples, and divide by the sum of these weights",
            partial(mistakes_in_mean, parts, weights, rank), digits[0],
        )  # fmt: skip
        yield Claim(
            f"the variance from {call}", mine["returned"][2], variance, why_variance,
            partial(mistakes_in_variance, parts, weights, rank), digits[1],
        )  # fmt: skip
        yield Claim(
            f"normalized from {call}", mine["returned"][0], normalized[rank], "mean and variance are right; normalized is "
            "(x - mean) / (variance + eps).sqrt(), channel by channel",
            partial(mistakes_in_normalized, parts, weights, rank, eps), digits[2],
        )  # fmt: skip
        yield from well_behaved(call, mine, most=2)
        if len(parts[rank]) >= MANY:
            yield sums_are_sent(call, mine, parts[rank])

    return claims


def three_tensors(call, returned, part):
    """Claims that an answer returned normalized, mean and variance, in the right shapes."""
    is_list = isinstance(returned, list) and len(returned) == 3
    yield Claim(
        call, is_list and all(isinstance(value, torch.Tensor) for value in returned), True,
        "return normalized, mean, variance, in this order", told="three tensors", shown=returned,
    )  # fmt: skip
    shapes = {"normalized": part.shape, "the mean": part.shape[1:2], "the variance": part.shape[1:2]}
    for (what, shape), value in zip(shapes.items(), returned):
        yield Claim(
            f"the shape of {what} from {call}", tuple(value.shape), tuple(shape), "normalized must have the shape of x; "
            "mean and variance must have one number per channel: sum over all dimensions except the second",
        )  # fmt: skip
    yield Claim(
        f"the type of normalized from {call}", returned[0].dtype, part.dtype, "the next layer expects the type of x: "
        "compute in 64 bits, and return .to(x.dtype)",
    )  # fmt: skip


def in_one(parts, weights):
    """The joined batch and its weights, in 64 bits."""
    return torch.cat(parts).double(), torch.cat(weights).double()


IGNORES_WEIGHTS = "the weights are ignored: a sample of weight w counts like w samples"


def mistakes_in_mean(parts, weights, rank):
    joined, of_all = in_one(parts, weights)
    own_parts = [statistics(*in_one(*part)) for part in pairs_of(parts, weights)]
    means = [mean for mean, _, _ in own_parts]
    plain, (mean, _, total) = statistics(joined)[0], statistics(joined, of_all)
    values = joined[:, 0].numel()
    return [
        (mean, NARROWED),
        *([(mean * total, LIGHT)] if total < 1 else []),
        (plain, IGNORES_WEIGHTS),
        (statistics(parts[rank].double())[0], f"it is the mean of this rank's own part, and {IGNORES_WEIGHTS}"),
        (means[rank], "it is the mean of this rank's own part: sum over the ranks"),
        (sum(means) / len(parts), "it is the mean of the ranks' means, in which a part with little weight counts as "
                                  "much as any other: sum values and weights, and then divide"),
        (mean * total / own_parts[rank][2], "the sum over all ranks is divided by this rank's weights: sum the "
                                            "weights, too"),
        (mean * total / of_all.sum(), "it is divided by the weights of the samples, but a sample has several values "
                                      "per channel, and each has this weight"),
        (mean * total / values, "the weighted sum is divided by the number of values: divide by the sum of their weights"),
        (mean * total / len(joined), "it is divided by the number of samples: divide by the sum of the weights of all "
                                     "values"),
    ]  # fmt: skip


def pairs_of(parts, weights):
    return [([part], [of_part]) for part, of_part in zip(parts, weights)]


def mistakes_in_variance(parts, weights, rank):
    joined, of_all = in_one(parts, weights)
    mean, variance, total = statistics(joined, of_all)
    own_parts = [statistics(*in_one(*part)) for part in pairs_of(parts, weights)]
    variances = [own for _, own, _ in own_parts]
    weighted = sum(own * part for _, own, part in own_parts) / total
    by_square = sum_by_channel((along_samples(of_all, joined) * joined).square()) / total
    around = (joined - along_channels(mean, joined)).square()
    apart = "it is a mean of the ranks' variances, which ignores the differences between their means: sum the squares"
    return [
        (variance, NARROWED),
        (statistics(joined)[1], IGNORES_WEIGHTS),
        (sum_by_channel(around) / joined[:, 0].numel(), "the mean is weighted, but the squares are not"),
        (variances[rank], "it is the variance of this rank's own part: sum over the ranks"),
        (sum(variances) / len(parts), apart),
        (weighted, apart),
        (by_square - mean.square(), "the weights are squared as well: multiply x² by them, not x before you square it"),
        (variance * total / (total - 1), "it is divided by one less than the sum of the weights: BatchNorm normalises "
                                         "with the biased variance"),
        (variance + mean.square(), "it is the mean of the squares: subtract the square of the mean"),
        (variance.sqrt(), "it is the standard deviation, the root of the variance"),
    ]  # fmt: skip


def mistakes_in_normalized(parts, weights, rank, eps):
    x, each = parts[rank].double(), along_samples(weights[rank].double(), parts[rank])
    mean, variance, total = statistics(*in_one(parts, weights))
    own_mean, own_variance, _ = statistics(x, weights[rank].double())
    plain_mean, plain_variance, _ = statistics(torch.cat(parts).double())
    unbiased = variance * total / (total - 1)

    def by(deviation, mean=mean):
        return (x - along_channels(mean, x)) / along_channels(deviation, x)

    right = by((variance + eps).sqrt())
    return [
        (right, NARROWED),
        (right * (each > 0), "samples of weight 0 do not count in mean and variance, but they are normalised like all "
                             "others"),
        (right * each, "it is multiplied by the weights: they decide what mean and variance are, and nothing else"),
        (by((plain_variance + eps).sqrt(), plain_mean), "normalized uses mean and variance without weights, though the "
                                                        "returned ones are right"),
        (by(variance.sqrt()), "eps is missing: add it to the variance"),
        (by(variance.sqrt() + eps), "eps is added to the root: add it to the variance, under the root"),
        (by(variance + eps), "it is divided by the variance: the root is missing"),
        (by((unbiased + eps).sqrt()), "normalized uses the unbiased variance, though the returned variance is the "
                                      "biased one"),
        (by((own_variance + eps).sqrt(), own_mean), "normalized uses the mean and variance of this rank's own part, "
                                                    "though the returned ones are those of the joined batch"),
    ]  # fmt: skip


@question(
    "A sample of weight w counts like w samples. Which sums over the values of a channel give the mean and the "
    "variance then? Sums over the parts add up to the sums over the whole batch; means and variances do not.",
    "Each value is multiplied by the weight of its sample: you need the sums of w, of w * x and of w * x². (Not of "
    "(w * x)².) torch.cat joins all three into one tensor, for one all_reduce. Start with x.double(), because "
    "mean(x²) - mean(x)² is a small difference between large numbers.",
    "wide = x.double(); each = weights.double().view(-1, 1, ..., 1); sums = torch.cat([(each * wide).sum(dims), (each "
    "* wide * wide).sum(dims), the sum of each.expand_as(wide) over one channel]); all_reduce; mean and variance by "
    "division; then (wide - mean) / (variance + eps).sqrt() with both as view(1, -1, 1, ...), and .to(x.dtype).",
)
def check_normalize(answer, draw):
    """Mean, variance and the normalised part must be those of the joined batch with its
    weights: with uneven parts, with an empty part or one without weight, and in 32 bits
    with a mean much larger than the deviation; and the ranks must send only a few numbers.
    """
    n = draw.choice([2, 3])
    batches = [parts_of_a_batch(draw, n, dims) for dims in (4, 2, 5, 3)]
    batches[0] = [channels_last(part) for part in batches[0]]
    batches.append(far_from_zero(draw, batches[0]))
    cases = [a_forward(draw, parts, light=parts[0].dim() == 2) for parts in batches]
    cases.append(a_forward(draw, batches[1], without=draw.randrange(n)))
    cases.append(a_forward(draw, many_samples(draw, n)))
    seen = answer.on_ranks(calls, cases, nproc=n)
    for place, case in enumerate(cases):
        on_every_rank(claims_about(*case), [of_rank[place] for of_rank in seen])

    for n, empty in ((2, draw.randrange(2)), (3, draw.randrange(3))):
        case = a_forward(draw, parts_of_a_batch(draw, n, draw.randint(2, 4), empty))
        on_every_rank(claims_about(*case), seen_with_an_empty_part(answer, *case, empty))
