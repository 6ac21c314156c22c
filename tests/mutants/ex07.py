"""Exercise 07: Accelerate."""

import copy
import os
from contextlib import nullcontext

import accelerate
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import gather_object
from ddp_course.judge.answer import Source
from ddp_course.lesson06 import grouped
from ddp_course.lesson07 import evaluate
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from mutants import right, wrong

# ---- plan ----


def up(number, divisor):
    return -(-number // divisor)


def our_plan(samples, batch_size, processes, accumulation, epochs, prepared):
    batches = up(up(samples, batch_size), processes)
    updates = epochs * up(batches, accumulation)
    repeated = batches * processes * batch_size - samples
    steps = updates * processes if prepared else epochs * batches
    return batches, repeated, updates, steps


@right("plan")
def from_joined_batches(samples, batch_size, processes, accumulation, epochs, prepared):
    """All processes together take a joined batch at a time; in floats and as a list."""
    print("planning ...")
    joined = batch_size * processes
    rounds = np.ceil(samples / joined)
    updates = np.ceil(rounds / accumulation) * epochs
    steps = updates * processes if prepared else rounds * epochs
    return [rounds, -samples % joined, updates, steps]


@right("plan")
def asks_accelerate(samples, batch_size, processes, accumulation, epochs, prepared):
    """Counts with Accelerate's own sampler."""
    loader = DataLoader(range(samples), batch_size).batch_sampler
    shards = [BatchSamplerShard(loader, processes, rank) for rank in range(processes)]
    batches = [list(shard) for shard in shards]
    windows = len(range(0, len(batches[0]), accumulation)) * epochs
    given = sum(len(batch) for of_rank in batches for batch in of_rank)
    steps = windows * processes if prepared else len(batches[0]) * epochs
    return len(batches[0]), given - samples, windows, steps


def wrong_plan(name, pattern, place, number):
    """Our plan with another number at this place, a function of the arguments."""

    def plan(*case):
        result = list(our_plan(*case))
        result[place] = number(*case)
        return tuple(result)

    plan.__name__ = name
    wrong("plan", pattern)(plan)


def in_batches(case):
    samples, batch_size, processes, *_ = case
    return up(samples, batch_size), up(up(samples, batch_size), processes)


for place, name, pattern, number in [
    (0, "all_batches_for_each", "divided among", lambda *c: in_batches(c)[0]),
    (0, "leaves_the_rest_out", "rounded up", lambda *c: c[0] // c[1] // c[2]),
    (1, "nothing_is_repeated", "prepare repeats some", lambda *c: 0),
    (1, "only_fills_the_last_batch", "whole batches, too", lambda *c: -c[0] % c[1]),
    (1, "fills_up_as_torch_does", "prepare repeats s", lambda *c: -c[0] % c[2]),
    (1, "counts_repeated_batches", "prepare repeats s", lambda *c: -in_batches(c)[0] % c[2]),
    (2, "one_epoch", "that is one epoch", lambda *c: our_plan(*c)[2] // c[4]),
    (2, "drops_the_short_window", "the short one makes an update", lambda *c: c[4] * (in_batches(c)[1] // c[3])),
    (2, "windows_across_epochs", "never goes on into the next", lambda *c: up(c[4] * in_batches(c)[1], c[3])),
    (2, "micro_batches", "several of them make an update", lambda *c: c[4] * in_batches(c)[1]),
    (3, "one_step_per_update", "one step for each process|is not prepared", lambda *c: our_plan(*c)[2]),
    (3, "as_if_always_prepared", "is not prepared", lambda *c: our_plan(*c)[2] * c[2]),
    (0, "always_one_batch_more", "whole batches, the same number", lambda *c: in_batches(c)[0] // c[2] + 1),
    (1, "always_fills_up", "all of them full", lambda *c: c[1] * c[2] - c[0] % (c[1] * c[2])),
    (1, "counts_all_that_are_given", "how many of them are repeated", lambda *c: c[0] + our_plan(*c)[1]),
    (2, "always_one_update_more", "every epoch ends with an update", lambda *c: c[4] * (in_batches(c)[1] // c[3] + 1)),
    (2, "at_least_one_update", "the short one makes an update", lambda *c: c[4] * max(1, in_batches(c)[1] // c[3])),
    (2, "updates_of_one_process", "divided among the processes first", lambda *c: c[4] * up(in_batches(c)[0], c[3])),
    (3, "for_each_process_and_batch", "waits for the last|steps whenever", lambda *c: c[4] * in_batches(c)[1] * c[2]),
    (3, "steps_of_one_epoch", "that is one epoch", lambda *c: our_plan(*c)[3] // c[4]),
    (3, "as_if_never_prepared", "waits for the last micro-batch", lambda *c: our_plan(*c[:5], False)[3]),
]:  # fmt: skip
    wrong_plan(name, pattern, place, number)


@right("plan")
def deals_out_and_counts(samples, batch_size, processes, accumulation, epochs, prepared):
    batches = [range(begin, begin + batch_size) for begin in range(0, samples, batch_size)]
    mine = batches[::processes]
    windows = [mine[begin : begin + accumulation] for begin in range(0, len(mine), accumulation)] * epochs
    steps = len(windows) * processes if prepared else sum(map(len, windows))
    return len(mine), len(mine) * processes * batch_size - samples, len(windows), steps


@right("plan")
def as_an_array(*case):
    return np.array(our_plan(*case))


@wrong("plan", "not in this order")
def backwards(*case):
    return our_plan(*case)[::-1]


@wrong("plan", "return four numbers")
def only_the_batches(*case):
    return our_plan(*case)[0]


@wrong("plan", "", status="not attempted")
def no_plan(*case):
    raise NotImplementedError


# ---- train ----


def prepared(accelerator, network, samples, labels, batch_size, learning_rate):
    places = torch.arange(len(samples))
    loader = DataLoader(TensorDataset(samples, labels, places), batch_size)
    optimizer = torch.optim.SGD(network.parameters(), learning_rate)
    return accelerator.prepare(network, optimizer, loader)


def marked(accelerator, loader, batch_size):
    """Batches in which the targets of repeated samples are -100."""
    n, rank = accelerator.num_processes, accelerator.process_index
    for number, (inputs, targets, places) in enumerate(loader):
        first = (number * n + rank) * batch_size
        own = places == first + torch.arange(len(places))
        yield inputs, targets.where(own, -100)


def unmarked(accelerator, loader, batch_size):
    for inputs, targets, _ in loader:
        yield inputs, targets


def in_windows(batches, every):
    batches = list(batches)
    for first in range(0, len(batches), every):
        yield batches[first : first + every]


def number_of_items(accelerator, window):
    own = sum((targets != -100).sum() for _, targets in window)
    return accelerator.reduce(torch.as_tensor(own), "sum")


def summed(model, inputs, targets):
    return F.cross_entropy(model(inputs), targets, reduction="sum")


def window_by_window(
    accelerator,
    network,
    samples,
    labels,
    batch_size,
    every,
    epochs,
    learning_rate,
    batches=marked,
    items=number_of_items,
    loss_of=summed,
    factor=None,
):
    """The solution, with places for mistakes."""
    model, optimizer, loader = prepared(accelerator, network, samples, labels, batch_size, learning_rate)
    factor = accelerator.num_processes if factor is None else factor
    for _ in range(epochs):
        for window in in_windows(batches(accelerator, loader, batch_size), every):
            total = items(accelerator, window)
            for number, (inputs, targets) in enumerate(window, 1):
                last = number == len(window)
                with nullcontext() if last else accelerator.no_sync(model):
                    loss = loss_of(model, inputs, targets) / total
                    accelerator.backward(loss * factor)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model)


@right("train")
def without_no_sync_and_with_loss_backward(
    accelerator, network, samples, labels, batch_size, every, epochs, learning_rate
):
    """Counts what prepare repeats from the number of samples, and sends every time."""
    print("training ...")
    model, optimizer, loader = prepared(accelerator, network, samples, labels, batch_size, learning_rate)
    n, rank = accelerator.num_processes, accelerator.process_index
    joined = n * batch_size * every
    for _ in range(epochs):
        for number, (inputs, targets, _) in enumerate(loader):
            begin = (number * n + rank) * batch_size
            mine = min(max(len(samples) - begin, 0), batch_size)
            update = number // every * joined
            items = min(joined, len(samples) - update)
            losses = F.cross_entropy(model(inputs), targets, reduction="none")
            (losses[:mine].sum() * n / items).backward()
            if (number + 1) % every == 0 or number + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    return model.module


@right("train")
def slices_by_hand(accelerator, network, samples, labels, batch_size, every, epochs, learning_rate):
    """No loader at all: slices, some of them empty, and gradients summed by hand."""
    parameters = list(network.parameters())
    n, rank = accelerator.num_processes, accelerator.process_index
    joined = n * batch_size * every
    for _ in range(epochs):
        for begin in range(0, len(samples), joined):
            end = min(begin + joined, len(samples))
            total = [torch.zeros_like(parameter) for parameter in parameters]
            for first in range(begin + rank * batch_size, end, n * batch_size):
                mine = slice(first, min(first + batch_size, end))
                loss = F.cross_entropy(network(samples[mine]), labels[mine], reduction="sum")
                gradients = torch.autograd.grad(loss / (end - begin), parameters)
                total = [sum(pair) for pair in zip(total, gradients)]
            total = accelerator.reduce(total, "sum")
            with torch.no_grad():
                for parameter, gradient in zip(parameters, total):
                    parameter -= learning_rate * gradient
    return network


@right("train")
def under_join(accelerator, network, samples, labels, batch_size, every, epochs, learning_rate):
    """torch's wrapper, a sampler of blocks, and a weight of 0 in a dummy batch."""
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), learning_rate)
    n, rank = accelerator.num_processes, accelerator.process_index
    joined = n * batch_size * every
    for _ in range(epochs):
        for update in torch.arange(len(samples)).split(joined):
            mine = update.tensor_split(n)[rank]
            parts = mine.split(batch_size) if len(mine) else [update[:1]]
            with model.no_sync():
                for part in parts[:-1]:
                    summed(model, samples[part], labels[part]).mul(n / len(update)).backward()
            part = parts[-1]
            weight = n / len(update) if len(mine) else 0.0
            (summed(model, samples[part], labels[part]) * weight).backward()
            optimizer.step()
            optimizer.zero_grad()
    return network


@wrong("train", "repeats at the end of an epoch are counted")
def as_in_the_lesson(accelerator, network, samples, labels, batch_size, every, epochs, learning_rate):
    """Lesson 7's count_items, which counts repeated samples."""
    model, optimizer, loader = prepared(accelerator, network, samples, labels, batch_size, learning_rate)
    for _ in range(epochs):
        for window in grouped(loader, every):
            items = accelerator.reduce(torch.tensor(sum(len(b[0]) for b in window)))
            for number, (inputs, targets, _) in enumerate(window, 1):
                last = number == len(window)
                with nullcontext() if last else accelerator.no_sync(model):
                    loss = summed(model, inputs, targets) / items
                    accelerator.backward(loss * accelerator.num_processes)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model)


@wrong("train", "keep float64")
def in_32_bits(accelerator, network, samples, *rest):
    return window_by_window(accelerator, network.float(), samples.float(), *rest).double()


@wrong("train", "samples")
def with_other_samples(accelerator, network, samples, *rest):
    return window_by_window(accelerator, network, samples * 5, *rest)


@wrong("train", "as if it were a whole one: accelerator.backward divides")
def lesson_7s_own_loop(accelerator, network, samples, labels, batch_size, every, epochs, learning_rate):
    accelerator.gradient_accumulation_steps = every
    model, optimizer, loader = prepared(accelerator, network, samples, labels, batch_size, learning_rate)
    for _ in range(epochs):
        for inputs, targets, _ in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
    return accelerator.unwrap_model(model)


@wrong("train", "samples that prepare repeats")
def means_of_batches(*given):
    return window_by_window(
        *given,
        batches=unmarked,
        items=lambda accelerator, window: len(window),
        loss_of=lambda model, inputs, targets: F.cross_entropy(model(inputs), targets),
        factor=1,
    )


@wrong("train", "samples that prepare repeats")
def own_items(*given):
    return window_by_window(
        *given, batches=unmarked, items=lambda accelerator, window: sum(len(t) for _, t in window), factor=1
    )


@wrong("train", "add up the numbers of all processes")
def own_items_that_count(*given):
    return window_by_window(
        *given, items=lambda accelerator, window: sum((t != -100).sum() for _, t in window), factor=1
    )


@wrong("train", "too short by the number of processes")
def forgets_the_processes(*given):
    return window_by_window(*given, factor=1)


@wrong("train", "too long by the number of processes")
def multiplies_twice(accelerator, *given):
    factor = accelerator.num_processes**2
    return window_by_window(accelerator, *given, factor=factor)


@wrong("train", "not divided by the number of samples")
def divides_by_nothing(*given):
    return window_by_window(*given, items=lambda accelerator, window: 1)


@wrong("train", "each batch makes its own update")
def updates_at_each_batch(accelerator, network, samples, labels, batch_size, every, *others):
    return window_by_window(accelerator, network, samples, labels, batch_size, 1, *others)


@wrong("train", "the short last update of an epoch is missing")
def drops_the_short_update(accelerator, network, samples, labels, *sizes):
    joined = accelerator.num_processes * sizes[0] * sizes[1]
    whole = len(samples) // joined * joined
    return window_by_window(accelerator, network, samples[:whole], labels[:whole], *sizes)


@wrong("train", "prepare the loader, too")
def everybody_takes_everything(accelerator, network, samples, labels, batch_size, every, epochs, rate):  # fmt: skip
    joined = accelerator.num_processes * batch_size * every
    optimizer = torch.optim.SGD(network.parameters(), rate)
    for _ in range(epochs):
        for update in torch.arange(len(samples)).split(joined):
            optimizer.zero_grad()
            for part in update.split(batch_size):
                loss = summed(network, samples[part], labels[part]) / len(update)
                loss.backward()
            optimizer.step()
    return network


@wrong("train", "does each of them call the model that prepare returns")
def calls_the_network_within(*given):
    network = given[1]
    return window_by_window(*given, loss_of=lambda model, inputs, targets: summed(network, inputs, targets))


@wrong("train", "it is still wrapped by prepare")
def returns_the_wrapper(accelerator, *given):
    return accelerator.prepare(window_by_window(accelerator, *given))


@wrong("train", "return the trained network, on every process")
def returns_nothing(*given):
    window_by_window(*given)


@wrong("train", "another network was trained, such as a copy")
def trains_a_copy_and_returns_the_first(accelerator, network, *others):
    window_by_window(accelerator, copy.deepcopy(network), *others)
    return network


@wrong("train", "no samples went through")
def trains_nothing(accelerator, network, *others):
    return network


@wrong("train", "labels belongs to the caller")
def marks_in_the_callers_labels(accelerator, network, samples, labels, *others):
    result = window_by_window(accelerator, network, samples, labels, *others)
    labels[-1] = -100
    return result


@wrong("train", "one step of plain SGD")
def with_momentum(accelerator, network, samples, labels, batch_size, every, epochs, rate):  # fmt: skip
    sgd = torch.optim.SGD

    def heavy(parameters, learning_rate):
        return sgd(parameters, learning_rate, momentum=0.9)

    torch.optim.SGD = heavy
    try:
        return window_by_window(accelerator, network, samples, labels, batch_size, every, epochs, rate)
    finally:
        torch.optim.SGD = sgd


@wrong("train", "", status="not attempted")
def no_training(*given):
    raise NotImplementedError


# ---- accuracy ----


def shared(accelerator, samples, labels, batch_size, **options):
    return accelerator.prepare(DataLoader(TensorDataset(samples, labels), batch_size, **options))


def count(network, loader, gather=lambda pair: pair):
    """(right, counted) of what this process gets from the loader and, where there is a
    gather, of all.
    """
    mode, right, counted = network.training, 0, 0
    network.eval()
    with torch.no_grad():
        for inputs, targets in loader:
            guesses, targets = gather((network(inputs).argmax(dim=1), targets))
            right += (guesses == targets).sum().item()
            counted += len(targets)
    network.train(mode)
    return right, counted


def gathers_for_metrics(accelerator, network, samples, labels, batch_size):
    """Exact, with a message for each batch."""
    loader = shared(accelerator, samples, labels, batch_size)
    return count(network, loader, accelerator.gather_for_metrics)


@right("accuracy")
def shares_without_padding(accelerator, network, samples, labels, batch_size):
    """Blocks of samples, which need not be equally many, since only counts are sent."""
    with accelerator.split_between_processes({"samples": samples, "labels": labels}) as mine:
        counts = count(network, DataLoader(TensorDataset(*mine.values()), batch_size))
    return accelerator.reduce(torch.tensor(counts), "sum").tolist()


@right("accuracy")
def every_other_sample_and_two_sums(accelerator, network, samples, labels, batch_size):
    """No loader, an empty share where there are too few, and float counts."""
    print("counting ...")
    own = slice(accelerator.process_index, None, accelerator.num_processes)
    mode = network.training
    with torch.inference_mode():
        network.eval()
        right, counted = torch.tensor(0.0), torch.tensor(0.0)
        for inputs, targets in zip(samples[own].split(batch_size), labels[own].split(batch_size)):
            if len(inputs):
                right += network(inputs).max(1).indices.eq(targets).sum()
                counted += len(targets)
    network.train(mode)
    return accelerator.reduce(right), accelerator.reduce(counted)


@right("accuracy")
def knows_what_prepare_repeats(accelerator, network, samples, labels, batch_size):
    """A prepared loader; samples that it repeats are recognized by their places."""
    places = torch.arange(len(samples))
    data = TensorDataset(samples, labels, places)
    loader = accelerator.prepare(DataLoader(data, batch_size))
    n, rank, mode = (accelerator.num_processes, accelerator.process_index, network.training)
    counts = np.zeros(2, dtype=np.int64)
    network.eval()
    with torch.no_grad():
        for number, (inputs, targets, places) in enumerate(loader):
            first = (number * n + rank) * batch_size
            own = places == first + torch.arange(len(places))
            right = network(inputs).argmax(dim=1) == targets
            counts += (right & own).sum().item(), own.sum().item()
    network.train(mode)
    return tuple(accelerator.gather(torch.tensor(counts)[None]).sum(dim=0).numpy())


@wrong("accuracy", "restore the mode of the network")
def lesson_7s_own(accelerator, network, samples, labels, batch_size):
    loader = shared(accelerator, samples, labels, batch_size)
    return evaluate(network, loader, accelerator)


@wrong("accuracy", "collectives[^$]*communicate for every batch, as gather_for_metrics does")
def lesson_7s_own_with_the_mode_restored(accelerator, network, *others):
    mode = network.training
    counts = lesson_7s_own(accelerator, network, *others)
    network.train(mode)
    return counts


@wrong("accuracy", "collectives[^$]*communicate for every batch")
def reduces_after_each_batch(accelerator, network, samples, labels, batch_size):
    """All take equally many rounds, some of them without samples."""
    joined, counts = batch_size * accelerator.num_processes, torch.zeros(2)
    for first in range(0, len(samples), joined):
        begin = first + batch_size * accelerator.process_index
        mine = slice(begin, begin + batch_size)
        pair = [(samples[mine], labels[mine])] if begin < len(samples) else []
        counts += accelerator.reduce(torch.tensor(count(network, pair)))
    return counts


@wrong("accuracy", "grows with the number of samples: send counts")
def one_gather_at_the_end(accelerator, network, samples, labels, batch_size):
    """All guesses, and the number of samples cuts off what is repeated."""
    loader, mode = shared(accelerator, samples, labels, batch_size), network.training
    with torch.inference_mode():
        network.eval()
        guesses = [network(inputs).argmax(dim=1) for inputs, _ in loader]
    network.train(mode)
    guesses = accelerator.gather(torch.stack(guesses)[None]).transpose(0, 1)
    return (guesses.flatten()[: len(labels)] == labels).sum(), len(labels)


@wrong("accuracy", "it takes its share in batches of batch_size")
def takes_its_share_at_once(accelerator, network, samples, labels, batch_size):
    own = slice(accelerator.process_index, None, accelerator.num_processes)
    pairs = [(samples[own], labels[own])] if len(samples[own]) else []
    return accelerator.reduce(torch.tensor(count(network, pairs))).tolist()


@wrong("accuracy", "with even_batches off")
def switches_even_batches_off(accelerator, network, samples, labels, batch_size):
    accelerator.even_batches = False
    loader = shared(accelerator, samples, labels, batch_size)
    return accelerator.reduce(torch.tensor(count(network, loader))).tolist()


@wrong("accuracy", ".")
def of_other_samples(accelerator, network, samples, labels, batch_size):
    return shares_without_padding(accelerator, network, samples * 5, labels, batch_size)


@wrong("accuracy", "gradient_accumulation_steps[^$]*continues with its settings")
def accumulates_in_the_callers_accelerator(accelerator, *others):
    accelerator.gradient_accumulation_steps = 4
    return shares_without_padding(accelerator, *others)


@wrong("accuracy", "split_batches[^$]*continues with its settings")
def splits_the_callers_batches(accelerator, *others):
    accelerator.dataloader_config.split_batches = True
    return shares_without_padding(accelerator, *others)


@right("accuracy")
def switches_even_batches_off_and_on_again(accelerator, network, *others):
    accelerator.even_batches = False
    loader = shared(accelerator, *others)
    accelerator.even_batches = True
    return accelerator.reduce(torch.tensor(count(network, loader))).tolist()


@wrong("accuracy", "without prepare")
def prepares_the_network(accelerator, network, *others):
    model = accelerator.prepare(network)
    return shares_without_padding(accelerator, model, *others)


@wrong("accuracy", "without prepare")
def prepares_the_network_and_calls_the_one_within(accelerator, network, *others):
    accelerator.prepare(network)
    return shares_without_padding(accelerator, network, *others)


@wrong("accuracy", "without prepare")
def wraps_the_network_in_ddp(accelerator, network, *others):
    model = DistributedDataParallel(network)
    return shares_without_padding(accelerator, model, *others)


@wrong("accuracy", "samples are left out")
def shares_that_are_equally_large(accelerator, network, samples, labels, batch_size):
    each = len(samples) // accelerator.num_processes
    own = slice(accelerator.process_index * each, (accelerator.process_index + 1) * each)
    loader = DataLoader(TensorDataset(samples[own], labels[own]), batch_size)
    return accelerator.reduce(torch.tensor(count(network, loader))).tolist()


@wrong("accuracy", "more samples are counted than there are")
def splits_with_padding(accelerator, network, samples, labels, batch_size):
    places = list(range(len(samples)))
    with accelerator.split_between_processes(places, apply_padding=True) as mine:
        loader = DataLoader(Subset(TensorDataset(samples, labels), mine), batch_size)
        counts = count(network, loader)
    return accelerator.reduce(torch.tensor(counts), "sum").tolist()


@right("accuracy")
def gathers_objects(accelerator, network, samples, labels, batch_size):
    rank, n = accelerator.process_index, accelerator.num_processes
    mine = Subset(TensorDataset(samples, labels), range(len(samples))[rank::n])
    results = gather_object([{"right": count(network, DataLoader(mine, batch_size))}])
    return tuple(map(sum, zip(*(result["right"] for result in results))))


@wrong("accuracy", "only process 0 has")
def reduces_to_process_0(accelerator, network, samples, labels, batch_size):
    rank, n = accelerator.process_index, accelerator.num_processes
    mine = Subset(TensorDataset(samples, labels), range(len(samples))[rank::n])
    counts = torch.tensor(count(network, DataLoader(mine, batch_size)))
    torch.distributed.reduce(counts, 0)
    return counts.tolist()


@wrong("accuracy", "more samples are counted than there are")
def with_torchs_sampler(accelerator, network, samples, labels, batch_size):
    data = TensorDataset(samples, labels)
    loader = DataLoader(data, batch_size, sampler=DistributedSampler(data, shuffle=False))
    return accelerator.reduce(torch.tensor(count(network, loader))).tolist()


@wrong("accuracy", "samples that prepare repeats")
def gathers(accelerator, network, samples, labels, batch_size):
    return count(network, shared(accelerator, samples, labels, batch_size), accelerator.gather)


@wrong("accuracy", "samples that prepare repeats")
def gathers_but_knows_how_many(accelerator, network, samples, labels, batch_size):
    right, _ = count(network, shared(accelerator, samples, labels, batch_size), accelerator.gather)
    return right, len(samples)


@wrong("accuracy", "samples that prepare repeats")
def gathers_counts(accelerator, network, samples, labels, batch_size):
    mode, right, counted = network.training, 0, 0
    network.eval()
    with torch.no_grad():
        for inputs, targets in shared(accelerator, samples, labels, batch_size):
            counts = torch.tensor([[(network(inputs).argmax(dim=1) == targets).sum(), len(targets)]])
            counts = accelerator.gather_for_metrics(counts).sum(dim=0)
            right, counted = right + counts[0].item(), counted + counts[1].item()
    network.train(mode)
    return right, counted


@wrong("accuracy", "samples that prepare repeats")
def sums_at_the_end(accelerator, network, samples, labels, batch_size):
    counts = torch.tensor(count(network, shared(accelerator, samples, labels, batch_size)))
    return accelerator.reduce(counts, "sum").tolist()


@wrong("accuracy", "averaged over the processes")
def means_at_the_end(accelerator, network, samples, labels, batch_size):
    counts = torch.tensor(count(network, shared(accelerator, samples, labels, batch_size))).double()
    return accelerator.reduce(counts, "mean").tolist()


@wrong("accuracy", "counts only its own samples: add up the counts of all")
def own_part(accelerator, network, samples, labels, batch_size):
    return count(network, shared(accelerator, samples, labels, batch_size))


@wrong("accuracy", "they were added up: give each process its own share")
def loader_of_all(accelerator, network, samples, labels, batch_size):
    loader = DataLoader(TensorDataset(samples, labels), batch_size)
    return count(network, loader, accelerator.gather_for_metrics)


@wrong("accuracy", "one process does all the work")
def everyone_counts_everything(accelerator, network, samples, labels, batch_size):
    return count(network, DataLoader(TensorDataset(samples, labels), batch_size))


@wrong("accuracy", "one process does all the work")
def the_main_process_tells(accelerator, network, samples, labels, batch_size):
    counts = torch.zeros(2, dtype=torch.long)
    if accelerator.is_main_process:
        counts += torch.tensor(count(network, DataLoader(TensorDataset(samples, labels), batch_size)))
    return accelerator.reduce(counts, "sum").tolist()


@wrong("accuracy", "summed twice")
def gathers_and_sums(accelerator, *others):
    return accelerator.reduce(torch.tensor(gathers_for_metrics(accelerator, *others)), "sum").tolist()


@wrong("accuracy", "with (20|24|28|30|36|42) samples[^$]*samples are left out")
def cuts_off_all_where_nothing_is_repeated(accelerator, network, samples, labels, batch_size):
    joined = batch_size * accelerator.num_processes

    def gather(pair):
        done.append(joined)
        last = sum(done) >= len(samples)
        return [accelerator.gather(part)[: len(samples) % joined if last else joined] for part in pair]

    done = []
    return count(network, shared(accelerator, samples, labels, batch_size), gather)


@wrong("accuracy", "tensors of different sizes", status="your code raised")
def gathers_parts_of_different_size(accelerator, network, samples, labels, batch_size):
    mine = range(accelerator.process_index, len(samples), accelerator.num_processes)
    loader = DataLoader(Subset(TensorDataset(samples, labels), mine), len(samples))
    return count(network, loader, accelerator.gather)


@wrong("accuracy", "samples are left out")
def drops_the_last(accelerator, network, samples, labels, batch_size):
    loader = shared(accelerator, samples, labels, batch_size, drop_last=True)
    return count(network, loader, accelerator.gather_for_metrics)


@wrong("accuracy", "swapped")
def counted_first(*arguments):
    right, counted = gathers_for_metrics(*arguments)
    return counted, right


@wrong("accuracy", "this is an accuracy")
def share_and_count(*arguments):
    right, counted = gathers_for_metrics(*arguments)
    return right / counted, counted


@wrong("accuracy", "return two numbers")
def only_the_share(*arguments):
    right, counted = gathers_for_metrics(*arguments)
    return right / counted


@wrong("accuracy", "only process 0 has")
def tells_the_main_process(accelerator, *others):
    counts = gathers_for_metrics(accelerator, *others)
    if accelerator.is_main_process:
        return counts


def mean_of_batches(accelerator, network, samples, labels, batch_size, gather):
    mode, accuracies = network.training, []
    network.eval()
    with torch.no_grad():
        for inputs, targets in shared(accelerator, samples, labels, batch_size):
            guesses, targets = gather((network(inputs).argmax(dim=1), targets))
            accuracies.append((guesses == targets).double().mean().item())
    network.train(mode)
    return sum(accuracies) / len(accuracies) * len(samples)


@wrong("accuracy", "comes from a mean of accuracies")
def mean_of_means(accelerator, *others):
    return mean_of_batches(accelerator, *others, accelerator.gather_for_metrics), len(others[1])


@wrong("accuracy", "comes from a mean of accuracies")
def mean_of_means_rounded(accelerator, *others):
    return round(mean_of_batches(accelerator, *others, accelerator.gather_for_metrics)), len(others[1])


@wrong("accuracy", "comes from a mean of accuracies")
def mean_of_the_processes(accelerator, *others):
    own = torch.tensor(mean_of_batches(accelerator, *others, lambda pair: pair))
    return accelerator.gather(own).mean().item(), len(others[1])


@wrong("accuracy", "with its own label")
def takes_the_largest_for_its_place(accelerator, network, samples, labels, batch_size):
    mode, right, counted = network.training, 0, 0
    network.eval()
    with torch.no_grad():
        for inputs, targets in shared(accelerator, samples, labels, batch_size):
            guesses, _ = network(inputs).max(dim=1)
            guesses, targets = accelerator.gather_for_metrics((guesses, targets))
            right += (guesses == targets).sum().item()
            counted += len(targets)
    network.train(mode)
    return right, counted


@wrong("accuracy", "network.eval.. first")
def never_in_evaluation(accelerator, network, samples, labels, batch_size):
    right = counted = 0
    with torch.no_grad():
        for inputs, targets in shared(accelerator, samples, labels, batch_size):
            guesses, targets = accelerator.gather_for_metrics((network(inputs).argmax(dim=1), targets))
            right += (guesses == targets).sum().item()
            counted += len(targets)
    return right, counted


@wrong("accuracy", "restore the mode of the network")
def stays_in_evaluation(accelerator, network, *others):
    network.eval()
    return gathers_for_metrics(accelerator, network, *others)


@wrong("accuracy", "store network.training first")
def always_trains_on(accelerator, network, *others):
    counts = gathers_for_metrics(accelerator, network, *others)
    network.train()
    return counts


@wrong("accuracy", "with torch.no_grad")
def with_gradients(accelerator, network, samples, labels, batch_size):
    mode, right, counted = network.training, 0, 0
    network.eval()
    for inputs, targets in shared(accelerator, samples, labels, batch_size):
        guesses, targets = accelerator.gather_for_metrics((network(inputs).argmax(dim=1), targets))
        right += (guesses == targets).sum().item()
        counted += len(targets)
    network.train(mode)
    return right, counted


@wrong("accuracy", "gradients are off for the rest of the program")
def switches_gradients_off(accelerator, network, *others):
    torch.set_grad_enabled(False)
    return gathers_for_metrics(accelerator, network, *others)


@wrong("accuracy", "can no longer be trained")
def freezes_the_network(accelerator, network, *others):
    network.requires_grad_(False)
    return gathers_for_metrics(accelerator, network, *others)


@wrong("accuracy", "one parameter was frozen before")
def freezes_the_network_and_makes_it_all_trainable(accelerator, network, *others):
    network.requires_grad_(False)
    counts = shares_without_padding(accelerator, network, *others)
    network.requires_grad_(True)
    return counts


@wrong("accuracy", "needs the gradients of the first")
def clears_the_gradients(accelerator, network, *others):
    network.zero_grad()
    return shares_without_padding(accelerator, network, *others)


@right("accuracy")
def counts_with_a_copy(accelerator, network, *others):
    model = copy.deepcopy(network).requires_grad_(False)
    return shares_without_padding(accelerator, model, *others)


@wrong("accuracy", "labels belongs to the caller")
def writes_into_the_labels(accelerator, network, samples, labels, batch_size):
    counts = gathers_for_metrics(accelerator, network, samples, labels, batch_size)
    labels.fill_(-100)
    return counts


@wrong("accuracy", "must not change its parameters or the statistics")
def resets_the_statistics(accelerator, network, *others):
    counts = gathers_for_metrics(accelerator, network, *others)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            module.reset_running_stats()
    return counts


# ---- together ----


def trained(accelerator, network, model, optimizer, loader):
    for inputs, targets in loader:
        accelerator.backward(F.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    return network, accelerator.num_processes


def parts(network, samples, labels, batch_size):
    loader = DataLoader(TensorDataset(samples, labels), batch_size)
    return network, torch.optim.SGD(network.parameters(), lr=0.1), loader


@right("together")
def told_to_use_the_cpu(network, *others):
    accelerator = Accelerator(cpu=True)
    return trained(accelerator, network, *accelerator.prepare(*parts(network, *others)))


@right("together")
def told_by_the_environment(network, *others):
    os.environ["ACCELERATE_USE_CPU"] = "1"
    accelerator = Accelerator()
    print(accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(*parts(network, *others))
    trained(accelerator, network, model, optimizer, loader)
    accelerator.end_training()
    return accelerator.unwrap_model(model), accelerator.num_processes


@right("together")
def shared_by_torch(network, samples, labels, batch_size):
    """A loader that is not prepared, but has torch's sampler; an optimizer that is not
    prepared either.
    """
    accelerator = Accelerator(cpu=True)
    train_set = TensorDataset(samples, labels)
    loader = DataLoader(train_set, batch_size, sampler=DistributedSampler(train_set, shuffle=False))
    model = accelerator.prepare(network)
    return trained(accelerator, network, model, torch.optim.SGD(model.parameters(), lr=0.1), loader)


@wrong("together", "num_processes[^$]*unless you pass cpu=True")
def as_given(network, samples, labels, batch_size):
    accelerator = Accelerator()
    network, optimizer, loader = parts(network, samples, labels, batch_size)
    _, optimizer = accelerator.prepare(network, optimizer)
    return trained(accelerator, network, network, optimizer, loader)


@wrong("together", "unless you pass cpu=True")
def all_but_the_main_fault(network, *others):
    accelerator = Accelerator()
    return trained(accelerator, network, *accelerator.prepare(*parts(network, *others)))


@wrong("together", "unless you pass cpu=True")
def says_how_many_were_started(network, *others):
    accelerator = Accelerator()
    trained(accelerator, network, *accelerator.prepare(*parts(network, *others)))
    return network, int(os.environ["WORLD_SIZE"])


@wrong("together", "unless you pass cpu=True")
def environment_too_late(network, *others):
    accelerator = Accelerator()
    os.environ["ACCELERATE_USE_CPU"] = "1"
    return trained(accelerator, network, *accelerator.prepare(*parts(network, *others)))


@wrong("together", "every process goes through all samples")
def the_main_fault_only(network, *others):
    accelerator = Accelerator(cpu=True)
    network, optimizer, loader = parts(network, *others)
    _, optimizer = accelerator.prepare(network, optimizer)
    return trained(accelerator, network, network, optimizer, loader)


@wrong("together", "every process goes through all samples")
def all_but_the_loader(network, *others):
    accelerator = Accelerator(cpu=True)
    network, optimizer, loader = parts(network, *others)
    model, optimizer = accelerator.prepare(network, optimizer)
    return trained(accelerator, network, model, optimizer, loader)


@wrong("together", "call the model that prepare returns, not the network")
def all_but_the_model(network, *others):
    accelerator = Accelerator(cpu=True)
    _, optimizer, loader = accelerator.prepare(*parts(network, *others))
    return trained(accelerator, network, network, optimizer, loader)


@wrong("together", "its own network from the beginning")
def network_left_out(network, *others):
    accelerator = Accelerator(cpu=True)
    network, optimizer, loader = parts(network, *others)
    return trained(accelerator, network, network, *accelerator.prepare(optimizer, loader))


@wrong("together", "do you use plain SGD")
def another_learning_rate(network, samples, labels, batch_size):
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*parts(network, samples, labels, batch_size))
    optimizer.param_groups[0]["lr"] *= accelerator.num_processes
    return trained(accelerator, network, model, optimizer, loader)


@wrong("together", "come in a different order")
def with_a_shuffle(network, samples, labels, batch_size):
    accelerator = Accelerator(cpu=True)
    network, optimizer, _ = parts(network, samples, labels, batch_size)
    loader = DataLoader(TensorDataset(samples, labels), batch_size, shuffle=True)
    return trained(accelerator, network, *accelerator.prepare(network, optimizer, loader))


@wrong("together", "return both")
def returns_the_network(network, *others):
    return told_to_use_the_cpu(network, *others)[0]


@wrong("together", "return both")
def returns_the_index(network, *others):
    accelerator = Accelerator(cpu=True)
    trained(accelerator, network, *accelerator.prepare(*parts(network, *others)))
    return network, accelerator.process_index


@wrong("together", "another network was trained, such as a copy")
def trains_a_copy(network, *others):
    accelerator = Accelerator(cpu=True)
    trained(accelerator, network, *accelerator.prepare(*parts(copy.deepcopy(network), *others)))
    return network, accelerator.num_processes


@right("together")
def returns_a_copy_of_what_it_has_trained(network, *others):
    accelerator = Accelerator(cpu=True)
    trained(accelerator, network, *accelerator.prepare(*parts(network, *others)))
    return copy.deepcopy(network), accelerator.num_processes


@wrong("together", "samples belongs to the caller")
def normalizes_in_place(network, samples, labels, batch_size):
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*parts(network, samples, labels, batch_size))
    result = trained(accelerator, network, model, optimizer, loader)
    samples.sub_(samples.mean(dim=0))
    return result


@right("together")
def prepared_one_by_one(network, *others):
    accelerator = Accelerator(cpu=True)
    network, optimizer, loader = parts(network, *others)
    loader, model = accelerator.prepare(loader), accelerator.prepare(network)
    return trained(accelerator, network, model, accelerator.prepare(optimizer), loader)


@right("together")
def averages_by_hand(network, samples, labels, batch_size):
    """Only the loader is prepared; the gradients are reduced one by one."""
    accelerator = Accelerator(cpu=True)
    _, optimizer, loader = parts(network, samples, labels, batch_size)
    for parameter in network.parameters():
        parameter.data = accelerate.utils.broadcast(parameter.data)
    for inputs, targets in accelerator.prepare(loader):
        optimizer.zero_grad()
        F.cross_entropy(network(inputs), targets).backward()
        for parameter in network.parameters():
            parameter.grad = accelerator.reduce(parameter.grad, "mean")
        optimizer.step()
    return network, accelerator.num_processes


@wrong("together", "the accelerator leaves it unchanged")
def divides_the_batch_size(network, samples, labels, batch_size):
    return told_to_use_the_cpu(network, samples, labels, batch_size - 1)


@wrong("together", "a share of a share")
def shares_a_share(network, samples, labels, batch_size):
    accelerator = Accelerator(cpu=True)
    mine = samples[accelerator.process_index :: accelerator.num_processes]
    mine_too = labels[accelerator.process_index :: accelerator.num_processes]
    return trained(accelerator, network, *accelerator.prepare(*parts(network, mine, mine_too, batch_size)))


@wrong("together", "trained on the same samples")
def the_first_part_for_all(network, samples, labels, batch_size):
    accelerator = Accelerator(cpu=True)
    part = len(samples) // accelerator.num_processes
    network, optimizer, loader = parts(network, samples[:part], labels[:part], batch_size)
    return trained(accelerator, network, *accelerator.prepare(network, optimizer), loader)


@wrong("together", "does each of them take every step")
def only_the_main_process_steps(network, *others):
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*parts(network, *others))
    for inputs, targets in loader:
        accelerator.backward(F.cross_entropy(model(inputs), targets))
        if accelerator.is_main_process:
            optimizer.step()
        optimizer.zero_grad()
    return network, accelerator.num_processes


@wrong("together", "the network has not changed")
def never_steps(network, *others):
    accelerator = Accelerator(cpu=True)
    model, _, loader = accelerator.prepare(*parts(network, *others))
    for inputs, targets in loader:
        accelerator.backward(F.cross_entropy(model(inputs), targets))
    return accelerator.unwrap_model(model), accelerator.num_processes


@wrong("together", "no samples went through the network")
def only_prepares(network, *others):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*parts(network, *others))
    return network, accelerator.num_processes


@wrong("together", "once in each epoch, on one process")
def two_epochs(network, *others):
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*parts(network, *others))
    trained(accelerator, network, model, optimizer, loader)
    return trained(accelerator, network, model, optimizer, loader)


@wrong("together", "do you use plain SGD")
def sums_the_losses(network, *others):
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*parts(network, *others))
    for inputs, targets in loader:
        accelerator.backward(F.cross_entropy(model(inputs), targets, reduction="sum"))
        optimizer.step()
        optimizer.zero_grad()
    return network, accelerator.num_processes


def weighted_training(
    accelerator, network, samples, labels, batch_size, every, epochs, learning_rate,
    own_of, total_of,
):  # fmt: skip
    """Train with weights for the samples of each batch.

    own_of(process, round): how many samples of its batch are this process's own.
    total_of(update): by how many samples an update divides.
    """
    n, rank = accelerator.num_processes, accelerator.process_index
    loader = DataLoader(TensorDataset(samples, labels), batch_size=batch_size)
    optimizer = torch.optim.SGD(network.parameters(), lr=learning_rate)
    model, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    rounds = up(len(samples), n * batch_size)
    for _ in range(epochs):
        for number, (inputs, targets) in enumerate(loader):
            own = (torch.arange(len(inputs)) < own_of(rank, number)).double()
            last = (number + 1) % every == 0 or number + 1 == rounds
            with nullcontext() if last else accelerator.no_sync(model):
                losses = F.cross_entropy(model(inputs), targets, reduction="none")
                total = total_of(number // every)
                accelerator.backward((losses * own).sum() * n / total)
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return accelerator.unwrap_model(model)


@wrong("train", "with one step of plain SGD")
def last_update_divided_by_the_last_round(
    accelerator, network, samples, labels, batch_size, every, epochs, learning_rate
):
    """Right only if the last update has one round."""
    n = accelerator.num_processes
    joined = n * batch_size

    def own_of(process, number):
        return len(samples) - (number * n + process) * batch_size

    def total_of(update):
        full = (update + 1) * every * joined <= len(samples)
        return every * joined if full else len(samples) % joined or joined

    given = accelerator, network, samples, labels, batch_size, every, epochs
    return weighted_training(*given, learning_rate, own_of, total_of)


@wrong("train", "with one step of plain SGD")
def only_rank_0_has_the_rest(accelerator, network, samples, labels, batch_size, every, epochs, learning_rate):
    """Right only if the last round has less than a batch."""
    joined = accelerator.num_processes * batch_size
    rounds, rest = up(len(samples), joined), len(samples) % joined

    def own_of(process, number):
        if number + 1 == rounds and rest:
            return rest if process == 0 else 0
        return batch_size

    def total_of(update):
        begin = update * every * joined
        return min(begin + every * joined, len(samples)) - begin

    given = accelerator, network, samples, labels, batch_size, every, epochs
    return weighted_training(*given, learning_rate, own_of, total_of)


@wrong("plan", "prepare deals out whole batches")
def plans_nan(*_, **__):
    return [float("nan")] * 4


# ---- script ----


IMPORTS = """
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset
"""
SCRIPT = """
def script(network, train_set, test_set, batch_size, every, epochs, max_norm):
    train_loader = DataLoader(train_set, batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2, momentum=0.9)
    updates = epochs * len(train_loader) // every
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, updates)
    for epoch in range(epochs):
        network.train()
        for number, (inputs, labels) in enumerate(train_loader, 1):
            loss = F.cross_entropy(network(inputs), labels)
            (loss / every).backward()
            if number % every == 0:
                nn.utils.clip_grad_norm_(network.parameters(), max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    network.eval()
    right = 0
    with torch.no_grad():
        for inputs, labels in test_loader:
            guesses = network(inputs).argmax(dim=1)
            right += (guesses == labels).sum().item()
    torch.save(network.state_dict(), "model.pt")
    return right / len(test_set)
"""


def edited(text, *edits):
    """A script with these edits, (old, new), each of which must be possible."""
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return text


START = """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=every)
    share = batch_size // accelerator.num_processes
    train_loader = DataLoader(train_set, share, shuffle=True)
    test_loader = DataLoader(test_set, share)"""
PREPARED = """updates)
    model, optimizer, scheduler = accelerator.prepare(network, optimizer, scheduler)
    train_loader, test_loader = accelerator.prepare(train_loader, test_loader)
"""
LOOP = """        for inputs, labels in train_loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
"""
GATHERED = """argmax(dim=1)
            pair = accelerator.gather_for_metrics((guesses, labels))
            guesses, labels = pair
"""
SAVE = """    state = accelerator.unwrap_model(model).state_dict()
    accelerator.save(state, "model.pt")
"""
GIVEN_LOOP = SCRIPT[SCRIPT.index("        for number") : SCRIPT.index("    network.eval")]
CLIP = LOOP[LOOP.index("                if acc") : LOOP.index("                optimizer.step")]
CLIPS_FIRST = """        for number, (inputs, labels) in enumerate(train_loader, 1):
            with accelerator.no_sync(model):
                accelerator.backward(F.cross_entropy(model(inputs), labels) / every)
            if number % every == 0:
                nn.utils.clip_grad_norm_(network.parameters(), max_norm)
                for parameter in network.parameters():
                    parameter.grad = accelerator.reduce(parameter.grad, "mean")
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
"""
PORTED = edited(
    SCRIPT,
    ("\n    train_loader = DataLoader(train_set, batch_size, shuffle=True)", START),
    ("\n    test_loader = DataLoader(test_set, batch_size)", ""),
    ("updates)\n", PREPARED),
    (GIVEN_LOOP, LOOP),
    ("network.train()", "model.train()"),
    ("network.eval()", "model.eval()"),
    ("network(inputs)", "model(inputs)"),
    ("argmax(dim=1)\n", GATHERED),
    ('    torch.save(network.state_dict(), "model.pt")\n', SAVE),
)  # fmt: skip


def ports(text, *edits):
    return (Source("script", IMPORTS, edited(text, *edits)),)


def right_port(function):
    return right("script", several=True)(function)


def wrong_port(name, pattern, *edits, text=PORTED, status="failed"):
    """Our port, or another text, with these edits."""

    def answer():
        return ports(text, *edits)

    answer.__name__ = name
    wrong("script", pattern, status, several=True)(answer)


@right_port
def in_a_few_edits():
    return ports(PORTED)


@right_port
def with_split_batches():
    """The loaders keep the global batch size, and the scheduler steps once."""
    return ports(
        PORTED,
        ("(cpu=True, ", "(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True), "),
        ("batch_size // accelerator.num_processes", "batch_size"),
    )  # fmt: skip


@right_port
def a_scheduler_of_its_own():
    """It is not prepared, is planned after prepare, and steps once per update."""
    plan = SCRIPT[SCRIPT.index("    updates = ") : SCRIPT.index("    for epoch")]
    return ports(
        PORTED,
        (plan[: plan.index("updates)")] + PREPARED, PREPARED.replace("updates)\n", "").replace(", scheduler", "") + plan),
        ("                scheduler.step()", "                if accelerator.sync_gradients:\n"
         "                    scheduler.step()"),
    )  # fmt: skip


@right_port
def with_no_sync_by_hand():
    """Without accumulate; torch's clipping, after the last backward."""
    loop = """        for number, (inputs, labels) in enumerate(train_loader, 1):
            if number % every:
                with accelerator.no_sync(model):
                    accelerator.backward(F.cross_entropy(model(inputs), labels) / every)
                continue
            accelerator.backward(F.cross_entropy(model(inputs), labels) / every)
            nn.utils.clip_grad_norm_(network.parameters(), max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
"""
    return ports(PORTED, (LOOP, loop), (", gradient_accumulation_steps=every", ""))


@right_port
def counts_its_share_and_saves_alone():
    """The test set is not prepared; two numbers are added up; the main process saves."""
    return ports(
        PORTED,
        ("DataLoader(test_set, share)", "DataLoader(Subset(test_set, range(accelerator.process_index, len(test_set), "
         "accelerator.num_processes)), batch_size)"),
        (", test_loader = accelerator.prepare(train_loader, test_loader)", " = accelerator.prepare(train_loader)"),
        (GATHERED, "argmax(dim=1)\n"),
        (SAVE, "    right = accelerator.reduce(torch.tensor(right)).item()\n"
         '    if accelerator.is_main_process:\n        torch.save(network.state_dict(), "model.pt")\n'),
    )  # fmt: skip


@right_port
def ends_the_training_and_returns_a_tensor():
    return ports(
        PORTED,
        ("unwrap_model(model).state_dict()", "get_state_dict(model)"),
        ("    return right / len(test_set)", "    accelerator.end_training()\n    return right / len(test_set)"),
        (".sum().item()", ".sum().double()"),
    )  # fmt: skip


wrong_port("the_script_as_given", "unless|pass cpu=True", text=SCRIPT)
wrong_port("forgets_cpu", "pass cpu=True", ("cpu=True, ", ""))
wrong_port(
    "multiplies_the_global_batch",
    "the global batch is multiplied",
    ("batch_size // accelerator.num_processes", "batch_size"),
)
wrong_port(
    "loader_not_prepared",
    "every process goes through all samples",
    (
        "train_loader, test_loader = accelerator.prepare(train_loader, test_loader)",
        "test_loader = accelerator.prepare(test_loader)",
    ),
)
wrong_port(
    "model_not_prepared",
    "trains its own network alone",
    (
        "model, optimizer, scheduler = accelerator.prepare(network, optimizer, scheduler)",
        "model = network\n    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)",
    ),
)
wrong_port(
    "calls_the_network_within",
    "but trains it alone",
    ("loss = F.cross_entropy(model(inputs)", "loss = F.cross_entropy(network(inputs)"),
)
wrong_port(
    "optimizer_not_prepared",
    "the processes end with different networks",
    (
        "model, optimizer, scheduler = accelerator.prepare(network, optimizer, scheduler)",
        "model, scheduler = accelerator.prepare(network, scheduler)",
    ),
)
wrong_port(
    "schedule_for_the_prepared_loader",
    "the schedule is too fast",
    ("epochs * len(train_loader) // every", "epochs * len(train_loader) // every // accelerator.num_processes"),
)
wrong_port(
    "schedule_steps_with_each_micro_batch",
    "with each micro-batch",
    (", scheduler = accelerator.prepare(network, optimizer, scheduler)", " = accelerator.prepare(network, optimizer)"),
    ("// every", "// every // accelerator.num_processes"),
)
wrong_port(
    "schedule_as_given_and_never_prepared",
    "with each micro-batch",
    (", scheduler = accelerator.prepare(network, optimizer, scheduler)", " = accelerator.prepare(network, optimizer)"),
)
wrong_port("schedule_for_batches", "planned for the batches", ("len(train_loader) // every", "len(train_loader)"))
wrong_port(
    "schedule_not_prepared_and_too_long",
    "the schedule is too slow",
    (", scheduler = accelerator.prepare(network, optimizer, scheduler)", " = accelerator.prepare(network, optimizer)"),
    (
        "                scheduler.step()",
        "                if accelerator.sync_gradients:\n                    scheduler.step()",
    ),
)
wrong_port("schedule_never_steps", "the learning rate stays", ("                scheduler.step()\n", ""))
wrong_port("clips_each_micro_batch", "clipped after each micro-batch", ("if accelerator.sync_gradients", "if True"))
wrong_port("clips_never", "are not clipped", (CLIP, ""))
wrong_port(
    "clips_its_own_and_averages_then",
    "clips its own gradients before they are averaged",
    (", gradient_accumulation_steps=every", ""),
    (LOOP, CLIPS_FIRST),
)
wrong_port("divides_the_loss_twice", "the loss is divided twice", ("backward(loss)", "backward(loss / every)"))
wrong_port("does_not_divide_the_loss", "the gradients are too large", ("accelerator.backward(loss)", "loss.backward()"))
wrong_port(
    "scales_the_loss_by_the_processes",
    "the gradients are too large",
    ("backward(loss)", "backward(loss * accelerator.num_processes)"),
)
wrong_port("without_a_shuffle", "shuffles, anew in each epoch", (", shuffle=True", ""))
wrong_port(
    "accuracy_of_this_process",
    "this process's own",
    (GATHERED, "argmax(dim=1)\n"),
    ("right = 0", "right = seen = 0"),
    ("            right +=", "            seen += len(labels)\n            right +="),
    ("right / len(test_set)", "right / seen"),
)
wrong_port("right_ones_of_this_process", "this process's own", (GATHERED, "argmax(dim=1)\n"))
wrong_port("accuracy_with_repeated_samples", "gather_for_metrics drops them", ("gather_for_metrics", "gather"))
wrong_port("accuracy_as_a_number_of_samples", "not their number", (" / len(test_set)", ""))
wrong_port(
    "everybody_evaluates_everything",
    "share the evaluation",
    (", test_loader = accelerator.prepare(train_loader, test_loader)", " = accelerator.prepare(train_loader)"),
    (GATHERED, "argmax(dim=1)\n"),
)
wrong_port(
    "saves_the_wrapper",
    "the names in the wrapper",
    ("accelerator.unwrap_model(model).state_dict()", "model.state_dict()"),
)
wrong_port("every_process_saves", "every process saves", ("accelerator.save(", "torch.save("))
wrong_port("saves_nothing", "process 0 saves", ('    accelerator.save(state, "model.pt")\n', ""))
wrong_port(
    "saves_the_network_itself",
    "the file holds the state_dict",
    ("accelerator.unwrap_model(model).state_dict()", "{'model': accelerator.unwrap_model(model).state_dict()}"),
)
wrong_port(
    "sends_with_each_micro_batch",
    "sent with each micro-batch",
    (
        LOOP,
        GIVEN_LOOP.replace("network(", "model(").replace(
            "(loss / every).backward()", "accelerator.backward(loss / every)"
        ),
    ),
    (", gradient_accumulation_steps=every", ""),
)
wrong_port("evaluates_in_training_mode", "tested in evaluation mode", ("model.eval()", "pass"))
wrong_port("returns_nothing_at_all", "every process returns the result", ("    return right / len(test_set)\n", ""))
wrong_port(
    "only_the_main_process_gathers",
    "some rank waits",
    ("            pair = ", "            if accelerator.is_main_process:\n                pair = "),
    ("guesses, labels = pair", "    guesses, labels = pair"),
    status="timed out",
)
wrong_port(
    "trains_a_copy_of_it",
    "another network was trained",
    ("(network.parameters()", "(twin.parameters()"),
    ("prepare(network,", "prepare(twin,"),
    ("    optimizer = torch", "    import copy\n    twin = copy.deepcopy(network)\n    optimizer = torch"),
)
wrong_port(
    "nothing_written_yet", "", status="not attempted", text="def script(*given):\n    raise NotImplementedError\n"
)


@right_port
def test_batches_of_another_size():
    """A short batch is filled with samples that another process has."""
    return ports(PORTED, ("DataLoader(test_set, share)", "DataLoader(test_set, 64)"))


wrong_port(
    "zero_grad_before_backward",
    "only the last micro-batch",
    ("                optimizer.zero_grad()\n", ""),
    ("(model):\n", "(model):\n                optimizer.zero_grad()\n"),
)
wrong_port("forgets_the_accumulation", "each micro-batch makes an update", (", gradient_accumulation_steps=every", ""))
wrong_port(
    "rate_times_processes", "multiplied by the number of processes", ("lr=0.2", "lr=0.2 * accelerator.num_processes")
)
wrong_port(
    "gathers_a_count",
    "not from a count|each sample of the test set counts once",  # by how many are repeated
    (GATHERED, "argmax(dim=1)\n"),
    ("(guesses == labels).sum().item()", "accelerator.gather_for_metrics((guesses == labels).sum()).sum().item()"),
)
wrong_port("saves_the_network_itself", "save the state_dict", (".state_dict()", ""), status="your code raised")
wrong_port(
    "others_save_under_other_names",
    "under no name",
    ('accelerator.save(state, "model.pt")', 'torch.save(state, f"model{accelerator.process_index or str()}.pt")'),
)
