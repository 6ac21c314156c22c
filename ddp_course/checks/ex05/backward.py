"""Question 3: the gradient for a rank's part of a joined batch."""

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


def a_backward(draw, parts, without=None):
    """A case for `calls`: its name, and the arguments of each rank; and autograd's
    gradients in one process, for each rank's part.
    """
    eps, joined = draw.uniform(0.2, 0.6), torch.cat(parts).requires_grad_(True)
    weights = weights_of(draw, parts, without, light=joined.dim() == 2 and without is None)
    mean, variance, _ = statistics(joined, torch.cat(weights))
    scale = (variance + eps).rsqrt()
    normalized = (joined - along_channels(mean, joined)) * along_channels(scale, joined)
    noise = torch.randn(joined.shape, generator=torch.Generator().manual_seed(draw.randrange(10**6)))
    gradient = 0.5 + normalized.detach() + noise
    normalized.backward(gradient)

    name = f"input_gradient with {in_words(parts)}"
    if without is not None:
        name += f", and only weights of 0 on rank {without}"
    lengths = [len(part) for part in parts]
    given = zip(gradient.split(lengths), normalized.detach().split(lengths), weights)
    arguments = [
        {"gradient": of_rank.clone(), "normalized": normal.clone(), "scale": scale.detach().clone(), "weights": of_part}
        for of_rank, normal, of_part in given
    ]
    return name, arguments, joined.grad.split(lengths)


# ---- what is claimed ----


def claims_about(call, arguments, expected):
    """For each rank: it has its part of the `expected` gradients."""
    weightless = not all(of_rank["weights"].any() for of_rank in arguments)

    def claims(rank, of_ranks):
        mine, shape = of_ranks[rank], tuple(expected[rank].shape)
        got = mine["returned"]
        yield waited(call, mine)
        given = tuple(got.shape) if isinstance(got, torch.Tensor) else None
        yield Claim(
            call, given, shape, "the gradient must have the shape of x, like normalized",
            told=f"a tensor of shape {shape}", shown=got if given is None else f"shape {given}",
        )  # fmt: skip
        if weightless:
            yield Claim(
                call, got.isnan().any().item(), False, "a part that is empty, or has only weights of 0, has no mean: 0/0 is "
                "nan. Sum over all ranks first, and then divide", told="numbers", shown="nan",
            )  # fmt: skip
        yield Claim(
            call, got, expected[rank], "three terms belong to it: of the value itself, of the mean, and of the variance, "
            "each channel by channel; check the sign, the factor and the shape of each",
            partial(mistakes, arguments, expected[rank], rank),
        )  # fmt: skip
        yield from well_behaved(call, mine, most=1)
        if len(got) >= MANY:
            yield sums_are_sent(call, mine, got)

    return claims


def mistakes(arguments, expected, rank):
    n, (gradient, normalized, scale, weights) = len(arguments), arguments[rank].values()
    values = gradient.shape[2:].numel()  # per sample and channel
    total = sum(of_rank["weights"].sum() for of_rank in arguments) * values
    own_total = (weights.sum() * values).clamp(min=1e-9)
    count = sum(len(of_rank["gradient"]) for of_rank in arguments) * values
    sums = [sums_of(of_rank["gradient"], of_rank["normalized"]) for of_rank in arguments]
    weighted = [along_samples(of_rank["weights"], of_rank["gradient"]) * of_rank["gradient"] for of_rank in arguments]
    with_weights = sum(sums_of(one, of_rank["normalized"]) for one, of_rank in zip(weighted, arguments)) / total
    own, every = sums[rank], sum(sums)
    each = along_samples(weights, gradient)

    def result(mean, slope, each=each, factor=scale, first=gradient):
        mean, slope, factor = (along_channels(vector, gradient) for vector in (mean, slope, factor))
        return (first - each * (mean + normalized * slope)) * factor

    mean, slope = every / total
    nothing = torch.zeros_like(mean)
    own_loss = "the first term, the gradient itself, has no weight: each loss counts once"
    return [
        (expected, NARROWED),
        *([(result(*every), LIGHT)] if total < 1 else []),
        (expected * (each > 0), "a sample of weight 0 is normalised like all others, so it has a gradient, too"),
        (result(*every / count, 1), "the weights are ignored: a value of weight w moves mean and variance by w / (the sum "
                                    "of all weights)"),
        (result(*every / total, 1), "both terms must be multiplied by the weight of the sample"),
        (result(*with_weights), "the sums over gradient have weights: the losses have none, so sum without"),
        (result(*with_weights, 1), "the weights belong to the sample whose gradient it is, not into the sums over all "
                                   "gradients"),
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
        (-expected, "the sign is the opposite"),
        (each * expected, "the whole result is multiplied by the weights: only two of its three terms are"),
        *((result(*terms, factors, first=weighted[rank]), own_loss) for terms in (with_weights, every / total)
          for factors in (1, each)),
        (n * expected, "it is multiplied by the number of ranks: the sums already include all ranks"),
        (expected / n, "it is divided by the number of ranks: use the sum of the losses, not the mean"),
        (result(mean, slope, factor=nothing + 1), "scale is missing"),
        (result(mean, slope, factor=1 / scale), "it is divided by scale, which is 1 / sqrt(variance + eps) already"),
    ]  # fmt: skip


def sums_of(gradient, normalized):
    """The sums of gradient and of gradient * normalized per channel, (2, channels)."""
    return torch.stack([sum_by_channel(gradient), sum_by_channel(gradient * normalized)])


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
        arguments |= {what: channels_last(arguments[what]) for what in ("gradient", "normalized")}
    cases.insert(1, a_backward(draw, batches[1], without=draw.randrange(n)))
    seen = answer.on_ranks(calls, [case[:2] for case in cases], nproc=n)
    for place, case in enumerate(cases):
        on_every_rank(claims_about(*case), [of_rank[place] for of_rank in seen])

    n = 5 - n
    empty = draw.randrange(n)
    case = a_backward(draw, parts_of_a_batch(draw, n, draw.randint(2, 4), empty))
    on_every_rank(claims_about(*case), seen_with_an_empty_part(answer, *case[:2], empty))
