"""Question 3: an exact metric, for which the processes communicate once."""

import math

import torch

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import hold
from ddp_course.checks.ex07.networks import PRELOADED, changed, inputs_unchanged
from ddp_course.checks.ported import RECORD, RecordingNetwork
from ddp_course.checks.samples import CLASSES, Numbered, same_as, two_numbers
from ddp_course.checks.training import equal, state
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.launch import start_server

MOST_CALLS, MOST_BYTES = 2, 64  # of collectives: how many, and each per process


def metrics(accuracy, sizes, batch_size, seed):
    """Count on data sets of these sizes; return for each the result, and what the
    network saw and how it changed.
    """
    from accelerate import Accelerator

    accelerator, seen = Accelerator(cpu=True), []
    accelerator.wait_for_everyone()
    before = settings(accelerator)
    for place, size in enumerate(sizes):
        data = half_known(size, seed, batch_size * accelerator.num_processes)
        network = in_training(seed)
        network.train(comes_in_training(place))
        RECORD.clear()
        with trying(f"{size} samples"), CheckedWatch() as watch:
            returned = accuracy(accelerator, network, data.inputs, data.labels, batch_size)
        modes = {module.training for module in network.modules()}
        seen.append(
            {"returned": returned, "modes": sorted(modes), "record": list(RECORD)}
            | {"sent": [entry["whole"] for entry in watch.log]}
            | {"wrapped": any(is_start_of_ddp(entry, network) for entry in watch.log)}
            | left_behind(data, network, size, seed, batch_size)
            | {"settings": [before, settings(accelerator)]}
        )
        if seen[-1]["wrapped"]:
            break  # DDP may wait for a process that has no sample
    accelerator.end_training()
    return seen


def in_training(seed):
    """The network in the middle of training: it has gradients, and one of its
    parameters is frozen.
    """
    network = RecordingNetwork(seed, mixing=True)
    network.layers[0].bias.requires_grad_(False)
    for number, parameter in enumerate(network.parameters()):
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, number + 0.5)
    return network


def settings(accelerator):
    """What the caller may have chosen, {name: value in words}."""
    chosen = dict(vars(accelerator.dataloader_config))
    for name in ("gradient_accumulation_steps", "device_placement", "step_scheduler_with_optimizer"):
        chosen[name] = getattr(accelerator, name)
    return {name: str(value) for name, value in chosen.items()}


def is_start_of_ddp(entry, network):
    """Whether all parameters were broadcast, as DDP does when it is constructed."""
    size = sum(parameter.nbytes for parameter in network.parameters())
    return entry["name"] == "broadcast" and entry["bytes"] >= size


def left_behind(data, network, size, seed, batch_size):
    """What is no longer as it was before the call. Gradients are recorded again."""
    from accelerate import PartialState

    joined = batch_size * PartialState().num_processes
    before = in_training(seed)
    pairs = list(zip(network.parameters(), before.parameters()))
    seen = {
        "records": torch.is_grad_enabled(),
        "changed": changed(data, half_known(size, seed, joined)),
        "same": equal(state(network), state(before)),
        "frozen": any(was.requires_grad > now.requires_grad for now, was in pairs),
        "unfrozen": any(was.requires_grad < now.requires_grad for now, was in pairs),
        "gradients": all(
            now.grad is not None and torch.equal(now.grad, was.grad) for now, was in pairs if was.grad is not None
        ),
    }
    torch.set_grad_enabled(True)
    return seen


def comes_in_training(place):
    return place % 2 == 0


def half_known(size, seed, joined):
    """Samples for which the network is right on the first `joined` ones, which may be
    repeated, and on half of the others, but not on the last.
    """
    data, generator = Numbered(size, seed + size), torch.Generator().manual_seed(seed)
    guesses = guesses_of(data, seed)
    data.labels = guesses.clone()
    if size > joined:
        others = joined + torch.randperm(size - joined, generator=generator)
        unknown = [*others[: math.ceil(len(others) / 2)].tolist(), size - 1]
        data.labels[unknown] = (guesses[unknown] + 1) % CLASSES
    return data


@torch.no_grad()
def guesses_of(data, seed):
    return RecordingNetwork(seed, mixing=True).eval().layers(data.inputs[:, 1:]).argmax(dim=1)


@question(
    "What makes it necessary in training that all processes get equally many batches? Is it necessary here, too? A loader "
    "that is not prepared repeats nothing.",
    "Give each process its own part of the samples: torch.utils.data.Subset, slices, or "
    "accelerator.split_between_processes. Count in the loop, without communication, and add up the two numbers of all "
    "processes after it. Before the loop, store network.training, call network.eval(), and use torch.no_grad().",
    "mine = range(accelerator.process_index, len(samples), accelerator.num_processes); loader = "
    "DataLoader(Subset(TensorDataset(samples, labels), mine), batch_size). In the loop, counts += "
    "torch.tensor([right, len(targets)]), from torch.zeros(2, dtype=torch.long). At the end, call network.train(mode), "
    "where mode is the stored network.training, and return accelerator.reduce(counts, 'sum').tolist().",
)
def check_accuracy(answer, draw):
    """Every process must return the exact number of correct predictions and of samples,
    after hardly any communication, and leave the network unchanged.
    """
    start_server(*PRELOADED)  # where none runs yet
    for n in (2, 3):
        batch_size, seed = draw.randint(5, 7), draw.randrange(10**6)
        joined = n * batch_size
        # In the first case, one process of a prepared loader fills up a batch and others
        # repeat whole batches.
        sizes = [4 * joined + draw.randint(n + 1, batch_size - 1), 2 * joined + 1, 2 * joined, 1]
        seen = answer.on_ranks(metrics, sizes, batch_size, seed, nproc=n, timeout=20)
        for place, size in enumerate(sizes):
            of_ranks = [of_rank[place] for of_rank in seen]
            judge_metric(place, size, batch_size, seed, of_ranks)
        for place, size in enumerate(sizes):
            judge_work(size, batch_size, [of_rank[place] for of_rank in seen])


def judge_metric(place, size, batch_size, seed, of_ranks):
    n = len(of_ranks)
    checked = f"accuracy with {size} sample{'s' * (size > 1)}, batch_size={batch_size}, {n} processes"
    mode, other = "training mode", "evaluation mode"
    if not comes_in_training(place):
        mode, other = other, mode
    for rank, of_rank in enumerate(of_ranks):
        where = f"{rank} of {n}"
        if any(entry["training"] for entry in of_rank["record"]):
            cause = "in training mode, Dropout removes values at random, and BatchNorm uses the other "
            cause += "samples of the batch: network.eval() first"
            raise Wrong(f"the network in {checked}", rank=where, expected="evaluation mode",
                        got="training mode", cause=cause)  # fmt: skip
        if any(entry["gradient"] for entry in of_rank["record"]):
            cause = "this does not train, so autograd need not record anything: use with torch.no_grad()"
            raise Wrong(f"the network's outputs in {checked}", rank=where, expected="outputs without gradients",
                        got="outputs that require gradients", cause=cause)  # fmt: skip
        if of_rank["modes"] != [comes_in_training(place)]:
            cause = "it was in evaluation mode before: store network.training first, and pass it to train()"
            if comes_in_training(place):
                cause = "training would continue without Dropout: restore the mode of the network"
            raise Wrong(f"the network after {checked}", rank=where, expected=mode, got=other,
                        cause=cause)  # fmt: skip
        judge_surroundings(checked, of_rank, where)

    data = half_known(size, seed, n * batch_size)
    right = guesses_of(data, seed) == data.labels
    truth = torch.tensor([int(right.sum()), size])
    totals = [two_numbers(of_rank["returned"]) for of_rank in of_ranks]
    wrong = [rank for rank, pair in enumerate(totals) if pair is None or (pair - truth).abs().max() > 1e-6]
    seen = [[number for entry in of_rank["record"] for number in entry["samples"]] for of_rank in of_ranks]
    if wrong:
        got = ", ".join(f"{of_rank['returned']} on rank {rank}" for rank, of_rank in enumerate(of_ranks))
        raise Wrong(checked, rank=f"{wrong[0]} of {n}", expected=f"({truth[0]}, {size}) on every process",
                    got=got, cause=cause_of_totals(totals, wrong, right, seen, batch_size))  # fmt: skip


def judge_work(size, batch_size, of_ranks):
    """Raise Wrong unless the processes have shared the work, with little communication."""
    n = len(of_ranks)
    checked = f"accuracy with {size} sample{'s' * (size > 1)}, batch_size={batch_size}, {n} processes"
    batches = [[len(entry["samples"]) for entry in of_rank["record"]] for of_rank in of_ranks]
    rank = max(range(n), key=lambda rank: sum(batches[rank]))
    if size > 4 * n * batch_size and sum(batches[rank]) > 0.8 * size:
        cause = "the numbers are right, but one process does all the work: give each process its own share"
        raise Wrong(f"the number of samples that go through the network in {checked}", rank=f"{rank} of {n}",
                    expected=f"about {size // n}", got=sum(batches[rank]), cause=cause)  # fmt: skip
    largest = [max(of_rank, default=0) for of_rank in batches]
    if max(largest) > batch_size:
        rank = largest.index(max(largest))
        cause = "a process cannot keep more samples in memory: it takes its share in batches of batch_size"
        raise Wrong(f"the largest batch in {checked}", rank=f"{rank} of {n}",
                    expected=f"at most {batch_size}", got=max(largest), cause=cause)  # fmt: skip
    for rank, of_rank in enumerate(of_ranks):
        sent, where = of_rank["sent"], f"{rank} of {n}"
        if len(sent) > MOST_CALLS:
            cause = "the numbers are right, but the processes communicate for every batch, as gather_for_metrics does: "
            cause += "count in the loop, and add up the counts of all processes after it"
            if len(sent) < max(map(len, batches)):
                cause = "the numbers are right, but two counts can be added up in one collective, or in two"
            raise Wrong(f"the number of collectives in {checked}", rank=where, expected=f"at most {MOST_CALLS}",
                        got=len(sent), cause=cause)  # fmt: skip
        if max(sent, default=0) > MOST_BYTES * n:
            cause = "the numbers are right, but what is sent grows with the number of samples: send counts, not guesses"
            raise Wrong(f"the bytes of the largest collective in {checked}, of all processes together", rank=where,
                        expected=f"at most {MOST_BYTES * n}", got=max(sent), cause=cause)  # fmt: skip


def judge_surroundings(checked, of_rank, where):
    """Raise Wrong unless everything that the answer was given is as before, and was
    used as it is.
    """
    if of_rank["wrapped"]:
        cause = "prepare wraps the network in DistributedDataParallel, whose constructor sends all parameters. "
        cause += "This only evaluates: call the network that you were given, without prepare"
        raise Wrong(f"the collectives in {checked}", rank=where, expected=f"at most {MOST_CALLS}, of counts",
                    got=f"{len(of_rank['sent'])}, and one of them broadcasts the parameters", cause=cause)  # fmt: skip
    hold(inputs_unchanged(checked, of_rank["changed"]), where)
    if not of_rank["records"]:
        cause = "gradients are off for the rest of the program, so nothing can be trained: with torch.no_grad() "
        cause += "switches them on again at its end, torch.set_grad_enabled(False) does not"
        raise Wrong(f"torch.is_grad_enabled() after {checked}", rank=where, expected=True, got=False,
                    cause=cause)  # fmt: skip
    if of_rank["frozen"]:
        cause = "the network can no longer be trained: with torch.no_grad() records nothing and leaves the "
        cause += "parameters alone, requires_grad_(False) does not"
        raise Wrong(f"requires_grad of the parameters after {checked}", rank=where, expected=True, got=False,
                    cause=cause)  # fmt: skip
    if of_rank["unfrozen"]:
        cause = "one parameter was frozen before, and now it is trained: with torch.no_grad() leaves requires_grad as "
        cause += "it is"
        raise Wrong(f"requires_grad of the parameters after {checked}", rank=where, expected="as before",
                    got="True for a frozen parameter", cause=cause)  # fmt: skip
    if not of_rank["gradients"]:
        cause = "the caller may be between two backward passes of one update, and needs the gradients of the first: "
        cause += "leave .grad alone"
        raise Wrong(f"the gradients after {checked}", rank=where, expected="as before", got="other gradients",
                    cause=cause)  # fmt: skip
    before, after = of_rank["settings"]
    for name, value in before.items():
        if after.get(name) == value:
            continue
        cause = (
            "the accelerator belongs to the caller, whose training continues with its settings: leave them as they are"
        )
        if name == "even_batches":
            cause = "the accelerator belongs to the caller: with even_batches off, the next loader that it prepares "
            cause += "for training gives the processes different numbers of batches, and they wait for each other"
        raise Wrong(f"accelerator's {name} after {checked}", rank=where, expected=value, got=after.get(name),
                    cause=cause)  # fmt: skip
    if not of_rank["same"]:
        cause = "to evaluate a network must not change its parameters or the statistics of BatchNorm"
        raise Wrong(f"the parameters and buffers after {checked}", rank=where, expected="as before",
                    got="other numbers", cause=cause)  # fmt: skip


def cause_of_totals(totals, wrong, right, seen, batch_size):
    """The likely cause of wrong totals. right: which predictions are correct; seen: the
    samples that went through each process.
    """
    n, size, correct = len(seen), len(right), int(right.sum())
    if 0 not in wrong:
        return "only process 0 has the numbers: every process must return them"
    if any(total is None for total in totals):
        return "return two numbers, on every process: the correct predictions and the samples"
    filled = math.ceil(size / (n * batch_size)) * n * batch_size  # with the repeated samples, which are all right

    def all_are(first, second):
        return all(abs(pair[0] - first) < 1 and same_as(second)(pair[1]) for pair in totals)

    own = [torch.tensor([int(right[share].sum()), len(share)]) for share in seen]
    if len(seen[0]) < size and all((pair - mine).abs().max() < 1e-6 for pair, mine in zip(totals, own)):
        return "each process counts only its own samples: add up the counts of all processes"
    if all_are(size, correct):
        return "the two numbers are swapped: first the correct predictions, then the samples"
    if all_are(n * correct, n * size) and len(seen[0]) >= size:
        return "every process went through all samples, and then they were added up: give each process its own share"
    if all_are(n * correct, n * size):
        return "summed twice: after gather_for_metrics each process already has the results of all"
    if all_are(correct + filled - size, filled) or all_are(correct + filled - size, size):
        cause = "samples that prepare repeats, to fill the last batches, are counted twice: "
        return cause + "a loader that is not prepared repeats none, and here no process has to wait for another"
    if all_are((correct + filled - size) / n, filled / n):
        return "the counts are averaged over the processes: sum them"
    if all(pair[1] > size for pair in totals):
        cause = "more samples are counted than there are: the processes need not get equally many here, so none has "
        return cause + "to be repeated"
    if all(pair[1] < size for pair in totals):
        return "samples are left out: include the last batch, which need not be full"
    if all(0 < pair[0] <= 1 for pair in totals):
        return "this is an accuracy; return the number of correct predictions, an integer"
    means = [part.double().mean() for part in right.split(n * batch_size)]
    accuracies = [sum(means) / len(means), (correct + filled - size) / filled]
    if any(all_are(size * accuracy, size) for accuracy in accuracies):
        cause = "it comes from a mean of accuracies, in which the few samples of a last batch count as much as "
        return cause + "those of a full batch, or repeated samples count: sum the correct predictions"
    return "do you compare the argmax of each sample with its own label, and count it once?"
