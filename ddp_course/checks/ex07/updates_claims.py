"""What question 2 claims of a training, and the updates to which likely mistakes lead."""

import math
from functools import partial

from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ddp_course.checks.claims import Between, Claim, agree
from ddp_course.checks.ex07.networks import inputs_unchanged
from ddp_course.checks.ported import DIGITS, RecordingNetwork, gradient
from ddp_course.checks.samples import Numbered


def shares(checked, case, rank, of_ranks):
    """Claims that a process has its share of the samples, batch by batch."""
    n, (samples, batch_size, _, epochs) = len(of_ranks), case
    batches = of_ranks[rank]["trained"]
    count, most = sum(map(len, batches)), epochs * math.ceil(math.ceil(samples / batch_size) / n) * batch_size
    otherwise = (
        "each process has its own share of the samples: prepare the loader, too, and loop over what prepare returns"
    )
    if count <= 2 * most and len(set(sum(batches, []))) < samples:
        otherwise = "each sample should go through the network once per epoch, on one process"
    yield Claim(f"how many samples a process is trained on, in {checked}", count, Between(0, most), otherwise,
                told=f"at most {most}")  # fmt: skip
    yield Claim(f"the largest batch in {checked}", max(map(len, batches), default=0), Between(0, batch_size),
                "batch_size is the batch size per process, and a process takes one batch at a time",
                told=f"at most {batch_size}")  # fmt: skip


def some_trained(checked, case, of_ranks):
    count = sum(len(batch) for of_rank in of_ranks for batch in of_rank["trained"])
    yield Claim(f"how many samples the processes are trained on, in {checked}", count, Between(1), "no samples went through "
                "the network that should be trained", told=case[0] * case[-1])  # fmt: skip


def comes_back(checked, rank, of_ranks):
    seen, what = of_ranks[rank], f"what comes back from {checked}"
    yield Claim(what, seen["end"] is None, False, "return the trained network, on every process", told="the network",
                shown=seen["returned"])  # fmt: skip
    yield Claim(what, seen["wrapped"], False, "it is still wrapped by prepare: return accelerator.unwrap_model(model)",
                told="the network", shown=seen["returned"])  # fmt: skip
    yield from inputs_unchanged(checked, seen["changed"])


def like_one_process(checked, case, rate, seed, rank, of_ranks):
    """The claim that a process ends with the parameters of one that counts each sample of an
    update once.
    """
    n, ends = len(of_ranks), [of_rank["end"] for of_rank in of_ranks]
    trained = [of_rank["trained"] for of_rank in of_ranks]
    descended = partial(after, Numbered(case[0], seed), seed, rate)
    likely = lambda: mistakes(case, trained, descended)  # noqa: E731
    otherwise = (
        "is the loss of an update the sum of the cross-entropies of its samples, each once, over their number, with one "
        "step of plain SGD?"
    )
    if any(of_rank["copied"] for of_rank in of_ranks):
        likely, otherwise = (), (
            "another network was trained, such as a copy, and not the one that comes back: return the one that the "
            "optimizer changes"
        )  # fmt: skip
    elif any(number not in range(case[0]) for batches in trained for number in sum(batches, [])):
        likely, otherwise = (
            (),
            "the network was trained on other numbers than the given samples: pass them on as they are",
        )
    elif any(end.isnan().any() for end in ends):
        otherwise = (
            "in the last update of an epoch, a process may have repeated samples only, and its own number is 0, and 0/0 is "
            "nan: divide by the number of all processes"
        )  # fmt: skip
    elif not all(agree(end, ends[0], DIGITS) for end in ends):
        likely, otherwise = (), (
            "the processes end with different networks: does each of them call the model that prepare returns, and take "
            "every step?"
        )  # fmt: skip
    yield Claim(f"the parameters after {checked}, compared with one process on the joined samples of each update",
                ends[rank], descended(right_updates(case, n)), otherwise, likely, DIGITS)  # fmt: skip


# ---- what an update is: a list of (samples, factor of the mean of their losses) ----


def right_updates(case, n):
    samples, batch_size, every, epochs = case
    joined = n * batch_size * every
    epoch = [range(begin, min(begin + joined, samples)) for begin in range(0, samples, joined)]
    return [[(part, 1)] for part in epoch] * epochs


def after(data, seed, rate, updates, scale=1):
    """The parameters of one process after SGD on these updates, one vector."""
    network = RecordingNetwork(seed)
    for update in updates:
        step = sum(factor * gradient(network, data, numbers) for numbers, factor in update)
        parameters = parameters_to_vector(network.parameters()).detach()
        vector_to_parameters(parameters - rate * scale * step, network.parameters())
    return parameters_to_vector(network.parameters()).detach()


def windows(trained, every, epochs):
    """For each update, the batches of all processes. trained: for each process, the samples
    of each of its batches.
    """
    found = []
    for batches in trained:
        length = len(batches) // epochs
        epoch = [batches[first : first + length] for first in range(0, len(batches), max(length, 1))]
        found.append([part[first : first + every] for part in epoch for first in range(0, len(part), every)])
    every_window = ([batch for batches in window for batch in batches if batch] for window in zip(*found))
    return [window for window in every_window if window]


# ---- mistakes ----


def mistakes(case, trained, descended):
    """Pairs of the parameters to which a mistake leads, and its cause. descended: what they
    are after some updates.
    """
    n, (*_, every, epochs) = len(trained), case
    right = right_updates(case, n)
    groups, singly = windows(trained, every, epochs), windows(trained, 1, epochs)
    longest = max(len(numbers) for [(numbers, _)] in right)
    whole = [update for update in right if len(update[0][0]) == longest]
    in_batches = [[(batch, 1 / (every * n)) for batch in window] for window in groups]
    sums = [[[(numbers, len(numbers) * part) for numbers, _ in update] for update in right] for part in (1, 1 / n)]
    return [
        (descended(right), "some digits are lost: keep float64 for the network and its gradients"),
        (descended([]), "the network has not changed: does the optimizer step, and does it have these parameters?"),
        (descended(right, 1 / n), "every step is too short by the number of processes: DDP takes the mean over them, so "
         "multiply the loss by num_processes"),
        (descended(right, n), "every step is too long by the number of processes: multiply by num_processes once only"),
        (descended(whole), "the short last update of an epoch is missing"),
        (descended(map(by_size, groups)), "samples that prepare repeats at the end of an epoch are counted, too: each "
         "sample of an update counts once"),
        (descended(in_batches), f"the short last update of an epoch is divided by {every} batches, as if it were a whole "
         "one: accelerator.backward divides by gradient_accumulation_steps, so divide by the samples that there are"),
        (descended(means_of_own(case, n)), "each process divides by its own number of samples: add up the numbers of all "
         "processes, and multiply by num_processes, because DDP takes the mean"),
        (descended(map(by_size, singly)), "each batch makes its own update, instead of `every` together"),
        *[(descended(each), "the sum of the losses is not divided by the number of samples") for each in sums],
    ]  # fmt: skip


def by_size(window):
    """An update in which each batch counts by its samples, repeated or not."""
    total = sum(map(len, window))
    return [(batch, len(batch) / total) for batch in window]


def means_of_own(case, n):
    """Each process divides by its own samples, without the repeated ones."""
    batch_size, found = case[1], []
    for [(numbers, _)] in right_updates(case, n):
        batches = [numbers[first : first + batch_size] for first in range(0, len(numbers), batch_size)]
        shares = [sum(map(list, batches[process::n]), []) for process in range(n)]
        found.append([(share, 1 / n) for share in shares if share])
    return found
