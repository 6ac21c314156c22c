"""Question 4: a program of the learner's own, started by torchrun."""

import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DistributedSampler

from ddp_course.checks.ex04 import watched
from ddp_course.checks.ex04.by_torchrun import a_run
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong

FEATURES, CLASSES, LEARNING_RATE = 8, 3, 0.1


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
    return flat(network.state_dict()), losses


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
        judge_ending(checked, n, seen)
        judge_manners(checked, n, seen)
        parameters, losses = result_of(checked, seen["result"], start)
        run = (checked, n, data, start, epochs, batch_size)
        judge_steps(*run, losses)
        judge_parameters(*run, parameters)
        judge_losses(*run, losses)


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


def judge_ending(checked, n, seen):
    if seen["error"]:
        cause = "the program has ended with an error on one rank, and torchrun has stopped the others"
        for text, known in KNOWN_ERRORS.items():
            if text in seen["error"]:
                cause = known
        raise Wrong(checked, expected="no error", got=seen["error"], cause=cause)


def judge_manners(checked, n, seen):
    """Only rank 0 writes and prints, and all ranks leave the group."""
    for rank, (notes, printed) in enumerate(zip(seen["notes"], seen["printed"])):
        where = f"{rank} of {n}"
        if rank and notes["wrote"]:
            raise Wrong(f"the files that each rank writes in {checked}", rank=where, expected="none",
                        got=", ".join(sorted(set(notes["wrote"]))), cause="all ranks run the whole program, and all "
                        "write the same file at the same time: let rank 0 do it")  # fmt: skip
        if (rank > 0) == bool(printed):
            raise Wrong(f"what each rank prints in {checked}", rank=where,
                        expected="nothing" if rank else "one line or more", got=printed[0] if printed else "nothing",
                        cause="only rank 0 prints")  # fmt: skip
        if notes["stayed"]:
            raise Wrong(f"the process group at the end of {checked}", rank=where, expected="the rank has left it",
                        got="the rank is still in it", cause="dist.destroy_process_group() is missing")  # fmt: skip


def result_of(checked, result, start):
    """The parameters, one vector, and the losses in result.json."""
    where = f"result.json after {checked}"
    names = ["parameters", "losses"]
    if not isinstance(result, dict) or not set(names) <= set(result):
        got = "no such file, or no JSON" if result is None else f"{str(result)[:60]}"
        raise Wrong(where, expected=f"a dict with {' and '.join(names)}", got=got,
                    cause="rank 0 writes the file as the given program does")  # fmt: skip
    found, losses = result["parameters"], result["losses"]
    if list(found) != list(start):
        cause = "the file holds the parameters of the network, by name, as the given program writes them"
        if any(name.startswith("module.") for name in found):
            cause = "these are the names in the wrapper: save the state of the network inside, model.module"
        raise Wrong(f"the names in {where}", expected=", ".join(start), got=", ".join(found), cause=cause)  # fmt: skip
    try:
        vector = flat(found)
        losses = [float(loss) for loss in losses]
    except (TypeError, ValueError, RuntimeError):
        vector, losses = torch.zeros(0), []
    if len(vector) != len(flat(start)):
        raise Wrong(where, expected="lists of numbers", got=f"{str(result)[:60]} ...",
                    cause="rank 0 writes the file as the given program does")  # fmt: skip
    return vector, losses


def judge_steps(checked, n, data, start, epochs, batch_size, losses):
    steps = epochs * len(data[1]) // batch_size
    if len(losses) == steps:
        return
    share = len(data[1]) // n
    with_whole_batches = epochs * math.ceil(share / batch_size)
    looks = {
        with_whole_batches: "batch_size is that of all ranks together: each rank takes its n-th part of it in each "
        "step",
        steps * n: "every rank goes through all samples, in parts of a batch: let a sampler divide them",
        steps // epochs: "the losses of all epochs belong in the file",
    }  # fmt: skip
    raise Wrong(f"how many losses there are after {checked}, with {len(data[1])} samples", expected=steps,
                got=len(losses), cause=looks.get(len(losses), "there is one loss per step, that of the batch of all "
                "ranks"))  # fmt: skip


def judge_parameters(checked, n, data, start, epochs, batch_size, got):
    right = list(orders(len(data[1]), epochs))
    truth, _ = trained(data, start, steps_of(right, batch_size))
    if close(got, truth):
        return
    own = [order[0::n] for order in right]
    looks = [
        (steps_of([right[0]] * epochs, batch_size), 1, "every epoch has the same order: tell the sampler which epoch it "
         "is"),
        (steps_of(own, batch_size // n), 1, "this is what rank 0 ends with if it trains on its own share alone: is the "
         "wrapped model called, and has each rank another share?"),
        (steps_of([range(len(data[1]))] * epochs, batch_size), 1, "nothing is shuffled: the samples come in the order of "
         "the data set"),
        (steps_of(right, batch_size), n, "every step is too long by a factor of the number of ranks: leave the learning "
         "rate as it is, and do not sum"),
        (steps_of(right, batch_size), 1 / n, "every step is too short by a factor of the number of ranks: DDP already "
         "averages the gradients"),
        ([], 1, "the parameters are still those of start.pt: has the optimizer the parameters of the model that is "
         "trained?"),
    ]  # fmt: skip
    otherwise = ("does DistributedSampler, with its own seed, divide the samples; does the sampler know the epoch; do all "
                 "ranks start from start.pt; and does the loop call the wrapped model?")  # fmt: skip
    causes = [
        cause for steps, factor, cause in looks if close(got, trained(data, start, steps, LEARNING_RATE * factor)[0])
    ]
    raise Wrong(f"the parameters after {checked}, compared with one process", expected=truth, got=got,
                cause=causes[0] if causes else otherwise)  # fmt: skip


def judge_losses(checked, n, data, start, epochs, batch_size, got):
    steps = steps_of(orders(len(data[1]), epochs), batch_size)
    _, truth = trained(data, start, steps)
    truth, got = torch.tensor(truth), torch.tensor(got)
    if close(got, truth, 1e-4):  # those who add them in 32 bits are right, too
        return
    _, of_rank_0 = trained(data, start, steps, every=n)
    cause = "the loss of a step is the mean over the batch of all ranks"
    if close(got, torch.tensor(of_rank_0), 1e-4):
        cause = "these are the losses of rank 0's own samples: average the losses over the ranks"
    elif close(got, n * truth, 1e-4):
        cause = "this is the sum over the ranks: divide by their number"
    elif close(got, truth / n, 1e-4):
        cause = "divided by the number of ranks once too often"
    [first, *_] = (step for step in range(len(truth)) if not close(got[step], truth[step], 1e-4))
    raise Wrong(f"the loss of step {first + 1} after {checked}, compared with one process",
                expected=truth[first].item(), got=got[first].item(), cause=cause)  # fmt: skip


def close(one, other, tolerance=1e-8):
    return bool(torch.allclose(one.double(), other.double(), tolerance, tolerance))
