"""Exercise 07: a DDP loop in Accelerate, an exact metric, and copies that were meant to
train as one.
"""

import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_course.checks.samples import CLASSES, WIDTH, Numbered, same_as, two_numbers
from ddp_course.checks.training import a_look, equal, fill, state, unwrapped
from ddp_course.ranks.launch import start_server
from ddp_course.school.judge import Wrong, question, trying

# Accelerate is imported on the ranks only: the process that judges need not wait for
# it. They begin with it, and with what it imports on the way, where that is installed.
PRELOADED = ["accelerate", "datasets", "deepspeed"]

LEARNING_RATE = 0.1  # in question 3

# ---- what the answers are tried on ----

# what the networks of this process write down; not in the network, or a copy would have
# its own
PAGES = []


class Diary(nn.Module):
    """A small network, in 64 bits, that ignores its first input, a sample's number, but
    writes it down.

    mixing: with BatchNorm and Dropout, which do in training something else than in
    evaluation.
    """

    def __init__(self, seed, mixing=False):
        super().__init__()
        middle = [nn.BatchNorm1d(8), nn.Dropout(0.5)] if mixing else []
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 8), *middle, nn.Tanh(), nn.Linear(8, CLASSES)
        )
        fill(self, seed)

    def forward(self, inputs):
        outputs = self.layers(inputs[:, 1:])
        training = any(module.training for module in self.modules())
        numbers = inputs[:, 0].long().tolist()
        PAGES.append(
            {
                "samples": numbers,
                "training": training,
                "gradient": outputs.requires_grad,
            }
        )
        return outputs


def trained_on():
    """The samples of each training step of this process, a list of lists."""
    return [page["samples"] for page in PAGES if page["gradient"]]


def in_words(returned):
    return "None" if returned is None else f"a {type(returned).__name__}"


# ---- who was trained on what, and where that leads: for questions 1 and 3 ----


def judge_samples(checked, trained, samples, batch_size, epochs=1, window=1):
    """Raise Wrong unless the ranks shared the samples, and took in each update those
    that come next.

    trained: for each rank, the samples of each of its batches; window: how many of
    these make an update.
    """
    n, share = len(trained), samples // len(trained)
    seen = [set(sum(batches, [])) for batches in trained]
    counts = [sum(map(len, batches)) for batches in trained]

    def wrong_count(rank, cause):
        expected = f"{epochs} epoch{'s' * (epochs > 1)} of {share}"
        return Wrong(f"how many samples a process is trained on, in {checked}", rank=f"{rank} of {n}",
                     expected=expected, got=counts[rank], cause=cause)  # fmt: skip

    for rank, count in enumerate(counts):
        if count == 0:
            raise wrong_count(
                rank, "nothing has gone through the network that is to be trained"
            )
        if len(seen[rank]) == samples and count >= epochs * samples:
            cause = "every process goes through all of the samples: prepare the loader, too, and loop over what "
            raise wrong_count(rank, cause + "prepare returns")
    sizes = sorted({len(batch) for batches in trained for batch in batches})
    if sizes != [batch_size]:
        cause = "batch_size is what each process takes at a time: the accelerator leaves it as it is, and so "
        cause += "should you"
        raise Wrong(f"the sizes of the batches in {checked}", expected=batch_size,
                    got=", ".join(map(str, sizes)), cause=cause)  # fmt: skip
    for rank, count in enumerate(counts):
        if (
            count == share
            and count < epochs * share
            and len(set.union(*seen)) == samples
        ):
            raise wrong_count(rank, "that is one epoch only")
        if count < epochs * share:
            cause = "samples are left out: where a sampler shares them out, and then prepare does, too, each "
            raise wrong_count(rank, cause + "process has a share of a share")
        if count > epochs * share:
            cause = "each sample is for one process, and goes through the network once in each epoch"
            raise wrong_count(rank, cause)
    joined = n * batch_size * window
    for update in range(epochs * samples // joined):
        begin = update * joined % samples
        of_ranks = [
            sum(batches[update * window : (update + 1) * window], [])
            for batches in trained
        ]
        together = sorted(sum(of_ranks, []))
        if together != list(range(begin, begin + joined)):
            cause = "the samples come in another order: without a shuffle, and dealt out batch by batch, "
            cause += "those that come next in the data make the next update"
            if len(set(together)) < len(together):
                cause = "several processes are trained on the same samples: each sample is for one of them"
            got = ", ".join(
                f"{numbers} on rank {rank}" for rank, numbers in enumerate(of_ranks)
            )
            raise Wrong(f"the samples of update {update + 1}, of all processes together, in {checked}",
                        expected=f"samples {begin} to {begin + joined - 1}", got=got,
                        cause=cause)  # fmt: skip


def ends(
    networks, data, trained, rate, window=1, averaged=True, each=False, clears="after"
):
    """Where the networks of all ranks end that go through these batches with SGD: their
    states.

    trained: for each rank, the samples of each of its batches; window: how many of
    these make an update. And what may go wrong. averaged=False: nobody averages
    gradients. each: there is a step after each batch, though gradients are averaged
    only at the end of a window. clears: gradients are cleared 'after' a step, or
    'before' the backward of the last batch of a window, or 'never'.
    """
    for place, batches in enumerate(zip(*trained), 1):
        full = place % window == 0
        if full and clears == "before":
            for network in networks:
                network.zero_grad()
        for network, numbers in zip(networks, batches):
            outputs = network.layers(data.inputs[numbers, 1:])
            (F.cross_entropy(outputs, data.labels[numbers]) / window).backward()
        if full and averaged:
            average_gradients(networks)
        if full or each:
            for network in networks:
                step(network, rate, clears == "after")
    return [state(network) for network in networks]


def average_gradients(networks):
    for parameters in zip(*(network.parameters() for network in networks)):
        mean = sum(parameter.grad for parameter in parameters) / len(parameters)
        for parameter in parameters:
            parameter.grad = mean.clone()


@torch.no_grad()
def step(network, rate, clears):
    for parameter in network.parameters():
        parameter -= rate * parameter.grad
        if clears:
            parameter.grad = None


def judge_ends(checked, got, start, those_that, looks):
    """Raise Wrong unless all ranks have ended where one process does; say what it looks
    like instead.

    got: the ranks' states; start: where they began; those_that: gives the states in
    which ranks end that make the mistakes in its arguments; looks: pairs of a list of
    such mistakes and their cause.
    """
    truth = those_that()[0]
    for rank, end in enumerate(got):
        if equal(end, truth):
            continue
        cause = "is it plain SGD with the given learning rate, on the mean cross entropy of the batch?"
        if not all(equal(other, got[0]) for other in got):
            cause = "the processes have ended with different networks: does each of them take every step?"
        elif equal(end, start):
            cause = "the network is as it was: does the optimizer step, and does it hold these parameters?"
        for mistakes, likely in looks:
            if any(all(map(equal, got, those_that(**mistake))) for mistake in mistakes):
                cause = likely
                break
        checked = f"the parameters after {checked}, next to one process with the joined batches"
        raise Wrong(checked, rank=f"{rank} of {len(got)}", expected=a_look(truth), got=a_look(end),
                    cause=cause)  # fmt: skip


# ---- 1: port a DDP loop ----


def trainings(train, cases, batch_size, epochs, rate, seed):
    """Train for each case, (samples, gradient_accumulation_steps); say what came back,
    and who saw what.
    """
    from accelerate import Accelerator

    seen = []
    for samples, window in cases:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window)
        # or a rank might leave while another is still connecting to it
        accelerator.wait_for_everyone()
        data, network = Numbered(samples, seed), Diary(seed)
        PAGES.clear()
        with trying(f"gradient_accumulation_steps={window}"):
            returned = train(
                accelerator, network, data.inputs, data.labels, batch_size, epochs, rate
            )
        network = unwrapped(returned)
        of_case = {"returned": in_words(returned), "end": None, "trained": trained_on()}
        if isinstance(network, Diary):
            of_case |= {"wrapped": network is not returned, "end": state(network)}
        seen.append(of_case)
    accelerator.end_training()
    return seen


@question(
    "Make loader and optimizer as in the loop above, but without sampler and wrapper, and give all three to "
    "accelerator.prepare. From then on use only what it returns, in the order in which you gave it.",
    "The whole body of the inner loop belongs into `with accelerator.accumulate(model):`. In it, "
    "accelerator.backward(loss) takes the place of loss.backward(). And look up when a prepared optimizer "
    "obeys zero_grad(): number 5 under `Break it` in the lesson.",
    "model, optimizer, loader = accelerator.prepare(network, optimizer, loader). For each batch, within "
    "accumulate: loss = F.cross_entropy(model(inputs), targets), accelerator.backward(loss), "
    "optimizer.step(), optimizer.zero_grad(). At the end, return accelerator.unwrap_model(model).",
)
def check_train(answer, draw):
    """All ranks end where one process does that takes the joined batches of each
    update, in any window.
    """
    start_server(*PRELOADED)  # where none runs yet
    for n in (2, 3):
        batch_size, epochs, seed = draw.randint(4, 5), 2, draw.randrange(10**6)
        rate, window = draw.uniform(0.1, 0.3), draw.choice([2, 3])
        lengths = [(draw.randint(3, 5), 1), (draw.randint(2, 3) * window, window)]
        cases = [(n * batch_size * length, window) for length, window in lengths]
        seen = answer.on_ranks(
            trainings, cases, batch_size, epochs, rate, seed, nproc=n
        )
        for place, (samples, window) in enumerate(cases):
            of_ranks = [of_rank[place] for of_rank in seen]
            judge_training(of_ranks, samples, window, batch_size, epochs, rate, seed)


def judge_training(of_ranks, samples, window, batch_size, epochs, rate, seed):
    n, data = len(of_ranks), Numbered(samples, seed)
    checked = f"train with {samples} samples, batch_size={batch_size}, epochs={epochs}, {n} processes, "
    checked += f"gradient_accumulation_steps={window}"
    trained = [of_rank["trained"] for of_rank in of_ranks]
    judge_samples(checked, trained, samples, batch_size, epochs, window)
    for rank, of_rank in enumerate(of_ranks):
        if of_rank["end"] is None or of_rank["wrapped"]:
            cause = "return the network that was trained, and on every process"
            if of_rank["end"] is not None:
                cause = "it is still in what prepare has wrapped it in: accelerator.unwrap_model(model)"
            raise Wrong(f"what comes back from {checked}", rank=f"{rank} of {n}", expected="the network",
                        got=of_rank["returned"], cause=cause)  # fmt: skip

    def those_that(rate=rate, window=window, **mistakes):
        return ends(
            [Diary(seed) for _ in of_ranks], data, trained, rate, window, **mistakes
        )

    by_window = (
        f"accelerator.backward(loss) divides by the {window} batches of an update"
    )
    looks = [
        ([{"averaged": False}], "each process has trained a network of its own, and nobody averaged "
         "gradients: prepare the network, and call what prepare returns"),
        ([{"each": True}], "there is a step after each batch, before gradients are averaged: prepare the "
         "optimizer, too, and its step() does nothing until an update is complete"),
        ([{"window": 1}, {"window": 1, "rate": rate / window}], "each batch makes an update of its own, not "
         f"{window} together: the body of the loop belongs into `with accelerator.accumulate(model):`"),
        ([{"clears": "before"}], "only the last batch of each update counts: a prepared optimizer ignores "
         "zero_grad() until that one, and there it comes before backward, and clears the gradients of those "
         "before: call it after step()"),
        ([{"clears": "never"}], "the gradients of the updates before are still there: zero_grad()"),
        ([{"rate": rate * window}], f"every step is {window} times too long: {by_window}, loss.backward() "
         "does not"),
        ([{"rate": rate / window}], f"every step is {window} times too short: {by_window} already"),
        ([{"rate": rate * n}], f"every step is {n} times too long: the gradients are averaged over the "
         "processes, and not summed, so leave the learning rate as it is"),
        ([{"rate": rate / n}], f"every step is {n} times too short: the gradients are averaged over the "
         "processes already"),
    ]  # fmt: skip
    judge_ends(
        checked,
        [of_rank["end"] for of_rank in of_ranks],
        state(Diary(seed)),
        those_that,
        looks,
    )


# ---- 2: an exact metric ----


def metrics(accuracy, sizes, batch_size, seed):
    """Count on data sets of these sizes; of each, what came back, and what the network
    saw and became.
    """
    from accelerate import Accelerator

    accelerator, network, seen = Accelerator(cpu=True), Diary(seed, mixing=True), []
    accelerator.wait_for_everyone()
    for place, size in enumerate(sizes):
        data = half_known(size, seed, batch_size * accelerator.num_processes)
        network.train(comes_in_training(place))
        PAGES.clear()
        with trying(f"{size} samples"):
            returned = accuracy(
                accelerator, network, data.inputs, data.labels, batch_size
            )
        modes = {module.training for module in network.modules()}
        seen.append(
            {"returned": returned, "modes": sorted(modes), "pages": list(PAGES)}
        )
    accelerator.end_training()
    return seen


def comes_in_training(place):
    return place % 2 == 0


def half_known(size, seed, joined):
    """Samples of which the network gets the first `joined` ones right, which are those
    that may be repeated, and half of the others, but not the last."""
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
    return Diary(seed, mixing=True).eval().layers(data.inputs[:, 1:]).argmax(dim=1)


@question(
    "A prepared loader gives every process equally many full batches. Where the samples do not suffice, some "
    "come again. Which of the accelerator's functions knows how many those are?",
    "accelerator.gather_for_metrics takes what there is for each sample, predictions and labels, but not "
    "counts or means, and gives every process those of all. Before the loop: note network.training, call "
    "network.eval(), and begin torch.no_grad().",
    "loader = accelerator.prepare(DataLoader(TensorDataset(samples, labels), batch_size)). For each batch: "
    "guesses, targets = accelerator.gather_for_metrics((network(inputs).argmax(dim=1), targets)); "
    "right += (guesses == targets).sum().item(); counted += len(targets). At the end, network.train(mode), "
    "where mode is what network.training was.",
)
def check_accuracy(answer, draw):
    """Exactly how many are right, of exactly all samples, on every process; the network
    stays as it was.
    """
    start_server(*PRELOADED)  # where none runs yet
    for n in (2, 3):
        batch_size, seed = draw.randint(5, 7), draw.randrange(10**6)
        joined = n * batch_size
        # First, one process has to fill up a batch, and others repeat whole ones.
        sizes = [
            4 * joined + draw.randint(n + 1, batch_size - 1),
            2 * joined + 1,
            2 * joined,
            1,
        ]
        seen = answer.on_ranks(metrics, sizes, batch_size, seed, nproc=n)
        for place, size in enumerate(sizes):
            judge_metric(
                place, size, batch_size, seed, [of_rank[place] for of_rank in seen]
            )


def judge_metric(place, size, batch_size, seed, of_ranks):
    n = len(of_ranks)
    checked = f"accuracy with {size} sample{'s' * (size > 1)}, batch_size={batch_size}, {n} processes"
    mode, other = "training mode", "evaluation mode"
    if not comes_in_training(place):
        mode, other = other, mode
    for rank, of_rank in enumerate(of_ranks):
        where = f"{rank} of {n}"
        if any(page["training"] for page in of_rank["pages"]):
            cause = "in training mode Dropout leaves out numbers at random, and BatchNorm looks at the other "
            cause += "samples of the batch: network.eval() first"
            raise Wrong(f"the network in {checked}", rank=where, expected="evaluation mode",
                        got="training mode", cause=cause)  # fmt: skip
        if any(page["gradient"] for page in of_rank["pages"]):
            cause = "nothing is trained here, so nothing needs to be kept for backward: with torch.no_grad()"
            raise Wrong(f"the network's outputs in {checked}", rank=where, expected="no gradients wanted",
                        got="outputs that require gradients", cause=cause)  # fmt: skip
        if of_rank["modes"] != [comes_in_training(place)]:
            cause = "it had come in evaluation mode: note network.training first, and give train() that"
            if comes_in_training(place):
                cause = "training would go on without Dropout now: put the network back into its mode"
            raise Wrong(f"the network after {checked}", rank=where, expected=mode, got=other,
                        cause=cause)  # fmt: skip

    data = half_known(size, seed, n * batch_size)
    right = guesses_of(data, seed) == data.labels
    truth = torch.tensor([int(right.sum()), size])
    totals = [two_numbers(of_rank["returned"]) for of_rank in of_ranks]
    wrong = [
        rank
        for rank, pair in enumerate(totals)
        if pair is None or (pair - truth).abs().max() > 1e-6
    ]
    seen = [
        [number for page in of_rank["pages"] for number in page["samples"]]
        for of_rank in of_ranks
    ]
    if wrong:
        got = ", ".join(
            f"{of_rank['returned']} on rank {rank}"
            for rank, of_rank in enumerate(of_ranks)
        )
        raise Wrong(checked, rank=f"{wrong[0]} of {n}", expected=f"({truth[0]}, {size}) on every process",
                    got=got, cause=cause_of_totals(totals, wrong, right, seen, batch_size))  # fmt: skip
    if size > 4 * n * batch_size and max(map(len, seen)) > 0.8 * size:
        rank = max(range(n), key=lambda rank: len(seen[rank]))
        cause = "the numbers are right, but one process does all of the work: prepare the loader"
        raise Wrong(f"how many samples go through the network in {checked}", rank=f"{rank} of {n}",
                    expected=f"about {size // n}", got=len(seen[rank]), cause=cause)  # fmt: skip


def cause_of_totals(totals, wrong, right, seen, batch_size):
    """What wrong totals look like. right: which samples are; seen: those that went
    through each process.
    """
    n, size, correct = len(seen), len(right), int(right.sum())
    if 0 not in wrong:
        return "only process 0 knows the numbers: every process is to return them"
    if any(total is None for total in totals):
        return "return two numbers, on every process: how many are right, and how many there are"
    filled = (
        math.ceil(size / (n * batch_size)) * n * batch_size
    )  # with those repeated, which are all right

    def all_are(first, second):
        return all(
            abs(pair[0] - first) < 1 and same_as(second)(pair[1]) for pair in totals
        )

    own = [torch.tensor([int(right[share].sum()), len(share)]) for share in seen]
    if len(seen[0]) < size and all(
        (pair - mine).abs().max() < 1e-6 for pair, mine in zip(totals, own)
    ):
        return "each process tells of the samples that it has gone through itself: gather those of all"
    if all_are(size, correct):
        return "the two numbers have changed places: first how many are right"
    if all_are(n * correct, n * size) and len(seen[0]) >= size:
        return "every process has gone through all samples, and they were gathered: prepare the loader"
    if all_are(n * correct, n * size):
        return (
            "summed twice: after gather_for_metrics each process has the results of all"
        )
    if all_are(correct + filled - size, filled) or all_are(
        correct + filled - size, size
    ):
        cause = "samples that prepare repeats, to fill the last batches, are counted again: "
        return (
            cause
            + "gather_for_metrics leaves them out, if it is given something for each sample, no sums"
        )
    if all_are((correct + filled - size) / n, filled / n):
        return "the counts are averaged over the processes: they are to be summed"
    if all(pair[1] < size for pair in totals):
        return "samples are left out: the last batch counts, too, though it need not be full"
    if all(0 < pair[0] <= 1 for pair in totals):
        return "an accuracy is a share; what is asked for is how many are right, a whole number"
    means = [part.double().mean() for part in right.split(n * batch_size)]
    accuracies = [sum(means) / len(means), (correct + filled - size) / filled]
    if any(all_are(size * accuracy, size) for accuracy in accuracies):
        cause = "it is made of a mean of accuracies, in which the few samples of a last batch weigh as much as "
        return (
            cause
            + "those of a full one, or repeated ones count: sum up how many are right"
        )
    return "is the place of a sample's largest output compared with its own label, and counted once?"


# ---- 3: two copies ----


def copies(together, samples, batch_size, seed):
    """What came back, how many processes Accelerate counts, and what the network saw.
    No GPU is seen here.
    """
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_TORCH_DEVICE": "cpu"}
    from accelerate import PartialState

    data, network = Numbered(samples, seed), Diary(seed + int(os.environ["RANK"]))
    returned, end = together(network, data.inputs, data.labels, batch_size), None
    match returned:
        case (nn.Module() as network, int() as number) if isinstance(
            unwrapped(network), Diary
        ):
            returned, end = number, state(unwrapped(network))
        case _:
            returned = in_words(returned)
    counted = PartialState().num_processes
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return {
        "returned": returned,
        "end": end,
        "counted": counted,
        "trained": trained_on(),
    }


@question(
    "Print accelerator.num_processes in the function, run the check, and read what it says under `printed`. "
    "How many should there be? Number 1 under `Break it` in the lesson has the reason.",
    "The other two show only where there are several processes. Follow the three things that training needs, "
    "network, loader and optimizer: does each go through prepare, and is what comes back what the loop uses?",
    "accelerator = Accelerator(cpu=True); model, optimizer, loader = accelerator.prepare(network, optimizer, "
    "loader); and in the loop model(inputs): network(inputs) goes around what averages gradients.",
)
def check_together(answer, draw):
    """The accelerator counts all processes, they share the samples, and end where one
    process does.
    """
    start_server(*PRELOADED)  # where none runs yet
    for n in (2, 3):
        batch_size, seed = draw.randint(3, 5), draw.randrange(10**6)
        samples = n * batch_size * draw.randint(4, 6)
        seen = answer.on_ranks(copies, samples, batch_size, seed, nproc=n)
        judge_copies(seen, samples, batch_size, seed)


def judge_copies(seen, samples, batch_size, seed):
    n, data = len(seen), Numbered(samples, seed)
    checked = (
        f"together with {samples} samples, batch_size={batch_size}, on {n} processes"
    )
    for rank, of_rank in enumerate(seen):
        where = f"{rank} of {n}"
        if of_rank["counted"] != n:
            cause = "Accelerator() looks for GPUs: where there are none, each process believes that it is alone, "
            cause += "and trains a copy of its own, unless it is told cpu=True"
            raise Wrong(f"the accelerator's num_processes in {checked}", rank=where, expected=n,
                        got=of_rank["counted"], cause=cause)  # fmt: skip
        if of_rank["end"] is None or of_rank["returned"] != n:
            cause = "return both, as in the program that you were given: network, accelerator.num_processes"
            raise Wrong(f"what comes back from {checked}", rank=where, expected=f"the network, and {n}",
                        got=of_rank["returned"], cause=cause)  # fmt: skip
    trained = [of_rank["trained"] for of_rank in seen]
    judge_samples(checked, trained, samples, batch_size)

    def those_that(seeds=(seed,) * n, **mistakes):
        return ends(
            [Diary(one) for one in seeds], data, trained, LEARNING_RATE, **mistakes
        )

    looks = [
        ([{"averaged": False}], "the processes begin alike, but nobody averages gradients: call the "
         "model that prepare returns, and not the network that is in it"),
        ([{"averaged": False, "seeds": range(seed, seed + n)}], "each process trains a network of its own, "
         "from the beginning: prepare the network, too, and call what prepare returns"),
    ]  # fmt: skip
    judge_ends(
        checked,
        [of_rank["end"] for of_rank in seen],
        state(Diary(seed)),
        those_that,
        looks,
    )
