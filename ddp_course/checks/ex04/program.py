"""Question 4: a program of the learner's own, started by torchrun."""

import math
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DistributedSampler

from ddp_course.checks.claims import Claim, hold, on_every_rank
from ddp_course.checks.ex04 import watched
from ddp_course.checks.ex04.by_torchrun import a_run
from ddp_course.judge.question import question

FEATURES, CLASSES, LEARNING_RATE = 8, 3, 0.1
DIGITS_OF_LOSSES = 4  # those who add them in 32 bits are right, too


def make_network():
    """The one that the program trains."""
    layers = nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES)
    return nn.Sequential(*layers).double()


def draw_files(samples, seed):
    """What is in samples.pt and start.pt: (inputs, labels), and parameters."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, FEATURES, generator=generator).double()
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    start = {
        name: torch.randn(tensor.shape, generator=generator).double() / 3
        for name, tensor in make_network().state_dict().items()
    }
    return (inputs, labels), start


def orders(samples, epochs):
    """DistributedSampler's order of each epoch, that of all ranks together."""
    sampler = DistributedSampler(range(samples), num_replicas=1, rank=0)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        yield list(sampler)


def steps_of(orders, batch_size):
    """The samples of each step."""
    return [order[begin : begin + batch_size] for order in orders for begin in range(0, len(order), batch_size)]


def trained(data, start, steps, learning_rate=LEARNING_RATE, every=1):
    """What one process ends with that takes these steps: its parameters, and the loss of
    every n-th sample in each step.
    """
    network, losses = make_network(), []
    network.load_state_dict(start)
    inputs, labels = data
    for numbers in steps:
        own = numbers[::every]
        losses.append(F.cross_entropy(network(inputs[own]), labels[own]).item())
        network.zero_grad()
        F.cross_entropy(network(inputs[numbers]), labels[numbers]).backward()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter -= learning_rate * parameter.grad
    return flat(network.state_dict()), torch.tensor(losses, dtype=torch.double)


def flat(parameters):
    """All numbers of a state_dict, one vector."""
    return torch.cat([torch.as_tensor(p, dtype=torch.double).flatten() for p in parameters.values()])


@question(
    "Start with the table of eight edits in the lesson: which of them does this program need? Then run it yourself with "
    "one rank, two and three. Which numbers of the result change, though they should not?",
    "The batch is that of all ranks: which part of it does each rank take? Each rank knows the loss of its own part "
    "only. And the names of the parameters in the file are those of the network without the wrapper.",
    'dist.init_process_group("gloo"); sampler = DistributedSampler(train_set); DataLoader(train_set, batch_size // '
    "dist.get_world_size(), sampler=sampler); wrap the model; sampler.set_epoch(epoch); average the losses with "
    "dist.all_reduce; write model.module.state_dict() and print if dist.get_rank() == 0; "
    "dist.destroy_process_group().",
)
def check_program(answer, draw):
    """torchrun starts it on two ranks and on three; the result must be that of one
    process.
    """
    watching = Path(watched.__file__).read_text()
    for n in (2, 3):
        epochs, batch_size = 5 - n, 6 * draw.randint(1, 2)
        samples = batch_size * draw.randint(4, 6)
        data, start = draw_files(samples, draw.randrange(10**6))
        files = {"samples.pt": data, "start.pt": start}
        arguments = [str(epochs), str(batch_size)]
        [seen] = answer.on_ranks(a_run, watching, files, n, arguments, timeout=30)
        checked = f"torchrun --nproc_per_node {n} program.py {epochs} {batch_size}"
        hold(ends(checked, seen["error"]))
        on_every_rank(partial(manners, checked), list(zip(seen["notes"], seen["printed"])))
        hold(like_one_process(checked, n, data, start, epochs, batch_size, seen["result"]))


KNOWN_ERRORS = {
    "program is no text": "program is the text of a Python program, between quotes",
    "digits.pt": "this program reads digits.pt, the data of the lesson's script: here the samples are in samples.pt",
    "unrecognized arguments": "the lesson's program has flags of its own: yours is given two numbers",
    "invalid choice": "the lesson's program has flags of its own: yours is given two numbers",
    "has not been initialized": "a program that torchrun starts has to join the process group itself: "
    "dist.init_process_group",
    "sampler option is mutually exclusive": "a DataLoader has either a sampler or shuffle=True: the sampler shuffles",
    "closed by peer": "another rank has left, or is in another call, while this one waited for it: do all ranks call the "
    "same collectives?",
}


# ---- what is claimed ----


def ends(checked, error):
    causes = (cause for text, cause in reversed(KNOWN_ERRORS.items()) if text in error)
    otherwise = "the program has ended with an error on one rank, and torchrun has stopped the others"
    yield Claim(checked, error, "", next(causes, otherwise), told="no error")


def manners(checked, rank, of_ranks):
    """Only rank 0 writes and prints, and all ranks leave the group."""
    notes, printed = of_ranks[rank]
    yield Claim(f"the files that each rank writes in {checked}", sorted(set(notes["wrote"])) if rank else [], [],
                "all ranks run the whole program, and all write the same file at the same time: let rank 0 do it",
                told="none", shown=", ".join(sorted(set(notes["wrote"]))))  # fmt: skip
    yield Claim(f"what each rank prints in {checked}", bool(printed), rank == 0, "only rank 0 prints",
                told="nothing" if rank else "one line or more", shown=printed[0] if printed else "nothing")  # fmt: skip
    yield Claim(f"the process group at the end of {checked}", notes["stayed"], False, "dist.destroy_process_group() is "
                "missing", told="the rank has left it", shown="the rank is still in it")  # fmt: skip


def like_one_process(checked, n, data, start, epochs, batch_size, result):
    where, as_given = f"result.json after {checked}", "rank 0 writes the file as the given program does"
    parts = [type(result.get(name)) for name in ("parameters", "losses")] if isinstance(result, dict) else None
    yield Claim(where, parts == [dict, list], True, as_given, told="a dict with parameters and losses",
                shown="no such file, or no JSON" if result is None else f"{str(result)[:60]}")  # fmt: skip
    names = list(result["parameters"])
    yield Claim(f"the names in {where}", names, list(start), "the file holds the parameters of the network, by name, as "
                "the given program writes them", [
                    ([f"module.{name}" for name in start], "these are the names in the wrapper: save the state of the "
                     "network inside, model.module"),
                ], told=", ".join(start), shown=", ".join(names))  # fmt: skip
    parameters, losses = numbers_in(result)
    yield Claim(where, None if parameters is None else len(parameters), len(flat(start)), as_given, told="lists of numbers",
                shown=f"{str(result)[:60]} ...")  # fmt: skip

    samples = len(data[1])
    steps, share = epochs * samples // batch_size, samples // n
    yield Claim(f"how many losses there are after {checked}, with {samples} samples", len(losses), steps,
                "there is one loss per step, that of the batch of all ranks", [
                    (epochs * math.ceil(share / batch_size), "batch_size is that of all ranks together: each rank takes its "
                     "n-th part of it in each step"),
                    (steps * n, "every rank goes through all samples, in parts of a batch: let a sampler divide them"),
                    (steps // epochs, "the losses of all epochs belong in the file"),
                ])  # fmt: skip
    right = list(orders(samples, epochs))
    ended, truth = trained(data, start, steps_of(right, batch_size))
    yield Claim(f"the parameters after {checked}, compared with one process", parameters, ended, "does DistributedSampler, "
                "with its own seed, divide the samples; does the sampler know the epoch; do all ranks start from start.pt; "
                "and does the loop call the wrapped model?", partial(mistakes, n, data, start, batch_size, right),
                digits=8)  # fmt: skip
    _, of_rank_0 = trained(data, start, steps_of(right, batch_size), every=n)
    yield Claim(f"the losses after {checked}, compared with one process", losses, truth, "the loss of a step is the mean "
                "over the batch of all ranks", [
                    (of_rank_0, "these are the losses of rank 0's own samples: average the losses over the ranks"),
                    (n * truth, "this is the sum over the ranks: divide by their number"),
                    (truth / n, "divided by the number of ranks once too often"),
                ], DIGITS_OF_LOSSES)  # fmt: skip


def numbers_in(result):
    """The parameters and the losses in result.json, two vectors, or None and None."""
    try:
        return flat(result["parameters"]), torch.tensor([float(loss) for loss in result["losses"]], dtype=torch.double)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None, None


def mistakes(n, data, start, batch_size, right):
    """Of the orders of the epochs, or of the steps: the parameters at the end, and the cause."""
    epochs, samples = len(right), len(data[1])
    every, own = steps_of(right, batch_size), [order[0::n] for order in right]
    found = [
        (steps_of([right[0]] * epochs, batch_size), 1, "every epoch has the same order: tell the sampler which epoch it is"),
        (steps_of([right[0], *right[:-1]], batch_size), 1, "each epoch has the order of the one before: tell the sampler "
         "which epoch it is before the loop over its samples begins"),
        (steps_of(own, batch_size // n), 1, "this is what rank 0 ends with if it trains on its own share alone: is the "
         "wrapped model called, and has each rank another share?"),
        (steps_of([range(samples)] * epochs, batch_size), 1, "nothing is shuffled: the samples come in the order of the "
         "data set"),
        (every, n, "every step is too long by a factor of the number of ranks: leave the learning rate as it is, and do not "
         "sum"),
        (every, 1 / n, "every step is too short by a factor of the number of ranks: DDP already averages the gradients"),
        ([], 1, "the parameters are still those of start.pt: has the optimizer the parameters of the model that is "
         "trained?"),
    ]  # fmt: skip
    return [(trained(data, start, steps, LEARNING_RATE * factor)[0], cause) for steps, factor, cause in found]
