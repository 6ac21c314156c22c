"""Questions 2 and 3: normalise a joined batch whose samples have weights, forward and
backward.
"""

from functools import partial

import torch

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.works import noting_works
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.lesson05 import along_channels, sum_by_channel
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import SYMPTOMS

# ---- parts of a batch, and what an answer did with them ----


def parts_of_a_batch(draw, ranks, dims, empty=None):
    """A random batch, float64 (batch, channels, ...): parts of different lengths, one
    per rank.

    empty: the rank whose part has no samples. The mean and deviation of a channel
    differ between the parts.
    """
    lengths = [0 if rank == empty else length for rank, length in enumerate(draw.sample(range(3, 8), ranks))]
    channels, further = draw.randint(8, 10), draw.sample(range(2, 5), dims - 2)
    generator, parts = torch.Generator().manual_seed(draw.randrange(10**6)), []
    for length in lengths:
        noise = torch.randn(length, channels, *further, generator=generator, dtype=torch.float64)
        mean = 2 * torch.randn(channels, generator=generator)
        deviation = 0.5 + torch.rand(channels, generator=generator)
        parts.append(along_channels(mean, noise) + along_channels(deviation, noise) * noise)
    return parts


def channels_last(parts):
    """The same images, (batch, channels, height, width), with the channels of a pixel
    side by side in memory.
    """
    return [part.contiguous(memory_format=torch.channels_last) for part in parts]


def many_samples(draw, ranks):
    """Parts of a batch, so large that a few numbers per channel are negligible, and one
    per sample is not.
    """
    generator = torch.Generator().manual_seed(draw.randrange(10**6))
    shapes = [(3000 + rank, 2, 4, 4) for rank in range(ranks)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def in_words(parts):
    """A batch in words: 'parts of 3 and 5 samples, each (8, 2, 4), float64'."""
    *first, last = [str(len(part)) for part in parts]
    kind = str(parts[0].dtype).removeprefix("torch.")
    return f"parts of {', '.join(first)} and {last} samples, each {tuple(parts[0].shape[1:])}, {kind}"


def calls(function, cases):
    """Call an answer with this rank's arguments of each case; return what it returned,
    sent and changed.

    cases: pairs of a name and a list of arguments for each rank.
    """
    seen = []
    with process_group(timeout=4) as (rank, world_size):
        for name, of_ranks in cases:
            given = of_ranks[rank]
            tensors = [value for value in given if isinstance(value, torch.Tensor)]
            copies = [tensor.clone() for tensor in tensors]
            before = settings()
            with trying(name), CheckedWatch() as watch, noting_works() as works:
                returned = function(*given)
            pairs = enumerate(zip(tensors, copies))
            seen.append({
                "returned": returned, "sent": [entry["name"] for entry in watch.log],
                "bytes": sum(entry["bytes"] for entry in watch.log),
                "forgotten": sum(not work.waited for work in works),
                "changed": [place for place, (tensor, copy) in pairs if not torch.equal(tensor, copy)],
                "settings": [text for text, value in settings().items() if value != before[text]],
            })  # fmt: skip
    return seen


def settings():
    """What an answer shares with the rest of the program, {in words: value}."""
    return {
        "whether gradients are recorded": torch.is_grad_enabled(),
        "the default dtype": str(torch.get_default_dtype()),
        "the state of the random generator": torch.get_rng_state().tolist(),
    }


def the_call_with_an_empty_part(function, name, of_ranks):
    """One of these `calls`; "lost" on a rank that waited for another one until the
    timeout.
    """
    try:
        return calls(function, [(name, of_ranks)])[0]
    except RuntimeError as error:
        if any(symptom in str(error) for symptom in SYMPTOMS):
            return "lost"
        raise


def seen_with_an_empty_part(answer, name, of_ranks, empty):
    n = len(of_ranks)
    seen = answer.on_ranks(the_call_with_an_empty_part, name, of_ranks, nproc=n)
    if "lost" in seen:
        raise Wrong(name, rank=f"{empty} of {n}", expected="the same collectives as on the other ranks",
                    got="it returned while the others wait for it", cause="a rank with an empty part must call the "
                    "same collectives, with zeros: the other ranks do not know that its part is empty",
                    )  # fmt: skip
    return seen


def judge_waits(name, of_ranks):
    for rank, of_rank in enumerate(of_ranks):
        if of_rank["forgotten"]:
            raise Wrong(name, rank=f"{rank} of {len(of_ranks)}", expected="a wait() for each all-reduce",
                        got="one without a wait()", cause="all_reduce(..., async_op=True) only starts the "
                        "operation: the sums may be incomplete until work.wait() has returned")  # fmt: skip


def judge_manners(name, of_ranks, most, inputs):
    """Raise Wrong unless the inputs are unchanged and at most `most` collectives were
    called.
    """
    for rank, of_rank in enumerate(of_ranks):
        where = f"{rank} of {len(of_ranks)}"
        for place in of_rank["changed"]:
            raise Wrong(f"{inputs[place]} after {name}", rank=where, expected="unchanged", got="changed",
                        cause="it was changed in place, but the caller still needs it: -=, mul_() and other "
                        "in-place operations write into the given tensor")  # fmt: skip
        for text in of_rank["settings"]:
            raise Wrong(f"{text}, after {name}", rank=where, expected="as before the call", got="changed",
                        cause="this setting belongs to the whole program: change it for a block at most, as "
                        "`with torch.no_grad():` does")  # fmt: skip
        if len(of_rank["sent"]) > most:
            raise Wrong(f"collectives in {name}", rank=where, expected=f"at most {most}",
                        got=", ".join(of_rank["sent"]), cause="in each collective, all ranks wait for the slowest: "
                        "use torch.cat to send values together that are known at the same time")  # fmt: skip


def judge_bytes(name, arguments, of_ranks):
    """Raise Wrong if something was sent for each sample of these `many_samples`."""
    for rank, of_rank in enumerate(of_ranks):
        part = arguments[rank][0]
        if of_rank["bytes"] < 4 * len(part):
            continue
        cause = "you send numbers for each sample: add them up over the samples before you send them"
        if of_rank["bytes"] >= part.nbytes:
            cause = "you send the samples themselves: sums over them are enough"
        raise Wrong(f"the bytes sent by {name}", rank=f"{rank} of {len(of_ranks)}",
                    expected="a few numbers per channel, however many samples there are",
                    got=f"{of_rank['bytes']:,} bytes, where this rank's part of x has {part.nbytes:,}",
                    cause=cause)  # fmt: skip


def agree(got, expected, tolerance):
    """Whether the numbers agree within a relative and absolute tolerance."""
    return torch.allclose(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


def compare(checked, where, got, expected, looks, otherwise, tolerance=1e-10):
    """Raise Wrong unless `got` agrees with `expected`; name the likely mistake.

    looks: a function that gives pairs of numbers and a cause; otherwise: the cause if
    none of them fits.
    """
    if agree(got, expected, tolerance):
        return
    if tolerance < 1e-5 and agree(got, expected, 1e-5):
        cause = "it is right to about seven digits: at some point you converted 64 bits to 32"
    else:
        cause = next((text for value, text in looks() if agree(got, value, 1e-5)), otherwise)
    checked, expected, got = where_they_differ(checked, expected, got, tolerance)
    raise Wrong(checked, rank=where, expected=expected, got=got, cause=cause)


def where_they_differ(checked, expected, got, tolerance):
    """What to show of two tensors, so that the difference is seen."""
    if agree(got, expected, 1e-3):
        return (checked, "the same to ten digits", f"off by {(got - expected).abs().max():.1g}")
    different = ~torch.isclose(got.double(), expected.double(), tolerance, tolerance)
    if different.flatten()[:6].any():
        return checked, expected, got
    return f"{checked}, where they differ", expected[different], got[different]


def weights_of(draw, parts, without=None, light=False):
    """Weights for the samples of each part, of its dtype, some of them 0.

    without: the rank whose samples all have the weight 0, like padding. light: whether
    all weights of the batch together are less than 1.
    """
    generator, weights = torch.Generator().manual_seed(draw.randrange(10**6)), []
    for rank, part in enumerate(parts):
        of_part = 0.2 + 2 * torch.rand(len(part), generator=generator)
        of_part[rank % 3 : rank % 3 + 1] = 0
        of_part *= 0.01 if light else 1
        weights.append((of_part * (rank != without)).to(part.dtype))
    return weights


def along_samples(weights, x):
    """View weights, (batch,), so that they broadcast over x (batch, channels, ...)."""
    return weights.view(-1, *[1] * (x.dim() - 1))


def statistics(x, weights=None):
    """The weighted mean and variance of each channel, and the sum of the weights of its
    values. weights: (batch,); if left out, all are 1. Both are nan without any weight.
    """
    weights = x.new_ones(len(x)) if weights is None else weights
    each = along_samples(weights, x)
    total = weights.sum() * x.shape[2:].numel()
    mean = sum_by_channel(x * each) / total
    squares = (x - along_channels(mean, x)).square() * each
    return mean, sum_by_channel(squares) / total, total


# ---- 2: forward ----


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
    batches[0] = channels_last(batches[0])
    channels = batches[0][0].shape[1]
    far = torch.tensor([draw.choice([-1, 1]) * draw.uniform(2000, 5000) for _ in range(channels)])
    batches.append([(part + along_channels(far, part)).float() for part in batches[0]])
    batches.append(many_samples(draw, n))
    cases = [a_forward(draw, parts, light=parts[0].dim() == 2) for parts in batches]
    cases.append(a_forward(draw, batches[1], without=draw.randrange(n)))
    seen = answer.on_ranks(calls, cases, nproc=n)
    for place, case in enumerate(cases):
        judge_normalized(*case, [of_rank[place] for of_rank in seen])
    large = len(batches) - 1
    judge_bytes(*cases[large], [of_rank[large] for of_rank in seen])

    for n, empty in ((2, draw.randrange(2)), (3, draw.randrange(3))):
        case = a_forward(draw, parts_of_a_batch(draw, n, draw.randint(2, 4), empty))
        judge_normalized(*case, seen_with_an_empty_part(answer, *case, empty))


def a_forward(draw, parts, without=None, light=False):
    """A case for `calls`."""
    eps = round(draw.uniform(0.2, 0.6), 2)
    name = f"normalize(x, weights, eps={eps}) with {in_words(parts)}"
    if without is not None:
        name += f", and only weights of 0 on rank {without}"
    weights = weights_of(draw, parts, without, light)
    return name, [[part, of_part, eps] for part, of_part in zip(parts, weights)]


def judge_normalized(name, arguments, of_ranks):
    """Raise Wrong unless the ranks have the results of one process on the joined batch."""
    parts, weights, [eps, *_] = zip(*arguments)
    joined = torch.cat(parts).double()
    mean, variance, _ = statistics(joined, torch.cat(weights).double())
    normalized = joined - along_channels(mean, joined)
    normalized /= along_channels((variance + eps).sqrt(), joined)
    normalized = normalized.split([len(part) for part in parts])
    narrow = parts[0].dtype == torch.float32
    tolerance = 1e-2 if narrow else 1e-10
    why_variance = "it is the weighted mean of (x - mean)², over all values of a channel, on all ranks"
    if narrow:
        why_variance = (
            "the mean is much larger than the deviation, which the rounding of 32 bits destroys: sum in 64 bits, or "
            "subtract the mean before squaring"
        )  # fmt: skip

    judge_waits(name, of_ranks)
    for rank, of_rank in reversed(list(enumerate(of_ranks))):  # rank 0 is often right by accident
        where = f"{rank} of {len(parts)}"
        got = three_tensors(name, where, of_rank["returned"], parts[rank])
        if any(tensor.isnan().any() for tensor in got) and not all(of_part.any() for of_part in weights):
            raise Wrong(name, rank=where, expected="numbers", got="nan", cause="the mean of a part that is empty or "
                        "has only weights of 0 is 0/0, which is nan, "
                        "and adding to nan gives nan: sum over all ranks first, and then divide",
                        )  # fmt: skip
        compare(f"the mean from {name}", where, got[1], mean, partial(looks_of_mean, parts, weights, rank),
                "on all ranks, sum the values of a channel times the weights of their samples, and divide by the "
                "sum of these weights", tolerance,
                )  # fmt: skip
        compare(f"the variance from {name}", where, got[2], variance, partial(looks_of_variance, parts, weights, rank),
                why_variance, tolerance)  # fmt: skip
        compare(f"normalized from {name}", where, got[0], normalized[rank],
                partial(looks_of_normalized, parts, weights, rank, eps), "mean and variance are right; normalized is "
                "(x - mean) / (variance + eps).sqrt(), channel by channel", tolerance)  # fmt: skip
    judge_manners(name, of_ranks, 2, ["x", "weights"])


def three_tensors(name, where, returned, part):
    """normalized, mean and variance, if the answer returned these three in the right
    shapes.
    """
    is_triple = isinstance(returned, list) and len(returned) == 3
    if not is_triple or not all(isinstance(value, torch.Tensor) for value in returned):
        raise Wrong(name, rank=where, expected="three tensors", got=returned,
                    cause="return normalized, mean, variance, in this order")  # fmt: skip
    shapes = {"normalized": part.shape, "the mean": part.shape[1:2], "the variance": part.shape[1:2]}
    for (what, shape), value in zip(shapes.items(), returned):
        if value.shape != shape:
            raise Wrong(f"the shape of {what} from {name}", rank=where, expected=tuple(shape),
                        got=tuple(value.shape), cause="normalized must have the shape of x; mean and variance must "
                        "have one number per channel: sum over all dimensions except the second")  # fmt: skip
    if returned[0].dtype != part.dtype:
        raise Wrong(f"the type of normalized from {name}", rank=where, expected=part.dtype,
                    got=returned[0].dtype, cause="the next layer expects the type of x: compute in 64 bits, "
                    "and return .to(x.dtype)")  # fmt: skip
    return returned


def in_one(parts, weights):
    """The joined batch and its weights, in 64 bits."""
    return torch.cat(parts).double(), torch.cat(weights).double()


LIGHT = "the weights of all values together are less than 1 here: divide by their sum as it is"
IGNORES_WEIGHTS = "the weights are ignored: a sample of weight w counts like w samples"


def looks_of_mean(parts, weights, rank):
    joined, of_all = in_one(parts, weights)
    own_parts = [statistics(*in_one(*part)) for part in pairs_of(parts, weights)]
    means = [mean for mean, _, _ in own_parts]
    plain, (mean, _, total) = statistics(joined)[0], statistics(joined, of_all)
    values = joined[:, 0].numel()
    return [
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


def looks_of_variance(parts, weights, rank):
    joined, of_all = in_one(parts, weights)
    mean, variance, total = statistics(joined, of_all)
    own_parts = [statistics(*in_one(*part)) for part in pairs_of(parts, weights)]
    variances = [own for _, own, _ in own_parts]
    weighted = sum(own * part for _, own, part in own_parts) / total
    by_square = sum_by_channel((along_samples(of_all, joined) * joined).square()) / total
    around = (joined - along_channels(mean, joined)).square()
    apart = "it is a mean of the ranks' variances, which ignores the differences between their means: sum the squares"
    return [
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


def looks_of_normalized(parts, weights, rank, eps):
    x, each = parts[rank].double(), along_samples(weights[rank].double(), parts[rank])
    mean, variance, total = statistics(*in_one(parts, weights))
    own_mean, own_variance, _ = statistics(x, weights[rank].double())
    plain_mean, plain_variance, _ = statistics(torch.cat(parts).double())
    unbiased = variance * total / (total - 1)

    def by(deviation, mean=mean):
        return (x - along_channels(mean, x)) / along_channels(deviation, x)

    return [
        (by((variance + eps).sqrt()) * each, "it is multiplied by the weights: they decide what mean and variance are, "
                                             "and nothing else"),
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


# ---- 3: backward ----


@question(
    "Each value of x changes the mean and the variance, and through them all normalised values of its channel, also "
    "on the other ranks. How much does it change them? In proportion to its weight. You need two sums per channel "
    "over all ranks' gradients, and one sum of weights.",
    "Without weights: (gradient - mean(gradient) - normalized * mean(gradient * normalized)) * scale. With weights, "
    "1 / count becomes weight / (sum of the weights of all values), in both terms. The two sums themselves have no "
    "weights: the losses have none.",
    "sums = torch.cat([gradient.sum(dims), (gradient * normalized).sum(dims), the sum of the weights of this "
    "rank's values]), where dims are all but the second; dist.all_reduce(sums); then (gradient - each * (first + "
    "normalized * second) / total) * scale, with each = weights as view(-1, 1, ...), and the others as view(1, -1, "
    "1, ...).",
)
def check_input_gradient(answer, draw):
    """The gradient for each rank's part must be autograd's for the joined batch, with
    the sum of all losses.
    """
    n = draw.choice([2, 3])
    batches = [parts_of_a_batch(draw, n, dims) for dims in (4, 2, 5, 3)]
    cases = [a_backward(draw, parts) for parts in [*batches, many_samples(draw, n)]]
    for arguments in cases[0][1]:
        arguments[:2] = channels_last(arguments[:2])
    seen = answer.on_ranks(calls, [case[:2] for case in cases], nproc=n)
    for place, case in enumerate(cases):
        judge_gradient(*case, [of_rank[place] for of_rank in seen])
    judge_bytes(*cases[-1][:2], [of_rank[-1] for of_rank in seen])

    other = 5 - n
    empty = draw.randrange(other)
    case = a_backward(draw, parts_of_a_batch(draw, other, draw.randint(2, 4), empty))
    judge_gradient(*case, seen_with_an_empty_part(answer, *case[:2], empty))


def a_backward(draw, parts):
    """A case for `calls`, and autograd's gradients in one process, for each rank's
    part.
    """
    eps, joined = draw.uniform(0.2, 0.6), torch.cat(parts).requires_grad_(True)
    weights = weights_of(draw, parts, light=joined.dim() == 2)
    mean, variance, _ = statistics(joined, torch.cat(weights))
    scale = (variance + eps).rsqrt()
    normalized = (joined - along_channels(mean, joined)) * along_channels(scale, joined)
    noise = torch.randn(joined.shape, generator=torch.Generator().manual_seed(draw.randrange(10**6)))
    gradient = 0.5 + normalized.detach() + noise
    normalized.backward(gradient)

    lengths = [len(part) for part in parts]
    given = zip(gradient.split(lengths), normalized.detach().split(lengths), weights)
    arguments = [
        [of_rank.clone(), normal.clone(), scale.detach().clone(), of_part] for of_rank, normal, of_part in given
    ]
    return (f"input_gradient with {in_words(parts)}", arguments, joined.grad.split(lengths))


def judge_gradient(name, arguments, expected, of_ranks):
    """Raise Wrong unless the ranks have these gradients."""
    judge_waits(name, of_ranks)
    for rank, of_rank in reversed(list(enumerate(of_ranks))):
        where, got, shape = (f"{rank} of {len(of_ranks)}", of_rank["returned"], expected[rank].shape)
        if not isinstance(got, torch.Tensor) or got.shape != shape:
            given = f"shape {tuple(got.shape)}" if isinstance(got, torch.Tensor) else got
            raise Wrong(name, rank=where, expected=f"a tensor of shape {tuple(shape)}", got=given,
                        cause="the gradient must have the shape of x, like normalized")  # fmt: skip
        compare(name, where, got, expected[rank], partial(looks_of_gradient, arguments, expected, rank),
                "three terms belong to it: of the value itself, of the mean, and of the variance, each channel by "
                "channel; check the sign, the factor and the shape of each")  # fmt: skip
    judge_manners(name, of_ranks, 1, ["gradient", "normalized", "scale", "weights"])


def looks_of_gradient(arguments, expected, rank):
    n, (gradient, normalized, scale, weights) = len(arguments), arguments[rank]
    values = gradient.shape[2:].numel()  # per sample and channel
    total = sum(of_rank[3].sum() for of_rank in arguments) * values
    own_total = (weights.sum() * values).clamp(min=1e-9)
    count = sum(len(of_rank[0]) for of_rank in arguments) * values
    sums = [sums_of_gradient(*of_rank) for of_rank in arguments]
    with_weights = sum(sums_of_gradient(*of_rank, of_rank[3]) for of_rank in arguments)
    own, every = sums[rank], sum(sums)
    each = along_samples(weights, gradient)

    def result(mean, slope, each=each, factor=scale):
        mean, slope, factor = (along_channels(vector, gradient) for vector in (mean, slope, factor))
        return (gradient - each * (mean + normalized * slope)) * factor

    mean, slope = every / total
    nothing = torch.zeros_like(mean)
    return [
        *([(result(*every), LIGHT)] if total < 1 else []),
        (expected[rank] * (each > 0), "a sample of weight 0 is normalised like all others, so it has a gradient, too"),
        (result(*every / count, 1), "the weights are ignored: a value of weight w moves mean and variance by w / (the sum "
                                    "of all weights)"),
        (result(*every / total, 1), "both terms must be multiplied by the weight of the sample"),
        (result(*with_weights / total), "the sums over gradient have weights: the losses have none, so sum without"),
        (result(*with_weights / total, 1), "the weights belong to the sample whose gradient it is, not into the sums "
                                           "over all gradients"),
        (result(*every / count), "it is divided by the number of values: divide by the sum of their weights"),
        (result(*every / total * values), "it is divided by the weights of the samples, but each value of a sample has "
                                          "this weight"),
        (result(*own / own_total), "the sums are over this rank's part only: sum over the ranks"),
        (result(*own / total), "the sums are over this rank's part only, but the weights are those of all ranks: sum "
                               "all of them over the ranks"),
        (result(*every / own_total), "the sums over all ranks are divided by this rank's weights: sum the weights, too"),
        (result(nothing, nothing), "mean and variance are treated as constants, but they depend on x"),
        (result(mean, nothing), "the term of the variance is missing"),
        (result(nothing, slope), "the term of the mean is missing"),
        (result(-mean, -slope), "the two terms are added: subtract them"),
        (result(-mean, slope), "the term of the mean has the wrong sign"),
        (result(mean, -slope), "the term of the variance has the wrong sign"),
        (-expected[rank], "the sign is the opposite"),
        (each * expected[rank], "the whole result is multiplied by the weights: only two of its three terms are"),
        (n * expected[rank], "it is multiplied by the number of ranks: the sums already include all ranks"),
        (expected[rank] / n, "it is divided by the number of ranks: use the sum of the losses, not the mean"),
        (result(mean, slope, factor=nothing + 1), "scale is missing"),
        (result(mean, slope, factor=1 / scale), "it is divided by scale, which is 1 / sqrt(variance + eps) already"),
    ]  # fmt: skip


def sums_of_gradient(gradient, normalized, scale, weights, each=None):
    """The sums of gradient and of gradient * normalized per channel, (2, channels).
    each: weights to sum with, if any.
    """
    if each is not None:
        gradient = gradient * along_samples(each, gradient)
    return torch.stack([sum_by_channel(gradient), sum_by_channel(gradient * normalized)])
