"""Exercise 07: Accelerate."""

import copy
import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from mutants import right, wrong

# ---- train ----


def prepared(accelerator, network, samples, labels, batch_size, learning_rate):
    loader = DataLoader(TensorDataset(samples, labels), batch_size)
    optimizer = torch.optim.SGD(network.parameters(), learning_rate)
    return accelerator.prepare(network, optimizer, loader)


def loop(accelerator, model, optimizer, loader, epochs):
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
    return accelerator.unwrap_model(model)


@right("train")
def as_in_the_lesson(
    accelerator, network, samples, labels, batch_size, epochs, learning_rate
):
    print("porting ...")
    return loop(
        accelerator,
        *prepared(accelerator, network, samples, labels, batch_size, learning_rate),
        epochs,
    )


@right("train")
def asks_when_it_is_time(
    accelerator, network, samples, labels, batch_size, epochs, learning_rate
):
    """An optimizer that is not prepared, and steps where the gradients have been
    averaged.
    """
    loader = accelerator.prepare(DataLoader(TensorDataset(samples, labels), batch_size))
    model = accelerator.prepare(network)
    optimizer = torch.optim.SGD(model.parameters(), learning_rate)
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(inputs), targets))
                if accelerator.sync_gradients:
                    optimizer.step()
                    optimizer.zero_grad()
    return network


@right("train")
def counts_batches_itself(
    accelerator, network, samples, labels, batch_size, epochs, learning_rate
):
    model, optimizer, loader = prepared(
        accelerator, network, samples, labels, batch_size, learning_rate
    )
    steps = accelerator.gradient_accumulation_steps
    for _ in range(epochs):
        for place, (inputs, targets) in enumerate(loader, 1):
            accelerator.backward(F.cross_entropy(model(inputs), targets))
            if place % steps == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model.module


@right("train")
def wraps_and_shares_by_hand(
    accelerator, network, samples, labels, batch_size, epochs, learning_rate
):
    """torch's wrapper, and its sampler, which deals out samples and not batches; a copy
    is trained.
    """
    train_set = TensorDataset(samples, labels)
    sampler = DistributedSampler(train_set, shuffle=False)
    model = DistributedDataParallel(copy.deepcopy(network))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), learning_rate))
    return loop(
        accelerator,
        model,
        optimizer,
        DataLoader(train_set, batch_size, sampler=sampler),
        epochs,
    )


@wrong("train", "its own network, without averaging")
def network_not_prepared(
    accelerator, network, samples, labels, batch_size, epochs, learning_rate
):
    _, optimizer, loader = prepared(
        accelerator, copy.deepcopy(network), samples, labels, batch_size, learning_rate
    )
    loader = accelerator.prepare(DataLoader(TensorDataset(samples, labels), batch_size))
    optimizer = accelerator.prepare(
        torch.optim.SGD(network.parameters(), learning_rate)
    )
    return loop(accelerator, network, optimizer, loader, epochs)


@wrong("train", "its own network, without averaging")
def calls_the_network_within(
    accelerator, network, samples, labels, batch_size, epochs, learning_rate
):
    _, optimizer, loader = prepared(
        accelerator, network, samples, labels, batch_size, learning_rate
    )
    return loop(accelerator, network, optimizer, loader, epochs)


@wrong("train", "prepare the optimizer, too")
def optimizer_not_prepared(
    accelerator, network, samples, labels, batch_size, epochs, learning_rate
):
    loader = DataLoader(TensorDataset(samples, labels), batch_size)
    model, loader = accelerator.prepare(network, loader)
    return loop(
        accelerator,
        model,
        torch.optim.SGD(model.parameters(), learning_rate),
        loader,
        epochs,
    )


@wrong("train", "every process goes through all samples: prepare the loader")
def loader_not_prepared(
    accelerator, network, samples, labels, batch_size, epochs, learning_rate
):
    model, optimizer, _ = prepared(
        accelerator, network, samples, labels, batch_size, learning_rate
    )
    loader = DataLoader(TensorDataset(samples, labels), batch_size)
    return loop(accelerator, model, optimizer, loader, epochs)


@wrong("train", "every process goes through all samples: prepare the loader")
def throws_away_what_prepare_returns(
    accelerator, network, samples, labels, batch_size, epochs, learning_rate
):
    loader = DataLoader(TensorDataset(samples, labels), batch_size)
    optimizer = torch.optim.SGD(network.parameters(), learning_rate)
    accelerator.prepare(network, optimizer, loader)
    return loop(accelerator, network, optimizer, loader, epochs)


@wrong("train", "every process goes through all samples: prepare the loader")
def everyone_takes_the_joined_batch(
    accelerator, network, samples, labels, batch_size, epochs, learning_rate
):
    """Has the right numbers, and no use of several processes."""
    joined = (
        batch_size * accelerator.num_processes * accelerator.gradient_accumulation_steps
    )
    optimizer = torch.optim.SGD(network.parameters(), learning_rate)
    for _ in range(epochs):
        for inputs, targets in DataLoader(TensorDataset(samples, labels), joined):
            optimizer.zero_grad()
            F.cross_entropy(network(inputs), targets).backward()
            optimizer.step()
    return network


@wrong("train", "has a share of a share")
def shares_out_twice(
    accelerator, network, samples, labels, batch_size, epochs, learning_rate
):
    train_set = TensorDataset(samples, labels)
    loader = DataLoader(
        train_set, batch_size, sampler=DistributedSampler(train_set, shuffle=False)
    )
    optimizer = torch.optim.SGD(network.parameters(), learning_rate)
    return loop(accelerator, *accelerator.prepare(network, optimizer, loader), epochs)


@wrong("train", "that is one epoch only")
def one_epoch(accelerator, network, samples, labels, batch_size, epochs, learning_rate):
    return loop(
        accelerator,
        *prepared(accelerator, network, samples, labels, batch_size, learning_rate),
        1,
    )


@wrong("train", "no samples went through the network")
def only_prepares(
    accelerator, network, samples, labels, batch_size, epochs, learning_rate
):
    model, _, _ = prepared(
        accelerator, network, samples, labels, batch_size, learning_rate
    )
    return accelerator.unwrap_model(model)


@wrong("train", "must go through the network once in each epoch")
def calls_the_model_twice(
    accelerator, network, samples, labels, batch_size, epochs, learning_rate
):
    model, optimizer, loader = prepared(
        accelerator, network, samples, labels, batch_size, learning_rate
    )
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), targets)
                right = (
                    accelerator.unwrap_model(model)(inputs).argmax(dim=1) == targets
                ).sum()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        print(f"{right} right in the last batch")
    return accelerator.unwrap_model(model)


@wrong("train", "batch_size is the batch size per process")
def divides_the_batch(
    accelerator, network, samples, labels, batch_size, epochs, learning_rate
):
    of_each = batch_size // accelerator.num_processes
    return loop(
        accelerator,
        *prepared(accelerator, network, samples, labels, of_each, learning_rate),
        epochs,
    )


@wrong("train", "the samples come in a different order")
def shuffles(accelerator, network, samples, labels, batch_size, epochs, learning_rate):
    loader = DataLoader(TensorDataset(samples, labels), batch_size, shuffle=True)
    optimizer = torch.optim.SGD(network.parameters(), learning_rate)
    return loop(accelerator, *accelerator.prepare(network, optimizer, loader), epochs)


@wrong("train", "the samples come in a different order")
def a_block_for_each(
    accelerator, network, samples, labels, batch_size, epochs, learning_rate
):
    model, optimizer, _ = prepared(
        accelerator, network, samples, labels, batch_size, learning_rate
    )
    with accelerator.split_between_processes(
        {"samples": samples, "labels": labels}
    ) as mine:
        loader = DataLoader(TensorDataset(mine["samples"], mine["labels"]), batch_size)
        return loop(accelerator, model, optimizer, loader, epochs)


@wrong("train", "several processes are trained on the same samples")
def the_first_share_for_all(
    accelerator, network, samples, labels, batch_size, epochs, learning_rate
):
    model, optimizer, _ = prepared(
        accelerator, network, samples, labels, batch_size, learning_rate
    )
    share = range(len(samples) // accelerator.num_processes)
    loader = DataLoader(Subset(TensorDataset(samples, labels), share), batch_size)
    return loop(accelerator, model, optimizer, loader, epochs)


def looped(
    accelerator, network, samples, labels, batch_size, epochs, learning_rate, body
):
    """The loop with another body in `accumulate`."""
    model, optimizer, loader = prepared(
        accelerator, network, samples, labels, batch_size, learning_rate
    )
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                body(model, optimizer, inputs, targets)
    return accelerator.unwrap_model(model)


@wrong("train", "only the last batch of each update counts")
def clears_first(accelerator, *others):
    def body(model, optimizer, inputs, targets):
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(inputs), targets))
        optimizer.step()

    return looped(accelerator, *others, body)


@wrong("train", "of earlier updates are still there")
def never_clears(accelerator, *others):
    def body(model, optimizer, inputs, targets):
        accelerator.backward(F.cross_entropy(model(inputs), targets))
        optimizer.step()

    return looped(accelerator, *others, body)


@wrong("train", "[23] times too long: accelerator.backward.*loss.backward.. does not")
def calls_the_losss_backward(accelerator, *others):
    def body(model, optimizer, inputs, targets):
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return looped(accelerator, *others, body)


@wrong("train", "[23] times too short: accelerator.backward.* already")
def divides_by_the_window_again(accelerator, *others):
    def body(model, optimizer, inputs, targets):
        loss = (
            F.cross_entropy(model(inputs), targets)
            / accelerator.gradient_accumulation_steps
        )
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return looped(accelerator, *others, body)


@wrong(
    "train", "2 times too short: the gradients are already averaged over the processes"
)
def divides_by_the_processes(accelerator, *others):
    def body(model, optimizer, inputs, targets):
        accelerator.backward(
            F.cross_entropy(model(inputs), targets) / accelerator.num_processes
        )
        optimizer.step()
        optimizer.zero_grad()

    return looped(accelerator, *others, body)


@wrong("train", "2 times too long: the gradients are averaged")
def scales_the_learning_rate(
    accelerator, network, samples, labels, batch_size, epochs, learning_rate
):
    rate = learning_rate * accelerator.num_processes
    return loop(
        accelerator,
        *prepared(accelerator, network, samples, labels, batch_size, rate),
        epochs,
    )


@wrong("train", "does the optimizer step")
def takes_no_step(accelerator, *others):
    def body(model, optimizer, inputs, targets):
        accelerator.backward(F.cross_entropy(model(inputs), targets))
        optimizer.zero_grad()

    return looped(accelerator, *others, body)


@wrong("train", "does each of them take every step")
def only_the_main_process_steps(accelerator, *others):
    def body(model, optimizer, inputs, targets):
        accelerator.backward(F.cross_entropy(model(inputs), targets))
        if accelerator.is_main_process:
            optimizer.step()
        optimizer.zero_grad()

    return looped(accelerator, *others, body)


@wrong("train", "do you use plain SGD with the given learning rate")
def sums_over_the_batch(accelerator, *others):
    def body(model, optimizer, inputs, targets):
        accelerator.backward(F.cross_entropy(model(inputs), targets, reduction="sum"))
        optimizer.step()
        optimizer.zero_grad()

    return looped(accelerator, *others, body)


@wrong("train", "do you use plain SGD with the given learning rate")
def with_momentum(
    accelerator, network, samples, labels, batch_size, epochs, learning_rate
):
    loader = DataLoader(TensorDataset(samples, labels), batch_size)
    optimizer = torch.optim.SGD(network.parameters(), learning_rate, momentum=0.9)
    return loop(accelerator, *accelerator.prepare(network, optimizer, loader), epochs)


def plainly(
    accelerator, network, samples, labels, batch_size, epochs, learning_rate, backward
):
    """The loop as it was, without accumulation."""
    model, optimizer, loader = prepared(
        accelerator, network, samples, labels, batch_size, learning_rate
    )
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            backward(F.cross_entropy(model(inputs), targets))
            optimizer.step()
    return accelerator.unwrap_model(model)


@wrong("train", "each batch makes its own update")
def forgets_accumulate(accelerator, *others):
    return plainly(accelerator, *others, accelerator.backward)


@wrong("train", "each batch makes its own update")
def ports_half_of_it(accelerator, *others):
    return plainly(accelerator, *others, lambda loss: loss.backward())


@wrong("train", "DistributedDataParallel[^$]*unwrap_model")
def returns_the_wrapped_model(
    accelerator, network, samples, labels, batch_size, epochs, learning_rate
):
    model, optimizer, loader = prepared(
        accelerator, network, samples, labels, batch_size, learning_rate
    )
    loop(accelerator, model, optimizer, loader, epochs)
    return model


@wrong("train", "None[^$]*return the trained network, on every process")
def returns_nothing(*arguments):
    as_in_the_lesson(*arguments)


@wrong(
    "train",
    "rank +1 of 2[^$]*return the trained network, on every process",
)
def returns_on_the_main_process(accelerator, *others):
    network = as_in_the_lesson(accelerator, *others)
    if accelerator.is_main_process:
        return network


@wrong("train", "waits for another that does not come", status="timed out")
def only_the_main_process_trains(accelerator, *others):
    if accelerator.is_main_process:
        return as_in_the_lesson(accelerator, *others)
    return others[0]


@wrong("train", "do not call init_process_group", status="your code raised")
def joins_the_group_again(accelerator, *others):
    dist.init_process_group("gloo")
    return as_in_the_lesson(accelerator, *others)


@wrong("train", "not iterable", status="your code raised")
def takes_them_in_another_order(accelerator, *others):
    *others, epochs, learning_rate = others
    loader, model, optimizer = prepared(accelerator, *others, learning_rate)
    return loop(accelerator, model, optimizer, loader, epochs)


@wrong("train", "another network was trained, such as a copy")
def returns_the_network_before(accelerator, network, *others):
    as_in_the_lesson(accelerator, copy.deepcopy(network), *others)
    return network


@wrong("train", "a new Accelerator.. has changed it")
def makes_its_own_accelerator(accelerator, *others):
    return as_in_the_lesson(Accelerator(cpu=True), *others)


@wrong("train", "labels belongs to the caller")
def reverses_the_labels(accelerator, network, samples, labels, *others):
    result = as_in_the_lesson(accelerator, network, samples, labels, *others)
    labels.copy_(labels.flip(0))
    return result


# ---- accuracy ----


def shared(accelerator, samples, labels, batch_size, **options):
    return accelerator.prepare(
        DataLoader(TensorDataset(samples, labels), batch_size, **options)
    )


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


@right("accuracy")
def gathers_for_metrics(accelerator, network, samples, labels, batch_size):
    loader = shared(accelerator, samples, labels, batch_size)
    return count(network, loader, accelerator.gather_for_metrics)


@right("accuracy")
def cuts_the_padding_off_itself(accelerator, network, samples, labels, batch_size):
    """A prepared copy of the network; all guesses, in the order of the data, and
    more.
    """
    model = accelerator.prepare(copy.deepcopy(network)).eval()
    with torch.inference_mode():
        loader = shared(accelerator, samples, labels, batch_size)
        guesses = [
            accelerator.gather(model(inputs).argmax(dim=1)) for inputs, _ in loader
        ]
    print("counting ...")
    return (torch.cat(guesses)[: len(labels)] == labels).sum(), torch.tensor(
        len(labels)
    )


@right("accuracy")
def shares_without_padding(accelerator, network, samples, labels, batch_size):
    """Blocks of samples, which need not be equally many, since only counts are sent."""
    with accelerator.split_between_processes(
        {"samples": samples, "labels": labels}
    ) as mine:
        counts = count(network, DataLoader(TensorDataset(*mine.values()), batch_size))
    return accelerator.reduce(torch.tensor(counts), "sum").tolist()


@right("accuracy")
def marks_what_is_repeated(accelerator, network, samples, labels, batch_size):
    places = torch.arange(len(samples))
    seen = {}
    with torch.no_grad():
        mode = network.training
        for inputs, targets, place in accelerator.prepare(
            DataLoader(TensorDataset(samples, labels, places), batch_size)
        ):
            right = network.eval()(inputs).argmax(dim=1) == targets
            gathered = accelerator.gather((place, right))
            seen.update(zip(gathered[0].tolist(), gathered[1].tolist()))
    network.train(mode)
    return sum(seen.values()), len(seen)


@wrong("accuracy", "samples that prepare repeats")
def gathers(accelerator, network, samples, labels, batch_size):
    return count(
        network, shared(accelerator, samples, labels, batch_size), accelerator.gather
    )


@wrong("accuracy", "samples that prepare repeats")
def gathers_but_knows_how_many(accelerator, network, samples, labels, batch_size):
    right, _ = count(
        network, shared(accelerator, samples, labels, batch_size), accelerator.gather
    )
    return right, len(samples)


@wrong("accuracy", "samples that prepare repeats")
def gathers_counts(accelerator, network, samples, labels, batch_size):
    mode, right, counted = network.training, 0, 0
    network.eval()
    with torch.no_grad():
        for inputs, targets in shared(accelerator, samples, labels, batch_size):
            counts = torch.tensor(
                [[(network(inputs).argmax(dim=1) == targets).sum(), len(targets)]]
            )
            counts = accelerator.gather_for_metrics(counts).sum(dim=0)
            right, counted = right + counts[0].item(), counted + counts[1].item()
    network.train(mode)
    return right, counted


@wrong("accuracy", "samples that prepare repeats")
def sums_at_the_end(accelerator, network, samples, labels, batch_size):
    counts = torch.tensor(
        count(network, shared(accelerator, samples, labels, batch_size))
    )
    return accelerator.reduce(counts, "sum").tolist()


@wrong("accuracy", "averaged over the processes")
def means_at_the_end(accelerator, network, samples, labels, batch_size):
    counts = torch.tensor(
        count(network, shared(accelerator, samples, labels, batch_size))
    ).double()
    return accelerator.reduce(counts, "mean").tolist()


@wrong("accuracy", "counts only its own samples: gather those of all")
def own_part(accelerator, network, samples, labels, batch_size):
    return count(network, shared(accelerator, samples, labels, batch_size))


@wrong("accuracy", "they were gathered: prepare the loader")
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
        counts += torch.tensor(
            count(network, DataLoader(TensorDataset(samples, labels), batch_size))
        )
    return accelerator.reduce(counts, "sum").tolist()


@wrong("accuracy", "summed twice")
def gathers_and_sums(accelerator, *others):
    return accelerator.reduce(
        torch.tensor(gathers_for_metrics(accelerator, *others)), "sum"
    ).tolist()


@wrong("accuracy", "with (20|24|28|30|36|42) samples[^$]*samples are left out")
def cuts_off_all_where_nothing_is_repeated(
    accelerator, network, samples, labels, batch_size
):
    joined = batch_size * accelerator.num_processes

    def gather(pair):
        done.append(joined)
        last = sum(done) >= len(samples)
        return [
            accelerator.gather(part)[: len(samples) % joined if last else joined]
            for part in pair
        ]

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
    return mean_of_batches(accelerator, *others, accelerator.gather_for_metrics), len(
        others[1]
    )


@wrong("accuracy", "comes from a mean of accuracies")
def mean_of_means_rounded(accelerator, *others):
    return round(
        mean_of_batches(accelerator, *others, accelerator.gather_for_metrics)
    ), len(others[1])


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
            guesses, targets = accelerator.gather_for_metrics(
                (network(inputs).argmax(dim=1), targets)
            )
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
        guesses, targets = accelerator.gather_for_metrics(
            (network(inputs).argmax(dim=1), targets)
        )
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


@right("accuracy")
def one_gather_at_the_end(accelerator, network, samples, labels, batch_size):
    """All flags of all processes, and the number of samples cuts off what is repeated."""
    loader, mode, flags = (
        shared(accelerator, samples, labels, batch_size),
        network.training,
        [],
    )
    with torch.inference_mode():
        network.eval()
        for inputs, targets in loader:
            flags.append(
                accelerator.gather_for_metrics(
                    network(inputs).max(1).indices.eq(targets).to(torch.uint8)
                )
            )
    network.train(mode)
    flags = torch.cat(flags)
    return flags.sum(dtype=torch.int64).item(), flags.numel()


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
    loader = DataLoader(
        train_set, batch_size, sampler=DistributedSampler(train_set, shuffle=False)
    )
    model = accelerator.prepare(network)
    return trained(
        accelerator, network, model, torch.optim.SGD(model.parameters(), lr=0.1), loader
    )


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
    return trained(
        accelerator, network, network, *accelerator.prepare(optimizer, loader)
    )


@wrong("together", "do you use plain SGD")
def another_learning_rate(network, samples, labels, batch_size):
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(
        *parts(network, samples, labels, batch_size)
    )
    optimizer.param_groups[0]["lr"] *= accelerator.num_processes
    return trained(accelerator, network, model, optimizer, loader)


@wrong("together", "come in a different order")
def with_a_shuffle(network, samples, labels, batch_size):
    accelerator = Accelerator(cpu=True)
    network, optimizer, _ = parts(network, samples, labels, batch_size)
    loader = DataLoader(TensorDataset(samples, labels), batch_size, shuffle=True)
    return trained(
        accelerator, network, *accelerator.prepare(network, optimizer, loader)
    )


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
    trained(
        accelerator,
        network,
        *accelerator.prepare(*parts(copy.deepcopy(network), *others)),
    )
    return network, accelerator.num_processes


@right("together")
def returns_a_copy_of_what_it_has_trained(network, *others):
    accelerator = Accelerator(cpu=True)
    trained(accelerator, network, *accelerator.prepare(*parts(network, *others)))
    return copy.deepcopy(network), accelerator.num_processes


@wrong("together", "samples belongs to the caller")
def normalizes_in_place(network, samples, labels, batch_size):
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(
        *parts(network, samples, labels, batch_size)
    )
    result = trained(accelerator, network, model, optimizer, loader)
    samples.sub_(samples.mean(dim=0))
    return result
