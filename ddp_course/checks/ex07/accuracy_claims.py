"""What question 3 claims of a metric that two or three processes have counted."""

import math

from ddp_course.checks.claims import Between, Claim, agree
from ddp_course.checks.ex07.accuracy_cases import comes_in_training, guesses_of, half_known
from ddp_course.checks.ex07.networks import inputs_unchanged
from ddp_course.checks.samples import two_numbers

MOST_CALLS, MOST_BYTES = 2, 64  # of collectives: how many, and each per process
ANY = Between(-math.inf)
MODES = ("evaluation mode", "training mode")

# ---- the network, and all that belongs to the caller ----

KEPT = [  # what is observed, of what, how it should be, how it is, and the cause
    ("off", "torch.is_grad_enabled()", True, False, "gradients are off for the rest of the program, so nothing can be "
     "trained: with torch.no_grad() switches them on again at its end, torch.set_grad_enabled(False) does not"),
    ("frozen", "requires_grad of the parameters", True, False, "the network can no longer be trained: with torch.no_grad() "
     "records nothing and leaves the parameters alone, requires_grad_(False) does not"),
    ("unfrozen", "requires_grad of the parameters", "as before", "True for a frozen parameter", "one parameter was frozen "
     "before, and now it is trained: with torch.no_grad() leaves requires_grad as it is"),
    ("other gradients", "the gradients", "as before", "other gradients", "the caller may be between two backward passes of "
     "one update, and needs the gradients of the first: leave .grad alone"),
    ("other numbers", "the parameters and buffers", "as before", "other numbers", "to evaluate a network must not change "
     "its parameters or the statistics of BatchNorm"),
]  # fmt: skip
SETTINGS = "the accelerator belongs to the caller, whose training continues with its settings: leave them as they are"
UNEVEN = (
    "the accelerator belongs to the caller: with even_batches off, the next loader that it prepares for training gives the "
    "processes different numbers of batches, and they wait for each other"
)  # fmt: skip


def surroundings(checked, place, rank, of_ranks):
    """Claims that all that the answer was given is used as it is, and is as before."""
    seen, mode = of_ranks[rank], comes_in_training(place)
    training, gradient = (any(entry[name] for entry in seen["record"]) for name in ("training", "gradient"))
    yield Claim(f"the network in {checked}", training, False, "in training mode, Dropout removes values at random, and "
                "BatchNorm uses the other samples of the batch: network.eval() first", told=MODES[0],
                shown=MODES[1])  # fmt: skip
    yield Claim(f"the network's outputs in {checked}", gradient, False, "this does not train, so autograd need not record "
                "anything: use with torch.no_grad()", told="outputs without gradients",
                shown="outputs that require gradients")  # fmt: skip
    otherwise = "training would continue without Dropout: restore the mode of the network"
    if not mode:
        otherwise = "it was in evaluation mode before: store network.training first, and pass it to train()"
    yield Claim(f"the network after {checked}", seen["modes"], [mode], otherwise, told=MODES[mode],
                shown=" and ".join(MODES[one] for one in seen["modes"]))  # fmt: skip
    yield Claim(f"the collectives in {checked}", seen["wrapped"], False, "prepare wraps the network in "
                "DistributedDataParallel, whose constructor sends all parameters. This only evaluates: call the network "
                "that you were given, without prepare", told=f"at most {MOST_CALLS}, of counts",
                shown=f"{len(seen['sent'])}, and one of them broadcasts the parameters")  # fmt: skip
    yield from inputs_unchanged(checked, seen["changed"])
    for name, of, told, shown, cause in KEPT:
        yield Claim(f"{of} after {checked}", seen[name], False, cause, told=told, shown=shown)
    before, after = seen["settings"]
    for name, value in before.items():
        cause = UNEVEN if name == "even_batches" else SETTINGS
        yield Claim(f"accelerator's {name} after {checked}", after.get(name), value, cause)


# ---- the two numbers ----


def totals(checked, size, batch_size, seed, rank, of_ranks):
    """The claim that a process returns the number of right samples, and of all."""
    n = len(of_ranks)
    data = half_known(size, seed, n * batch_size)
    right = guesses_of(data, seed) == data.labels
    truth = [float(right.sum()), float(size)]
    returned = [of_rank["returned"] for of_rank in of_ranks]
    first, got = (as_list(returned[place]) for place in (0, rank))
    likely = mistakes(right, samples_of(of_ranks[rank], size), n, batch_size)
    if rank > 0 and agree(first, truth, 7):
        likely = [(got, "only process 0 has the numbers: every process must return them")]
    yield Claim(checked, got, truth, "do you compare the argmax of each sample with its own label, and count it once?",
                likely, 7, told=f"({truth[0]:.0f}, {size}) on every process",
                shown=", ".join(f"{pair} on rank {place}" for place, pair in enumerate(returned)))  # fmt: skip


def as_list(returned):
    pair = two_numbers(returned)
    return None if pair is None else pair.tolist()


def samples_of(seen, size):
    """The samples that went through the network of a process, unless it was given others."""
    return [number for entry in seen["record"] for number in entry["samples"] if number in range(size)]


def mistakes(right, mine, n, batch_size):
    """Pairs of what a process returns, and the cause. right: which predictions are correct;
    mine: the samples that went through this process.
    """
    size, correct = len(right), int(right.sum())
    filled = math.ceil(size / (n * batch_size)) * n * batch_size  # with the repeated samples, which are all right
    with_repeated = correct + filled - size

    def about(first, second):
        return [Between(first - 0.99, first + 0.99), float(second)]

    own = [float(right[mine].sum()), float(len(mine))] if len(mine) < size else "all samples"
    twice = "summed twice: after gather_for_metrics each process already has the results of all"
    if len(mine) >= size:
        twice = "every process went through all samples, and then they were added up: give each process its own share"
    means = [part.double().mean().item() for part in right.split(n * batch_size)]
    return [
        (None, "return two numbers, on every process: the correct predictions and the samples"),
        (own, "each process counts only its own samples: add up the counts of all processes"),
        (about(size, correct), "the two numbers are swapped: first the correct predictions, then the samples"),
        (about(n * correct, n * size), twice),
        *[(about(with_repeated, counted), "samples that prepare repeats, to fill the last batches, are counted twice: a "
           "loader that is not prepared repeats none, and here no process has to wait for another")
          for counted in (filled, size)],
        (about(with_repeated / n, filled / n), "the counts are averaged over the processes: sum them"),
        ([ANY, Between(size + 0.001)], "more samples are counted than there are: the processes need not get equally many "
         "here, so none has to be repeated"),
        ([ANY, Between(-math.inf, size - 0.001)], "samples are left out: include the last batch, which need not be full"),
        ([Between(1e-9, 1.0), ANY], "this is an accuracy; return the number of correct predictions, an integer"),
        *[(about(size * accuracy, size), "it comes from a mean of accuracies, in which the few samples of a last batch "
           "count as much as those of a full batch, or repeated samples count: sum the correct predictions")
          for accuracy in (sum(means) / len(means), with_repeated / filled)],
    ]  # fmt: skip


# ---- the work ----


def work(checked, size, batch_size, rank, of_ranks):
    """Claims that a process has only its share of the samples, in small batches."""
    n, batches = len(of_ranks), batches_of(of_ranks[rank])
    if size > 4 * n * batch_size:
        yield Claim(f"the number of samples that go through the network in {checked}", sum(batches), Between(0, 0.8 * size),
                    "the numbers are right, but one process does all the work: give each process its own share",
                    told=f"about {size // n}")  # fmt: skip
    yield Claim(f"the largest batch in {checked}", max(batches, default=0), Between(0, batch_size), "a process cannot keep "
                "more samples in memory: it takes its share in batches of batch_size",
                told=f"at most {batch_size}")  # fmt: skip


def messages(checked, rank, of_ranks):
    """Claims that the processes communicate at the end only, and little."""
    sent, most = of_ranks[rank]["sent"], MOST_BYTES * len(of_ranks)
    otherwise = (
        "the numbers are right, but the processes communicate for every batch, as gather_for_metrics does: count in the "
        "loop, and add up the counts of all processes after it"
    )
    if len(sent) < max(len(batches_of(seen)) for seen in of_ranks):
        otherwise = "the numbers are right, but two counts can be added up in one collective, or in two"
    yield Claim(f"the number of collectives in {checked}", len(sent), Between(0, MOST_CALLS), otherwise,
                told=f"at most {MOST_CALLS}")  # fmt: skip
    yield Claim(f"the bytes of the largest collective in {checked}, of all processes together", max(sent, default=0),
                Between(0, most), "the numbers are right, but what is sent grows with the number of samples: send counts, "
                "not guesses", told=f"at most {most}")  # fmt: skip


def batches_of(seen):
    """The sizes of a process's batches."""
    return [len(entry["samples"]) for entry in seen["record"]]
