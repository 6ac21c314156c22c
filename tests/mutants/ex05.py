"""Exercise 05: SyncBatchNorm."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from ddp_course import lesson05
from ddp_course.lesson05 import SyncBatchNorm
from mutants import right, wrong

BATCH_NORMS = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d

# ---- normalize ----


def by_channel(x):
    """All values of each channel, (channels, values)."""
    return x.transpose(0, 1).flatten(1)


def like(vector, x):
    return vector.reshape(-1, *[1] * (x.dim() - 2))


def summed(*vectors):
    """Each of these summed over the ranks, in one all-reduce."""
    flat = torch.cat([vector.reshape(-1) for vector in vectors])
    dist.all_reduce(flat)
    return flat.split([vector.numel() for vector in vectors])


def count_of(x):
    return torch.tensor([x.numel() // x.shape[1]]).double()


def statistics(x):
    """Count, mean and variance of the joined batch."""
    wide = by_channel(x.double())
    total, squares, count = summed(wide.sum(1), wide.square().sum(1), count_of(x))
    return count, total / count, squares / count - (total / count) ** 2


def apply(x, mean, variance, eps):
    return (
        ((x - like(mean, x)) / (like(variance, x) + eps).sqrt()).to(x.dtype),
        mean,
        variance,
    )


@right("normalize")
def as_in_the_lesson(x, eps):
    return lesson05.NormalizeOverRanks.apply(x, eps)[:3]


@right("normalize")
def the_mean_first(x, eps):
    """Two collectives, and for float32 nothing wider than that."""
    values = by_channel(x)
    total, count = summed(values.sum(1), count_of(x).to(x.dtype))
    mean = total / count
    (squares,) = summed((values - mean[:, None]).square().sum(1))
    return apply(x, mean, squares / count, eps)


@right("normalize")
def joins_the_ranks_own_statistics(x, eps):
    """Chan's formula, from all_gather of each rank's count, mean and sum of squared
    deviations.
    """
    values = by_channel(x)
    count = values.new_full([len(values)], values.shape[1])
    mean = values.sum(1) / count.clamp(min=1)
    mine = torch.stack([count, mean, (values - mean[:, None]).square().sum(1)])
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    counts, means, squares = torch.stack(gathered, dim=1)
    mean = (counts * means).sum(0) / counts.sum(0)
    variance = (squares + counts * (means - mean) ** 2).sum(0) / counts.sum(0)
    return apply(x, mean, variance, eps)


@right("normalize")
def with_objects_and_batch_norm(x, eps):
    """Sums as Python objects, a list instead of a tuple, and torch for the rest."""
    wide = by_channel(x.double())
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (wide.sum(1), wide.square().sum(1), wide.shape[1]))
    total, squares, count = map(sum, zip(*gathered))
    mean, variance = total / count, squares / count - (total / count).square()
    print(f"{count} values a channel")
    if not len(x):
        return [x.clone(), mean, variance]
    return [
        F.batch_norm(x.double(), mean, variance, training=False, eps=eps).to(x.dtype),
        mean,
        variance,
    ]


@wrong("normalize", "mean of this rank's own part: sum over the ranks")
def does_not_communicate(x, eps):
    values = by_channel(x)
    return apply(x, values.mean(1), values.var(1, correction=0), eps)


@wrong("normalize", "mean of the ranks' means")
def averages_means_and_squares(x, eps):
    values = by_channel(x.double())
    mean, squares = summed(values.mean(1), values.square().mean(1))
    mean, squares = mean / dist.get_world_size(), squares / dist.get_world_size()
    return apply(x, mean, squares - mean**2, eps)


@wrong("normalize", "divided by this rank's count")
def divides_by_its_own_count(x, eps):
    values = by_channel(x.double())
    total, squares = summed(values.sum(1), values.square().sum(1))
    mean = total / values.shape[1]
    return apply(x, mean, squares / values.shape[1] - mean**2, eps)


@wrong("normalize", "divided by the number of samples")
def counts_samples(x, eps):
    wide = by_channel(x.double())
    total, squares, count = summed(
        wide.sum(1), wide.square().sum(1), torch.tensor([len(x)]).double()
    )
    return apply(x, total / count, squares / count - (total / count) ** 2, eps)


@wrong("normalize", "sum all values of a channel on all ranks")
def divides_by_the_world_size(x, eps):
    wide = by_channel(x.double())
    total, squares = summed(wide.sum(1), wide.square().sum(1))
    n = dist.get_world_size()
    return apply(x, total / n, squares / n - (total / n) ** 2, eps)


@wrong("normalize", "mean of the ranks' variances, which ignores")
def averages_variances(x, eps):
    count, mean, _ = statistics(x)
    values = by_channel(x.double())
    (variance,) = summed(values.var(1, correction=0))
    return apply(x, mean, variance / dist.get_world_size(), eps)


@wrong("normalize", "mean of the ranks' variances, which ignores")
def weighs_variances(x, eps):
    values = by_channel(x.double())
    total, variance, count = summed(
        values.sum(1), values.var(1, correction=0) * values.shape[1], count_of(x)
    )
    return apply(x, total / count, variance / count, eps)


@wrong("normalize", "variance of this rank's own part")
def only_the_mean_is_of_all(x, eps):
    return apply(x, statistics(x)[1], by_channel(x).var(1, correction=0), eps)


@wrong("normalize", "unbiased variance, divided by one less")
def takes_the_unbiased_variance(x, eps):
    count, mean, variance = statistics(x)
    return apply(x, mean, variance * count / (count - 1), eps)


@wrong("normalize", "subtract the square of the mean")
def takes_the_mean_of_the_squares(x, eps):
    count, mean, variance = statistics(x)
    return apply(x, mean, variance + mean**2, eps)


@wrong("normalize", "the standard deviation, the root of the variance")
def returns_the_deviation(x, eps):
    count, mean, variance = statistics(x)
    normalized, *_ = apply(x, mean, variance, eps)
    return normalized, mean, variance.sqrt()


@wrong("normalize", r"mean of \(x - mean\)², over all values")
def takes_absolute_deviations(x, eps):
    count, mean, _ = statistics(x)
    (total,) = summed((by_channel(x.double()) - mean[:, None]).abs().sum(1))
    return apply(x, mean, total / count, eps)


@wrong("normalize", "eps is missing")
def forgets_eps(x, eps):
    count, mean, variance = statistics(x)
    return apply(x, mean, variance, 0.0)


@wrong("normalize", "eps is added to the root: add it to the variance")
def adds_eps_to_the_root(x, eps):
    count, mean, variance = statistics(x)
    return (x - like(mean, x)) / (like(variance, x).sqrt() + eps), mean, variance


@wrong("normalize", "divided by the variance: the root is missing")
def forgets_the_root(x, eps):
    count, mean, variance = statistics(x)
    return (x - like(mean, x)) / (like(variance, x) + eps), mean, variance


@wrong(
    "normalize",
    "uses the unbiased variance, though the returned variance is the biased one",
)
def divides_by_the_unbiased_one(x, eps):
    count, mean, variance = statistics(x)
    normalized, *_ = apply(x, mean, variance * count / (count - 1), eps)
    return normalized, mean, variance


@wrong(
    "normalize",
    "of this rank's own part, though the returned ones are those of the joined batch",
)
def normalizes_with_its_own(x, eps):
    count, mean, variance = statistics(x)
    if len(x):
        x = F.batch_norm(x, None, None, training=True, eps=eps)
    return x, mean, variance


@wrong("normalize", r"mean and variance are right; normalized is")
def does_not_subtract_the_mean(x, eps):
    count, mean, variance = statistics(x)
    return x / (like(variance, x) + eps).sqrt(), mean, variance


@wrong(
    "normalize",
    r"must match the size[^$]*\(in normalize\(x, eps",
    status="your code raised",
)
def forgets_to_reshape(x, eps):
    count, mean, variance = statistics(x)
    return (x - mean) / (variance + eps).sqrt(), mean, variance


@wrong("normalize", "one number per channel")
def only_over_the_samples(x, eps):
    wide = x.double()
    count = torch.tensor([len(x)]).double()
    total, squares, count = summed(wide.sum(0), wide.square().sum(0), count)
    mean = (total / count).view(x.shape[1:])
    variance = (squares / count).view(x.shape[1:]) - mean**2
    return (x - mean) / (variance + eps).sqrt(), mean, variance


@wrong("normalize", "one number per channel")
def keeps_the_dimensions(x, eps):
    count, mean, variance = statistics(x)
    normalized, *_ = apply(x, mean, variance, eps)
    return normalized, like(mean, x), like(variance, x)


@wrong("normalize", "return normalized, mean, variance, in this order")
def returns_one_tensor(x, eps):
    count, mean, variance = statistics(x)
    return apply(x, mean, variance, eps)[0]


@wrong("normalize", "one number per channel")
def returns_them_in_another_order(x, eps):
    count, mean, variance = statistics(x)
    normalized, *_ = apply(x, mean, variance, eps)
    return mean, variance, normalized


@wrong("normalize", "adding to nan gives nan")
def weighs_means_by_hand(x, eps):
    values = by_channel(x.double())
    count = values.shape[1]
    total, squares, count = summed(
        values.mean(1) * count,
        values.square().mean(1) * count,
        torch.tensor([count]).double(),
    )
    return apply(x, total / count, squares / count - (total / count) ** 2, eps)


@wrong("normalize", "must call the same collectives, with zeros")
def leaves_where_nothing_is_to_do(x, eps):
    if len(x) == 0:
        return x, torch.zeros(x.shape[1]), torch.ones(x.shape[1])
    count, mean, variance = statistics(x)
    return apply(x, mean, variance, eps)


@wrong("normalize", r"IndexError[^$]*\(in normalize[^$]* 0", status="your code raised")
def looks_at_the_first_value(x, eps):
    wide = by_channel(x.double())
    count = torch.tensor([len(x) * x[0, 0].numel()]).double()
    total, squares, count = summed(wide.sum(1), wide.square().sum(1), count)
    return apply(x, total / count, squares / count - (total / count) ** 2, eps)


@wrong("normalize", "do all ranks call the same collectives", status="your code raised")
def only_rank_zero_sums(x, eps):
    if dist.get_rank() == 0:
        return apply(x, *statistics(x)[1:], eps)
    values = by_channel(x)
    return apply(x, values.mean(1), values.var(1, correction=0), eps)


@wrong("normalize", "which the rounding of 32 bits destroys")
def sums_as_narrow_as_x(x, eps):
    values = by_channel(x)
    total, squares, count = summed(
        values.sum(1), values.square().sum(1), count_of(x).to(x.dtype)
    )
    return apply(x, total / count, squares / count - (total / count) ** 2, eps)


@wrong("normalize", "which the rounding of 32 bits destroys")
def sends_narrow_sums(x, eps):
    wide = by_channel(x.double())
    sums = [wide.sum(1), wide.square().sum(1), count_of(x)]
    total, squares, count = summed(*[part.to(x.dtype) for part in sums])
    return apply(x, total / count, squares / count - (total / count) ** 2, eps)


@wrong("normalize", "you converted 64 bits to 32")
def collects_sums_in_32_bits(x, eps):
    channels = x.shape[1]
    sums = torch.zeros(2 * channels + 1)
    sums[:channels], sums[channels:-1] = (
        by_channel(x).sum(1),
        by_channel(x).square().sum(1),
    )
    sums[-1] = x.numel() // channels
    dist.all_reduce(sums)
    mean = sums[:channels] / sums[-1]
    return apply(x, mean, sums[channels:-1] / sums[-1] - mean**2, eps)


@wrong("normalize", r"return .to\(x.dtype\)")
def returns_the_wide_one(x, eps):
    count, mean, variance = statistics(x)
    return apply(x.double(), mean, variance, eps)


@wrong("normalize", "you send the samples themselves")
def gathers_the_batch(x, eps):
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, x)
    wide = by_channel(torch.cat(gathered).double())
    return apply(x, wide.mean(1), wide.var(1, correction=0), eps)


@wrong("normalize", "send values together that are known at the same time")
def one_collective_for_each(x, eps):
    wide = by_channel(x.double())
    (total,), (squares,), (count,) = (
        summed(wide.sum(1)),
        summed(wide.square().sum(1)),
        summed(count_of(x)),
    )
    return apply(x, total / count, squares / count - (total / count) ** 2, eps)


@wrong("normalize", "it was changed in place")
def normalizes_in_place(x, eps):
    count, mean, variance = statistics(x)
    x -= like(mean, x).to(x.dtype)
    x /= (like(variance, x) + eps).sqrt().to(x.dtype)
    return x.clone(), mean, variance


@wrong("normalize", "view size is not compatible", status="your code raised")
def views_what_is_not_contiguous(x, eps):
    count, mean, variance = statistics(x)
    return apply(x.view(x.numel()).view(x.shape), mean, variance, eps)


@wrong("normalize", "the default dtype[^$]*belongs to the whole program")
def sets_the_default_dtype(x, eps):
    torch.set_default_dtype(torch.float64)
    count, mean, variance = statistics(x)
    return apply(x, mean, variance, eps)


@wrong("normalize", "whether gradients are recorded[^$]*belongs to the whole program")
def switches_gradients_off(x, eps):
    torch.set_grad_enabled(False)
    count, mean, variance = statistics(x)
    return apply(x, mean, variance, eps)


@wrong("normalize", "until work.wait.. has returned")
def does_not_wait(x, eps):
    wide = by_channel(x.double())
    sums = torch.cat([wide.sum(1), wide.square().sum(1), count_of(x)])
    dist.all_reduce(sums, async_op=True)
    total, squares, count = sums.split([x.shape[1], x.shape[1], 1])
    return apply(x, total / count, squares / count - (total / count) ** 2, eps)


@wrong("normalize", "", status="not attempted")
def not_begun(x, eps):
    raise NotImplementedError


# ---- input_gradient ----


def means(gradient, normalized, count):
    """The two means over the joined batch, in the shape of a channel."""
    sums = summed(by_channel(gradient).sum(1), by_channel(gradient * normalized).sum(1))
    return [like(part / count, gradient) for part in sums]


def own_sums(gradient, normalized):
    return like(by_channel(gradient).sum(1), gradient), like(
        by_channel(gradient * normalized).sum(1), gradient
    )


@right("input_gradient")
def with_a_matrix(gradient, normalized, scale, count):
    """The sums as one (2, channels) tensor, by einsum."""
    flat = [
        tensor.flatten(2) if tensor.dim() > 2 else tensor[..., None]
        for tensor in (gradient, normalized)
    ]
    sums = torch.stack([flat[0].sum((0, 2)), torch.einsum("bcs,bcs->c", *flat)])
    dist.all_reduce(sums, op=dist.ReduceOp.SUM)
    mean, slope = sums[:, :, None] / count
    return ((flat[0] - mean - flat[1] * slope) * scale[:, None]).view(gradient.shape)


@right("input_gradient")
def by_way_of_autograd(gradient, normalized, scale, count):
    """Gathers the sums of all ranks, and lets autograd take the rest apart."""
    mine = torch.stack(
        [by_channel(gradient).sum(1), by_channel(gradient * normalized).sum(1)]
    )
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    mean, slope = torch.stack(gathered).sum(0) / count
    with torch.enable_grad():
        z = normalized.clone().requires_grad_(True)
        loss = (
            z * gradient - z * like(mean, z) - z.square() / 2 * like(slope, z)
        ).sum()
        return torch.autograd.grad(loss, z)[0] * like(scale, z)


@right("input_gradient")
def averages_and_multiplies(gradient, normalized, scale, count):
    mean, slope = own_sums(gradient, normalized)
    sums = torch.cat([mean, slope])
    dist.all_reduce(sums, op=dist.ReduceOp.AVG)
    mean, slope = (sums * dist.get_world_size() / count).chunk(2)
    return like(scale, gradient) * (gradient - mean - slope * normalized)


@wrong("input_gradient", "both means are over this rank's part only")
def backward_of_its_own_part(gradient, normalized, scale, count):
    own_count = max(1, gradient.numel() // gradient.shape[1])
    mean, slope = (part / own_count for part in own_sums(gradient, normalized))
    return (gradient - mean - normalized * slope) * like(scale, gradient)


@wrong(
    "input_gradient",
    "the sums are over this rank's part only, but count is that of all",
)
def forgets_the_all_reduce(gradient, normalized, scale, count):
    mean, slope = (part / count for part in own_sums(gradient, normalized))
    return (gradient - mean - normalized * slope) * like(scale, gradient)


@wrong("input_gradient", "the sums over all ranks are divided by this rank's count")
def takes_its_own_count(gradient, normalized, scale, count):
    mean, slope = means(
        gradient, normalized, max(1, gradient.numel() // gradient.shape[1])
    )
    return (gradient - mean - normalized * slope) * like(scale, gradient)


@wrong("input_gradient", "treated as constants")
def statistics_are_constants(gradient, normalized, scale, count):
    return gradient * like(scale, gradient)


@wrong("input_gradient", "the term of the variance is missing")
def forgets_the_variance(gradient, normalized, scale, count):
    mean, _ = means(gradient, normalized, count)
    return (gradient - mean) * like(scale, gradient)


@wrong("input_gradient", "the term of the mean is missing")
def forgets_the_mean(gradient, normalized, scale, count):
    _, slope = means(gradient, normalized, count)
    return (gradient - normalized * slope) * like(scale, gradient)


@wrong("input_gradient", "two means are added: subtract")
def adds_the_means(gradient, normalized, scale, count):
    mean, slope = means(gradient, normalized, count)
    return (gradient + mean + normalized * slope) * like(scale, gradient)


@wrong("input_gradient", "the term of the mean has the wrong sign")
def adds_the_first_mean(gradient, normalized, scale, count):
    mean, slope = means(gradient, normalized, count)
    return (gradient + mean - normalized * slope) * like(scale, gradient)


@wrong("input_gradient", "the term of the variance has the wrong sign")
def adds_the_second_mean(gradient, normalized, scale, count):
    mean, slope = means(gradient, normalized, count)
    return (gradient - mean + normalized * slope) * like(scale, gradient)


@wrong("input_gradient", "averaged over the ranks and then divided by count")
def averages_the_sums(gradient, normalized, scale, count):
    mean, slope = means(gradient, normalized, count * dist.get_world_size())
    return (gradient - mean - normalized * slope) * like(scale, gradient)


def solved(gradient, normalized, scale, count):
    mean, slope = means(gradient, normalized, count)
    return (gradient - mean - normalized * slope) * like(scale, gradient)


@wrong("input_gradient", "the sign is the opposite")
def descends(gradient, normalized, scale, count):
    return -solved(gradient, normalized, scale, count)


@wrong("input_gradient", "multiplied by the number of ranks")
def multiplies_by_the_ranks(gradient, normalized, scale, count):
    return dist.get_world_size() * solved(gradient, normalized, scale, count)


@wrong("input_gradient", "use the sum of the losses")
def averages_as_ddp_does(gradient, normalized, scale, count):
    return solved(gradient, normalized, scale, count) / dist.get_world_size()


@wrong("input_gradient", "scale is missing")
def forgets_the_scale(gradient, normalized, scale, count):
    return solved(gradient, normalized, torch.ones_like(scale), count)


@wrong("input_gradient", "divided by scale, which is")
def divides_by_the_scale(gradient, normalized, scale, count):
    return solved(gradient, normalized, 1 / scale, count)


@wrong("input_gradient", "three terms belong to it")
def one_mean_for_all_channels(gradient, normalized, scale, count):
    mean, slope = means(gradient, normalized, count)
    return (gradient - mean.mean() - normalized * slope.mean()) * like(scale, gradient)


@wrong("input_gradient", "use torch.cat")
def sends_each_sum_alone(gradient, normalized, scale, count):
    (total,) = summed(by_channel(gradient).sum(1))
    (slope,) = summed(by_channel(gradient * normalized).sum(1))
    mean, slope = like(total / count, gradient), like(slope / count, gradient)
    return (gradient - mean - normalized * slope) * like(scale, gradient)


@wrong("input_gradient", "gradient after input_gradient[^$]*it was changed in place")
def writes_into_the_gradient(gradient, normalized, scale, count):
    mean, slope = means(gradient, normalized, count)
    return (
        gradient.sub_(mean).sub_(normalized * slope).mul_(like(scale, gradient)).clone()
    )


@wrong("input_gradient", "normalized after input_gradient[^$]*it was changed in place")
def writes_into_normalized(gradient, normalized, scale, count):
    mean, slope = means(gradient, normalized, count)
    normalized *= slope
    return (gradient - mean - normalized) * like(scale, gradient)


@wrong("input_gradient", "must call the same collectives, with zeros")
def nothing_to_do_for_an_empty_part(gradient, normalized, scale, count):
    return (
        gradient if not gradient.numel() else solved(gradient, normalized, scale, count)
    )


@wrong("input_gradient", "until work.wait.. has returned")
def goes_on_without_the_sums(gradient, normalized, scale, count):
    mean, slope = own_sums(gradient, normalized)
    sums = torch.cat([mean, slope])
    dist.all_reduce(sums, async_op=True)
    mean, slope = (sums / count).chunk(2)
    return (gradient - mean - normalized * slope) * like(scale, gradient)


@wrong("input_gradient", "you converted 64 bits to 32")
def sums_gradients_in_32_bits(gradient, normalized, scale, count):
    sums = torch.cat([part.float() for part in own_sums(gradient, normalized)])
    dist.all_reduce(sums)
    mean, slope = (sums / count).chunk(2)
    return (gradient - mean - normalized * slope) * like(scale, gradient)


@wrong("input_gradient", "the gradient must have the shape of x")
def returns_a_number_for_each_channel(gradient, normalized, scale, count):
    return by_channel(solved(gradient, normalized, scale, count)).sum(1)


@wrong("input_gradient", "the gradient must have the shape of x")
def forgets_to_return(gradient, normalized, scale, count):
    solved(gradient, normalized, scale, count)


@wrong("input_gradient", "you send the samples themselves")
def gathers_padded_batches(gradient, normalized, scale, count):
    samples = -(
        -count // (gradient.numel() // max(1, len(gradient)) // gradient.shape[1] or 1)
    )
    padded = torch.zeros(2, samples, *gradient.shape[1:], dtype=gradient.dtype)
    padded[0, : len(gradient)], padded[1, : len(gradient)] = gradient, normalized
    gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, padded)
    all_gradients, all_normalized = torch.cat(gathered, dim=1)
    mean, slope = (part / count for part in own_sums(all_gradients, all_normalized))
    return (gradient - mean - normalized * slope) * like(scale, gradient)


@wrong("input_gradient", "", status="not attempted")
def backward_not_begun(gradient, normalized, scale, count):
    raise NotImplementedError


# ---- convert ----


def converted(layer, **options):
    """A SyncBatchNorm with all that a BatchNorm holds."""
    names = ["eps", "momentum", "affine", "track_running_stats"]
    new = SyncBatchNorm(
        layer.num_features, **{name: getattr(layer, name) for name in names} | options
    )
    new.weight, new.bias = layer.weight, layer.bias
    new.running_mean, new.running_var = layer.running_mean, layer.running_var
    new.num_batches_tracked = layer.num_batches_tracked
    return new.train(layer.training)


def replaced(
    module, make=converted, is_one=lambda module: isinstance(module, BATCH_NORMS)
):
    """Every BatchNorm in a module replaced by what `make` makes of it."""
    if is_one(module):
        return make(module)
    for name, child in module._modules.items():
        setattr(module, name, replaced(child, make, is_one))
    return module


@right("convert")
def the_lessons_own(module):
    return lesson05.convert_sync_batchnorm(module)


@right("convert")
def changes_the_class(module):
    for layer in module.modules():
        if type(layer).__name__ in ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"):
            layer.__class__ = SyncBatchNorm
    return module


@right("convert")
def walks_over_the_paths(module):
    if isinstance(module, BATCH_NORMS):
        return moved(module)
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        if isinstance(layer, BATCH_NORMS):
            parent, _, name = path.rpartition(".")
            module.get_submodule(parent)._modules[name] = moved(layer)
    return module


def moved(layer):
    """The dictionaries themselves, under another class."""
    new = SyncBatchNorm.__new__(SyncBatchNorm)
    nn.Module.__init__(new)
    new.__dict__.update(vars(layer))
    print("replaced", layer)
    return new


@wrong("convert", "return the converted module")
def returns_nothing(module):
    replaced(module)


@wrong("convert", "a BatchNorm itself, which has no parent")
def forgets_the_module_itself(module):
    for child in module.modules():
        for name, layer in child.named_children():
            if isinstance(layer, BATCH_NORMS):
                setattr(child, name, converted(layer))
    return module


@wrong("convert", "1d, 2d and 3d")
def only_2d(module):
    return replaced(module, is_one=lambda module: isinstance(module, nn.BatchNorm2d))


@wrong("convert", "1d, 2d and 3d")
def forgets_3d(module):
    return replaced(
        module,
        is_one=lambda module: isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d),
    )


@wrong("convert", "a layer in eval mode may be trained later")
def skips_what_is_in_eval_mode(module):
    def is_one(layer):
        return isinstance(layer, BATCH_NORMS) and layer.training

    return replaced(module, is_one=is_one)


@wrong("convert", "the same layer is in two places")
def by_named_children(module):
    if isinstance(module, BATCH_NORMS):
        return converted(module)
    for name, child in module.named_children():
        setattr(module, name, by_named_children(child))
    return module


@wrong("convert", "layer 0.first of a network[^$]*deeper in the network")
def only_the_first_level(module):
    if isinstance(module, BATCH_NORMS):
        return converted(module)
    for name, child in module.named_children():
        if isinstance(child, BATCH_NORMS):
            setattr(module, name, converted(child))
    return module


@wrong("convert", "replace the layer in its parent")
def sets_paths_on_the_root(module):
    if isinstance(module, BATCH_NORMS):
        return converted(module)
    for path, layer in list(module.named_modules()):
        if isinstance(layer, BATCH_NORMS):
            setattr(module, path, converted(layer))
    return module


@wrong("convert", "torch's SyncBatchNorm, which trains on GPUs only")
def by_torch(module):
    return nn.SyncBatchNorm.convert_sync_batchnorm(module)


@wrong(
    "convert",
    "InstanceNorm2d, converted[^$]*replace only BatchNorm1d, 2d and 3d",
)
def takes_the_common_base(module):
    return replaced(
        module,
        is_one=lambda m: isinstance(m, _NormBase) and not isinstance(m, SyncBatchNorm),
    )


@wrong("convert", "already a SyncBatchNorm: leave it")
def converts_twice(module):
    return replaced(module, is_one=lambda module: isinstance(module, _BatchNorm))


@wrong("convert", "already a SyncBatchNorm: leave it")
def reads_names(module):
    is_one = lambda module: (
        "BatchNorm" in type(module).__name__ and hasattr(module, "num_features")
    )
    return replaced(module, is_one=is_one)


@wrong(
    "convert",
    r"'BatchNormBlock' object has no attribute 'num_features'[^$]*\(in convert of a network\)",
    status="your code raised",
)
def trusts_names(module):
    return replaced(
        module, is_one=lambda module: type(module).__name__.startswith("BatchNorm")
    )


@wrong("convert", "the same objects: change the given module")
def works_on_a_copy(module):
    return replaced(copy.deepcopy(module))


@wrong("convert", "eps of a BatchNorm1d[^$]*has default options")
def forgets_eps_and_momentum(module):
    def make(layer):
        return converted(layer, eps=1e-5, momentum=0.1)

    return replaced(module, make)


@wrong("convert", "momentum of a BatchNorm3d[^$]*has default options")
def cannot_do_without_momentum(module):
    return replaced(
        module, lambda layer: converted(layer, momentum=layer.momentum or 0.1)
    )


@wrong("convert", "affine of a BatchNorm2d[^$]*has default options")
def forgets_affine(module):
    return replaced(module, lambda layer: converted(layer, affine=True))


@wrong("convert", "track_running_stats of a BatchNorm3d[^$]*has default options")
def forgets_to_track(module):
    return replaced(module, lambda layer: converted(layer, track_running_stats=True))


@wrong(
    "convert",
    r"no attribute[^$]*\(in convert of a BatchNorm2d with affine=False\)",
    status="your code raised",
)
def copies_a_weight_that_is_not_there(module):
    def make(layer):
        new = converted(layer)
        new.weight.data.copy_(layer.weight.data)
        return new

    return replaced(module, make)


@wrong(
    "convert",
    r"NoneType[^$]*\(in convert of a BatchNorm3d with track_running_stats=False\)",
    status="your code raised",
)
def copies_statistics_that_are_not_there(module):
    def make(layer):
        new = converted(layer)
        new.running_mean = layer.running_mean.clone()
        return new

    return replaced(module, make)


@wrong("convert", "expected[^$]*eval mode[^$]*got[^$]*training mode[^$]*keep its mode")
def begins_to_train(module):
    return replaced(module, lambda layer: converted(layer).train())


@wrong("convert", "comes last")
def deletes_and_adds(module):
    if isinstance(module, BATCH_NORMS):
        return converted(module)
    for name, child in list(module._modules.items()):
        new = deletes_and_adds(child)
        if new is not child:
            delattr(module, name)
            module.add_module(name, new)
    return module


@wrong(
    "convert",
    "mutated during iteration|changed (size )?during iteration",
    status="your code raised",
)
def deletes_while_it_walks(module):
    if isinstance(module, BATCH_NORMS):
        return converted(module)
    for name, child in module._modules.items():
        del module._modules[name]
        module.add_module(name, deletes_while_it_walks(child))
    return module


def fresh(layer):
    options = [layer.eps, layer.momentum, layer.affine, layer.track_running_stats]
    return SyncBatchNorm(layer.num_features, *options).double().train(layer.training)


@wrong("convert", "the old layer's values are lost")
def makes_new_layers(module):
    return replaced(module, fresh)


@wrong("convert", "running_mean of a BatchNorm1d[^$]*the old layer's values are lost")
def forgets_the_buffers(module):
    def make(layer):
        new = fresh(layer)
        new.weight, new.bias = layer.weight, layer.bias
        return new

    return replaced(module, make)


@wrong("convert", "the old layer's values are lost")
def resets_what_it_took_over(module):
    def make(layer):
        new = converted(layer)
        new.reset_running_stats()
        return new

    return replaced(module, make)


@wrong("convert", "an optimizer that was made before trains the old parameter")
def loads_the_state_dict(module):
    def make(layer):
        new = fresh(layer)
        new.load_state_dict(layer.state_dict())
        return new

    return replaced(module, make)


@wrong("convert", "assign the old layer's buffer itself")
def copies_the_buffers(module):
    def make(layer):
        new = fresh(layer)
        new.weight, new.bias = layer.weight, layer.bias
        new.load_state_dict(layer.state_dict())
        return new

    return replaced(module, make)


@wrong("convert", "a frozen parameter must stay frozen")
def thaws(module):
    return replaced(module, lambda layer: converted(layer).requires_grad_(True))


@wrong("convert", "does it compute like a SyncBatchNorm")
def keeps_the_old_forward(module):
    def make(layer):
        new = converted(layer)
        new.forward = layer.forward
        return new

    return replaced(module, make)


class SyncedInName(SyncBatchNorm):
    """Only says that it is one."""

    def forward(self, x):
        return _BatchNorm.forward(self, x)


@wrong("convert", "does it compute like a SyncBatchNorm")
def gives_it_the_name(module):
    def make(layer):
        new = converted(layer)
        new.__class__ = SyncedInName
        return new

    return replaced(module, make)


@wrong("convert", "", status="not attempted")
def conversion_not_begun(module):
    raise NotImplementedError
