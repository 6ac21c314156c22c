"""Exercise 06: gradient accumulation."""

import itertools
import math
import time
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.nn import functional as F

from mutants import right, wrong

# ---- traffic ----


def gradient_bytes(network):
    trained = [value for value in network.parameters() if value.requires_grad]
    return sum(value.nbytes for value in trained)


def adds_up(network, buckets, batches, every, quiet, own=None):
    updates = math.ceil(batches / every)
    passes = updates if quiet else batches
    sent = gradient_bytes(network) if own is None else own
    return passes * buckets + updates, passes * sent + updates * 8


@right("traffic")
def by_rounding_up(network, buckets, batches, every, quiet):
    return adds_up(network, buckets, batches, every, quiet)


@right("traffic")
def by_going_through_the_epoch(network, buckets, batches, every, quiet):
    print("an epoch of", batches)
    calls = sent = np.int64(0)
    for place in range(1, batches + 1):
        last = place % every == 0 or place == batches
        calls += last
        sent += 8 * last
        if last or not quiet:
            calls += buckets
            sent += gradient_bytes(network)
    return np.array([calls, sent])


@wrong("traffic", "the last update of the epoch is shorter")
def drops_the_short_update(network, buckets, batches, every, quiet):
    updates = batches // every
    passes = updates if quiet else batches
    return passes * buckets + updates, passes * gradient_bytes(network) + updates * 8


@wrong("traffic", "without no_sync, the gradients are sent after each micro-batch")
def is_always_quiet(network, buckets, batches, every, quiet):
    return adds_up(network, buckets, batches, every, True)


@wrong("traffic", "with no_sync, only the last micro-batch of an update sends")
def is_never_quiet(network, buckets, batches, every, quiet):
    return adds_up(network, buckets, batches, every, False)


@wrong("traffic", "the all-reduce of the number of items is missing")
def forgets_the_items(network, buckets, batches, every, quiet):
    passes = math.ceil(batches / every) if quiet else batches
    return passes * buckets, passes * gradient_bytes(network)


@wrong("traffic", "a frozen parameter has no gradient")
def sends_frozen_ones(network, buckets, batches, every, quiet):
    own = sum(value.nbytes for value in network.parameters())
    return adds_up(network, buckets, batches, every, quiet, own)


@wrong("traffic", "are float64: 8 bytes each")
def takes_four_bytes(network, buckets, batches, every, quiet):
    own = 4 * sum(v.numel() for v in network.parameters() if v.requires_grad)
    return adds_up(network, buckets, batches, every, quiet, own)


@wrong("traffic", "these are numbers, not bytes")
def counts_parameters(network, buckets, batches, every, quiet):
    own = sum(v.numel() for v in network.parameters() if v.requires_grad)
    return adds_up(network, buckets, batches, every, quiet, own)


@wrong("traffic", "one all-reduce per bucket")
def one_for_all_gradients(network, buckets, batches, every, quiet):
    return adds_up(network, 1, batches, every, quiet)


@wrong("traffic", "it is what both ranks send")
def of_both_ranks(network, buckets, batches, every, quiet):
    calls, sent = adds_up(network, buckets, batches, every, quiet)
    return 2 * calls, 2 * sent


@wrong("traffic", "bytes: all gradients, once for each backward pass that sends")
def what_a_ring_of_four_sends(network, buckets, batches, every, quiet):
    calls, sent = adds_up(network, buckets, batches, every, quiet)
    return calls, sent * 2 * 3 // 4


@wrong("traffic", "the number of all-reduces and the number of bytes, in this order")
def a_fraction(network, buckets, batches, every, quiet):
    updates = batches / every
    return updates * buckets + updates, updates * gradient_bytes(network)


@wrong("traffic", "so no short one follows")
def always_adds_an_update(network, buckets, batches, every, quiet):
    updates = batches // every + 1
    passes = updates if quiet else batches
    return passes * buckets + updates, passes * gradient_bytes(network) + updates * 8


@wrong("traffic", "the number of items is summed once per update")
def counts_items_of_each_micro_batch(network, buckets, batches, every, quiet):
    passes = math.ceil(batches / every) if quiet else batches
    return passes * buckets + batches, passes * gradient_bytes(network) + batches * 8


@wrong("traffic", "do not multiply their bytes by `buckets`")
def all_gradients_in_each_bucket(network, buckets, batches, every, quiet):
    own = buckets * gradient_bytes(network)
    return adds_up(network, buckets, batches, every, quiet, own)


@wrong("traffic", "an int64 and has 8 bytes")
def takes_the_count_for_an_int32(network, buckets, batches, every, quiet):
    calls, sent = adds_up(network, buckets, batches, every, quiet)
    return calls, sent - 4 * math.ceil(batches / every)


@wrong("traffic", "", status="not attempted")
def traffic_not_begun(network, buckets, batches, every, quiet):
    raise NotImplementedError


# ---- window_step ----


def summed(number, op=dist.ReduceOp.SUM):
    """A number, summed over the ranks."""
    total = torch.as_tensor(number).double()
    dist.all_reduce(total, op)
    return total.item()


def sum_of_losses(model, inputs, labels, weights):
    losses = F.cross_entropy(model(inputs), labels, reduction="none")
    return (losses * weights).sum()


def mean_of_losses(model, inputs, labels, weights):
    total = weights.sum() if weights.any() else 1
    return sum_of_losses(model, inputs, labels, weights) / total


def own_weights(window):
    return sum(weights.sum() for _, _, weights in window)


def all_weights(window):
    return summed(own_weights(window))


def clip(model, max_norm):
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def step(model, window, optimizer, max_norm, factor, loss_of=sum_of_losses):
    """The parts of the answers below: each loss is multiplied by `factor`, and its
    gradient accumulated. Without a factor, no item has a weight.
    """
    if not all_weights(window):
        return
    optimizer.zero_grad()
    for batch in window:
        (factor * loss_of(model, *batch)).backward()
    clip(model, max_norm)
    optimizer.step()


def right_factor(window):
    return dist.get_world_size() / max(all_weights(window), 1e-9)


@right("window_step")
def communicates_once(model, window, optimizer, max_norm):
    total = all_weights(window)
    if total == 0:
        return
    factor = dist.get_world_size() / total
    for place, batch in enumerate(window, 1):
        with nullcontext() if place == len(window) else model.no_sync():
            (factor * sum_of_losses(model, *batch)).backward()
    clip(model, max_norm)
    optimizer.step()
    optimizer.zero_grad()


@right("window_step")
def scales_the_gradients_afterwards(model, window, optimizer, max_norm):
    """It looks for weights only after all backward passes, and clips by hand."""
    optimizer.zero_grad(set_to_none=False)
    for batch in window:
        sum_of_losses(model, *batch).backward()
    total = all_weights(window)
    if total:
        gradients = [parameter.grad for parameter in model.parameters()]
        for gradient in gradients:
            gradient *= dist.get_world_size() / total
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient *= min(1.0, max_norm / norm)
        optimizer.step()


@right("window_step")
def without_ddp(model, window, optimizer, max_norm):
    """The sums of the ranks' gradients, by hand; what has no weight is left out, as
    nobody waits for it.
    """
    parameters = list(model.parameters())
    gradients = [torch.zeros_like(parameter) for parameter in parameters]
    for inputs, labels, weights in window:
        if weights.any():
            loss = sum_of_losses(model.module, inputs, labels, weights)
            for gradient, more in zip(gradients, torch.autograd.grad(loss, parameters)):
                gradient += more
    total = all_weights(window)
    for parameter, gradient in zip(parameters, gradients):
        dist.all_reduce(gradient)
        parameter.grad = gradient / total
    if total > 0:
        clip(model, max_norm)
        optimizer.step()


@right("window_step")
def leaves_out_what_nobody_waits_for(model, window, optimizer, max_norm):
    """Within no_sync, what has no weight may be left out. The mean of the weights needs
    no world_size.
    """
    total = summed(own_weights(window), dist.ReduceOp.AVG)
    if not total:
        return
    optimizer.zero_grad()
    *others, last = window
    with model.no_sync():
        for inputs, labels, weights in others:
            if weights.any():
                logs = model(inputs).log_softmax(1)
                chosen = logs.gather(1, labels[:, None])[:, 0]
                (-(chosen * weights).sum() / total).backward()
    (sum_of_losses(model, *last) / total).backward()
    clip(model, max_norm)
    optimizer.step()


@wrong("window_step", "the weights are ignored")
def the_lessons_own(model, window, optimizer, max_norm):
    """Lesson 6's accumulate, after the log_softmax that its loss needs."""
    from ddp_course import lesson06  # not for the ranks of other answers: it is slow

    class WithLogSoftmax:
        no_sync = model.no_sync

        def __call__(self, inputs):
            return model(inputs).log_softmax(1)

    optimizer.zero_grad()
    cpu, off = torch.device("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    window = [(inputs, labels.masked_fill(weights == 0, lesson06.IGNORED)) for inputs, labels, weights in window]
    counted = lesson06.count_items(window, cpu)
    lesson06.accumulate(WithLogSoftmax(), window, cpu, off, torch.float32)
    clip(model, max_norm)
    if counted > 1:
        optimizer.step()


@wrong("window_step", "the weights are ignored")
def torchs_mean(model, window, optimizer, max_norm):
    """All items with any weight count the same."""
    counts = [(x, labels, (weights > 0).double()) for x, labels, weights in window]
    step(model, counts, optimizer, max_norm, right_factor(counts))


@wrong("window_step", "divided by the number of items: divide by the sum")
def divides_by_items(model, window, optimizer, max_norm):
    items = summed(sum((weights > 0).sum() for _, _, weights in window))
    factor = dist.get_world_size() / max(items, 1)
    step(model, window, optimizer, max_norm, factor)


@wrong("window_step", "[23] times too small: DDP divides the sum")
def forgets_world_size(model, window, optimizer, max_norm):
    factor = right_factor(window) / dist.get_world_size()
    step(model, window, optimizer, max_norm, factor)


@wrong("window_step", "(4|9) times too small: DDP divides by [23] anyway")
def divides_by_world_size(model, window, optimizer, max_norm):
    factor = right_factor(window) / dist.get_world_size() ** 2
    step(model, window, optimizer, max_norm, factor)


@wrong("window_step", "[23] times too large: divide by the weights of all ranks")
def divides_by_the_mean_of_weights(model, window, optimizer, max_norm):
    factor = right_factor(window) * dist.get_world_size()
    step(model, window, optimizer, max_norm, factor)


@wrong("window_step", "do not divide by the [56] micro-batches, too")
def divides_by_micro_batches_too(model, window, optimizer, max_norm):
    factor = right_factor(window) / len(window)
    step(model, window, optimizer, max_norm, factor)


@wrong("window_step", "it is a mean of the micro-batches' means")
def mean_of_means(model, window, optimizer, max_norm):
    step(model, window, optimizer, max_norm, 1 / len(window), mean_of_losses)


@wrong("window_step", "it is a mean of the micro-batches' means")
def sum_of_means(model, window, optimizer, max_norm):
    step(model, window, optimizer, max_norm, 1, mean_of_losses)


@wrong("window_step", "each rank divides by its own weights")
def divides_by_own_weights(model, window, optimizer, max_norm):
    factor = 1 / max(own_weights(window), 1e-9)
    step(model, window, optimizer, max_norm, factor)


def divided_by_weights_of_all_ranks(model, inputs, labels, weights):
    total = summed(weights.sum()) or 1
    factor = dist.get_world_size() / total
    return sum_of_losses(model, inputs, labels, weights) * factor


@wrong("window_step", "each micro-batch is divided by its own weights")
def weighs_each_micro_batch(model, window, optimizer, max_norm):
    step(model, window, optimizer, max_norm, 1, divided_by_weights_of_all_ranks)


@wrong("window_step", "0/0 is nan, and nan times 0 is nan")
def mean_times_weight(model, window, optimizer, max_norm):
    def loss_of(model, inputs, labels, weights):
        total = sum_of_losses(model, inputs, labels, weights)
        return total / weights.sum() * weights.sum()

    step(model, window, optimizer, max_norm, right_factor(window), loss_of)


@wrong("window_step", "no item of any rank has a weight")
def steps_without_weights(model, window, optimizer, max_norm):
    factor = right_factor(window)
    optimizer.zero_grad()
    for batch in window:
        (factor * sum_of_losses(model, *batch)).backward()
    clip(model, max_norm)
    optimizer.step()


@wrong("window_step", "it still contains the gradients of earlier updates")
def forgets_zero_grad(model, window, optimizer, max_norm):
    factor = right_factor(window)
    if factor > 1e6:
        return
    for batch in window:
        (factor * sum_of_losses(model, *batch)).backward()
    clip(model, max_norm)
    optimizer.step()


@wrong("window_step", "it contains only the last micro-batch")
def zero_grad_for_each(model, window, optimizer, max_norm):
    factor = right_factor(window)
    if factor > 1e6:
        return
    for batch in window:
        optimizer.zero_grad()
        (factor * sum_of_losses(model, *batch)).backward()
    clip(model, max_norm)
    optimizer.step()


@wrong("window_step", "let the gradients add up, and step once")
def steps_for_each(model, window, optimizer, max_norm):
    for batch in window:
        step(model, [batch], optimizer, max_norm, right_factor(window))


@wrong("window_step", "the step is missing: every rank must call")
def takes_no_step(model, window, optimizer, max_norm):
    for batch in window:
        (sum_of_losses(model, *batch) / 10).backward()


@wrong("window_step", "the step is missing: every rank must call")
def steps_on_rank_zero(model, window, optimizer, max_norm):
    factor = right_factor(window)
    optimizer.zero_grad()
    for batch in window:
        (factor * sum_of_losses(model, *batch)).backward()
    clip(model, max_norm)
    if dist.get_rank() == 0 and factor < 1e6:
        optimizer.step()


@wrong("window_step", "each rank uses its own gradients")
def never_synchronizes(model, window, optimizer, max_norm):
    with model.no_sync():
        step(model, window, optimizer, max_norm, right_factor(window))


@wrong("window_step", "each rank uses its own gradients")
def calls_the_inner_model(model, window, optimizer, max_norm):
    step(model.module, window, optimizer, max_norm, right_factor(window))


@wrong("window_step", "does it contain weight times loss of each item once")
def weighs_the_outputs(model, window, optimizer, max_norm):
    def loss_of(model, inputs, labels, weights):
        scaled = model(inputs) * weights[:, None]
        return F.cross_entropy(scaled, labels, reduction="sum")

    step(model, window, optimizer, max_norm, right_factor(window), loss_of)


@wrong("window_step", "it is longer than max_norm: clip it before the step")
def does_not_clip(model, window, optimizer, max_norm):
    step(model, window, optimizer, 1e9, right_factor(window))


@wrong("window_step", "it is longer than max_norm: clip it before the step")
def clips_after_the_step(model, window, optimizer, max_norm):
    step(model, window, optimizer, 1e9, right_factor(window))
    if model.module[0].weight.grad is not None:
        clip(model, max_norm)


@wrong("window_step", "each micro-batch is clipped")
def clips_in_the_loop(model, window, optimizer, max_norm):
    factor = right_factor(window)
    if factor > 1e6:
        return
    optimizer.zero_grad()
    for batch in window:
        (factor * sum_of_losses(model, *batch)).backward()
        clip(model, max_norm)
    optimizer.step()


@wrong("window_step", "each rank has clipped its own gradient")
def clips_before_averaging(model, window, optimizer, max_norm):
    factor = right_factor(window)
    if factor > 1e6:
        return
    optimizer.zero_grad()
    for batch in window:
        (factor * sum_of_losses(model.module, *batch)).backward()
    clip(model, max_norm)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
    optimizer.step()


@wrong("window_step", "it was clipped before it was scaled")
def clips_the_sum(model, window, optimizer, max_norm):
    total = all_weights(window)
    if not total:
        return
    optimizer.zero_grad()
    for batch in window:
        (sum_of_losses(model, *batch) * dist.get_world_size()).backward()
    clip(model, max_norm)
    for parameter in model.parameters():
        parameter.grad /= total
    optimizer.step()


@wrong("window_step", "each number is clipped: max_norm limits the norm")
def clips_values(model, window, optimizer, max_norm):
    factor = right_factor(window)
    if factor > 1e6:
        return
    optimizer.zero_grad()
    for batch in window:
        (factor * sum_of_losses(model, *batch)).backward()
    nn.utils.clip_grad_value_(model.parameters(), max_norm)
    optimizer.step()


@wrong("window_step", "a gradient shorter than max_norm must stay as it is")
def always_scales(model, window, optimizer, max_norm):
    factor = right_factor(window)
    if factor > 1e6:
        return
    optimizer.zero_grad()
    for batch in window:
        (factor * sum_of_losses(model, *batch)).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient *= max_norm / norm
    optimizer.step()


@wrong("window_step", "the sum of the weights is less than 1 here")
def divides_by_one_at_least(model, window, optimizer, max_norm):
    """As the lesson's count_items does."""
    factor = dist.get_world_size() / max(all_weights(window), 1)
    step(model, window, optimizer, max_norm, factor)


@wrong("window_step", "each parameter is clipped on its own")
def clips_parameter_by_parameter(model, window, optimizer, max_norm):
    factor = right_factor(window)
    if factor > 1e6:
        return
    optimizer.zero_grad()
    for batch in window:
        (factor * sum_of_losses(model, *batch)).backward()
    for parameter in model.parameters():
        nn.utils.clip_grad_norm_(parameter, max_norm)
    optimizer.step()


@wrong("window_step", "the micro-batches, after update 1[^$]*belong to the caller")
def normalizes_the_weights(model, window, optimizer, max_norm):
    total = all_weights(window)
    if total:
        for _, _, weights in window:
            weights /= total
        step(model, window, optimizer, max_norm, dist.get_world_size())


@wrong("window_step", "the mode of the model, after update 1")
def steps_in_eval_mode(model, window, optimizer, max_norm):
    model.eval()
    step(model, window, optimizer, max_norm, right_factor(window))


@wrong("window_step", "whether gradients are recorded[^$]*whole program")
def leaves_gradients_off(model, window, optimizer, max_norm):
    torch.set_grad_enabled(True)
    step(model, window, optimizer, max_norm, right_factor(window))
    torch.set_grad_enabled(False)


@wrong("window_step", "the other ranks wait in its backward")
def skips_what_has_no_weight(model, window, optimizer, max_norm):
    factor = right_factor(window)
    if factor > 1e6:
        return
    optimizer.zero_grad()
    for batch in window:
        if batch[2].any():
            (factor * sum_of_losses(model, *batch)).backward()
    clip(model, max_norm)
    optimizer.step()


@wrong("window_step", "the other ranks wait in its backward")
def a_rank_without_weights_has_nothing_to_do(model, window, optimizer, max_norm):
    factor = right_factor(window)
    if own_weights(window):
        optimizer.zero_grad()
        for batch in window:
            (factor * sum_of_losses(model, *batch)).backward()
        clip(model, max_norm)
        optimizer.step()


@wrong("window_step", "micro-batches were joined, which takes too much memory")
def joins_the_window(model, window, optimizer, max_norm):
    whole = tuple(torch.cat(parts) for parts in zip(*window))
    step(model, [whole], optimizer, max_norm, right_factor(window))


@wrong("window_step", "of all micro-batches are in memory")
def one_backward_for_all(model, window, optimizer, max_norm):
    factor = right_factor(window)
    if factor > 1e6:
        return
    optimizer.zero_grad()
    (factor * sum(sum_of_losses(model, *batch) for batch in window)).backward()
    clip(model, max_norm)
    optimizer.step()


@right("window_step")
def gathers_the_sums(model, window, optimizer, max_norm):
    """As Python objects; looks at the outputs once more, without their activations."""
    optimizer.zero_grad(set_to_none=False)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, float(own_weights(window)))
    mean = sum(every) / len(every)
    for inputs, labels, weights in window if mean else []:
        with torch.no_grad():
            model.module(inputs)
        (F.cross_entropy(model(inputs), labels, reduction="none") @ (weights / mean)).backward()
    if mean:
        norm = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
        optimizer.step()


@wrong("window_step", "the activations of 2 micro-batches are in memory")
def one_backward_for_two(model, window, optimizer, max_norm):
    factor = right_factor(window)
    if factor > 1e6:
        return
    optimizer.zero_grad()
    for place in range(0, len(window), 2):
        (factor * sum(sum_of_losses(model, *batch) for batch in window[place : place + 2])).backward()
    clip(model, max_norm)
    optimizer.step()


@wrong("window_step", "the step is missing: every rank must call")
def takes_little_for_nothing(model, window, optimizer, max_norm):
    if all_weights(window) >= 1:
        step(model, window, optimizer, max_norm, right_factor(window))


@wrong("window_step", "the step is missing: every rank must call")
def a_rank_without_weights_takes_no_step(model, window, optimizer, max_norm):
    optimizer.zero_grad()
    factor = right_factor(window)
    for batch in window:
        (factor * sum_of_losses(model, *batch)).backward()
    clip(model, max_norm)
    if own_weights(window):
        optimizer.step()


@wrong("window_step", "the momentum is gone")
def starts_the_optimizer_again(model, window, optimizer, max_norm):
    """Nothing of one update may be left over in the next one."""
    optimizer.state.clear()
    step(model, window, optimizer, max_norm, right_factor(window))


@wrong("window_step", "divided by the sum of all weights, and clipped")
def clips_by_the_largest(model, window, optimizer, max_norm):
    factor = right_factor(window)
    if factor > 1e6:
        return
    optimizer.zero_grad()
    for batch in window:
        (factor * sum_of_losses(model, *batch)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type=math.inf)
    optimizer.step()


@wrong("window_step", "", status="not attempted")
def window_step_not_begun(model, window, optimizer, max_norm):
    raise NotImplementedError


# ---- accumulate ----


def accumulate_with(model, stream, loss_of, in_no_sync):
    """in_no_sync(place, length): whether the micro-batch at this place, 0 for the first,
    is not to be sent.
    """
    window = list(stream)
    for place, (inputs, target) in enumerate(window):
        with model.no_sync() if in_no_sync(place, len(window)) else nullcontext():
            loss_of(model(inputs), target).backward()


def with_last(stream):
    """(whether it is the last, micro-batch), one kept back."""
    current = next(stream)
    for following in stream:
        yield False, current
        current = following
    yield True, current


@right("accumulate")
def keeps_one_back(model, stream, loss_of):
    print("an update")
    for is_last, (inputs, target) in with_last(stream):
        with nullcontext() if is_last else model.no_sync():
            loss_of(model(inputs), target).backward()


@right("accumulate")
def by_the_flag(model, stream, loss_of):
    """What no_sync does: it lowers a flag of the model."""
    for is_last, (inputs, target) in with_last(stream):
        model.require_backward_grad_sync = is_last
        loss_of(model(inputs), target).backward()


@right("accumulate")
def with_a_sentinel(model, stream, loss_of):
    """It is in the forward that DDP decides: no_sync may end before backward."""
    end = object()
    current = next(stream)
    while current is not end:
        inputs, target = current
        current = next(stream, end)
        with nullcontext() if current is end else model.no_sync():
            output = model(inputs)
        loss_of(output, target).backward()


@right("accumulate")
def past_ddp(model, stream, loss_of):
    """Only the last micro-batch goes through DDP, which sends what has added up without
    it.
    """
    for is_last, (inputs, target) in with_last(stream):
        network = model if is_last else model.module
        loss_of(network(inputs), target).backward()


@right("accumulate")
def with_pairwise(model, stream, loss_of):
    for current, following in itertools.pairwise(itertools.chain(stream, [None])):
        with model.no_sync() if following else nullcontext():
            loss_of(model(current[0]), current[1]).backward()


@wrong("accumulate", "the stream was read ahead")
def unpacks_the_stream(model, stream, loss_of):
    *others, last = stream
    with model.no_sync():
        for inputs, target in others:
            loss_of(model(inputs), target).backward()
    inputs, target = last
    loss_of(model(inputs), target).backward()


@wrong("accumulate", "the stream was read ahead")
def the_lessons_own_loop(model, stream, loss_of):
    micro_batches = list(stream)
    for number, (inputs, target) in enumerate(micro_batches, 1):
        last = number == len(micro_batches)
        with nullcontext() if last else model.no_sync():
            loss_of(model(inputs), target).backward()


@wrong("accumulate", r"has no len\(\)", status="your code raised")
def asks_for_the_length(model, stream, loss_of):
    for number, (inputs, target) in enumerate(stream, 1):
        with nullcontext() if number == len(stream) else model.no_sync():
            loss_of(model(inputs), target).backward()


@wrong("accumulate", "the stream was read ahead")
def keeps_two_back(model, stream, loss_of):
    kept = []
    for batch in stream:
        kept.append(batch)
        if len(kept) == 3:
            inputs, target = kept.pop(0)
            with model.no_sync():
                loss_of(model(inputs), target).backward()
    accumulate_with(model, kept, loss_of, lambda place, length: place < length - 1)


@wrong("accumulate", "[56] of [56] micro-batches were sent: all but the last")
def always_sends(model, stream, loss_of):
    accumulate_with(model, stream, loss_of, lambda place, length: False)


@wrong("accumulate", "each rank still has its own gradients")
def never_sends(model, stream, loss_of):
    accumulate_with(model, stream, loss_of, lambda place, length: True)


@wrong("accumulate", "around backward only, but the forward decides")
def backward_alone_within(model, stream, loss_of):
    window = list(stream)
    for place, (inputs, target) in enumerate(window, 1):
        loss = loss_of(model(inputs), target)
        with nullcontext() if place == len(window) else model.no_sync():
            loss.backward()


@wrong("accumulate", "sent with micro-batch 1 of [56]")
def sends_the_first(model, stream, loss_of):
    accumulate_with(model, stream, loss_of, lambda place, length: place > 0)


@wrong("accumulate", "sent with micro-batch [45] of [56]")
def sends_the_last_but_one(model, stream, loss_of):
    accumulate_with(model, stream, loss_of, lambda place, length: place != max(0, length - 2))


@wrong("accumulate", "2 of [56] micro-batches were sent")
def sends_the_last_two(model, stream, loss_of):
    accumulate_with(model, stream, loss_of, lambda place, length: place < length - 2)


@wrong("accumulate", "[45] of [56] micro-batches were sent")
def only_the_first_within(model, stream, loss_of):
    accumulate_with(model, stream, loss_of, lambda place, length: place == 0)


@wrong("accumulate", r"per rank: \[1, 1[^$]*each rank still has its own gradients")
def sends_only_after_the_first(model, stream, loss_of):
    for place, (is_last, (inputs, target)) in enumerate(with_last(stream)):
        with nullcontext() if is_last and place > 0 else model.no_sync():
            loss_of(model(inputs), target).backward()


@wrong("accumulate", r"ValueError[^$]*\(in an update of 1\)", status="your code raised")
def needs_two(model, stream, loss_of):
    window = list(stream)
    first, *middle, last = window
    with model.no_sync():
        for inputs, target in [first, *middle]:
            loss_of(model(inputs), target).backward()
    inputs, target = last
    loss_of(model(inputs), target).backward()


@wrong("accumulate", "no_sync has to end before the function returns")
def leaves_the_flag_down(model, stream, loss_of):
    by_the_flag(model, stream, loss_of)
    model.require_backward_grad_sync = False


@wrong("accumulate", "the last micro-batch is missing")
def forgets_the_last(model, stream, loss_of):
    window = list(stream)
    accumulate_with(model, window[:-1], loss_of, lambda place, length: True)


@wrong("accumulate", "the last micro-batch is missing")
def stops_one_early(model, stream, loss_of):
    window = list(stream)
    accumulate_with(model, window[:-1], loss_of, lambda place, length: place < length - 2)


@wrong("accumulate", "exactly once")
def takes_the_last_twice(model, stream, loss_of):
    window = list(stream)
    never_sends(model, window, loss_of)
    inputs, target = window[-1]
    loss_of(model(inputs), target).backward()


@wrong("accumulate", "they contain only the last micro-batch")
def clears_in_between(model, stream, loss_of):
    window = list(stream)
    for place, (inputs, target) in enumerate(window, 1):
        model.zero_grad()
        with nullcontext() if place == len(window) else model.no_sync():
            loss_of(model(inputs), target).backward()


@wrong("accumulate", "[56] times too small: loss_of already scales the loss")
def scales_again(model, stream, loss_of):
    window = list(stream)
    keeps_one_back(model, iter(window), lambda output, target: loss_of(output, target) / len(window))


@wrong("accumulate", "[23] times too large: DDP already averages them")
def sums_once_more(model, stream, loss_of):
    keeps_one_back(model, stream, loss_of)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


@wrong("accumulate", "do not call collectives yourself")
def averages_once_more(model, stream, loss_of):
    keeps_one_back(model, stream, loss_of)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)


@wrong("accumulate", "do not call collectives yourself")
def averages_by_hand(model, stream, loss_of):
    never_sends(model, stream, loss_of)
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(flat, dist.ReduceOp.AVG)
    torch.nn.utils.vector_to_parameters(flat, [parameter.grad for parameter in model.parameters()])


@wrong("accumulate", "do all ranks call the same collectives", status="your code raised")
def rank_zero_keeps_quiet(model, stream, loss_of):
    accumulate_with(model, stream, loss_of, lambda place, length: dist.get_rank() == 0)


@wrong("accumulate", "micro-batches were joined, which takes too much memory")
def joins_all(model, stream, loss_of):
    window = list(stream)
    inputs, targets = (torch.cat(parts) for parts in zip(*window))
    loss_of(model(inputs), targets).backward()


@wrong("accumulate", "of all micro-batches are in memory")
def one_backward(model, stream, loss_of):
    window = list(stream)
    sum(loss_of(model(inputs), target) for inputs, target in window).backward()


@wrong("accumulate", "each micro-batch goes through the network once")
def sends_with_one_pass_more(model, stream, loss_of):
    """All of them within no_sync; then a backward pass of zeros."""
    with model.no_sync():
        for inputs, target in stream:
            loss_of(model(inputs), target).backward()
    (0 * model(inputs).sum()).backward()


@wrong("accumulate", "do not call collectives yourself")
def asks_for_the_largest_number(model, stream, loss_of):
    window = list(stream)
    largest = torch.tensor(len(window))
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    accumulate_with(model, window, loss_of, lambda place, length: place < largest - 1)


@right("accumulate")
def one_no_sync_for_the_loop(model, stream, loss_of):
    current = next(stream)
    with model.no_sync():
        for following in stream:
            loss_of(model(current[0]), current[1]).backward()
            current = following
    loss_of(model(current[0]), current[1]).backward()


@right("accumulate")
def by_recursion(model, stream, loss_of):
    def go_on(inputs, target):
        following = next(stream, None)
        with model.no_sync() if following else nullcontext():
            loss_of(model(inputs), target).backward()
        if following:
            go_on(*following)

    go_on(*next(stream))


@wrong("accumulate", "the optimizer changes the parameters")
def takes_the_step(model, stream, loss_of):
    keeps_one_back(model, stream, loss_of)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


@wrong("accumulate", "the caller takes the step, and clears the gradients")
def clears_in_the_end(model, stream, loss_of):
    keeps_one_back(model, stream, loss_of)
    model.zero_grad()


@wrong("accumulate", "the model was in training mode and must be so afterwards")
def in_eval_mode(model, stream, loss_of):
    model.eval()
    keeps_one_back(model, stream, loss_of)


@wrong("accumulate", "a loop does not end", status="timed out")
def never_ends(model, stream, loss_of):
    while stream:
        time.sleep(0.1)


# ---- weighing_hook ----


def done(value):
    """A future that has this value already."""
    future = torch.futures.Future()
    future.set_result(value)
    return future


def weighed(gradients, weight):
    """Gradients of no weight may be nan."""
    return gradients * weight if weight else torch.zeros_like(gradients)


def extended(state, bucket, weight=None):
    """The bucket, times the items, and the items, as one tensor."""
    buffer, items = bucket.buffer(), state["items"]
    weight = items if weight is None else weight
    return torch.cat([weighed(buffer, weight), buffer.new_tensor([items])])


def summed_up(tensor, finish):
    """A future of finish(the sum of this tensor over the ranks)."""
    future = dist.all_reduce(tensor, async_op=True).get_future()
    return future.then(lambda future: finish(future.value()[0]))


def counted(state, sent):
    state["bytes"] += sent.numel() * sent.element_size()
    return sent


def mean_over_items(sums):
    return sums[:-1] / sums[-1]


@right("weighing_hook")
def with_a_future(state, bucket):
    print("bucket", bucket.index())
    sent = counted(state, extended(state, bucket))
    return summed_up(sent, mean_over_items)


@right("weighing_hook")
def waits_for_the_mean(state, bucket):
    """Averages both, so that the number of ranks cancels; returns what is finished."""
    sent = extended(state, bucket)
    dist.all_reduce(sent, dist.ReduceOp.AVG)
    state["bytes"] = np.int64(state["bytes"]) + sent.nbytes
    return done(mean_over_items(sent))


@right("weighing_hook")
def writes_into_the_buffer(state, bucket):
    """The items come first; the mean goes back into the buffer and its gradients."""
    buffer = bucket.buffer().mul_(state["items"])
    if not state["items"]:
        buffer.zero_()
    sent = buffer.new_empty(len(buffer) + 1)
    sent[0], sent[1:] = state["items"], buffer
    state["bytes"] += sent.nbytes

    def finish(future):
        [sums] = future.wait()
        buffer.copy_(sums[1:]).div_(sums[0])
        bucket.set_buffer(buffer)
        return bucket.buffer()

    return dist.all_reduce(sent, async_op=True).get_future().then(finish)


@right("weighing_hook")
def sends_the_items_once(state, bucket):
    """Only the first bucket carries the items; the others wait for its sum."""
    if bucket.index() == 0:
        sent = counted(state, extended(state, bucket))
        dist.all_reduce(sent)
        state["total"] = sent[-1].item()
        return done(sent[:-1] / state["total"])
    sent = counted(state, weighed(bucket.buffer(), state["items"]))
    total = state["total"]
    return summed_up(sent, lambda sums: sums / total)


@right("weighing_hook")
def gradient_by_gradient(state, bucket):
    """Joins the gradients of the bucket itself; counts in a tensor."""
    items = state["items"]
    parts = [weighed(gradient.flatten(), items) for gradient in bucket.gradients()]
    sent = torch.cat([*parts, torch.full_like(parts[0][:1], items)])
    state["bytes"] = torch.as_tensor(state["bytes"]) + sent.nbytes
    return summed_up(sent, mean_over_items)


@wrong("weighing_hook", "it is the plain mean of the ranks' gradients")
def torchs_hook(state, bucket):
    counted(state, bucket.buffer())
    return allreduce_hook(None, bucket)


@wrong("weighing_hook", "about the plain mean of the ranks' gradients, but rounded")
def torchs_hook_that_compresses(state, bucket):
    state["bytes"] += bucket.buffer().numel() * 2
    return bf16_compress_hook(None, bucket)


@wrong("weighing_hook", "it is the plain mean of the ranks' gradients")
def multiplies_and_divides_by_its_own(state, bucket):
    sent = counted(state, extended(state, bucket, weight=1))
    return summed_up(sent, lambda sums: sums[:-1] / dist.get_world_size())


@wrong("weighing_hook", "it is the plain sum of the ranks' gradients")
def only_sums(state, bucket):
    return summed_up(counted(state, bucket.buffer()), lambda sums: sums)


@wrong("weighing_hook", "the sum of items times gradient over the ranks: divide it")
def forgets_to_divide(state, bucket):
    sent = counted(state, extended(state, bucket))
    return summed_up(sent, lambda sums: sums[:-1])


@wrong("weighing_hook", "it is divided by [23], the number of ranks: divide by the")
def averages_over_ranks(state, bucket):
    sent = counted(state, bucket.buffer() * state["items"] / dist.get_world_size())
    return summed_up(sent, lambda sums: sums)


@wrong("weighing_hook", "and then by [23], the number of ranks: the former is enough")
def divides_by_both(state, bucket):
    sent = counted(state, extended(state, bucket))
    return summed_up(sent, lambda sums: mean_over_items(sums) / dist.get_world_size())


@wrong("weighing_hook", "[23] times too large: the items of all ranks are their sum")
def divides_by_the_mean(state, bucket):
    sent = counted(state, extended(state, bucket))
    return summed_up(sent, lambda sums: mean_over_items(sums) * dist.get_world_size())


@wrong("weighing_hook", "divided by the items, but was not multiplied by them")
def does_not_multiply(state, bucket):
    sent = counted(state, extended(state, bucket, weight=1))
    return summed_up(sent, mean_over_items)


@wrong("weighing_hook", "each rank divides by its own items|a rank may have 0 items")
def divides_by_its_own_items(state, bucket):
    sent, items = counted(state, bucket.buffer() * state["items"]), state["items"]
    return summed_up(sent, lambda sums: sums / items)


@wrong("weighing_hook", "a rank may have 0 items, and 0/0 is nan")
def shares_by_its_own_items(state, bucket):
    """Right but for a rank without items."""
    weight = torch.tensor(float(state["items"]))
    sent = counted(state, extended(state, bucket, weight * weight / weight))
    return summed_up(sent, mean_over_items)


@wrong("weighing_hook", "a rank with 0 items counts, as if it had 1")
def counts_one_item_at_least(state, bucket):
    """Gives a rank with 0 items the weight 1, and does so consistently."""
    items = max(state["items"], 1)
    buffer = bucket.buffer()
    sent = torch.cat([buffer * items, buffer.new_tensor([items])])
    return summed_up(counted(state, sent), mean_over_items)


@wrong("weighing_hook", "still this rank's own gradient")
def returns_what_it_was_given(state, bucket):
    sent = counted(state, extended(state, bucket))
    return summed_up(sent, lambda sums: bucket.buffer())


@wrong("weighing_hook", "it has only this rank's own gradient")
def does_not_wait(state, bucket):
    sent = counted(state, extended(state, bucket))
    own = sent.clone()
    dist.all_reduce(sent, async_op=True)
    return done(own[:-1])


@wrong("weighing_hook", "these are the items of an earlier step")
def remembers_the_first_items(state, bucket):
    items = state.setdefault("first", state["items"])
    sent = counted(state, extended({"items": items}, bucket))
    return summed_up(sent, mean_over_items)


@wrong("weighing_hook", "does each bucket get the same treatment")
def weighs_the_last_bucket(state, bucket):
    if bucket.is_last():
        sent = counted(state, extended(state, bucket))
        return summed_up(sent, mean_over_items)
    return done(bucket.buffer() * 0.9)


@wrong("weighing_hook", "it is the plain mean of the ranks' gradients")
def weighs_the_last_bucket_only(state, bucket):
    if bucket.is_last():
        sent = counted(state, extended(state, bucket))
        return summed_up(sent, mean_over_items)
    counted(state, bucket.buffer())
    return allreduce_hook(None, bucket)


@wrong("weighing_hook", "numbers were sent with fewer digits: send the type")
def sends_float32(state, bucket):
    sent = counted(state, extended(state, bucket).float())
    dtype = bucket.buffer().dtype
    return summed_up(sent, lambda sums: mean_over_items(sums).to(dtype))


@wrong("weighing_hook", "of the buffer's type, not more")
def sends_float64(state, bucket):
    sent = counted(state, extended(state, bucket).double())
    dtype = bucket.buffer().dtype
    return summed_up(sent, lambda sums: mean_over_items(sums).to(dtype))


@wrong("weighing_hook", "must have its size: leave out the items")
def keeps_the_items(state, bucket):
    sent = counted(state, extended(state, bucket))
    return summed_up(sent, lambda sums: sums / sums[-1])


@wrong("weighing_hook", "a rank with 0 items needs the same gradients")
def leaves_a_rank_without_items(state, bucket):
    sent = counted(state, extended(state, bucket))
    has_items = state["items"] > 0
    return summed_up(sent, lambda sums: mean_over_items(sums) * has_items)


@wrong("weighing_hook", "not what a ring sends of it")
def counts_what_a_ring_sends(state, bucket):
    n, sent = dist.get_world_size(), extended(state, bucket)
    state["bytes"] += 2 * (n - 1) * sent.nbytes // n
    return summed_up(sent, mean_over_items)


@wrong("weighing_hook", "it is about right, but rounded: send the type of the buffer")
def sends_sixteen_bits(state, bucket):
    sent = counted(state, extended(state, bucket).bfloat16())
    dtype = bucket.buffer().dtype
    return summed_up(sent, lambda sums: mean_over_items(sums.to(dtype)))


@wrong("weighing_hook", "can travel with the bucket, in one more element")
def sends_the_items_separately(state, bucket):
    items = counted(state, torch.tensor([state["items"]], dtype=torch.float64))
    dist.all_reduce(items)
    sent = counted(state, bucket.buffer() * state["items"])
    return summed_up(sent, lambda sums: sums / items.item())


@wrong("weighing_hook", "can travel with the bucket, in one more element")
def gathers_the_items(state, bucket):
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, state["items"])
    sent = counted(state, bucket.buffer() * (state["items"] / sum(gathered)))
    return summed_up(sent, lambda sums: sums)


@wrong("weighing_hook", "needs one more element per bucket, of the buffer's type")
def sends_the_items_for_each_gradient(state, bucket):
    buffer, items = bucket.buffer(), state["items"]
    sent = counted(state, torch.stack([buffer * items, torch.full_like(buffer, items)]))
    return summed_up(sent, lambda sums: sums[0] / sums[1])


@wrong("weighing_hook", "these are the bytes of the buffers alone")
def counts_the_buffer(state, bucket):
    counted(state, bucket.buffer())
    return summed_up(extended(state, bucket), mean_over_items)


@wrong("weighing_hook", "a number of this type has [48] bytes")
def counts_numbers(state, bucket):
    state["bytes"] += bucket.buffer().numel() + 1
    return summed_up(extended(state, bucket), mean_over_items)


@wrong("weighing_hook", "a number of this type has 8 bytes")
def counts_four_bytes(state, bucket):
    state["bytes"] += 4 * (bucket.buffer().numel() + 1)
    return summed_up(extended(state, bucket), mean_over_items)


@wrong("weighing_hook", "a number of this type has 4 bytes")
def counts_eight_bytes(state, bucket):
    state["bytes"] += 8 * (bucket.buffer().numel() + 1)
    return summed_up(extended(state, bucket), mean_over_items)


@wrong("weighing_hook", "do not multiply by world_size")
def counts_for_all_ranks(state, bucket):
    sent = extended(state, bucket)
    state["bytes"] += sent.nbytes * dist.get_world_size()
    return summed_up(sent, mean_over_items)


@wrong("weighing_hook", "it contains only the last call")
def starts_again(state, bucket):
    sent = extended(state, bucket)
    state["bytes"] = sent.nbytes
    return summed_up(sent, mean_over_items)


@wrong("weighing_hook", "callbacks run in several threads at once")
def counts_in_a_callback(state, bucket):
    sent = extended(state, bucket)

    def finish(sums):
        before = state["bytes"]
        time.sleep(0.1)  # as it may take, when several threads want the interpreter
        state["bytes"] = before + sums.nbytes
        return mean_over_items(sums)

    return summed_up(sent, finish)


@wrong("weighing_hook", "state has not changed")
def makes_another_dict(state, bucket):
    state = {"items": state["items"], "bytes": state["bytes"]}
    return with_a_future(state, bucket)


@wrong("weighing_hook", "only rank 0 has counted")
def counts_on_rank_zero_only(state, bucket):
    sent = extended(state, bucket)
    if dist.get_rank() == 0:
        state["bytes"] += sent.nbytes
    return summed_up(sent, mean_over_items)


@wrong("weighing_hook", "it belongs to the training loop: do not change it")
def stores_the_sum_of_items(state, bucket):
    sent = counted(state, extended(state, bucket))
    items = sent[-1:].clone()
    future = summed_up(sent, mean_over_items)
    if bucket.is_last():
        state["items"] = int(items) + 1
    return future


@wrong("weighing_hook", "needs the tensor later: return a future of it")
def returns_the_tensor(state, bucket):
    return with_a_future(state, bucket).wait()


@wrong("weighing_hook", "return a future of the averaged gradients")
def returns_nothing(state, bucket):
    dist.all_reduce(counted(state, extended(state, bucket)))


@wrong("weighing_hook", "a work is not a future")
def returns_the_work(state, bucket):
    return dist.all_reduce(counted(state, extended(state, bucket)), async_op=True)


@wrong("weighing_hook", "future is a list of one tensor")
def returns_the_future_of_the_work(state, bucket):
    sent = counted(state, extended(state, bucket))
    return dist.all_reduce(sent, async_op=True).get_future()


@wrong("weighing_hook", "future is a list of one tensor")
def divides_the_list(state, bucket):
    sent = counted(state, extended(state, bucket))
    future = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda future: future.value() / dist.get_world_size())


@wrong("weighing_hook", "nothing completes it")
def never_completes(state, bucket):
    dist.all_reduce(counted(state, extended(state, bucket)))
    return torch.futures.Future()


@wrong("weighing_hook", "some rank waits for another", status="timed out")
def skips_a_rank_without_items(state, bucket):
    if state["items"] == 0:
        return done(torch.zeros_like(bucket.buffer()))
    return with_a_future(state, bucket)


@right("weighing_hook")
def in_two_steps(state, bucket):
    """Weighs in one callback and divides in another; takes no nan from where."""
    buffer, items = bucket.buffer(), state["items"]
    weighted = torch.where(buffer.new_tensor(items > 0).bool(), buffer * items, 0)
    sent = counted(state, torch.nn.functional.pad(weighted, (0, 1), value=items))
    future = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda sums: sums.value()[0]).then(lambda sums: mean_over_items(sums.value()))


@wrong("weighing_hook", "nan times 0 is nan: put zeros in their place")
def multiplies_whatever_it_is(state, bucket):
    buffer, items = bucket.buffer(), state["items"]
    sent = torch.cat([buffer * items, buffer.new_tensor([items])])
    return summed_up(counted(state, sent), mean_over_items)


@wrong("weighing_hook", "it must be the sum of the bytes of all tensors|a number of this type has")
def counts_an_int_for_the_items(state, bucket):
    state["bytes"] += bucket.buffer().nbytes + 4
    return summed_up(extended(state, bucket), mean_over_items)


@wrong("weighing_hook", "is each rank's gradient multiplied by its items, summed")
def weighs_twice(state, bucket):
    items = state["items"]
    sent = counted(state, extended(state, bucket, weight=items**2))
    return summed_up(sent, mean_over_items)


@wrong("weighing_hook", "is each rank's gradient multiplied by its items|0/0 is nan")
def divides_by_the_items_first(state, bucket):
    sent = counted(state, extended(state, bucket, weight=1 / max(state["items"], 1e-9)))
    return summed_up(sent, mean_over_items)


@wrong("weighing_hook", "it must be the sum of the bytes of all tensors")
def counts_the_last_bucket_only(state, bucket):
    sent = extended(state, bucket)
    if bucket.is_last():
        counted(state, sent)
    return summed_up(sent, mean_over_items)


@wrong("weighing_hook", "", status="not attempted")
def weighing_hook_not_begun(state, bucket):
    raise NotImplementedError


# ---- train_epochs ----


class Epochs:
    """What the answers below share: all right."""

    def __call__(self, model, epochs, every, schedule):
        self.model, self.every, self.schedule, self.update = model, every, schedule, 0
        for self.batches in epochs:
            self.begin_epoch()
            for number, batch in enumerate(self.batches, 1):
                self.number = number
                self.micro_batch(*batch)
                if self.steps():
                    self.step()
                self.after_micro_batch()

    def begin_epoch(self):
        pass

    def after_micro_batch(self):
        pass

    def steps(self):
        return self.number % self.every == 0 or self.number == len(self.batches)

    def sends(self):
        return self.steps()

    def size(self):
        """The micro-batches of this update."""
        begin = (self.number - 1) // self.every * self.every
        return min(self.every, len(self.batches) - begin)

    def micro_batch(self, inputs, targets):
        if self.sends():
            self.backward(self.loss(inputs, targets))
        else:
            with self.model.no_sync():
                self.backward(self.loss(inputs, targets))

    def loss(self, inputs, targets):
        return F.mse_loss(self.model(inputs), targets)

    def backward(self, loss):
        (loss / self.size()).backward()

    @torch.no_grad()
    def step(self):
        rate = self.schedule(self.update)
        for parameter in self.model.parameters():
            parameter -= rate * parameter.grad
            parameter.grad = None
        self.count()

    def count(self):
        self.update += 1


def epochs_by(kind):
    """As a function, which is what the question asks for."""

    def train_epochs(model, epochs, every, schedule):
        return kind()(model, epochs, every, schedule)

    train_epochs.__name__, train_epochs.__module__ = kind.__name__, kind.__module__
    return train_epochs


def right_epochs(kind):
    right("train_epochs")(epochs_by(kind))
    return kind


def wrong_epochs(*given, **options):
    def register(kind):
        wrong("train_epochs", *given, **options)(epochs_by(kind))
        return kind

    return register


def epochs_with(*bugs):
    """A repaired loop in which some of the given bugs are left."""

    class Rest(Epochs):
        def steps(self):
            return self.number % self.every == 0 if "rest" in bugs else super().steps()

        def size(self):
            return self.every if "rest" in bugs else super().size()

        def micro_batch(self, inputs, targets):
            if "backward" not in bugs:
                return super().micro_batch(inputs, targets)
            loss = self.loss(inputs, targets)
            with nullcontext() if self.sends() else self.model.no_sync():
                self.backward(loss)

        def count(self):
            self.update += "rate" not in bugs

        def after_micro_batch(self):
            self.update += "rate" in bugs

    return Rest


LEFT_OVER, TOO_FAST, BACKWARD_ONLY = (
    "get into the first",
    "with each micro-batch. It is planned",
    "DDP decides in forward",
)


@wrong("train_epochs", LEFT_OVER)
def train_epochs_as_given(model, epochs, every, schedule):
    step = 0
    for batches in epochs:
        for number, (inputs, targets) in enumerate(batches, 1):
            sends = number % every == 0
            loss = (model(inputs) - targets).pow(2).mean() / every
            with nullcontext() if sends else model.no_sync():
                loss.backward()
            if sends:
                learning_rate = schedule(step)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= learning_rate * parameter.grad
                        parameter.grad = None
            step += 1


@wrong_epochs(LEFT_OVER)
class EpochsThatLeak(epochs_with("rest")):
    pass


@wrong_epochs(TOO_FAST)
class EpochsThatCountMicroBatches(epochs_with("rate")):
    pass


@wrong_epochs(BACKWARD_ONLY)
class EpochsQuietInBackward(epochs_with("backward")):
    pass


@wrong_epochs(LEFT_OVER)
class EpochsWithTheRestAndTheRate(epochs_with("rest", "rate")):
    pass


@wrong_epochs(LEFT_OVER)
class EpochsWithTheRestAndBackward(epochs_with("rest", "backward")):
    pass


@wrong_epochs(TOO_FAST)
class EpochsWithTheRateAndBackward(epochs_with("rate", "backward")):
    pass


@right_epochs
class EpochsRepaired(Epochs):
    pass


@right_epochs
class EpochsQuietInForward(Epochs):
    """DDP decides there."""

    def micro_batch(self, inputs, targets):
        with nullcontext() if self.sends() else self.model.no_sync():
            loss = self.loss(inputs, targets)
        self.backward(loss)


@right("train_epochs")
def epochs_in_windows(model, epochs, every, schedule):
    """Each update is cut out of its epoch first, and has its rate from an iterator."""
    rates = map(schedule, itertools.count())
    for batches in epochs:
        for begin in range(0, len(batches), every):
            window = batches[begin : begin + every]
            for place, (inputs, targets) in enumerate(window):
                model.require_backward_grad_sync = place == len(window) - 1
                F.mse_loss(model(inputs), targets).div(len(window)).backward()
            rate = next(rates)
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-rate)
            model.zero_grad()


@right_epochs
class EpochsScaledAtTheEnd(Epochs):
    """The gradients are divided, not the losses; zeros in the place of None."""

    def begin_epoch(self):
        self.done = 0

    def backward(self, loss):
        loss.backward()
        self.done += 1

    @torch.no_grad()
    def step(self):
        for parameter in self.model.parameters():
            parameter.sub_(parameter.grad / self.done * self.schedule(self.update))
        self.model.zero_grad(set_to_none=False)
        self.done = 0
        self.count()


@wrong_epochs("no effect: make an update")
class EpochsThatLoseTheRest(epochs_with("rest")):
    def begin_epoch(self):
        self.model.zero_grad()


@wrong_epochs("divide by their number")
class EpochsThatDivideByEvery(Epochs):
    def size(self):
        return self.every


@wrong_epochs("has to be outside of no_sync")
class EpochsThatStepWithoutSending(Epochs):
    def sends(self):
        return self.number % self.every == 0


@wrong_epochs("has to be outside of no_sync|divide by their number")
class EpochsThatStepWithoutSendingAndDivide(Epochs):
    def sends(self):
        return self.number % self.every == 0

    def size(self):
        return self.every


@wrong_epochs("begins anew in each epoch")
class EpochsWithAnUpdateNumberPerEpoch(Epochs):
    def begin_epoch(self):
        self.update = 0


@wrong_epochs("one update ahead")
class EpochsOneUpdateAhead(Epochs):
    def step(self):
        self.count()
        self.update, number = self.update, self.update
        super().step()
        self.update = number


@wrong_epochs("never moves on")
class EpochsWithoutASchedule(Epochs):
    def count(self):
        pass


@wrong_epochs("is their mean")
class EpochsThatAddUpLosses(Epochs):
    def backward(self, loss):
        loss.backward()


@wrong_epochs("here it is done again")
class EpochsThatDivideByTheRanks(Epochs):
    def size(self):
        return super().size() * dist.get_world_size()


@wrong_epochs("have not been averaged over the ranks")
class EpochsThatNeverSend(Epochs):
    def sends(self):
        return False


@wrong_epochs("all but the last of each update belong inside")
class EpochsThatAlwaysSend(Epochs):
    def sends(self):
        return True


@wrong_epochs("not all of it was sent by DDP")
class EpochsThatAverageByHand(Epochs):
    def sends(self):
        return False

    def step(self):
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        super().step()


@wrong_epochs("which micro-batches have gone into each update")
class EpochsThatKeepGradients(Epochs):
    def step(self):
        kept = [parameter.grad for parameter in self.model.parameters()]
        super().step()
        for parameter, gradient in zip(self.model.parameters(), kept):
            parameter.grad = gradient


@wrong("train_epochs", "micro-batches were joined")
def epochs_joined(model, epochs, every, schedule):
    update = 0
    for batches in epochs:
        for begin in range(0, len(batches), every):
            inputs, targets = map(torch.cat, zip(*batches[begin : begin + every]))
            F.mse_loss(model(inputs), targets).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= schedule(update) * parameter.grad
                    parameter.grad = None
            update += 1


@wrong_epochs("later backward passes send nothing")
class EpochsThatLeaveDdpQuiet(Epochs):
    def __call__(self, *given):
        super().__call__(*given)
        given[0].require_backward_grad_sync = False


@wrong_epochs("is anything divided by 0")
class EpochsDividedByNothing(Epochs):
    """Where an epoch has no rest, its last update has the remainder of 0."""

    def size(self):
        whole = self.number < len(self.batches) // self.every * self.every
        return self.every if whole else len(self.batches) % self.every
