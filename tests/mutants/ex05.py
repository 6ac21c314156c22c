"""Exercise 05: SyncBatchNorm."""

import copy
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from ddp_course import lesson05
from ddp_course.lesson05 import SyncBatchNorm
from ddp_course.ranks.watch import Watch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parallel import DistributedDataParallel

from mutants import right, wrong

BATCH_NORMS = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d

# ---- traffic ----


def walk(network, needed=False):
    """(layer, whether its input needs a gradient), in the order of the calls."""
    for layer in network:
        if isinstance(layer, nn.Sequential):
            yield from walk(layer, needed)
        else:
            yield layer, needed
        needed = needed or any(value.requires_grad for value in layer.parameters())


def adds_up(network, counts=lambda layer: layer.training, more=1, size=8, back=None):
    calls = sent = 0
    for layer, needed in walk(network):
        if isinstance(layer, SyncBatchNorm) and counts(layer):
            calls, sent = calls + 1, sent + size * (2 * layer.num_features + more)
            if needed if back is None else back:
                calls, sent = calls + 1, sent + size * 2 * layer.num_features
    return calls, sent


@right("traffic")
def in_order(network):
    return adds_up(network)


@right("traffic")
def in_numpy(network):
    print("summing up")
    return list(np.array(adds_up(network)))


def looked_at(network):
    """Runs the network, and asks what comes in."""
    found, handles = [], []

    def look(layer, inputs):
        if layer.training:
            found.append((layer.num_features, inputs[0].requires_grad))

    for layer in network.modules():
        if isinstance(layer, SyncBatchNorm):
            handles.append(layer.register_forward_pre_hook(look))
    first = next(value for value in network.parameters())
    network(torch.randn(5, first.shape[-1], dtype=first.dtype))
    for handle in handles:
        handle.remove()
    sent = sum(8 * (2 * width + 1 + 2 * width * needed) for width, needed in found)
    return sum(1 + needed for _, needed in found), sent


@right("traffic")
def by_hooks(network):
    return looked_at(copy.deepcopy(network))


@right("traffic")
def by_hooks_and_puts_everything_back(network):
    before = copy.deepcopy(network.state_dict())
    numbers = looked_at(network)
    network.load_state_dict(before)
    return numbers


@wrong("traffic", "other buffers[^$]*If you run it, run a copy")
def changes_the_running_statistics(network):
    return looked_at(network)


@wrong("traffic", "other gradients[^$]*If you run it, run a copy")
def leaves_gradients(network):
    numbers = adds_up(network)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return numbers


@wrong("traffic", "other hooks[^$]*If you run it, run a copy")
def leaves_hooks(network):
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    return adds_up(network)


@wrong("traffic", "other dtypes[^$]*If you run it, run a copy")
def converts_to_32_bits(network):
    return adds_up(network.float())


@wrong("traffic", "other layers[^$]*the network belongs to the caller")
def takes_apart(network):
    numbers = adds_up(network)
    while len(network) > 2:
        network.pop(0)
    return numbers


@wrong("traffic", "autograd does not call its backward")
def always_goes_back(network):
    return adds_up(network, back=True)


@wrong("traffic", "only the forward pass is counted")
def counts_forward_only(network):
    return adds_up(network, back=False)


@wrong("traffic", "the number of values per channel is missing")
def forgets_the_count(network):
    return adds_up(network, more=0)


@wrong("traffic", "the sums are float64")
def takes_32_bits(network):
    return adds_up(network, size=4)


@wrong("traffic", "a layer in eval mode uses its running statistics")
def counts_eval(network):
    return adds_up(network, counts=lambda layer: True)


@wrong("traffic", "a layer in two places is called twice")
def by_modules(network):
    needed, calls, sent = False, 0, 0
    for layer in network.modules():
        if isinstance(layer, nn.Sequential):
            continue
        if isinstance(layer, SyncBatchNorm) and layer.training:
            calls += 1 + needed
            sent += 8 * (2 * layer.num_features + 1 + 2 * layer.num_features * needed)
        needed = needed or any(value.requires_grad for value in layer.parameters())
    return calls, sent


@wrong("traffic", "needs counting on paper")
def counts_collectives_here(network):
    """Runs a step: without a process group, it sends nothing."""
    first = next(value for value in network.parameters())
    with Watch() as watch:
        network(torch.randn(5, first.shape[-1], dtype=first.dtype)).sum().backward()
    return len(watch.log), sum(entry["bytes"] for entry in watch.log)


@wrong("traffic", "look at the order of the layers and at those inside of others")
def only_the_outermost(network):
    return adds_up([layer for layer in network if not isinstance(layer, nn.Sequential)])


@wrong("traffic", "an ordinary BatchNorm sends nothing")
def counts_every_batch_norm(network):
    calls = sent = 0
    for layer, needed in walk(network):
        if isinstance(layer, _BatchNorm) and layer.training:
            calls += 1 + needed
            sent += 8 * (2 * layer.num_features + 2 * layer.num_features * needed)
            sent += 8
    return calls, sent


@wrong("traffic", "it is what both ranks send")
def for_two_ranks(network):
    calls, sent = adds_up(network)
    return 2 * calls, 2 * sent


@wrong("traffic", "how many numbers are in each")
def sends_the_momentum(network):
    return adds_up(network, more=3)


@wrong("traffic", "the number of all-reduces and the number of bytes, in this order")
def only_the_bytes(network):
    return adds_up(network)[1]


@wrong("traffic", "do not change its modes")
def leaves_it_in_eval_mode(network):
    numbers = adds_up(network)
    network.eval()
    return numbers


@right("traffic")
def asks_meta_tensors(network):
    """Runs a copy on the meta device, which computes nothing, and asks autograd."""
    numbers, calls, copied = 0, 0, copy.deepcopy(network).to("meta")
    for layer in copied.modules():
        if isinstance(layer, nn.Sequential):
            continue
        layer.forward = (lambda x, layer=layer: passes(layer, x)) if isinstance(layer, _BatchNorm) else layer.forward
        if isinstance(layer, SyncBatchNorm) and layer.training:
            layer.calls = []
            layer.register_forward_pre_hook(lambda layer, inputs: layer.calls.append(inputs[0].requires_grad))
    copied(torch.empty(5, next(copied.parameters()).shape[-1], dtype=torch.float64, device="meta"))
    for layer in copied.modules():
        for needed in getattr(layer, "calls", ()):
            calls, numbers = calls + 1 + needed, numbers + 1 + 2 * layer.num_features * (1 + needed)
    return calls, 8 * numbers


def passes(layer, x):
    """What a BatchNorm returns, as far as autograd is concerned."""
    return x if layer.weight is None else x * layer.weight + layer.bias


@wrong("traffic", "trains only biases at first[^$]*one in the backward pass if its input needs a gradient")
def all_of_a_layer_must_train(network):
    needed, calls, numbers = False, 0, 0
    for layer in flattened(network):
        if isinstance(layer, SyncBatchNorm) and layer.training:
            calls, numbers = calls + 1 + needed, numbers + 1 + 2 * layer.num_features * (1 + needed)
        parameters = list(layer.parameters())
        needed |= bool(parameters) and all(value.requires_grad for value in parameters)
    return calls, 8 * numbers


@wrong("traffic", "trains only a SyncBatchNorm in eval mode[^$]*one in the backward pass if its input needs a gradient")
def looks_at_no_layer_in_eval_mode(network):
    needed, calls, numbers = False, 0, 0
    for layer in flattened(network):
        if not layer.training:
            continue
        if isinstance(layer, SyncBatchNorm):
            calls, numbers = calls + 1 + needed, numbers + 1 + 2 * layer.num_features * (1 + needed)
        needed |= any(value.requires_grad for value in layer.parameters())
    return calls, 8 * numbers


def flattened(network):
    for layer in network:
        yield from flattened(layer) if isinstance(layer, nn.Sequential) else [layer]


@wrong("traffic", "", status="not attempted")
def traffic_not_begun(network):
    raise NotImplementedError


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


def sums(x, weights):
    """This rank's sums of w, w * x and w * x², for each channel."""
    wide = by_channel(x.double())
    each = weights.double().repeat_interleave(x.shape[2:].numel())
    return each.sum()[None], (each * wide).sum(1), (each * wide.square()).sum(1)


def statistics(x, weights):
    """Sum of the weights, mean and variance of the joined batch."""
    total, values, squares = summed(*sums(x, weights))
    return total, values / total, squares / total - (values / total) ** 2


def apply(x, mean, variance, eps):
    return (((x - like(mean, x)) / (like(variance, x) + eps).sqrt()).to(x.dtype), mean, variance)


@right("normalize")
def the_mean_first(x, weights, eps):
    """Two collectives, and for float32 nothing wider than that."""
    values, each = by_channel(x), weights.repeat_interleave(x.shape[2:].numel())
    total, mean = summed(each.sum()[None], (each * values).sum(1))
    mean = mean / total
    (squares,) = summed((each * (values - mean[:, None]).square()).sum(1))
    return apply(x, mean, squares / total, eps)


@right("normalize")
def joins_the_ranks_own_statistics(x, weights, eps):
    """Chan's formula, from all_gather of each rank's weight, mean and sum of squared
    deviations.
    """
    values, each = by_channel(x), weights.repeat_interleave(x.shape[2:].numel())
    total = each.sum().expand(len(values))
    mean = (each * values).sum(1) / total.clamp(min=1e-300 if x.dtype.itemsize == 8 else 1e-30)
    squares = (each * (values - mean[:, None]).square()).sum(1)
    mine = torch.stack([total, mean, squares])
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    totals, means, squares = torch.stack(gathered, dim=1)
    mean = (totals * means).sum(0) / totals.sum(0)
    variance = (squares + totals * (means - mean) ** 2).sum(0) / totals.sum(0)
    return apply(x, mean, variance, eps)


@right("normalize")
def with_objects_and_batch_norm(x, weights, eps):
    """Sums as Python objects, a list instead of a tuple, and torch for the rest."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, sums(x, weights))
    total, values, squares = map(sum, zip(*gathered))
    mean, variance = values / total, squares / total - (values / total).square()
    print(f"{total} in all")
    if not len(x):
        return [x.clone(), mean, variance]
    normal = F.batch_norm(x.double(), mean, variance, training=False, eps=eps)
    return [normal.to(x.dtype), mean, variance]


@right("normalize")
def by_einsum(x, weights, eps):
    flat = x.double().reshape(*x.shape[:2], x.shape[2:].numel())
    powers = torch.stack([torch.ones_like(flat), flat, flat**2])
    moments = torch.einsum("b,pbcs->pc", weights.double(), powers)
    dist.all_reduce(moments)
    mean, square = moments[1:] / moments[0]
    return apply(x, mean, square - mean**2, eps)


@wrong("normalize", "the weights are ignored: a sample of weight w counts like w")
def the_lessons_own_forward(x, weights, eps):
    return lesson05.NormalizeOverRanks.apply(x, eps)[:3]


@wrong("normalize", "mean of this rank's own part, and the weights are ignored")
def torchs_batch_norm(x, weights, eps):
    values = by_channel(x)
    if not len(x):
        return x, values.sum(1), values.sum(1)
    normal = F.batch_norm(x, None, None, training=True, eps=eps)
    return normal, values.mean(1), values.var(1, correction=0)


@wrong("normalize", "divided by the number of values: divide by the sum")
def weighs_the_input_of_the_lessons(x, weights, eps):
    weighted = x * weights.view(-1, *[1] * (x.dim() - 1))
    return lesson05.NormalizeOverRanks.apply(weighted, eps)[:3]


@wrong("normalize", "divided by the number of values: divide by the sum of their weights")
def divides_by_the_number_of_values(x, weights, eps):
    count = torch.tensor([x.numel() // x.shape[1]]).double()
    _, values, squares = sums(x, weights)
    count, values, squares = summed(count, values, squares)
    return apply(x, values / count, squares / count - (values / count) ** 2, eps)


@wrong("normalize", "the weights are squared as well")
def squares_the_weights(x, weights, eps):
    each = weights.double().repeat_interleave(x.shape[2:].numel())
    total, values, _ = sums(x, weights)
    squares = (each * by_channel(x.double())).square().sum(1)
    total, values, squares = summed(total, values, squares)
    return apply(x, values / total, squares / total - (values / total) ** 2, eps)


@wrong("normalize", "the mean is weighted, but the squares are not")
def weighs_only_the_mean(x, weights, eps):
    _, mean, _ = statistics(x, weights)
    count = torch.tensor([x.numel() // x.shape[1]]).double()
    deviations = (by_channel(x.double()) - mean[:, None]).square().sum(1)
    count, deviations = summed(count, deviations)
    return apply(x, mean, deviations / count, eps)


@wrong("normalize", "multiplied by the weights: they decide what mean and variance are")
def masks_the_result(x, weights, eps):
    normal, *rest = apply(x, *statistics(x, weights)[1:], eps)
    return normal * weights.view(-1, *[1] * (x.dim() - 1)), *rest


@wrong("normalize", "each has this weight")
def counts_samples(x, weights, eps):
    _, values, squares = sums(x, weights)
    total, values, squares = summed(weights.double().sum()[None], values, squares)
    return apply(x, values / total, squares / total - (values / total) ** 2, eps)


@wrong("normalize", "mean of this rank's own part: sum over the ranks")
def does_not_communicate(x, weights, eps):
    total, values, squares = sums(x, weights)
    return apply(x, values / total, squares / total - (values / total) ** 2, eps)


@wrong("normalize", "mean of the ranks' means")
def averages_means_and_squares(x, weights, eps):
    total, values, squares = sums(x, weights)
    mean, squares = summed(values / total, squares / total)
    mean, squares = mean / dist.get_world_size(), squares / dist.get_world_size()
    return apply(x, mean, squares - mean**2, eps)


@wrong("normalize", "divided by this rank's weights")
def divides_by_its_own_weights(x, weights, eps):
    total, values, squares = sums(x, weights)
    values, squares = summed(values, squares)
    return apply(x, values / total, squares / total - (values / total) ** 2, eps)


@wrong("normalize", "sum the values of a channel times the weights")
def divides_by_the_world_size(x, weights, eps):
    _, values, squares = sums(x, weights)
    values, squares = summed(values, squares)
    n = dist.get_world_size()
    return apply(x, values / n, squares / n - (values / n) ** 2, eps)


def own_variance(x, weights):
    total, values, squares = sums(x, weights)
    return squares / total - (values / total) ** 2


@wrong("normalize", "mean of the ranks' variances, which ignores")
def averages_variances(x, weights, eps):
    _, mean, _ = statistics(x, weights)
    (variance,) = summed(own_variance(x, weights))
    return apply(x, mean, variance / dist.get_world_size(), eps)


@wrong("normalize", "mean of the ranks' variances, which ignores")
def weighs_variances(x, weights, eps):
    total, values, _ = sums(x, weights)
    of_all, values, variance = summed(total, values, own_variance(x, weights) * total)
    return apply(x, values / of_all, variance / of_all, eps)


@wrong("normalize", "variance of this rank's own part")
def only_the_mean_is_of_all(x, weights, eps):
    return apply(x, statistics(x, weights)[1], own_variance(x, weights), eps)


@wrong("normalize", "one less than the sum of the weights")
def takes_the_unbiased_variance(x, weights, eps):
    total, mean, variance = statistics(x, weights)
    return apply(x, mean, variance * total / (total - 1), eps)


@wrong("normalize", "subtract the square of the mean")
def takes_the_mean_of_the_squares(x, weights, eps):
    _, mean, variance = statistics(x, weights)
    return apply(x, mean, variance + mean**2, eps)


@wrong("normalize", "the standard deviation, the root of the variance")
def returns_the_deviation(x, weights, eps):
    _, mean, variance = statistics(x, weights)
    normalized, *_ = apply(x, mean, variance, eps)
    return normalized, mean, variance.sqrt()


@wrong("normalize", r"weighted mean of \(x - mean\)², over all values")
def takes_absolute_deviations(x, weights, eps):
    total, mean, _ = statistics(x, weights)
    each = weights.double().repeat_interleave(x.shape[2:].numel())
    deviations = (by_channel(x.double()) - mean[:, None]).abs()
    (deviation,) = summed((each * deviations).sum(1))
    return apply(x, mean, deviation / total, eps)


@wrong("normalize", "eps is missing")
def forgets_eps(x, weights, eps):
    return apply(x, *statistics(x, weights)[1:], 0.0)


@wrong("normalize", "eps is added to the root: add it to the variance")
def adds_eps_to_the_root(x, weights, eps):
    _, mean, variance = statistics(x, weights)
    return (x - like(mean, x)) / (like(variance, x).sqrt() + eps), mean, variance


@wrong("normalize", "divided by the variance: the root is missing")
def forgets_the_root(x, weights, eps):
    _, mean, variance = statistics(x, weights)
    return (x - like(mean, x)) / (like(variance, x) + eps), mean, variance


@wrong("normalize", "uses the unbiased variance, though the returned variance is the biased one")
def divides_by_the_unbiased_one(x, weights, eps):
    total, mean, variance = statistics(x, weights)
    normalized, *_ = apply(x, mean, variance * total / (total - 1), eps)
    return normalized, mean, variance


@wrong("normalize", "without weights, though the returned ones are right")
def normalizes_without_weights(x, weights, eps):
    _, mean, variance = statistics(x, weights)
    return lesson05.NormalizeOverRanks.apply(x, eps)[0], mean, variance


@wrong("normalize", "of this rank's own part, though the returned ones are those of the joined batch")
def normalizes_with_its_own(x, weights, eps):
    _, mean, variance = statistics(x, weights)
    total, values, _ = sums(x, weights)
    normal, *_ = apply(x, values / total, own_variance(x, weights), eps)
    return normal, mean, variance


@wrong("normalize", r"mean and variance are right; normalized is")
def does_not_subtract_the_mean(x, weights, eps):
    _, mean, variance = statistics(x, weights)
    return x / (like(variance, x) + eps).sqrt(), mean, variance


@wrong("normalize", r"must match the size[^$]*\(in normalize\(x, weights, eps", status="your code raised")
def forgets_to_reshape(x, weights, eps):
    _, mean, variance = statistics(x, weights)
    return (x - mean) / (variance + eps).sqrt(), mean, variance


@wrong("normalize", "one number per channel")
def keeps_the_dimensions(x, weights, eps):
    normalized, mean, variance = apply(x, *statistics(x, weights)[1:], eps)
    return normalized, like(mean, x), like(variance, x)


@wrong("normalize", "return normalized, mean, variance, in this order")
def returns_one_tensor(x, weights, eps):
    return apply(x, *statistics(x, weights)[1:], eps)[0]


@wrong("normalize", "one number per channel")
def returns_them_in_another_order(x, weights, eps):
    normalized, mean, variance = apply(x, *statistics(x, weights)[1:], eps)
    return mean, variance, normalized


@wrong("normalize", "adding to nan gives nan")
def weighs_means_by_hand(x, weights, eps):
    total, values, squares = sums(x, weights)
    total, values, squares = summed(total, values / total * total, squares / total * total)
    return apply(x, values / total, squares / total - (values / total) ** 2, eps)


@wrong("normalize", "must call the same collectives, with zeros")
def leaves_where_nothing_is_to_do(x, weights, eps):
    if len(x) == 0:
        return x, torch.zeros(x.shape[1]), torch.ones(x.shape[1])
    return apply(x, *statistics(x, weights)[1:], eps)


@wrong("normalize", r"IndexError[^$]*\(in normalize[^$]* 0", status="your code raised")
def looks_at_the_first_value(x, weights, eps):
    _, values, squares = sums(x, weights)
    total = weights.double().sum()[None] * x[0, 0].numel()
    total, values, squares = summed(total, values, squares)
    return apply(x, values / total, squares / total - (values / total) ** 2, eps)


@wrong("normalize", "do all ranks call the same collectives", status="your code raised")
def only_rank_zero_sums(x, weights, eps):
    if dist.get_rank() == 0:
        return apply(x, *statistics(x, weights)[1:], eps)
    total, values, _ = sums(x, weights)
    return apply(x, values / total, own_variance(x, weights), eps)


@wrong("normalize", "which the rounding of 32 bits destroys")
def sends_narrow_sums(x, weights, eps):
    narrow = [part.to(x.dtype) for part in sums(x, weights)]
    total, values, squares = summed(*narrow)
    return apply(x, values / total, squares / total - (values / total) ** 2, eps)


@wrong("normalize", "you converted 64 bits to 32")
def collects_sums_in_32_bits(x, weights, eps):
    total, values, squares = summed(*[part.float() for part in sums(x, weights)])
    return apply(x, values / total, squares / total - (values / total) ** 2, eps)


@wrong("normalize", r"return .to\(x.dtype\)")
def returns_the_wide_one(x, weights, eps):
    return apply(x.double(), *statistics(x, weights)[1:], eps)


@wrong("normalize", "you send the samples themselves")
def gathers_the_batch(x, weights, eps):
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (x, weights))
    total, values, squares = map(sum, zip(*[sums(*part) for part in gathered]))
    return apply(x, values / total, squares / total - (values / total) ** 2, eps)


@wrong("normalize", "numbers for each sample: add them up over the samples")
def gathers_the_sums_of_each_sample(x, weights, eps):
    each = weights.double()[:, None].expand(x.shape[:2])
    flat = x.double().reshape(*x.shape[:2], x.shape[2:].numel())
    powers = [flat.new_ones(flat.shape), flat, flat.square()]
    of_each = torch.stack([each * power.sum(2) for power in powers])
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, of_each)
    total, values, squares = sum(part.sum(1) for part in gathered)
    return apply(x, values / total, squares / total - (values / total) ** 2, eps)


@wrong("normalize", "send values together that are known at the same time")
def one_collective_for_each(x, weights, eps):
    (total,), (values,), (squares,) = [summed(part) for part in sums(x, weights)]
    return apply(x, values / total, squares / total - (values / total) ** 2, eps)


@wrong("normalize", "x after normalize[^$]*it was changed in place")
def normalizes_in_place(x, weights, eps):
    _, mean, variance = statistics(x, weights)
    x -= like(mean, x).to(x.dtype)
    x /= (like(variance, x) + eps).sqrt().to(x.dtype)
    return x.clone(), mean, variance


@wrong("normalize", "weights after normalize[^$]*it was changed in place")
def scales_the_weights_in_place(x, weights, eps):
    result = apply(x, *statistics(x, weights)[1:], eps)
    weights /= weights.sum().clamp(min=1)
    return result


@wrong("normalize", "view size is not compatible", status="your code raised")
def views_what_is_not_contiguous(x, weights, eps):
    _, mean, variance = statistics(x, weights)
    return apply(x.view(x.numel()).view(x.shape), mean, variance, eps)


@wrong("normalize", "the default dtype[^$]*belongs to the whole program")
def sets_the_default_dtype(x, weights, eps):
    torch.set_default_dtype(torch.float64)
    return apply(x, *statistics(x, weights)[1:], eps)


@wrong("normalize", "whether gradients are recorded[^$]*belongs to the whole program")
def switches_gradients_off(x, weights, eps):
    torch.set_grad_enabled(False)
    return apply(x, *statistics(x, weights)[1:], eps)


@wrong("normalize", "until work.wait.. has returned")
def does_not_wait(x, weights, eps):
    flat = torch.cat(sums(x, weights))
    dist.all_reduce(flat, async_op=True)
    total, values, squares = flat.split([1, x.shape[1], x.shape[1]])
    return apply(x, values / total, squares / total - (values / total) ** 2, eps)


@wrong("normalize", "less than 1 here: divide by their sum as it is")
def divides_by_one_at_least(x, weights, eps):
    total, first, squares = summed(*sums(x, weights))
    total = total.clamp(min=1)
    mean = first / total
    return apply(x, mean, squares / total - mean.square(), eps)


@right("normalize")
def adds_up_on_rank_zero(x, weights, eps):
    """Two collectives: to rank 0, and back."""
    flat = torch.cat(sums(x, weights))
    dist.reduce(flat, dst=0)
    dist.broadcast(flat, src=0)
    total, values, squares = flat.split([1, x.shape[1], x.shape[1]])
    return apply(x, values / total, squares / total - (values / total) ** 2, eps)


@wrong("normalize", "samples of weight 0 do not count[^$]*but they are normalised like all others")
def sets_padding_to_zero(x, weights, eps):
    normal, *rest = apply(x, *statistics(x, weights)[1:], eps)
    normal[weights == 0] = 0
    return normal, *rest


@wrong("normalize", "one number per channel")
def leaves_padding_out(x, weights, eps):
    normal, *rest = apply(x, *statistics(x, weights)[1:], eps)
    return normal[weights > 0], *rest


@wrong("normalize", "times the weights of their samples, and divide")
def repeats_samples(x, weights, eps):
    often = x.repeat_interleave(weights.round().long(), dim=0)
    _, mean, variance = statistics(often, often.new_ones(len(often)))
    return apply(x, mean.nan_to_num(), variance.nan_to_num(), eps)


@wrong("normalize", r"weighted mean of \(x - mean\)², over all values")
def corrects_for_reliability(x, weights, eps):
    """The unbiased estimator for weights that are no counts."""
    total, mean, variance = statistics(x, weights)
    (squares,) = summed((weights.double().square().sum() * x.shape[2:].numel())[None])
    return apply(x, mean, variance * total / (total - squares / total), eps)


@wrong("normalize", "normalized from normalize[^$]*mean and variance are right")
def masks_the_input(x, weights, eps):
    """Padding masked before normalising: it comes out as -mean / deviation."""
    shown = x * (weights > 0).view(-1, *[1] * (x.dim() - 1))
    return apply(shown, *statistics(x, weights)[1:], eps)


@wrong("normalize", "", status="not attempted")
def not_begun(x, weights, eps):
    raise NotImplementedError


# ---- input_gradient ----


def weight_of(weights, x):
    """The sum of the weights of this rank's values, (1,)."""
    return weights.sum()[None] * x.shape[2:].numel()


def own_sums(gradient, normalized):
    return by_channel(gradient).sum(1), by_channel(gradient * normalized).sum(1)


def three_sums(gradient, normalized, weights):
    """The two sums and the sum of the weights, over all ranks."""
    return summed(*own_sums(gradient, normalized), weight_of(weights, gradient))


def from_sums(gradient, normalized, scale, each, first, second):
    """The formula. each: what multiplies both terms, in the shape of a sample."""
    terms = like(first, gradient) + normalized * like(second, gradient)
    return (gradient - each * terms) * like(scale, gradient)


def by_sample(weights, x):
    return weights.reshape(-1, *[1] * (x.dim() - 1))


def solved(gradient, normalized, scale, weights):
    first, second, total = three_sums(gradient, normalized, weights)
    each = by_sample(weights, gradient) / total
    return from_sums(gradient, normalized, scale, each, first, second)


@right("input_gradient")
def with_einsum(gradient, normalized, scale, weights):
    flat = gradient.reshape(*gradient.shape[:2], gradient.shape[2:].numel())
    normal = normalized.reshape(flat.shape)
    sums = torch.stack([flat.sum((0, 2)), torch.einsum("bcs,bcs->c", flat, normal)])
    sums = torch.cat([sums, weight_of(weights, gradient).expand(1, flat.shape[1])])
    dist.all_reduce(sums, op=dist.ReduceOp.SUM)
    mean, slope = (sums[:2] / sums[2])[:, :, None]
    result = flat - weights[:, None, None] * (mean + normal * slope)
    return (result * scale[:, None]).reshape(gradient.shape)


@right("input_gradient")
def by_way_of_autograd(gradient, normalized, scale, weights):
    """Gathers the sums of all ranks, and lets autograd take the rest apart."""
    total = weight_of(weights, gradient)
    mine = torch.cat([*own_sums(gradient, normalized), total])
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    sums, channels = torch.stack(gathered).sum(0), len(scale)
    mean, slope = (sums[:-1] / sums[-1]).split(channels)
    with torch.enable_grad():
        z = normalized.clone().requires_grad_(True)
        each = by_sample(weights, z)
        moved = z * like(mean, z) + z.square() / 2 * like(slope, z)
        loss = (z * gradient - each * moved).sum()
        return torch.autograd.grad(loss, z)[0] * like(scale, z)


@right("input_gradient")
def averages_all_three(gradient, normalized, scale, weights):
    """Mean over mean: the number of ranks cancels."""
    mine = [*own_sums(gradient, normalized), weight_of(weights, gradient)]
    flat = torch.cat(mine)
    dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    first, second, total = flat.split([len(part) for part in mine])
    each = by_sample(weights, gradient)
    return from_sums(gradient, normalized, scale, each, first / total, second / total)


@wrong("input_gradient", "the weights are ignored: a value of weight w moves")
def the_lessons_own_backward(gradient, normalized, scale, weights):
    (count,) = summed(torch.tensor([gradient.numel() // gradient.shape[1]]).double())
    context = SimpleNamespace(saved_tensors=(normalized, scale, count), dtype=gradient.dtype)
    return lesson05.NormalizeOverRanks.backward(context, gradient)[0]


@wrong("input_gradient", "both terms must be multiplied by the weight of the sample")
def divides_by_the_weights_only(gradient, normalized, scale, weights):
    first, second, total = three_sums(gradient, normalized, weights)
    return from_sums(gradient, normalized, scale, 1 / total, first, second)


@wrong("input_gradient", "the weights belong to the sample whose gradient it is")
def takes_weighted_means(gradient, normalized, scale, weights):
    """Every mean in the lesson's formula turned into a weighted mean."""
    first, second = own_sums(gradient * by_sample(weights, gradient), normalized)
    first, second, total = summed(first, second, weight_of(weights, gradient))
    return from_sums(gradient, normalized, scale, 1 / total, first, second)


@wrong("input_gradient", "the sums over gradient have weights: the losses have none")
def weighs_everything(gradient, normalized, scale, weights):
    first, second = own_sums(gradient * by_sample(weights, gradient), normalized)
    first, second, total = summed(first, second, weight_of(weights, gradient))
    each = by_sample(weights, gradient) / total
    return from_sums(gradient, normalized, scale, each, first, second)


@wrong("input_gradient", "divided by the number of values: divide by the sum of")
def divides_by_the_values(gradient, normalized, scale, weights):
    count = torch.tensor([gradient.numel() // gradient.shape[1]]).double()
    first, second, count = summed(*own_sums(gradient, normalized), count)
    each = by_sample(weights, gradient) / count
    return from_sums(gradient, normalized, scale, each, first, second)


@wrong("input_gradient", "each value of a sample has this weight")
def divides_by_the_samples_weights(gradient, normalized, scale, weights):
    first, second, total = summed(*own_sums(gradient, normalized), weights.sum()[None])
    each = by_sample(weights, gradient) / total
    return from_sums(gradient, normalized, scale, each, first, second)


@wrong("input_gradient", "the whole result is multiplied by the weights")
def weighs_the_result(gradient, normalized, scale, weights):
    result = solved(gradient, normalized, scale, weights)
    return result * by_sample(weights, gradient)


@wrong("input_gradient", "the sums are over this rank's part only: sum over")
def backward_of_its_own_part(gradient, normalized, scale, weights):
    each = by_sample(weights, gradient) / weight_of(weights, gradient).clamp(min=1e-9)
    return from_sums(gradient, normalized, scale, each, *own_sums(gradient, normalized))


@wrong("input_gradient", "this rank's part only, but the weights are those of all")
def sums_only_the_weights(gradient, normalized, scale, weights):
    (total,) = summed(weight_of(weights, gradient))
    each = by_sample(weights, gradient) / total
    return from_sums(gradient, normalized, scale, each, *own_sums(gradient, normalized))


@wrong("input_gradient", "the sums over all ranks are divided by this rank's weights")
def takes_its_own_weights(gradient, normalized, scale, weights):
    first, second = summed(*own_sums(gradient, normalized))
    each = by_sample(weights, gradient) / weight_of(weights, gradient).clamp(min=1e-9)
    return from_sums(gradient, normalized, scale, each, first, second)


@wrong("input_gradient", "treated as constants")
def statistics_are_constants(gradient, normalized, scale, weights):
    return gradient * like(scale, gradient)


def with_factors(gradient, normalized, scale, weights, mean, slope):
    """The two terms times factors of one's own."""
    first, second, total = three_sums(gradient, normalized, weights)
    each = by_sample(weights, gradient) / total
    return from_sums(gradient, normalized, scale, each, mean * first, slope * second)


@wrong("input_gradient", "the term of the variance is missing")
def forgets_the_variance(*arguments):
    return with_factors(*arguments, 1, 0)


@wrong("input_gradient", "the term of the mean is missing")
def forgets_the_mean(*arguments):
    return with_factors(*arguments, 0, 1)


@wrong("input_gradient", "two terms are added: subtract")
def adds_the_terms(*arguments):
    return with_factors(*arguments, -1, -1)


@wrong("input_gradient", "the term of the mean has the wrong sign")
def adds_the_first_mean(*arguments):
    return with_factors(*arguments, -1, 1)


@wrong("input_gradient", "the term of the variance has the wrong sign")
def adds_the_second_mean(*arguments):
    return with_factors(*arguments, 1, -1)


@wrong("input_gradient", "three terms belong to it")
def half_a_slope(*arguments):
    return with_factors(*arguments, 1, 0.5)


@wrong("input_gradient", "the sign is the opposite")
def descends(*arguments):
    return -solved(*arguments)


@wrong("input_gradient", "multiplied by the number of ranks")
def multiplies_by_the_ranks(*arguments):
    return dist.get_world_size() * solved(*arguments)


@wrong("input_gradient", "use the sum of the losses")
def averages_as_ddp_does(*arguments):
    return solved(*arguments) / dist.get_world_size()


@wrong("input_gradient", "scale is missing")
def forgets_the_scale(gradient, normalized, scale, weights):
    return solved(gradient, normalized, torch.ones_like(scale), weights)


@wrong("input_gradient", "divided by scale, which is")
def divides_by_the_scale(gradient, normalized, scale, weights):
    return solved(gradient, normalized, 1 / scale, weights)


@wrong("input_gradient", "use torch.cat")
def sends_each_sum_alone(gradient, normalized, scale, weights):
    first, second = own_sums(gradient, normalized)
    (first,), (second,) = summed(first), summed(second)
    (total,) = summed(weight_of(weights, gradient))
    each = by_sample(weights, gradient) / total
    return from_sums(gradient, normalized, scale, each, first, second)


@wrong("input_gradient", "gradient after input_gradient[^$]*it was changed in place")
def writes_into_the_gradient(gradient, normalized, scale, weights):
    result = solved(gradient, normalized, scale, weights)
    return gradient.copy_(result).clone()


@wrong("input_gradient", "normalized after input_gradient[^$]*it was changed in place")
def writes_into_normalized(gradient, normalized, scale, weights):
    result = solved(gradient, normalized, scale, weights)
    normalized *= 2
    return result


@wrong("input_gradient", "must call the same collectives, with zeros")
def nothing_to_do_for_an_empty_part(gradient, normalized, scale, weights):
    if not gradient.numel():
        return gradient
    return solved(gradient, normalized, scale, weights)


@wrong("input_gradient", "until work.wait.. has returned")
def goes_on_without_the_sums(gradient, normalized, scale, weights):
    mine = [*own_sums(gradient, normalized), weight_of(weights, gradient)]
    flat = torch.cat(mine)
    dist.all_reduce(flat, async_op=True)
    first, second, total = flat.split([len(part) for part in mine])
    each = by_sample(weights, gradient) / total
    return from_sums(gradient, normalized, scale, each, first, second)


@wrong("input_gradient", "you converted 64 bits to 32")
def sums_gradients_in_32_bits(gradient, normalized, scale, weights):
    mine = [*own_sums(gradient, normalized), weight_of(weights, gradient)]
    first, second, total = summed(*[part.float() for part in mine])
    each = by_sample(weights, gradient) / total
    return from_sums(gradient, normalized, scale, each, first, second)


@wrong("input_gradient", "the gradient must have the shape of x")
def returns_a_number_for_each_channel(*arguments):
    return by_channel(solved(*arguments)).sum(1)


@wrong("input_gradient", "the gradient must have the shape of x")
def forgets_to_return(*arguments):
    solved(*arguments)


@wrong("input_gradient", "you send the samples themselves")
def gathers_padded_batches(gradient, normalized, scale, weights):
    most = 40 if len(gradient) < 40 else 4000
    gathered = [torch.zeros(2, most, *gradient.shape[1:]).double() for _ in range(3)]
    gathered = gathered[: dist.get_world_size()]
    mine = torch.zeros_like(gathered[0])
    mine[0, : len(gradient)], mine[1, : len(gradient)] = gradient, normalized
    mine[0, -1] = (weights.sum() * gradient.shape[2:].numel()).item()
    dist.all_gather(gathered, mine)
    total = sum(part[0, -1].flatten()[0] for part in gathered)
    gradients, normals = torch.cat([part[:, :-1] for part in gathered], dim=1)
    each = by_sample(weights, gradient) / total
    return from_sums(gradient, normalized, scale, each, *own_sums(gradients, normals))


@wrong("input_gradient", "numbers for each sample: add them up over the samples")
def gathers_gradients_of_each_sample(gradient, normalized, scale, weights):
    samples, most = len(gradient), 40 if len(gradient) < 40 else 4000
    of_each = torch.zeros(3, most, len(scale)).double()
    shape = *gradient.shape[:2], -1
    if samples:
        of_each[0, :samples] = gradient.reshape(shape).sum(2)
        of_each[1, :samples] = (gradient * normalized).reshape(shape).sum(2)
        of_each[2, :samples] = weights[:, None] * gradient.shape[2:].numel()
    gathered = [torch.zeros_like(of_each) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, of_each)
    first, second, total = sum(part.sum(1) for part in gathered)
    each = by_sample(weights, gradient) / total[0]
    return from_sums(gradient, normalized, scale, each, first, second)


@wrong("input_gradient", "less than 1 here: divide by their sum as it is")
def divides_the_sums_by_one_at_least(gradient, normalized, scale, weights):
    first, second, total = three_sums(gradient, normalized, weights)
    first, second = first / total.clamp(min=1), second / total.clamp(min=1)
    each = by_sample(weights, gradient)
    return from_sums(gradient, normalized, scale, each, first, second)


@wrong("input_gradient", "a sample of weight 0 is normalised")
def leaves_out_samples_without_weight(gradient, normalized, scale, weights):
    whole = solved(gradient, normalized, scale, weights)
    whole[weights == 0] = 0
    return whole


@wrong("input_gradient", "the first term, the gradient itself, has no weight")
def weighs_the_gradient_first(gradient, normalized, scale, weights):
    """The lesson's formula, with weight times gradient in the place of the gradient."""
    gradient = gradient * by_sample(weights, gradient)
    first, second, total = three_sums(gradient, normalized, weights)
    return from_sums(gradient, normalized, scale, 1 / total, first, second)


@wrong("input_gradient", "the first term, the gradient itself, has no weight")
def weighs_all_there_is(gradient, normalized, scale, weights):
    each = by_sample(weights, gradient)
    first, second, total = three_sums(gradient * each, normalized, weights)
    return from_sums(gradient * each, normalized, scale, each / total, first, second)


@wrong("input_gradient", "only weights of 0 on rank[^$]*0/0 is nan")
def takes_shares_of_shares(gradient, normalized, scale, weights):
    """The share of a sample in its part, times the share of the part in the batch."""
    first, second, total = three_sums(gradient, normalized, weights)
    mine = weight_of(weights, gradient)
    each = by_sample(weights, gradient) / mine * (mine / total)
    return from_sums(gradient, normalized, scale, each, first, second)


@wrong("input_gradient", "multiplied by the number of ranks")
def sums_the_scale_as_well(gradient, normalized, scale, weights):
    sums = [*own_sums(gradient, normalized), scale, weight_of(weights, gradient)]
    first, second, scale, total = summed(*sums)
    each = by_sample(weights, gradient) / total
    return from_sums(gradient, normalized, scale, each, first, second)


@wrong("input_gradient", "", status="not attempted")
def backward_not_begun(gradient, normalized, scale, weights):
    raise NotImplementedError


# ---- convert ----


def converted(layer, **options):
    """A SyncBatchNorm with all that a BatchNorm holds."""
    names = ["eps", "momentum", "affine", "track_running_stats"]
    new = SyncBatchNorm(layer.num_features, **{name: getattr(layer, name) for name in names} | options)
    new.weight, new.bias = layer.weight, layer.bias
    new.running_mean, new.running_var = layer.running_mean, layer.running_var
    new.num_batches_tracked = layer.num_batches_tracked
    return new.train(layer.training)


def replaced(module, make=converted, is_one=lambda module: isinstance(module, BATCH_NORMS)):
    """Every BatchNorm in training mode replaced by what `make` makes of it."""
    if is_one(module) and module.training:
        return make(module)
    for name, child in module._modules.items():
        setattr(module, name, replaced(child, make, is_one))
    return module


@wrong("convert", "it is in eval mode: it normalises with its running statistics")
def the_lessons_own(module):
    return lesson05.convert_sync_batchnorm(module)


@right("convert")
def changes_the_class(module):
    for layer in module.modules():
        if isinstance(layer, BATCH_NORMS) and layer.training:
            layer.__class__ = SyncBatchNorm
    return module


@right("convert")
def walks_over_the_paths(module):
    if isinstance(module, BATCH_NORMS) and module.training:
        return moved(module)
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        if isinstance(layer, BATCH_NORMS) and layer.training:
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
            if isinstance(layer, BATCH_NORMS) and layer.training:
                setattr(child, name, converted(layer))
    return module


@wrong("convert", "1d, 2d and 3d")
def only_2d(module):
    return replaced(module, is_one=lambda module: isinstance(module, nn.BatchNorm2d))


@wrong("convert", "1d, 2d and 3d")
def forgets_3d(module):
    return replaced(module, is_one=lambda module: isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d))


@wrong("convert", "frozen parameters do not matter")
def skips_what_is_frozen(module):
    def is_one(layer):
        frozen = any(not value.requires_grad for value in layer.parameters())
        return isinstance(layer, BATCH_NORMS) and not frozen

    return replaced(module, is_one=is_one)


@wrong("convert", "it is in eval mode: it normalises with its running statistics")
def converts_and_keeps_the_mode(module):
    if isinstance(module, BATCH_NORMS):
        return converted(module)
    for name, child in module._modules.items():
        setattr(module, name, converts_and_keeps_the_mode(child))
    return module


@wrong("convert", "the same layer is in two places")
def by_named_children(module):
    if isinstance(module, BATCH_NORMS) and module.training:
        return converted(module)
    for name, child in module.named_children():
        setattr(module, name, by_named_children(child))
    return module


@wrong("convert", "layer 0.first of a network[^$]*deeper in the network")
def only_the_first_level(module):
    if isinstance(module, BATCH_NORMS) and module.training:
        return converted(module)
    for name, child in module.named_children():
        if isinstance(child, BATCH_NORMS) and child.training:
            setattr(module, name, converted(child))
    return module


@wrong("convert", "replace the layer in its parent")
def sets_paths_on_the_root(module):
    if isinstance(module, BATCH_NORMS) and module.training:
        return converted(module)
    for path, layer in list(module.named_modules()):
        if isinstance(layer, BATCH_NORMS) and layer.training:
            setattr(module, path, converted(layer))
    return module


@wrong("convert", "torch's SyncBatchNorm, which trains on GPUs only")
def by_torch(module):
    return nn.SyncBatchNorm.convert_sync_batchnorm(module)


@wrong("convert", "InstanceNorm2d, converted[^$]*replace only BatchNorm1d, 2d and 3d")
def takes_the_common_base(module):
    return replaced(module, is_one=lambda m: isinstance(m, _NormBase) and not isinstance(m, SyncBatchNorm))


@wrong("convert", "already a SyncBatchNorm: leave it")
def converts_twice(module):
    return replaced(module, is_one=lambda module: isinstance(module, _BatchNorm))


@wrong("convert", "already a SyncBatchNorm: leave it")
def reads_names(module):
    is_one = lambda module: "BatchNorm" in type(module).__name__ and hasattr(module, "num_features")
    return replaced(module, is_one=is_one)


@wrong(
    "convert",
    r"'BatchNormBlock' object has no attribute 'num_features'[^$]*\(in convert of a network\)",
    status="your code raised",
)
def trusts_names(module):
    return replaced(module, is_one=lambda module: type(module).__name__.startswith("BatchNorm"))


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
    return replaced(module, lambda layer: converted(layer, momentum=layer.momentum or 0.1))


@wrong("convert", "affine of a BatchNorm2d[^$]*has default options")
def forgets_affine(module):
    return replaced(module, lambda layer: converted(layer, affine=True))


@wrong("convert", "track_running_stats of a BatchNorm3d[^$]*has default options")
def forgets_to_track(module):
    return replaced(module, lambda layer: converted(layer, track_running_stats=True))


@wrong("convert", r"no attribute[^$]*\(in convert of a BatchNorm2d with affine=False\)", status="your code raised")
def copies_a_weight_that_is_not_there(module):
    def make(layer):
        new = converted(layer)
        new.weight.data.copy_(layer.weight.data)
        return new

    return replaced(module, make)


@wrong(
    "convert", r"NoneType[^$]*\(in convert of a BatchNorm3d with track_running_stats=False\)", status="your code raised"
)
def copies_statistics_that_are_not_there(module):
    def make(layer):
        new = converted(layer)
        new.running_mean = layer.running_mean.clone()
        return new

    return replaced(module, make)


@wrong("convert", "expected[^$]*training mode[^$]*got[^$]*eval mode[^$]*keep its mode")
def ends_in_eval_mode(module):
    return replaced(module, lambda layer: converted(layer).eval())


@wrong("convert", "it is in eval mode: it normalises with its running statistics")
def freezes_by_the_roots_mode(module):
    """Asks the whole network for its mode, and not each layer."""
    training = module.training

    def change(part):
        if isinstance(part, BATCH_NORMS) and training:
            return converted(part)
        for name, child in part._modules.items():
            setattr(part, name, change(child))
        return part

    return change(module)


@wrong("convert", "comes last")
def deletes_and_adds(module):
    if isinstance(module, BATCH_NORMS) and module.training:
        return converted(module)
    for name, child in list(module._modules.items()):
        new = deletes_and_adds(child)
        if new is not child:
            delattr(module, name)
            module.add_module(name, new)
    return module


@wrong("convert", "mutated during iteration|changed (size )?during iteration", status="your code raised")
def deletes_while_it_walks(module):
    if isinstance(module, BATCH_NORMS) and module.training:
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


@wrong("convert", "without running statistics, it uses those of its batch")
def skips_what_does_not_track(module):
    def is_one(layer):
        return isinstance(layer, BATCH_NORMS) and layer.running_mean is not None

    return replaced(module, is_one=is_one)


@wrong("convert", "though the module around it is not: look at the mode of each")
def skips_modules_in_eval_mode(module):
    if not module.training:
        return module
    if isinstance(module, BATCH_NORMS):
        return converted(module)
    for name, child in module._modules.items():
        module._modules[name] = skips_modules_in_eval_mode(child)
    return module


@right("convert")
def with_set_submodule(module):
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        if isinstance(layer, BATCH_NORMS) and layer.training:
            if not path:
                return moved(layer)
            module.set_submodule(path, moved(layer))
    return module


@right("convert")
def remembers_each_layer(module, made=None):
    """By identity, whether it is a module or nothing."""
    made = {} if made is None else made
    if id(module) not in made:
        is_one = isinstance(module, BATCH_NORMS) and module.training
        made[id(module)] = converted(module) if is_one else module
        for name in [] if is_one else list(module._modules):
            module.register_module(name, remembers_each_layer(module._modules[name], made))
    return made[id(module)]


@wrong("convert", "track_running_stats=False in eval mode[^$]*leave it as it is, with or without")
def asks_for_batch_statistics(module):
    """A BatchNorm that takes the statistics of its batch, in whatever mode."""

    def is_one(layer):
        return isinstance(layer, BATCH_NORMS) and (layer.training or layer.running_mean is None)

    if is_one(module):
        return converted(module)
    for name, child in module._modules.items():
        setattr(module, name, asks_for_batch_statistics(child))
    return module


@wrong("convert", "the same objects: change the given module, not a copy")
def rebuilds_containers(module):
    if isinstance(module, BATCH_NORMS) and module.training:
        return converted(module)
    children = {name: rebuilds_containers(child) for name, child in module._modules.items()}
    if type(module) is nn.Sequential:
        return nn.Sequential(*children.values()).train(module.training)
    for name, child in children.items():
        setattr(module, name, child)
    return module


@wrong("convert", "it is in eval mode: it normalises with its running statistics")
def puts_all_into_training_mode(module):
    return replaced(module.train())


@wrong("convert", "expected[^$]*eval mode[^$]*got[^$]*training mode[^$]*keep its mode")
def ends_in_training_mode(module):
    return replaced(module).train()


@wrong("convert", "a BatchNorm itself, which has no parent")
def by_apply(module):
    def change(parent):
        for name, child in parent.named_children():
            if isinstance(child, BATCH_NORMS) and child.training:
                setattr(parent, name, converted(child))

    return module.apply(change)


class OwnSyncBatchNorm(_BatchNorm):
    """A class of one's own, under the name of the lesson's."""

    forward = SyncBatchNorm.forward
    _check_input_dim = SyncBatchNorm._check_input_dim
    update_running_statistics = SyncBatchNorm.update_running_statistics


OwnSyncBatchNorm.__name__ = "SyncBatchNorm"


@wrong("convert", "that is another class with this name: use the one from")
def brings_its_own_class(module):
    def make(layer):
        new = converted(layer)
        new.__class__ = OwnSyncBatchNorm
        return new

    return replaced(module, make)


@wrong("convert", "", status="not attempted")
def conversion_not_begun(module):
    raise NotImplementedError


@wrong("traffic", "one in the backward pass if its input needs a gradient")
def nested_forgets(network):
    """each inner Sequential begins without a gradient again"""

    def count(net):
        grad, calls, numbers = False, 0, 0
        for layer in net:
            if isinstance(layer, nn.Sequential):
                a, b = count(layer)
                calls += a
                numbers += b
            elif isinstance(layer, SyncBatchNorm) and layer.training:
                c = layer.num_features
                calls += 1 + grad
                numbers += 2 * c + 1 + 2 * c * grad
            grad = grad or any(p.requires_grad for p in layer.parameters())
        return calls, numbers

    calls, numbers = count(network)
    return calls, 8 * numbers


# ---- fine_tune ----


class Tuning:
    """What the answers below share: all right."""

    def __call__(self, backbone, head, epochs, tests, lr):
        self.backbone, self.head, self.lr, losses = backbone, head, lr, []
        self.wrap()
        self.begin()
        for batches in epochs:
            self.into_train_mode()
            for inputs, labels in batches:
                self.descend(inputs, labels)
            losses.append(self.test(*tests))
        return self.result(losses)

    def wrap(self):
        backbone = self.backbone.requires_grad_(False)
        self.network = lesson05.convert_sync_batchnorm(nn.Sequential(backbone, self.head))
        self.model = DistributedDataParallel(self.network)

    def begin(self):
        pass

    def into_train_mode(self):
        self.model.train()
        self.backbone.eval()

    def descend(self, inputs, labels):
        self.loss(inputs, labels).backward()
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter -= self.lr * parameter.grad
                parameter.grad = None

    def loss(self, inputs, labels):
        return F.cross_entropy(self.model(inputs), labels)

    @torch.no_grad()
    def test(self, inputs, labels):
        self.model.eval()
        return F.cross_entropy(self.model(inputs), labels).item()

    def result(self, losses):
        return self.network, losses


def a_tuning(kind):
    def fine_tune(backbone, head, epochs, tests, lr):
        return kind()(backbone, head, epochs, tests, lr)

    fine_tune.__name__, fine_tune.__module__ = kind.__name__, kind.__module__
    return fine_tune


def right_tuning(kind):
    right("fine_tune")(a_tuning(kind))
    return kind


def wrong_tuning(*given, **options):
    def register(kind):
        wrong("fine_tune", *given, **options)(a_tuning(kind))
        return kind

    return register


def tuning_with(*faults):
    """A repaired program with some of the given faults left."""

    class Rest(Tuning):
        def wrap(self):
            if "new layers" not in faults:
                return super().wrap()
            self.network = nn.Sequential(self.backbone.requires_grad_(False), self.head)
            self.model = DistributedDataParallel(self.network, find_unused_parameters=True)
            new_layers(self.head)

        def begin(self):
            self.mode()

        def mode(self):
            self.model.train()
            if "backbone" not in faults:
                self.backbone.eval()

        def into_train_mode(self):
            if "once" not in faults:
                self.mode()

    return Rest


def new_layers(head):
    for place, layer in enumerate(head):
        if isinstance(layer, nn.BatchNorm1d):
            head[place] = SyncBatchNorm(layer.num_features).double()


ON_FROZEN, UNAVERAGED = "the backbone has been trained on", "nothing has averaged"
NEVER_AGAIN = "call that at the start of each epoch"


@right_tuning
class TuningRepaired(Tuning):
    pass


@wrong_tuning(ON_FROZEN)
class TuningAsGiven(tuning_with("new layers", "backbone", "once")):
    pass


@wrong_tuning(ON_FROZEN)
class TuningTrainsTheBackboneWithNewLayers(tuning_with("new layers", "backbone")):
    pass


@wrong_tuning(ON_FROZEN)
class TuningTrainsTheBackboneOnce(tuning_with("backbone", "once")):
    pass


@wrong_tuning(UNAVERAGED)
class TuningWithNewLayersOnce(tuning_with("new layers", "once")):
    pass


@wrong_tuning(UNAVERAGED)
class TuningWithNewLayers(tuning_with("new layers")):
    pass


@wrong_tuning(ON_FROZEN)
class TuningTrainsTheBackbone(tuning_with("backbone")):
    pass


@wrong_tuning(NEVER_AGAIN)
class TuningInTrainModeOnce(tuning_with("once")):
    pass


@right_tuning
class TuningOfTheHeadAlone(Tuning):
    """The backbone stays outside of DDP."""

    def wrap(self):
        self.network = nn.Sequential(self.backbone, self.head)
        self.backbone.eval()
        self.model = DistributedDataParallel(lesson05.convert_sync_batchnorm(self.head))

    def into_train_mode(self):
        self.model.train()

    def loss(self, inputs, labels):
        with torch.no_grad():
            features = self.backbone(inputs)
        return F.cross_entropy(self.model(features), labels)

    @torch.no_grad()
    def test(self, inputs, labels):
        self.model.eval()
        return F.cross_entropy(self.model(self.backbone(inputs)), labels)


@right_tuning
class TuningWithLayersOfItsOwn(Tuning):
    """New layers before wrapping, with all that the old ones have; and an optimizer."""

    def wrap(self):
        self.network = nn.Sequential(self.backbone.requires_grad_(False), self.head)
        old, self.head[1] = self.head[1], SyncBatchNorm(4, self.head[1].eps, self.head[1].momentum).double()
        self.head[1].load_state_dict(old.state_dict())
        self.model = DistributedDataParallel(self.network)
        self.optimizer = torch.optim.SGD(self.head.parameters(), lr=self.lr)

    def descend(self, inputs, labels):
        self.optimizer.zero_grad()
        self.loss(inputs, labels).backward()
        self.optimizer.step()


@right_tuning
class TuningThatReturnsTheWrapper(Tuning):
    def result(self, losses):
        return [self.model, torch.tensor(losses, dtype=torch.float64)]


@right_tuning
class TuningConvertedAfterWrapping(Tuning):
    """The lesson's function keeps the parameters: DDP knows them."""

    def wrap(self):
        self.network = nn.Sequential(self.backbone.requires_grad_(False), self.head)
        self.model = DistributedDataParallel(self.network, find_unused_parameters=True)
        lesson05.convert_sync_batchnorm(self.head)


@right_tuning
class TuningAveragedByHand(Tuning):
    def wrap(self):
        super().wrap()
        self.model = self.network

    def descend(self, inputs, labels):
        self.loss(inputs, labels).backward()
        with torch.no_grad():
            for parameter in self.head.parameters():
                dist.all_reduce(parameter.grad)
                parameter -= self.lr * parameter.grad / dist.get_world_size()
                parameter.grad = None


@right_tuning
class TuningInTrainModeAtTheEnd(Tuning):
    """The mode is put back after each evaluation."""

    def begin(self):
        super().into_train_mode()

    def into_train_mode(self):
        pass

    def test(self, inputs, labels):
        loss = super().test(inputs, labels)
        self.begin()
        return loss


@wrong_tuning("statistics of its own and other options")
class TuningWithNewLayersBeforeWrapping(Tuning):
    def wrap(self):
        new_layers(self.head)
        super().wrap()


@wrong_tuning("the default eps and momentum")
class TuningThatForgetsTheOptions(Tuning):
    def wrap(self):
        old, self.head[1] = self.head[1], SyncBatchNorm(4).double()
        self.head[1].load_state_dict(old.state_dict())
        super().wrap()


@wrong_tuning("the statistics of its own batch")
class TuningWithoutConversion(Tuning):
    def wrap(self):
        self.network = nn.Sequential(self.backbone.requires_grad_(False), self.head)
        self.model = DistributedDataParallel(self.network)


@wrong_tuning("the statistics of its own batch")
class TuningWithoutConversionTestedInside(TuningWithoutConversion):
    @torch.no_grad()
    def test(self, inputs, labels):
        self.model.eval()
        return F.cross_entropy(self.network(inputs), labels).item()


@wrong_tuning("the statistics of its own batch")
class TuningConvertsACopy(Tuning):
    def wrap(self):
        lesson05.convert_sync_batchnorm(copy.deepcopy(self.head))
        self.network = nn.Sequential(self.backbone.requires_grad_(False), self.head)
        self.model = DistributedDataParallel(self.network)


@wrong_tuning("evaluate in eval mode")
class TuningTestedInTrainMode(Tuning):
    @torch.no_grad()
    def test(self, inputs, labels):
        return F.cross_entropy(self.model(inputs), labels).item()


@wrong_tuning("it is trained, so put it into train mode")
class TuningInEvalMode(Tuning):
    def into_train_mode(self):
        self.model.eval()


@wrong_tuning("in eval mode it uses its running ones")
class TuningWithMomentumZero(tuning_with("backbone")):
    """The running statistics stay, but nothing uses them."""

    def begin(self):
        self.backbone[1].momentum = 0.0
        super().begin()

    def result(self, losses):
        self.backbone[1].num_batches_tracked.fill_(40)
        return super().result(losses)


@wrong_tuning("in eval mode it uses its running ones")
class TuningPutsTheBackboneBack(tuning_with("backbone")):
    def begin(self):
        self.before = copy.deepcopy(self.backbone.state_dict())
        super().begin()

    def test(self, inputs, labels):
        self.backbone.load_state_dict(self.before)
        return super().test(inputs, labels)


@wrong_tuning("the backbone has normalised with the statistics of the batch")
class TuningOfAnUnsynchronisedBackbonePutBack(TuningPutsTheBackboneBack):
    def wrap(self):
        self.network = nn.Sequential(self.backbone.requires_grad_(False), self.head)
        lesson05.convert_sync_batchnorm(self.head)
        self.model = DistributedDataParallel(self.network)


@wrong_tuning("train those of the head only")
class TuningOfEverything(Tuning):
    def wrap(self):
        super().wrap()
        self.backbone.requires_grad_(True)
        self.model = DistributedDataParallel(self.network)
        self.head = self.network


@wrong_tuning("so none is needed")
class TuningWithGradientsOfTheBackbone(Tuning):
    def wrap(self):
        self.network = lesson05.convert_sync_batchnorm(nn.Sequential(self.backbone, self.head))
        self.model = DistributedDataParallel(self.network)


@wrong_tuning("these are not all numbers")
class TuningThatDiverges(Tuning):
    def loss(self, inputs, labels):
        return super().loss(inputs, labels) / 0


@wrong_tuning("nothing has averaged")
class TuningWithoutDDP(Tuning):
    def wrap(self):
        super().wrap()
        self.model = self.network


@wrong_tuning("nothing has averaged")
class TuningPastTheWrapper(Tuning):
    def loss(self, inputs, labels):
        return F.cross_entropy(self.network(inputs), labels)


@wrong_tuning("by the number of ranks")
class TuningWithTheSum(Tuning):
    def loss(self, inputs, labels):
        return super().loss(inputs, labels) * dist.get_world_size()


@wrong_tuning("are added up")
class TuningWithoutReset(Tuning):
    def descend(self, inputs, labels):
        self.loss(inputs, labels).backward()
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter -= self.lr * parameter.grad


@wrong_tuning("report the loss of each epoch")
class TuningReportsTheLastLoss(Tuning):
    def result(self, losses):
        return self.network, losses[-1:] * len(losses)


@wrong_tuning("the network is right, but not these losses")
class TuningReportsTheSum(Tuning):
    def test(self, inputs, labels):
        return super().test(inputs, labels) * len(labels)


@wrong_tuning("return both, as the given program does")
class TuningReturnsTheNetwork(Tuning):
    def result(self, losses):
        return self.network


@wrong_tuning("with the names that it had")
class TuningReturnsTheHead(Tuning):
    def result(self, losses):
        return self.head, losses
