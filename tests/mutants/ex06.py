"""Exercise 06: gradient accumulation."""

import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
)
from torch.nn import functional as F

from mutants import right, wrong

# ---- window_step ----


def counted(labels):
    return (labels != -100).sum()


def summed(number, op=dist.ReduceOp.SUM):
    """A number, summed over the ranks."""
    total = torch.as_tensor(number).double()
    dist.all_reduce(total, op)
    return total.item()


def sum_of_losses(model, inputs, labels):
    return F.cross_entropy(model(inputs), labels, reduction="sum")


def mean_of_losses(model, inputs, labels):
    return F.cross_entropy(model(inputs), labels)


def all_items(window):
    return summed(sum(counted(labels) for _, labels in window))


def step(model, window, optimizer, factor, loss_of=sum_of_losses):
    """The parts of the answers below: each loss is multiplied by `factor`, and its
    gradient accumulated.
    """
    optimizer.zero_grad()
    for inputs, labels in window:
        (factor * loss_of(model, inputs, labels)).backward()
    optimizer.step()


@right("window_step")
def communicates_once(model, window, optimizer):
    factor = dist.get_world_size() / all_items(window)
    for place, (inputs, labels) in enumerate(window, 1):
        with nullcontext() if place == len(window) else model.no_sync():
            (factor * sum_of_losses(model, inputs, labels)).backward()
    optimizer.step()
    optimizer.zero_grad()


@right("window_step")
def scales_the_gradients_afterwards(model, window, optimizer):
    optimizer.zero_grad(set_to_none=False)
    items = 0
    for inputs, labels in window:
        print("a micro-batch with", counted(labels).item(), "items")
        sum_of_losses(model, inputs, labels).backward()
        items += counted(labels)
    factor = dist.get_world_size() / summed(items)
    for parameter in model.parameters():
        parameter.grad *= factor
    optimizer.step()


@right("window_step")
def without_ddp(model, window, optimizer):
    """The sums of the ranks' gradients, by hand; what has no items is left out, as
    nobody waits for it.
    """
    gradients = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for inputs, labels in window:
        if counted(labels):
            loss = sum_of_losses(model.module, inputs, labels)
            for gradient, more in zip(
                gradients, torch.autograd.grad(loss, list(model.parameters()))
            ):
                gradient += more
    items = all_items(window)
    for parameter, gradient in zip(model.parameters(), gradients):
        dist.all_reduce(gradient)
        parameter.grad = gradient / items
    optimizer.step()


@right("window_step")
def leaves_out_what_nobody_waits_for(model, window, optimizer):
    """Within no_sync, what has no items may be left out. The mean of items needs no
    world_size.
    """
    items = summed(sum(counted(labels) for _, labels in window), dist.ReduceOp.AVG)
    optimizer.zero_grad()
    *others, last = window
    with model.no_sync():
        for inputs, labels in others:
            if counted(labels):
                F.nll_loss(model(inputs).log_softmax(1), labels, reduction="sum").div(
                    items
                ).backward()
    (sum_of_losses(model, *last) / items).backward()
    optimizer.step()


@right("window_step")
def weighs_the_means(model, window, optimizer):
    """A mean times its own number of items is a sum again; the weights are numbers of
    32 bits.
    """
    items = all_items(window)
    optimizer.zero_grad()
    for inputs, labels in window:
        weight = counted(labels).float() * dist.get_world_size() / items
        loss_of = mean_of_losses if counted(labels) else sum_of_losses
        (weight * loss_of(model, inputs, labels)).backward()
    optimizer.step()


@wrong("window_step", "[23] times too small: DDP divides the sum")
def forgets_world_size(model, window, optimizer):
    step(model, window, optimizer, 1 / all_items(window))


@wrong("window_step", "(4|9) times too small: DDP divides by [23] anyway")
def divides_by_world_size(model, window, optimizer):
    step(model, window, optimizer, 1 / all_items(window) / dist.get_world_size())


@wrong(
    "window_step",
    "[23] times too large: divide by the number of items on all ranks, not by its mean",
)
def divides_by_the_mean_of_items(model, window, optimizer):
    step(model, window, optimizer, dist.get_world_size() ** 2 / all_items(window))


@wrong("window_step", "do not divide by the [56] micro-batches, too")
def divides_by_micro_batches_too(model, window, optimizer):
    step(
        model,
        window,
        optimizer,
        dist.get_world_size() / all_items(window) / len(window),
    )


@wrong("window_step", "labels of -100 were counted")
def counts_what_is_ignored(model, window, optimizer):
    items = summed(sum(labels.numel() for _, labels in window))
    step(model, window, optimizer, dist.get_world_size() / items)


@wrong("window_step", "it is a mean of the micro-batches' means")
def mean_of_means(model, window, optimizer):
    step(model, window, optimizer, 1 / len(window), mean_of_losses)


@wrong("window_step", "it is a mean of the micro-batches' means")
def sum_of_means(model, window, optimizer):
    step(model, window, optimizer, 1, mean_of_losses)


@wrong("window_step", "each rank divides by its own number of items")
def divides_by_own_items(model, window, optimizer):
    step(model, window, optimizer, 1 / sum(counted(labels) for _, labels in window))


@wrong("window_step", "each rank divides by its own number of items")
def divides_by_own_items_times_world_size(model, window, optimizer):
    step(
        model,
        window,
        optimizer,
        dist.get_world_size() / sum(counted(labels) for _, labels in window),
    )


def divided_by_items_of_all_ranks(model, inputs, labels):
    items = max(1, summed(counted(labels)))
    return sum_of_losses(model, inputs, labels) * dist.get_world_size() / items


@wrong("window_step", "each micro-batch is divided by its own number of items")
def counts_each_micro_batch(model, window, optimizer):
    step(model, window, optimizer, 1, divided_by_items_of_all_ranks)


@wrong("window_step", "each micro-batch is divided by its own number of items")
def counts_each_micro_batch_and_divides(model, window, optimizer):
    step(model, window, optimizer, 1 / len(window), divided_by_items_of_all_ranks)


@wrong("window_step", "0/0 is nan, and nan times 0 is nan")
def masked_mean_times_items(model, window, optimizer):
    def loss_of(model, inputs, labels):
        mask = labels != -100
        losses = (
            F.cross_entropy(model(inputs), labels.clamp(min=0), reduction="none") * mask
        )
        return losses.sum() / mask.sum() * mask.sum()

    step(model, window, optimizer, dist.get_world_size() / all_items(window), loss_of)


@wrong("window_step", "it still contains the gradients of earlier windows")
def forgets_zero_grad(model, window, optimizer):
    factor = dist.get_world_size() / all_items(window)
    for inputs, labels in window:
        (factor * sum_of_losses(model, inputs, labels)).backward()
    optimizer.step()


@wrong("window_step", "it contains only the last micro-batch")
def zero_grad_for_each(model, window, optimizer):
    factor = dist.get_world_size() / all_items(window)
    for inputs, labels in window:
        optimizer.zero_grad()
        (factor * sum_of_losses(model, inputs, labels)).backward()
    optimizer.step()


@wrong("window_step", "let the gradients add up, and step once")
def steps_for_each(model, window, optimizer):
    factor = dist.get_world_size() / all_items(window)
    for inputs, labels in window:
        optimizer.zero_grad()
        (factor * sum_of_losses(model, inputs, labels)).backward()
        optimizer.step()


@wrong("window_step", "the step is missing: every rank must call")
def takes_no_step(model, window, optimizer):
    for inputs, labels in window:
        (sum_of_losses(model, inputs, labels) / 10).backward()


@wrong("window_step", "the step is missing: every rank must call")
def steps_on_rank_zero(model, window, optimizer):
    factor = dist.get_world_size() / all_items(window)
    optimizer.zero_grad()
    for inputs, labels in window:
        (factor * sum_of_losses(model, inputs, labels)).backward()
    if dist.get_rank() == 0:
        optimizer.step()


@wrong("window_step", "each rank uses its own gradients")
def never_synchronizes(model, window, optimizer):
    factor = dist.get_world_size() / all_items(window)
    with model.no_sync():
        step(model, window, optimizer, factor)


@wrong("window_step", "each rank uses its own gradients")
def calls_the_inner_model(model, window, optimizer):
    step(model.module, window, optimizer, dist.get_world_size() / all_items(window))


@wrong("window_step", "does it contain the loss of each item once")
def counts_what_is_ignored_as_class_0(model, window, optimizer):
    clamped = [(inputs, labels.clamp(min=0)) for inputs, labels in window]
    step(model, clamped, optimizer, dist.get_world_size() / all_items(window))


@wrong("window_step", "the micro-batches, after window 1[^$]*belong to the caller")
def writes_into_the_labels(model, window, optimizer):
    items = all_items(window)
    optimizer.zero_grad()
    for inputs, labels in window:
        counts = labels != -100
        losses = F.cross_entropy(model(inputs), labels.clamp_(min=0), reduction="none")
        (losses[counts].sum() * dist.get_world_size() / items).backward()
    optimizer.step()


@wrong("window_step", "the mode of the model, after window 1")
def steps_in_eval_mode(model, window, optimizer):
    model.eval()
    step(model, window, optimizer, dist.get_world_size() / all_items(window))


@wrong("window_step", "whether gradients are recorded[^$]*whole program")
def leaves_gradients_off(model, window, optimizer):
    torch.set_grad_enabled(True)
    step(model, window, optimizer, dist.get_world_size() / all_items(window))
    torch.set_grad_enabled(False)


@wrong("window_step", "the other ranks wait in its backward")
def skips_what_has_no_items(model, window, optimizer):
    factor = dist.get_world_size() / all_items(window)
    step(model, [pair for pair in window if counted(pair[1])], optimizer, factor)


@wrong("window_step", "the other ranks wait in its backward")
def skips_the_last_without_items(model, window, optimizer):
    factor = dist.get_world_size() / all_items(window)
    optimizer.zero_grad()
    for place, (inputs, labels) in enumerate(window, 1):
        with nullcontext() if place == len(window) else model.no_sync():
            if counted(labels):
                (factor * sum_of_losses(model, inputs, labels)).backward()
    optimizer.step()


@wrong("window_step", "the other ranks wait in its backward")
def a_rank_without_items_has_nothing_to_do(model, window, optimizer):
    if sum(counted(labels) for _, labels in window):
        step(model, window, optimizer, dist.get_world_size() / all_items(window))


@wrong(
    "window_step",
    "two ranks brought tensors of different sizes",
    status="your code raised",
)
def counts_on_rank_zero(model, window, optimizer):
    items = sum(counted(labels) for _, labels in window)
    if dist.get_rank() == 0:
        items = summed(items)
    step(model, window, optimizer, dist.get_world_size() / items)


@wrong("window_step", "micro-batches were joined, which takes too much memory")
def joins_the_window(model, window, optimizer):
    inputs, labels = (torch.cat(parts) for parts in zip(*window))
    step(
        model,
        [(inputs, labels)],
        optimizer,
        dist.get_world_size() / summed(counted(labels)),
    )


@wrong("window_step", "of all micro-batches are in memory")
def one_backward_for_all(model, window, optimizer):
    factor = dist.get_world_size() / all_items(window)
    optimizer.zero_grad()
    (factor * sum(sum_of_losses(model, *pair) for pair in window)).backward()
    optimizer.step()


@wrong("window_step", "", status="not attempted")
def window_step_not_begun(model, window, optimizer):
    raise NotImplementedError


# ---- accumulate ----


def accumulate_with(model, window, loss_of, in_no_sync):
    """in_no_sync(place): whether the micro-batch at this place, 0 for the first, is not
    to be sent.
    """
    for place, (inputs, target) in enumerate(window):
        with model.no_sync() if in_no_sync(place) else nullcontext():
            loss_of(model(inputs), target).backward()


@right("accumulate")
def all_but_the_last(model, window, loss_of):
    print(len(window), "micro-batches")
    accumulate_with(model, window, loss_of, lambda place: place < len(window) - 1)


@right("accumulate")
def by_the_flag(model, window, loss_of):
    """What no_sync does: it lowers a flag of the model."""
    for place, (inputs, target) in enumerate(window, 1):
        model.require_backward_grad_sync = place == len(window)
        loss_of(model(inputs), target).backward()


@right("accumulate")
def forward_alone_within(model, window, loss_of):
    """It is in the forward that DDP decides: no_sync may end before backward."""
    for place, (inputs, target) in enumerate(window, 1):
        with nullcontext() if place == len(window) else model.no_sync():
            output = model(inputs)
        loss_of(output, target).backward()


@right("accumulate")
def past_ddp(model, window, loss_of):
    """Only the last micro-batch goes through DDP, which sends what has added up without
    it.
    """
    for inputs, target in window[:-1]:
        loss_of(model.module(inputs), target).backward()
    inputs, target = window[-1]
    loss_of(model(inputs), target).backward()


@wrong("accumulate", "[56] of [56] micro-batches were sent: all but the last")
def always_sends(model, window, loss_of):
    accumulate_with(model, window, loss_of, lambda place: False)


@wrong("accumulate", "each rank still has its own gradients")
def never_sends(model, window, loss_of):
    accumulate_with(model, window, loss_of, lambda place: True)


@wrong("accumulate", "around backward only, but the forward decides")
def backward_alone_within(model, window, loss_of):
    for place, (inputs, target) in enumerate(window, 1):
        loss = loss_of(model(inputs), target)
        with nullcontext() if place == len(window) else model.no_sync():
            loss.backward()


@wrong("accumulate", "sent with micro-batch 1 of [56]")
def sends_the_first(model, window, loss_of):
    accumulate_with(model, window, loss_of, lambda place: place > 0)


@wrong("accumulate", "sent with micro-batch [45] of [56]")
def sends_the_last_but_one(model, window, loss_of):
    accumulate_with(
        model, window, loss_of, lambda place: place != max(0, len(window) - 2)
    )


@wrong("accumulate", "2 of [56] micro-batches were sent")
def sends_the_last_two(model, window, loss_of):
    accumulate_with(model, window, loss_of, lambda place: place < len(window) - 2)


@wrong("accumulate", "[45] of [56] micro-batches were sent")
def only_the_first_within(model, window, loss_of):
    accumulate_with(model, window, loss_of, lambda place: place == 0)


@wrong("accumulate", r"a window of 1, \d[^$]*each rank still has its own gradients")
def sends_only_after_the_first(model, window, loss_of):
    accumulate_with(
        model, window, loss_of, lambda place: place == 0 or place < len(window) - 1
    )


@wrong("accumulate", r"ValueError[^$]*\(in a window of 1\)", status="your code raised")
def needs_two(model, window, loss_of):
    first, *middle, last = window
    with model.no_sync():
        for inputs, target in [first, *middle]:
            loss_of(model(inputs), target).backward()
    inputs, target = last
    loss_of(model(inputs), target).backward()


@wrong("accumulate", "no_sync has to end before the function returns")
def leaves_the_flag_down(model, window, loss_of):
    by_the_flag(model, window, loss_of)
    model.require_backward_grad_sync = False


@wrong("accumulate", "the last micro-batch is missing")
def forgets_the_last(model, window, loss_of):
    accumulate_with(model, window[:-1], loss_of, lambda place: True)


@wrong("accumulate", "the last micro-batch is missing")
def stops_one_early(model, window, loss_of):
    accumulate_with(model, window[:-1], loss_of, lambda place: place < len(window) - 2)


@wrong("accumulate", "exactly once")
def takes_the_last_twice(model, window, loss_of):
    never_sends(model, window, loss_of)
    inputs, target = window[-1]
    loss_of(model(inputs), target).backward()


@wrong("accumulate", "they contain only the last micro-batch")
def clears_in_between(model, window, loss_of):
    for place, (inputs, target) in enumerate(window, 1):
        model.zero_grad()
        with nullcontext() if place == len(window) else model.no_sync():
            loss_of(model(inputs), target).backward()


@wrong("accumulate", "[56] times too small: loss_of already scales the loss")
def scales_again(model, window, loss_of):
    all_but_the_last(
        model, window, lambda output, target: loss_of(output, target) / len(window)
    )


@wrong("accumulate", "[23] times too large: DDP already averages them")
def sums_once_more(model, window, loss_of):
    all_but_the_last(model, window, loss_of)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


@wrong("accumulate", "do not call collectives yourself")
def averages_once_more(model, window, loss_of):
    all_but_the_last(model, window, loss_of)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)


@wrong("accumulate", "do not call collectives yourself")
def averages_by_hand(model, window, loss_of):
    never_sends(model, window, loss_of)
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(flat, dist.ReduceOp.AVG)
    torch.nn.utils.vector_to_parameters(
        flat, [parameter.grad for parameter in model.parameters()]
    )


@wrong(
    "accumulate", "do all ranks call the same collectives", status="your code raised"
)
def rank_zero_keeps_quiet(model, window, loss_of):
    accumulate_with(model, window, loss_of, lambda place: dist.get_rank() == 0)


@wrong("accumulate", "micro-batches were joined, which takes too much memory")
def joins_all(model, window, loss_of):
    inputs, targets = (torch.cat(parts) for parts in zip(*window))
    loss_of(model(inputs), targets).backward()


@wrong("accumulate", "of all micro-batches are in memory")
def one_backward(model, window, loss_of):
    sum(loss_of(model(inputs), target) for inputs, target in window).backward()


@wrong("accumulate", "a loop does not end", status="timed out")
def never_ends(model, window, loss_of):
    while window:
        time.sleep(0.1)


# ---- counting_hook ----


def counting(state, bucket):
    state["calls"] += 1
    state["bytes"] += bucket.buffer().numel() * bucket.buffer().element_size()


@right("counting_hook")
def divides_at_the_end(state, bucket):
    counting(state, bucket)
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda future: future.wait()[0] / dist.get_world_size())


@right("counting_hook")
def with_torchs_hook(state, bucket):
    print("bucket", bucket.index())
    counting(state, bucket)
    return allreduce_hook(None, bucket)


@right("counting_hook")
def waits(state, bucket):
    counting(state, bucket)
    mean = bucket.buffer().clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    future = torch.futures.Future()
    future.set_result(mean)
    return future


@right("counting_hook")
def gradient_by_gradient(state, bucket):
    """Counts, in tensors, the gradients and not the buffer; sends one after the
    other.
    """
    gradients = bucket.gradients()
    state["calls"] = torch.as_tensor(state["calls"]) + 1
    state["bytes"] = sum(
        (gradient.nbytes for gradient in gradients), torch.as_tensor(state["bytes"])
    )
    works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
    all_of_them = torch.futures.collect_all([work.get_future() for work in works])
    return all_of_them.then(lambda futures: bucket.buffer() / dist.get_world_size())


@wrong("counting_hook", "sum over the ranks: with your own hook, DDP does not divide")
def forgets_to_divide(state, bucket):
    counting(state, bucket)
    return (
        dist.all_reduce(bucket.buffer(), async_op=True)
        .get_future()
        .then(lambda future: future.value()[0])
    )


@wrong("counting_hook", "sum over the ranks: with your own hook, DDP does not divide")
def divides_a_copy(state, bucket):
    counting(state, bucket)

    def divide(future):
        future.value()[0] / dist.get_world_size()
        return future.value()[0]

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(divide)


@wrong("counting_hook", "divided by the number of ranks twice")
def divides_twice(state, bucket):
    counting(state, bucket)
    future = dist.all_reduce(
        bucket.buffer(), dist.ReduceOp.AVG, async_op=True
    ).get_future()
    return future.then(lambda future: future.value()[0] / dist.get_world_size())


@wrong("counting_hook", "still this rank's own gradient")
def returns_what_it_was_given(state, bucket):
    counting(state, bucket)
    mean = bucket.buffer() / dist.get_world_size()
    future = dist.all_reduce(mean, async_op=True).get_future()
    return future.then(lambda future: bucket.buffer())


@wrong("counting_hook", "own gradient, divided, without the other ranks' gradients")
def does_not_wait(state, bucket):
    counting(state, bucket)
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@wrong("counting_hook", "neither the sum nor the mean of the ranks' gradients")
def compresses(state, bucket):
    counting(state, bucket)
    return bf16_compress_hook(None, bucket)


@wrong("counting_hook", "do you average each bucket")
def averages_the_last_bucket(state, bucket):
    counting(state, bucket)
    if bucket.is_last():
        return allreduce_hook(None, bucket)
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@wrong("counting_hook", r"a number of torch.float64 has 8 bytes")
def counts_numbers(state, bucket):
    state["calls"] += 1
    state["bytes"] += bucket.buffer().numel()
    return allreduce_hook(None, bucket)


@wrong("counting_hook", r"a number of torch.float64 has 8 bytes")
def counts_four_bytes(state, bucket):
    state["calls"] += 1
    state["bytes"] += 4 * bucket.buffer().numel()
    return allreduce_hook(None, bucket)


@wrong("counting_hook", r"a number of torch.float32 has 4 bytes")
def counts_eight_bytes(state, bucket):
    state["calls"] += 1
    state["bytes"] += 8 * bucket.buffer().numel()
    return allreduce_hook(None, bucket)


@wrong("counting_hook", "not those of all ranks: do not multiply by world_size")
def counts_for_all_ranks(state, bucket):
    state["calls"] += 1
    state["bytes"] += bucket.buffer().nbytes * dist.get_world_size()
    return allreduce_hook(None, bucket)


@wrong("counting_hook", "it must be the sum of the bytes of bucket.buffer")
def counts_what_a_ring_sends(state, bucket):
    n = dist.get_world_size()
    state["calls"] += 1
    state["bytes"] += 2 * (n - 1) * bucket.buffer().nbytes // n
    return allreduce_hook(None, bucket)


@wrong("counting_hook", "it must be the sum of the bytes of bucket.buffer")
def counts_no_bytes(state, bucket):
    state["calls"] += 1
    return allreduce_hook(None, bucket)


@wrong("counting_hook", "callbacks run in several threads at once")
def counts_in_a_callback(state, bucket):
    def finished(future):
        calls, counted = state["calls"], state["bytes"]
        time.sleep(
            0.1
        )  # as it may take, when threads want the interpreter at the same time
        state["calls"], state["bytes"] = calls + 1, counted + bucket.buffer().nbytes
        return future.value()

    return allreduce_hook(None, bucket).then(finished)


@wrong("counting_hook", "it contains only the last call")
def starts_again(state, bucket):
    state["calls"] = 1
    state["bytes"] = bucket.buffer().nbytes
    return allreduce_hook(None, bucket)


@wrong("counting_hook", "the number of times that DDP calls the hook, once per bucket")
def counts_gradients(state, bucket):
    state["calls"] += len(bucket.gradients())
    state["bytes"] += bucket.buffer().nbytes
    return allreduce_hook(None, bucket)


@wrong("counting_hook", "the number of times that DDP calls the hook, once per bucket")
def counts_backwards(state, bucket):
    state["calls"] += bucket.is_last()
    state["bytes"] += bucket.buffer().nbytes
    return allreduce_hook(None, bucket)


@wrong("counting_hook", "state has not changed")
def makes_another_dict(state, bucket):
    state = {
        "calls": state["calls"] + 1,
        "bytes": state["bytes"] + bucket.buffer().nbytes,
    }
    return allreduce_hook(None, bucket)


@wrong("counting_hook", "only rank 0 has counted")
def counts_on_rank_zero_only(state, bucket):
    if dist.get_rank() == 0:
        counting(state, bucket)
    return allreduce_hook(None, bucket)


@wrong("counting_hook", "needs the tensor later: return a future of it")
def returns_the_tensor(state, bucket):
    counting(state, bucket)
    return allreduce_hook(None, bucket).wait()


@wrong("counting_hook", "return a future of the averaged gradients")
def returns_nothing(state, bucket):
    counting(state, bucket)
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))


@wrong("counting_hook", "a work is not a future")
def returns_the_work(state, bucket):
    counting(state, bucket)
    return dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)


@wrong("counting_hook", "future is a list of one tensor")
def returns_the_future_of_the_work(state, bucket):
    counting(state, bucket)
    return dist.all_reduce(
        bucket.buffer().div_(dist.get_world_size()), async_op=True
    ).get_future()


@wrong("counting_hook", "future is a list of one tensor")
def divides_the_list(state, bucket):
    counting(state, bucket)
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda future: future.value() / dist.get_world_size())


@wrong("counting_hook", "nothing completes it")
def never_completes(state, bucket):
    counting(state, bucket)
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
    return torch.futures.Future()


@wrong("counting_hook", "some rank waits for another", status="timed out")
def rank_zero_averages(state, bucket):
    counting(state, bucket)
    if dist.get_rank() == 0:
        return allreduce_hook(None, bucket)
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@wrong("counting_hook", "", status="not attempted")
def counting_hook_not_begun(state, bucket):
    raise NotImplementedError
