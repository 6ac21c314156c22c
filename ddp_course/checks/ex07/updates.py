"""Question 2: updates that count each sample once, also at the end of an epoch."""

import math

import torch
from torch.nn import functional as F

from ddp_course.checks.claims import hold
from ddp_course.checks.ex07.networks import PRELOADED, changed, in_words, inputs_unchanged
from ddp_course.checks.ported import RECORD, RecordingNetwork, never_trained, trained_on
from ddp_course.checks.samples import Numbered
from ddp_course.checks.training import a_look, equal, state, unwrapped
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.launch import start_server


def trainings(train, cases, rate, seed):
    """Train for each case, (samples, batch_size, every, epochs); return the result, and
    which rank saw which samples.
    """
    from accelerate import Accelerator

    seen = []
    for samples, batch_size, every, epochs in cases:
        accelerator = Accelerator(cpu=True)
        # otherwise a rank might leave while another is still connecting to it
        accelerator.wait_for_everyone()
        data, network = Numbered(samples, seed), RecordingNetwork(seed)
        RECORD.clear()
        with trying(f"{samples} samples, batch_size={batch_size}, every={every}"):
            returned = train(accelerator, network, data.inputs, data.labels, batch_size, every, epochs, rate)
        network = unwrapped(returned)
        of_case = {
            "returned": in_words(returned),
            "end": None,
            "trained": trained_on(),
            "changed": changed(data, Numbered(samples, seed)),
            "copied": never_trained(network),
        }
        if isinstance(network, RecordingNetwork):
            of_case |= {"wrapped": network is not returned, "end": state(network)}
        seen.append(of_case)
    accelerator.end_training()
    return seen


@question(
    "Two things go wrong at the end of an epoch. The last update has fewer batches than `every`, and in the last "
    "batches are samples that prepare has taken once more from the beginning. How can you recognize these samples, if "
    "each sample brings its own number along?",
    "Number 3 under `Break it` in the lesson has the frame: the batches of an update, the number of items in them on "
    "all processes, a sum divided by that number. Put torch.arange(len(samples)) into the TensorDataset. Without a "
    "shuffle, batch r of process p begins with sample (r * num_processes + p) * batch_size; where a number is smaller "
    "than its place, the sample is a repeated one. F.cross_entropy leaves out targets of -100.",
    "Per batch: first = (r * num_processes + process_index) * batch_size; own = numbers == first + torch.arange("
    "len(numbers)); targets = targets.where(own, -100). Per update: items = accelerator.reduce(the number of targets "
    "that are not -100); under accelerator.no_sync(model) for all batches but the last, accelerator.backward("
    "F.cross_entropy(model(inputs), targets, reduction='sum') / items * accelerator.num_processes); then step() and "
    "zero_grad().",
)
def check_train(answer, draw):
    """All ranks must end with the parameters of one process that counts each sample of
    an update once.
    """
    start_server(*PRELOADED)  # where none runs yet
    for n in (2, 3):
        rate, seed = draw.uniform(0.1, 0.3), draw.randrange(10**6)
        cases = cut_short(draw, n)
        seen = answer.on_ranks(trainings, cases, rate, seed, nproc=n, timeout=20)
        for place, case in enumerate(cases):
            judge_training([of_rank[place] for of_rank in seen], case, rate, seed)


def cut_short(draw, n):
    """Sizes: nothing is left over; a last update of fewer batches, one of which is not
    full, and whole batches are repeated; the same with two rounds, of which the last
    reaches the second process; two full rounds; fewer samples than processes.
    """
    batch_size, every = draw.randint(3, 5), draw.randint(2, 3)
    joined = n * batch_size
    full = (2 * joined * every, batch_size, every, 1)
    in_last_round = draw.randint(1, batch_size - 1)
    short = ((every + 1) * joined + in_last_round, batch_size, every + 1, 2)
    rounds = every + 2  # in the first update; two are left for the last one
    second = ((rounds + 1) * joined + batch_size + 1, batch_size, rounds, 1)
    full_rounds = ((rounds + 2) * joined, batch_size, rounds, 1)
    return [full, short, second, full_rounds, (n - 1, batch_size, every, 2)]


def judge_training(of_ranks, case, rate, seed):
    n, (samples, batch_size, every, epochs) = len(of_ranks), case
    checked = f"train with {samples} sample{'s' * (samples > 1)}, batch_size={batch_size}, every={every}, "
    checked += f"epochs={epochs}, {n} processes"
    judge_shares(checked, [one["trained"] for one in of_ranks], case)
    for rank, of_rank in enumerate(of_ranks):
        where = f"{rank} of {n}"
        if of_rank["end"] is None or of_rank["wrapped"]:
            cause = "return the trained network, on every process"
            if of_rank["end"] is not None:
                cause = "it is still wrapped by prepare: return accelerator.unwrap_model(model)"
            raise Wrong(f"what comes back from {checked}", rank=where, expected="the network",
                        got=of_rank["returned"], cause=cause)  # fmt: skip
        hold(inputs_unchanged(checked, of_rank["changed"]), where)
    data = Numbered(samples, seed)
    truth = descend(data, seed, rate, right_updates(case, n))
    for rank, of_rank in enumerate(of_ranks):
        if not equal(of_rank["end"], truth):
            raise Wrong(f"the parameters after {checked}, compared with one process on the joined samples of each "
                        "update", rank=f"{rank} of {n}", expected=a_look(truth), got=a_look(of_rank["end"]),
                        cause=cause_of_end(of_ranks, data, case, rate, seed))  # fmt: skip


def judge_shares(checked, trained, case):
    """Raise Wrong unless the processes have shared the samples among them.

    trained: for each process, the samples of each of its batches.
    """
    n, (samples, batch_size, _, epochs) = len(trained), case
    most = epochs * math.ceil(math.ceil(samples / batch_size) / n) * batch_size
    for rank, batches in enumerate(trained):
        count, where = sum(map(len, batches)), f"{rank} of {n}"
        expected = f"at most {most}"
        if count > most:
            cause = "each process has its own share of the samples: prepare the loader, too, and loop over what "
            cause += "prepare returns"
            if count <= 2 * most and len(set(sum(batches, []))) < samples:
                cause = "each sample should go through the network once per epoch, on one process"
            raise Wrong(f"how many samples a process is trained on, in {checked}", rank=where,
                        expected=expected, got=count, cause=cause)  # fmt: skip
        if max(map(len, batches), default=0) > batch_size:
            cause = "batch_size is the batch size per process, and a process takes one batch at a time"
            raise Wrong(f"the largest batch in {checked}", rank=where, expected=f"at most {batch_size}",
                        got=max(map(len, batches)), cause=cause)  # fmt: skip
    if not any(map(len, trained)):
        raise Wrong(f"how many samples the processes are trained on, in {checked}", expected=epochs * samples,
                    got=0, cause="no samples went through the network that should be trained")  # fmt: skip


# ---- what an update is: a list of (samples, weight of each of their losses) ----


def right_updates(case, n):
    samples, batch_size, every, epochs = case
    joined = n * batch_size * every
    epoch = [range(begin, min(begin + joined, samples)) for begin in range(0, samples, joined)]
    return [[(list(part), 1 / len(part))] for part in epoch] * epochs


def windows(trained, every, epochs):
    """For each update, the batches of each process. trained: as in judge_shares."""
    found = []
    for batches in trained:
        length = len(batches) // epochs
        epoch = [batches[first : first + length] for first in range(0, len(batches), max(length, 1))]
        found.append([part[first : first + every] for part in epoch for first in range(0, len(part), every)])
    return list(zip(*found))


def descend(data, seed, rate, updates):
    """The state of one process's network after SGD on these updates."""
    network = RecordingNetwork(seed)
    for update in updates:
        loss = sum(weight * sum_of_losses(network, data, numbers) for numbers, weight in update)
        gradients = torch.autograd.grad(loss, list(network.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(network.parameters(), gradients):
                parameter -= rate * gradient
    return state(network)


def sum_of_losses(network, data, numbers):
    outputs = network.layers(data.inputs[numbers, 1:])
    return F.cross_entropy(outputs, data.labels[numbers], reduction="sum")


# ---- mistakes: the updates that they make of each process's batches ----


def all_batches(window):
    return [batch for batches in window for batch in batches if batch]


def repeats_count(window):
    total = sum(map(len, all_batches(window)))
    return [(batch, 1 / total) for batch in all_batches(window)]


def divided_by(parts):
    """Each batch's mean is one of so many parts of the update's loss."""
    return lambda window: [(batch, 1 / len(batch) / parts) for batch in all_batches(window)]


def means_of_own(case, n):
    """Each process divides by its own samples, without the repeated ones."""
    batch_size, found = case[1], []
    for [(numbers, _)] in right_updates(case, n):
        batches = [numbers[first : first + batch_size] for first in range(0, len(numbers), batch_size)]
        shares = [sum(batches[process::n], []) for process in range(n)]
        found.append([(share, 1 / len(share) / n) for share in shares if share])
    return found


def cause_of_end(of_ranks, data, case, rate, seed):
    """Why the processes have not ended where one process does."""
    got = [of_rank["end"] for of_rank in of_ranks]
    if any(of_rank["copied"] for of_rank in of_ranks):
        return (
            "another network was trained, such as a copy, and not the one that comes back: return the one that the "
            "optimizer changes"
        )
    if equal(got[0], state(RecordingNetwork(seed))):
        return "the network has not changed: does the optimizer step, and does it have these parameters?"
    if any(value.isnan().any() for end in got for value in end.values()):
        return (
            "in the last update of an epoch, a process may have repeated samples only, and its own number is 0, and "
            "0/0 is nan: divide by the number of all processes"
        )
    if not all(equal(other, got[0]) for other in got):
        return (
            "the processes end with different networks: does each of them call the model that prepare returns, and "
            "take every step?"
        )
    for cause, updates, factor in looks(of_ranks, case):
        if updates and equal(got[0], descend(data, seed, rate * factor, updates)):
            return cause
    return (
        "is the loss of an update the sum of the cross-entropies of its samples, each once, over their number, with "
        "one step of plain SGD?"
    )


def looks(of_ranks, case):
    """Causes, and the updates and the factor of the learning rate that they lead to."""
    n, (*_, every, epochs) = len(of_ranks), case
    right = right_updates(case, n)
    groups = windows([one["trained"] for one in of_ranks], every, epochs)
    singly = windows([one["trained"] for one in of_ranks], 1, epochs)
    most = max(len(numbers) for [(numbers, _)] in right)
    whole = [update for update in right if len(update[0][0]) == most]

    def made(rule, of=groups):
        return [rule(window) for window in of if all_batches(window)]

    return [
        ("every step is too short by the number of processes: DDP takes the mean over them, so multiply the loss by "
         "num_processes", right, 1 / n),
        ("every step is too long by the number of processes: multiply by num_processes once only", right, n),
        ("the short last update of an epoch is missing", whole, 1),
        ("samples that prepare repeats at the end of an epoch are counted, too: each sample of an update counts once",
         made(repeats_count), 1),
        (f"the short last update of an epoch is divided by {every} batches, as if it were a whole one: "
         "accelerator.backward divides by gradient_accumulation_steps, so divide by the samples that there are",
         made(divided_by(every * n)), 1),
        ("each process divides by its own number of samples: add up the numbers of all processes, and multiply by "
         "num_processes, because DDP takes the mean", means_of_own(case, n), 1),
        ("each batch makes its own update, instead of `every` together", made(repeats_count, singly), 1),
        ("the sum of the losses is not divided by the number of samples",
         [[(numbers, 1.0) for numbers, _ in update] for update in right], 1),
        ("the loss is summed, but not divided by the number of samples",
         [[(numbers, 1.0 / n) for numbers, _ in update] for update in right], 1),
    ]  # fmt: skip
