"""Exercise 05: batch normalisation over all ranks: forward, backward, and the
conversion of a network.
"""

from functools import partial
from itertools import zip_longest

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_course.checks.training import close, equal, fill, state, take_steps
from ddp_course.checks.works import noting_works
from ddp_course.lesson05 import SyncBatchNorm, along_channels, sum_by_channel
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import SYMPTOMS
from ddp_course.ranks.watch import Watch
from ddp_course.school.judge import Wrong, question, trying

# ---- 1 and 2: parts of a batch, and what an answer did with them ----


def parts_of_a_batch(draw, ranks, dims, empty=None):
    """A random batch, float64 (batch, channels, ...): parts of different lengths, one
    per rank.

    empty: the rank whose part has no samples. The mean and deviation of a channel
    differ between the parts.
    """
    lengths = [
        0 if rank == empty else length
        for rank, length in enumerate(draw.sample(range(3, 8), ranks))
    ]
    channels, further = draw.randint(8, 10), draw.sample(range(2, 5), dims - 2)
    generator, parts = torch.Generator().manual_seed(draw.randrange(10**6)), []
    for length in lengths:
        noise = torch.randn(
            length, channels, *further, generator=generator, dtype=torch.float64
        )
        mean = 2 * torch.randn(channels, generator=generator)
        deviation = 0.5 + torch.rand(channels, generator=generator)
        parts.append(
            along_channels(mean, noise) + along_channels(deviation, noise) * noise
        )
    return parts


def channels_last(parts):
    """The same images, (batch, channels, height, width), with the channels of a pixel
    side by side in memory.
    """
    return [part.contiguous(memory_format=torch.channels_last) for part in parts]


def many_samples(draw, ranks):
    """Parts of a batch, so large that a few numbers per channel are negligible."""
    generator = torch.Generator().manual_seed(draw.randrange(10**6))
    shapes = [(30 + rank, 2, 16, 16) for rank in range(ranks)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    ]


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
            with trying(name), Watch() as watch, noting_works() as works:
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
    """Raise Wrong if about as many bytes were sent as the batch has."""
    for rank, of_rank in enumerate(of_ranks):
        of_part = arguments[rank][0].nbytes
        if of_rank["bytes"] > of_part / 10:
            raise Wrong(f"the bytes sent by {name}", rank=f"{rank} of {len(of_ranks)}",
                        expected="a few numbers per channel",
                        got=f"{of_rank['bytes']:,} bytes, where this rank's part of x has {of_part:,}",
                        cause="you send the samples themselves: sums over them are enough")  # fmt: skip


def agree(got, expected, tolerance):
    """Whether the numbers agree within a relative and absolute tolerance."""
    return torch.allclose(
        got.double(), expected.double(), rtol=tolerance, atol=tolerance
    )


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
        cause = next(
            (text for value, text in looks() if agree(got, value, 1e-5)), otherwise
        )
    raise Wrong(checked, rank=where, expected=expected, got=got, cause=cause)


def statistics(x, less=0):
    """Mean and variance of each channel, both nan where x is empty. less: 1 for the
    unbiased variance.
    """
    count = x[:, 0].numel()
    mean = sum_by_channel(x) / count
    return mean, sum_by_channel((x - along_channels(mean, x)).square()) / (count - less)


# ---- 1: forward ----


@question(
    "You can compute the variance of a channel from three sums over its values: their count, the values, and their "
    "squares. Sums over the parts add up to the sums over the whole batch; means and variances do not.",
    "x.sum(dim=[0, *range(2, x.dim())]) keeps the channel dimension. torch.cat joins all three sums into one "
    "tensor, for one all_reduce. Start with x.double(), because mean(x²) - mean(x)² is a small difference between "
    "large numbers.",
    "wide = x.double(); sums = torch.cat([wide.sum(dims), (wide * wide).sum(dims), wide.new_tensor([values "
    "per channel])]); all_reduce; mean = total / count; variance = squares / count - mean²; then (wide - "
    "mean) / (variance + eps).sqrt(), with both as view(1, -1, 1, ...), and at the end .to(x.dtype).",
)
def check_normalize(answer, draw):
    """Mean, variance and the normalised part must be those of the joined batch: with
    uneven parts, with an empty part, and in 32 bits with a mean much larger than the
    deviation; and the ranks must send only a few numbers.
    """
    n = draw.choice([2, 3])
    batches = [parts_of_a_batch(draw, n, dims) for dims in (4, 2, 5, 3)]
    batches[0] = channels_last(batches[0])
    channels = batches[0][0].shape[1]
    far = torch.tensor(
        [draw.choice([-1, 1]) * draw.uniform(2000, 5000) for _ in range(channels)]
    )
    batches.append([(part + along_channels(far, part)).float() for part in batches[0]])
    batches.append(many_samples(draw, n))
    cases = [a_forward(draw, parts) for parts in batches]
    seen = answer.on_ranks(calls, cases, nproc=n)
    for place, case in enumerate(cases):
        judge_normalized(*case, [of_rank[place] for of_rank in seen])
    judge_bytes(*cases[-1], [of_rank[-1] for of_rank in seen])

    for n, empty in ((2, draw.randrange(2)), (3, draw.randrange(3))):
        case = a_forward(draw, parts_of_a_batch(draw, n, draw.randint(2, 4), empty))
        judge_normalized(*case, seen_with_an_empty_part(answer, *case, empty))


def a_forward(draw, parts):
    """A case for `calls`."""
    eps = round(draw.uniform(0.2, 0.6), 2)
    return f"normalize(x, eps={eps}) with {in_words(parts)}", [
        [part, eps] for part in parts
    ]


def judge_normalized(name, arguments, of_ranks):
    """Raise Wrong unless the ranks have the results of one process on the joined batch."""
    parts, eps = [part for part, _ in arguments], arguments[0][1]
    joined = torch.cat(parts).double()
    mean, variance = statistics(joined)
    normalized = F.batch_norm(joined, None, None, training=True, eps=eps).split(
        [len(part) for part in parts]
    )
    narrow = parts[0].dtype == torch.float32
    tolerance = 1e-2 if narrow else 1e-10
    why_variance = (
        "it is the mean of (x - mean)², over all values of a channel, on all ranks"
    )
    if narrow:
        why_variance = (
            "the mean is much larger than the deviation, which the rounding of 32 bits destroys: sum in 64 bits, or "
            "subtract the mean before squaring"
        )  # fmt: skip

    judge_waits(name, of_ranks)
    for rank, of_rank in reversed(
        list(enumerate(of_ranks))
    ):  # rank 0 is often right by accident
        where = f"{rank} of {len(parts)}"
        got = three_tensors(name, where, of_rank["returned"], parts[rank])
        if any(tensor.isnan().any() for tensor in got) and not all(map(len, parts)):
            raise Wrong(name, rank=where, expected="numbers", got="nan", cause="the mean of an empty part is 0/0, "
                        "which is nan, and adding to nan gives nan: sum over all ranks first, and then divide",
                        )  # fmt: skip
        compare(f"the mean from {name}", where, got[1], mean, partial(looks_of_mean, parts, rank),
                "sum all values of a channel on all ranks, and divide by their number", tolerance,
                )  # fmt: skip
        compare(f"the variance from {name}", where, got[2], variance, partial(looks_of_variance, parts, rank),
                why_variance, tolerance)  # fmt: skip
        compare(f"normalized from {name}", where, got[0], normalized[rank],
                partial(looks_of_normalized, parts, rank, eps), "mean and variance are right; normalized is "
                "(x - mean) / (variance + eps).sqrt(), channel by channel", tolerance)  # fmt: skip
    judge_manners(name, of_ranks, 2, ["x"])


def three_tensors(name, where, returned, part):
    """normalized, mean and variance, if the answer returned these three in the right
    shapes.
    """
    is_triple = isinstance(returned, list) and len(returned) == 3
    if not is_triple or not all(isinstance(value, torch.Tensor) for value in returned):
        raise Wrong(name, rank=where, expected="three tensors", got=returned,
                    cause="return normalized, mean, variance, in this order")  # fmt: skip
    shapes = {
        "normalized": part.shape,
        "the mean": part.shape[1:2],
        "the variance": part.shape[1:2],
    }
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


def looks_of_mean(parts, rank):
    joined, own = torch.cat(parts).double(), parts[rank].double()
    total, means = sum_by_channel(joined), [statistics(part)[0] for part in parts]
    return [
        (means[rank], "it is the mean of this rank's own part: sum over the ranks"),
        (sum(means) / len(parts), "it is the mean of the ranks' means, in which a short part counts as much as a "
                                  "long one: sum values and counts, and then divide"),
        (total / max(1, own[:, 0].numel()), "the sum over all ranks is divided by this rank's count: sum the "
                                            "counts, too"),
        (total / len(joined), "it is divided by the number of samples instead of the number of values"),
    ]  # fmt: skip


def looks_of_variance(parts, rank):
    joined = torch.cat(parts).double()
    mean, variance = statistics(joined)
    variances = [statistics(part)[1] for part in parts]
    weighted = sum(own * len(part) for own, part in zip(variances, parts)) / len(joined)
    apart = "it is a mean of the ranks' variances, which ignores the differences between their means: sum the squares"
    return [
        (variances[rank], "it is the variance of this rank's own part: sum over the ranks"),
        (sum(variances) / len(parts), apart),
        (weighted, apart),
        (statistics(joined, less=1)[1], "it is the unbiased variance, divided by one less than the count: "
                                        "BatchNorm normalises with the biased one"),
        (variance + mean.square(), "it is the mean of the squares: subtract the square of the mean"),
        (variance.sqrt(), "it is the standard deviation, the root of the variance"),
    ]  # fmt: skip


def looks_of_normalized(parts, rank, eps):
    joined, x = torch.cat(parts).double(), parts[rank].double()
    mean, variance = statistics(joined)
    own_mean, own_variance = statistics(x)
    unbiased = statistics(joined, less=1)[1]

    def by(deviation, mean=mean):
        return (x - along_channels(mean, x)) / along_channels(deviation, x)

    return [
        (by(variance.sqrt()), "eps is missing: add it to the variance"),
        (by(variance.sqrt() + eps), "eps is added to the root: add it to the variance, under the root"),
        (by(variance + eps), "it is divided by the variance: the root is missing"),
        (by((unbiased + eps).sqrt()), "normalized uses the unbiased variance, though the returned variance is the "
                                      "biased one"),
        (by((own_variance + eps).sqrt(), own_mean), "normalized uses the mean and variance of this rank's own part, "
                                                    "though the returned ones are those of the joined batch"),
    ]  # fmt: skip


# ---- 2: backward ----


@question(
    "Each value of x changes the mean and the variance, and through them all normalised values of its channel, also "
    "on the other ranks. You need two sums per channel over all ranks' gradients.",
    "In one process: (gradient - mean(gradient) - normalized * mean(gradient * normalized)) * scale, channel "
    "by channel. Both means are over the joined batch: sums over all ranks, divided by count.",
    "sums = torch.cat([gradient.sum(dims), (gradient * normalized).sum(dims)]), where dims are all but the "
    "second; dist.all_reduce(sums); mean, slope = (sums / count).chunk(2); then the formula, with mean, "
    "slope and scale as view(1, -1, 1, ...).",
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
    normalized = F.batch_norm(joined, None, None, training=True, eps=eps)
    noise = torch.randn(
        joined.shape, generator=torch.Generator().manual_seed(draw.randrange(10**6))
    )
    gradient = 0.5 + normalized.detach() + noise
    normalized.backward(gradient)

    lengths = [len(part) for part in parts]
    scale, count = (statistics(joined.detach())[1] + eps).rsqrt(), joined[:, 0].numel()
    pairs = zip(gradient.split(lengths), normalized.detach().split(lengths))
    arguments = [
        [of_rank.clone(), normal.clone(), scale, count] for of_rank, normal in pairs
    ]
    return (
        f"input_gradient with {in_words(parts)}",
        arguments,
        joined.grad.split(lengths),
    )


def judge_gradient(name, arguments, expected, of_ranks):
    """Raise Wrong unless the ranks have these gradients."""
    judge_waits(name, of_ranks)
    for rank, of_rank in reversed(list(enumerate(of_ranks))):
        where, got, shape = (
            f"{rank} of {len(of_ranks)}",
            of_rank["returned"],
            expected[rank].shape,
        )
        if not isinstance(got, torch.Tensor) or got.shape != shape:
            given = (
                f"shape {tuple(got.shape)}" if isinstance(got, torch.Tensor) else got
            )
            raise Wrong(name, rank=where, expected=f"a tensor of shape {tuple(shape)}", got=given,
                        cause="the gradient must have the shape of x, like normalized")  # fmt: skip
        compare(name, where, got, expected[rank], partial(looks_of_gradient, arguments, expected, rank),
                "three terms belong to it: of the value itself, of the mean, and of the variance, each channel by "
                "channel; check the sign, the factor and the shape of each")  # fmt: skip
    judge_manners(name, of_ranks, 1, ["gradient", "normalized", "scale"])


def looks_of_gradient(arguments, expected, rank):
    n, (gradient, normalized, scale, count) = len(arguments), arguments[rank]
    own_count = max(1, gradient[:, 0].numel())
    sums = [
        torch.stack([sum_by_channel(g), sum_by_channel(g * normal)])
        for g, normal, *_ in arguments
    ]
    own, (mean, slope) = sums[rank], sum(sums) / count

    def result(mean, slope, factor=scale):
        mean, slope, factor = (
            along_channels(vector, gradient) for vector in (mean, slope, factor)
        )
        return (gradient - mean - normalized * slope) * factor

    nothing = torch.zeros_like(mean)
    return [
        (result(*own / own_count), "both means are over this rank's part only: sum over the ranks, and divide by "
                                   "count"),
        (result(*own / count), "the sums are over this rank's part only, but count is that of all ranks: sum over "
                               "the ranks"),
        (result(*sum(sums) / own_count), "the sums over all ranks are divided by this rank's count: divide by count"),
        (result(nothing, nothing), "mean and variance are treated as constants, but they depend on x"),
        (result(mean, nothing), "the term of the variance is missing: normalized * mean(gradient * normalized)"),
        (result(nothing, slope), "the term of the mean is missing: mean(gradient)"),
        (result(-mean, -slope), "the two means are added: subtract them"),
        (result(-mean, slope), "the term of the mean has the wrong sign"),
        (result(mean, -slope), "the term of the variance has the wrong sign"),
        (result(mean / n, slope / n), "the sums are averaged over the ranks and then divided by count, which "
                                      "already includes the values of all ranks"),
        (-expected[rank], "the sign is the opposite"),
        (n * expected[rank], "it is multiplied by the number of ranks: the two sums already include all ranks"),
        (expected[rank] / n, "it is divided by the number of ranks: use the sum of the losses, not the mean"),
        (result(mean, slope, nothing + 1), "scale is missing"),
        (result(mean, slope, 1 / scale), "it is divided by scale, which is 1 / sqrt(variance + eps) already"),
    ]  # fmt: skip


# ---- 3: conversion ----

BATCH_NORMS = ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d"]
OPTIONS = ["num_features", "eps", "momentum", "affine", "track_running_stats"]


class BatchNormBlock(nn.Module):
    """Every kind of BatchNorm, with all options, at several depths, and modules that
    only look like one, such as this block by its name. Takes (batch, channels, 2, 2,
    2), returns (batch, width).
    """

    def __init__(self, channels, width, eps, momentum):
        super().__init__()
        self.first = nn.BatchNorm3d(channels, eps, momentum)
        self.first.weight.requires_grad_(False)
        others = nn.Sequential(
            nn.InstanceNorm2d(channels, affine=True), nn.GroupNorm(1, channels)
        )
        self.images = nn.ModuleDict(
            {"norm": nn.BatchNorm2d(channels, eps, affine=False), "others": others}
        )
        rest = [nn.Linear(8 * channels, width), SyncBatchNorm(width, eps)]
        rest += [
            nn.Sequential(nn.Tanh(), nn.BatchNorm1d(width, eps, momentum=None)),
            nn.LayerNorm(width),
        ]
        rest += [nn.BatchNorm1d(width, momentum=momentum).eval()]
        self.rest = nn.ModuleList(
            [nn.BatchNorm1d(channels, track_running_stats=False), nn.Sequential(*rest)]
        )

    def forward(self, x):
        x = self.images["norm"](self.first(x).flatten(3))
        x = self.rest[0](self.images["others"](x).flatten(2))
        return self.rest[1](x.flatten(1))


def networks(seed, channels, eps, momentum):
    """The networks to convert, {name: network}: single layers, and at the end a network
    to train.
    """
    width = 4
    made = {
        "a BatchNorm1d": nn.BatchNorm1d(channels, eps, momentum),
        "a BatchNorm2d with affine=False": nn.BatchNorm2d(channels, eps, momentum, affine=False),
        "a BatchNorm3d with track_running_stats=False":
            nn.BatchNorm3d(channels, eps, momentum=None, track_running_stats=False),
        "a frozen BatchNorm1d in eval mode": nn.BatchNorm1d(channels, eps).requires_grad_(False).eval(),
        "an InstanceNorm2d": nn.InstanceNorm2d(channels, eps, affine=True, track_running_stats=True),
        "a network": nn.Sequential(BatchNormBlock(channels, width, eps, momentum), nn.Linear(width, 2)),
        "a network that uses a layer twice": used_twice(channels, eps),
    }  # fmt: skip
    return {name: fill(network, seed) for name, network in made.items()}


def used_twice(channels, eps):
    layer = nn.BatchNorm1d(channels, eps)
    return nn.Sequential(layer, nn.Linear(channels, channels), layer)


def conversions(convert, *of_networks):
    """Convert each of the `networks`; describe every layer, parameter and buffer
    afterwards.
    """
    seen = []
    for name, network in networks(*of_networks).items():
        layers = dict(network.named_modules(remove_duplicate=False))
        tensors = tensors_of(network)
        before, values = (
            {path: about(layer) for path, layer in layers.items()},
            state(network),
        )
        kinds = {
            key: "Parameter" if isinstance(value, nn.Parameter) else "buffer"
            for key, value in tensors.items()
        }
        trained = {key: value.requires_grad for key, value in tensors.items()}
        with trying(f"convert of {name}"):
            converted = convert(network)
        if not isinstance(converted, nn.Module):
            return [
                {
                    "name": name,
                    "returned": "None"
                    if converted is None
                    else f"a {type(converted).__name__}",
                }
            ]
        new = {path: at(converted, path) for path in layers}
        new_tensors = tensors_of(converted)
        seen.append({
            "name": name,
            "layers": {
                path: {"before": before[path], "after": about(new[path]), "same": new[path] is layer}
                for path, layer in layers.items()
            },
            "keys": [list(values), list(converted.state_dict())],
            "tensors": {
                key: {
                    "kind": kinds[key], "same": new_tensors.get(key) is value,
                    "values": [values[key], new_tensors.get(key)],
                    "trained": [trained[key], key in new_tensors and new_tensors[key].requires_grad],
                }
                for key, value in tensors.items()
            },
        })  # fmt: skip
    return seen


def tensors_of(network):
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


def at(network, path):
    """The layer at a path such as 'features.0'; None where there is none."""
    try:
        return network.get_submodule(path)
    except AttributeError:
        return None


def about(layer):
    """A description of a layer, or of the object in its place: kind, mode and options."""
    kind = "SyncBatchNorm" if isinstance(layer, SyncBatchNorm) else type(layer).__name__
    kind = "torch.nn.SyncBatchNorm" if isinstance(layer, nn.SyncBatchNorm) else kind
    return {
        "kind": kind,
        **{name: getattr(layer, name, None) for name in ["training", *OPTIONS]},
    }


def convert_and_train(convert, batches, *of_networks):
    with process_group(timeout=4) as (rank, world_size):
        model = DistributedDataParallel(convert(networks(*of_networks)["a network"]))
        return take_steps(model, [batch.chunk(world_size)[rank] for batch in batches])


@question(
    "What must convert return for a single BatchNorm? And for any other module, can convert call itself for each of "
    "its children?",
    "for name, child in module.named_children(): setattr(module, name, convert(child)). A new layer is "
    "SyncBatchNorm(num_features, eps, momentum, affine, track_running_stats). What else does the old layer have?",
    "isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d): make the layer; assign weight, bias, "
    "running_mean, running_var and num_batches_tracked of the old layer, even if they are None; return "
    "layer.train(module.training). Any other module: convert its children, return it.",
)
def check_convert(answer, draw):
    """Every BatchNorm must become a SyncBatchNorm with its tensors, options and mode;
    nothing else may change; then the ranks must train like one process.
    """
    seed, channels = draw.randrange(10**6), draw.randint(3, 6)
    of_networks = (
        seed,
        channels,
        round(draw.uniform(0.1, 0.4), 2),
        round(draw.uniform(0.2, 0.6), 2),
    )
    seen = answer.on_ranks(conversions, *of_networks)[0]
    for case in seen:
        if "returned" in case:
            raise Wrong(f"what convert returns for {case['name']}", expected="a module", got=case["returned"],
                        cause="return the converted module, even if it is the same object")  # fmt: skip
    judge_kinds(seen)
    for judge in (judge_options, judge_tensors):
        for case in seen:
            judge(case)

    generator = torch.Generator().manual_seed(seed)
    batches = [
        torch.randn(8, channels, 2, 2, 2, generator=generator, dtype=torch.float64)
        for _ in range(3)
    ]
    of_ranks = answer.on_ranks(convert_and_train, batches, *of_networks, nproc=2)
    history = take_steps(networks(*of_networks)["a network"], batches)
    for step, expected in enumerate(history):
        for rank, of_rank in enumerate(of_ranks):
            got = of_rank[step]
            if not equal(got, expected):
                key = next(
                    key for key in expected if not close(got.get(key), expected[key])
                )
                raise Wrong(f"{key} after step {step + 1} of training with DDP", rank=f"{rank} of 2",
                            expected=expected[key], got=got.get(key), cause="each layer looks like a SyncBatchNorm, "
                            "but the ranks do not train like one process: does it compute like a SyncBatchNorm?",
                            )  # fmt: skip


def judge_kinds(seen):
    """Raise Wrong unless every BatchNorm has become a SyncBatchNorm and all else is
    unchanged.
    """
    layers = [layer for case in seen for layer in case["layers"].values()]
    for case in seen:
        for path, layer in case["layers"].items():
            old, new = layer["before"]["kind"], layer["after"]["kind"]
            if old in BATCH_NORMS and new != "SyncBatchNorm":
                cause = cause_of_a_layer_left(case, path, layers)
                raise Wrong(
                    the_place(case, path),
                    expected="SyncBatchNorm",
                    got=new,
                    cause=cause,
                )
            if old not in BATCH_NORMS and not layer["same"]:
                cause = "all other modules must stay the same objects: change the given module, not a copy"
                if old == "SyncBatchNorm":
                    cause = "it is already a SyncBatchNorm: leave it unchanged"
                elif new == "SyncBatchNorm":
                    cause = (
                        "replace only BatchNorm1d, 2d and 3d: this layer shares a base class with them, but "
                        "normalises each sample separately"
                    )  # fmt: skip
                raise Wrong(the_place(case, path), expected=f"the same {old}", got=f"another object, {new}",
                            cause=cause)  # fmt: skip


def cause_of_a_layer_left(case, path, layers):
    """Why a BatchNorm has not become a SyncBatchNorm. layers: of all networks."""
    before, after = case["layers"][path]["before"], case["layers"][path]["after"]
    done = [one["before"] for one in layers if one["after"]["kind"] == "SyncBatchNorm"]
    done = [one for one in done if one["kind"] in BATCH_NORMS]
    if after["kind"] == "torch.nn.SyncBatchNorm":
        return (
            "that is torch's SyncBatchNorm, which trains on GPUs only: use the one from "
            "ddp_course.lesson05"
        )
    if done and before["kind"] not in [one["kind"] for one in done]:
        return "BatchNorm comes in three kinds, 1d, 2d and 3d"
    if not before["training"] and all(one["training"] for one in done):
        return (
            "a layer in eval mode may be trained later: convert it too, and let it keep "
            "its mode"
        )
    if case["name"].endswith("twice"):
        return (
            "the same layer is in two places, and named_children(), named_modules() and modules() show it in "
            "the first one only: replace it in both"
        )  # fmt: skip
    if not path:
        return "the module may be a BatchNorm itself, which has no parent: return the new layer"
    return "it is deeper in the network: visit every child recursively, and replace the layer in its parent"


def judge_options(case):
    """Raise Wrong unless every layer has kept its options and its mode."""
    for path, layer in case["layers"].items():
        before, after = layer["before"], layer["after"]
        for option in OPTIONS:
            if after[option] != before[option]:
                raise Wrong(f"{option} of {the_place(case, path)}", expected=before[option],
                            got=after[option], cause="a new layer has default options: pass it all four options of "
                            "the old layer")  # fmt: skip
        if after["training"] != before["training"]:
            mode = {True: "training mode", False: "eval mode"}
            raise Wrong(the_place(case, path), expected=mode[before["training"]], got=mode[after["training"]],
                        cause="a layer must keep its mode, but a new layer starts in training mode: "
                        "layer.train(old.training)")  # fmt: skip


def judge_tensors(case):
    """Raise Wrong unless names, parameters and buffers are unchanged and the same
    objects.
    """
    keys, new_keys = case["keys"]
    if new_keys != keys:
        old, new = next(
            (old, new) for old, new in zip_longest(keys, new_keys) if old != new
        )
        raise Wrong(f"names in the state_dict of {case['name']}, converted", expected=f"{old} in this place",
                    got=new, cause="names and their order come from a layer's place among its siblings: setattr "
                    "keeps this place, but a layer that is deleted and added again comes last")  # fmt: skip
    for key, tensor in case["tensors"].items():
        what, (old, new) = f"{key} of {case['name']}, converted", tensor["values"]
        if not close(new, old):
            raise Wrong(what, expected=old, got=new, cause="the old layer's values are lost: assign its parameters "
                        "and buffers to the new layer")  # fmt: skip
        if not tensor["same"]:
            cause = "it is a copy: assign the old layer's buffer itself"
            if tensor["kind"] == "Parameter":
                cause = "it is a copy with the same numbers: an optimizer that was made before trains the old parameter"
            raise Wrong(
                what,
                expected=f"the same {tensor['kind']} as before",
                got="another object",
                cause=cause,
            )
        if tensor["trained"][0] != tensor["trained"][1]:
            raise Wrong(f"requires_grad of {what}", expected=tensor["trained"][0], got=tensor["trained"][1],
                        cause="a frozen parameter must stay frozen")  # fmt: skip


def the_place(case, path):
    """A layer in words: 'a BatchNorm1d, converted', or 'layer 0.first of a network,
    converted'.
    """
    return (
        f"layer {path} of {case['name']}, converted"
        if path
        else f"{case['name']}, converted"
    )
