"""Exercise 07: a DDP loop in Accelerate, an exact metric, and processes that each train
their own copy.
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

# Accelerate is imported on the ranks only, so that the judging process need not wait
# for it. The fork server imports it for the ranks, with those of its dependencies that
# are installed.
PRELOADED = ["accelerate", "datasets", "deepspeed"]

LEARNING_RATE = 0.1  # in question 3

# ---- the networks that the answers are tested with ----

# the record of this process's networks; not in the network, because a copy would have
# its own
PAGES = []


class Diary(nn.Module):
    """A small network, in 64 bits, that ignores its first input, a sample's number, but
    records it.

    mixing: with BatchNorm and Dropout, which behave differently in training and in
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
                "network": id(self),
            }
        )
        return outputs


def trained_on():
    """The samples of each training step of this process, a list of lists."""
    return [page["samples"] for page in PAGES if page["gradient"]]


def never_trained(network):
    """Whether training steps were taken, but none with this network."""
    networks = {page["network"] for page in PAGES if page["gradient"]}
    return bool(networks) and id(network) not in networks


def changed(data, original):
    """Which of the caller's tensors an answer has changed."""
    now = {"samples": data.inputs, "labels": data.labels}
    before = {"samples": original.inputs, "labels": original.labels}
    return [name for name in now if not torch.equal(now[name], before[name])]


def judge_inputs(checked, names, where):
    """Raise Wrong if an answer has changed the tensors that the caller gave it."""
    for name in names:
        cause = f"{name} belongs to the caller, who may use it again: work on a copy"
        raise Wrong(f"{name} after {checked}", rank=where, expected="as before",
                    got="other numbers", cause=cause)  # fmt: skip


def in_words(returned):
    return "None" if returned is None else f"a {type(returned).__name__}"


# ---- who was trained on what, and where that leads: for questions 1 and 3 ----


def judge_samples(checked, trained, samples, batch_size, epochs=1, window=1):
    """Raise Wrong unless the ranks divided the samples, and each update used the next
    samples in order.

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
                rank, "no samples went through the network that should be trained"
            )
        if len(seen[rank]) == samples and count >= epochs * samples:
            cause = "every process goes through all samples: prepare the loader, too, and loop over what "
            raise wrong_count(rank, cause + "prepare returns")
    sizes = sorted({len(batch) for batches in trained for batch in batches})
    if sizes != [batch_size]:
        cause = "batch_size is the batch size per process: the accelerator leaves it unchanged, and so "
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
            cause = "samples are left out: if a sampler divides them, and then prepare does, too, each "
            raise wrong_count(rank, cause + "process has a share of a share")
        if count > epochs * share:
            cause = "each sample must go through the network once in each epoch, on one process"
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
            cause = "the samples come in a different order: without a shuffle, and distributed batch by batch, "
            cause += "each update must use the next samples of the data"
            if len(set(together)) < len(together):
                cause = "several processes are trained on the same samples: each sample must go to one process"
            got = ", ".join(
                f"{numbers} on rank {rank}" for rank, numbers in enumerate(of_ranks)
            )
            raise Wrong(f"the samples of update {update + 1}, of all processes together, in {checked}",
                        expected=f"samples {begin} to {begin + joined - 1}", got=got,
                        cause=cause)  # fmt: skip


def ends(
    networks, data, trained, rate, window=1, averaged=True, each=False, clears="after"
):
    """The states of all ranks' networks after SGD on these batches.

    trained: for each rank, the samples of each of its batches; window: how many of
    these make an update. The other arguments are mistakes. averaged=False: gradients
    are not averaged. each: there is a step after each batch, though gradients are
    averaged only at the end of a window. clears: gradients are cleared 'after' a step,
    or 'before' the backward of the last batch of a window, or 'never'.
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


def judge_ends(checked, got, start, those_that, looks, copied):
    """Raise Wrong unless all ranks have ended where one process does; say what it looks
    like instead.

    got: the ranks' states; start: where they began; those_that: gives the states in
    which ranks end that make the mistakes in its arguments; looks: pairs of a list of
    such mistakes and their cause; copied: whether some network that came back was never
    trained, but another was.
    """
    truth = those_that()[0]
    for rank, end in enumerate(got):
        if equal(end, truth):
            continue
        cause = "do you use plain SGD with the given learning rate, on the mean cross entropy of the batch?"
        if copied:
            cause = "another network was trained, such as a copy, and not the one that comes back: return the one "
            cause += "that the optimizer changes"
        elif not all(equal(other, got[0]) for other in got):
            cause = "the processes end with different networks: does each of them take every step?"
        elif equal(end, start):
            cause = "the network has not changed: does the optimizer step, and does it have these parameters?"
        for mistakes, likely in [] if copied else looks:
            if any(all(map(equal, got, those_that(**mistake))) for mistake in mistakes):
                cause = likely
                break
        checked = f"the parameters after {checked}, compared with one process on the joined batches"
        raise Wrong(checked, rank=f"{rank} of {len(got)}", expected=a_look(truth), got=a_look(end),
                    cause=cause)  # fmt: skip


# ---- 1: port a DDP loop ----


def trainings(train, cases, batch_size, epochs, rate, seed):
    """Train for each case, (samples, gradient_accumulation_steps); return the result,
    and which rank saw which samples.
    """
    from accelerate import Accelerator

    seen = []
    for samples, window in cases:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window)
        # otherwise a rank might leave while another is still connecting to it
        accelerator.wait_for_everyone()
        data, network = Numbered(samples, seed), Diary(seed)
        PAGES.clear()
        with trying(f"gradient_accumulation_steps={window}"):
            returned = train(
                accelerator, network, data.inputs, data.labels, batch_size, epochs, rate
            )
        network = unwrapped(returned)
        of_case = {"returned": in_words(returned), "end": None, "trained": trained_on()}
        of_case |= {
            "steps": accelerator.gradient_accumulation_steps,
            "changed": changed(data, Numbered(samples, seed)),
            "copied": never_trained(network),
        }
        if isinstance(network, Diary):
            of_case |= {"wrapped": network is not returned, "end": state(network)}
        seen.append(of_case)
    accelerator.end_training()
    return seen


@question(
    "Make loader and optimizer as in the loop above, but without sampler and wrapper, and give all three to "
    "accelerator.prepare. From then on, use only what it returns, in the order of its arguments.",
    "The whole body of the inner loop belongs inside `with accelerator.accumulate(model):`. There, "
    "accelerator.backward(loss) replaces loss.backward(). When does a prepared optimizer execute zero_grad()? See "
    "number 5 under `Break it` in the lesson.",
    "model, optimizer, loader = accelerator.prepare(network, optimizer, loader). For each batch, within "
    "accumulate: loss = F.cross_entropy(model(inputs), targets), accelerator.backward(loss), "
    "optimizer.step(), optimizer.zero_grad(). At the end, return accelerator.unwrap_model(model).",
)
def check_train(answer, draw):
    """All ranks must end with the parameters of one process on the joined batches of
    each update, for any window.
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
            cause = "return the trained network, on every process"
            if of_rank["end"] is not None:
                cause = "it is still wrapped by prepare: return accelerator.unwrap_model(model)"
            raise Wrong(f"what comes back from {checked}", rank=f"{rank} of {n}", expected="the network",
                        got=of_rank["returned"], cause=cause)  # fmt: skip

    def those_that(rate=rate, window=window, **mistakes):
        return ends(
            [Diary(seed) for _ in of_ranks], data, trained, rate, window, **mistakes
        )

    judge_accelerator(checked, of_ranks, window)
    by_window = (
        f"accelerator.backward(loss) divides by the {window} batches of an update"
    )
    looks = [
        ([{"averaged": False}], "each process has trained its own network, without averaging gradients: prepare the "
         "network, and call what prepare returns"),
        ([{"each": True}], "there is a step after each batch, before the gradients are averaged: prepare the "
         "optimizer, too; then its step() does nothing until an update is complete"),
        ([{"window": 1}, {"window": 1, "rate": rate / window}], "each batch makes its own update, instead of "
         f"{window} together: the body of the loop belongs inside `with accelerator.accumulate(model):`"),
        ([{"clears": "before"}], "only the last batch of each update counts: a prepared optimizer ignores "
         "zero_grad() until the last batch, where your zero_grad() comes before backward and clears the gradients "
         "of the earlier batches: call it after step()"),
        ([{"clears": "never"}], "the gradients of earlier updates are still there: call zero_grad()"),
        ([{"rate": rate * window}], f"every step is {window} times too long: {by_window}, loss.backward() "
         "does not"),
        ([{"rate": rate / window}], f"every step is {window} times too short: {by_window} already"),
        ([{"rate": rate * n}], f"every step is {n} times too long: the gradients are averaged over the processes, "
         "not summed, so leave the learning rate unchanged"),
        ([{"rate": rate / n}], f"every step is {n} times too short: the gradients are already averaged over the "
         "processes"),
    ]  # fmt: skip
    judge_ends(
        checked,
        [of_rank["end"] for of_rank in of_ranks],
        state(Diary(seed)),
        those_that,
        looks,
        copied=any(of_rank["copied"] for of_rank in of_ranks),
    )


def judge_accelerator(checked, of_ranks, window):
    """Raise Wrong if the answer has changed the settings of the accelerator, or its own
    inputs.
    """
    for rank, of_rank in enumerate(of_ranks):
        where = f"{rank} of {len(of_ranks)}"
        judge_inputs(checked, of_rank["changed"], where)
        if of_rank["steps"] != window:
            cause = "all Accelerators of a process share this setting, so a new Accelerator() has changed it: "
            cause += "use the one that you are given"
            raise Wrong(f"accelerator.gradient_accumulation_steps after {checked}", rank=where, expected=window,
                        got=of_rank["steps"], cause=cause)  # fmt: skip


# ---- 2: an exact metric ----


def metrics(accuracy, sizes, batch_size, seed):
    """Count on data sets of these sizes; return for each the result, and what the
    network saw and how it changed.
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
            | left_behind(data, network, size, seed, batch_size)
        )
    accelerator.end_training()
    return seen


def left_behind(data, network, size, seed, batch_size):
    """What is no longer as it was before the call. Gradients are recorded again."""
    from accelerate import PartialState

    joined = batch_size * PartialState().num_processes
    before = Diary(seed, mixing=True)
    seen = {
        "records": torch.is_grad_enabled(),
        "changed": changed(data, half_known(size, seed, joined)),
        "same": equal(state(network), state(before)),
        "trainable": all(value.requires_grad for value in network.parameters()),
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
    return Diary(seed, mixing=True).eval().layers(data.inputs[:, 1:]).argmax(dim=1)


@question(
    "A prepared loader gives every process the same number of full batches. If there are not enough samples, it "
    "repeats some. Which function of the accelerator knows how many samples are repeated?",
    "accelerator.gather_for_metrics takes tensors with one entry per sample, such as predictions and labels, but "
    "not counts or means, and returns those of all processes on every process. Before the loop, store "
    "network.training, call network.eval(), and use torch.no_grad().",
    "loader = accelerator.prepare(DataLoader(TensorDataset(samples, labels), batch_size)). For each batch: guesses, "
    "targets = accelerator.gather_for_metrics((network(inputs).argmax(dim=1), targets)); right += (guesses == "
    "targets).sum().item(); counted += len(targets). At the end, call network.train(mode), where mode is the stored "
    "network.training.",
)
def check_accuracy(answer, draw):
    """Every process must return the exact number of correct predictions and of samples,
    and leave the network unchanged.
    """
    start_server(*PRELOADED)  # where none runs yet
    for n in (2, 3):
        batch_size, seed = draw.randint(5, 7), draw.randrange(10**6)
        joined = n * batch_size
        # In the first case, one process fills up a batch and others repeat whole
        # batches.
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
            cause = "in training mode, Dropout removes values at random, and BatchNorm uses the other "
            cause += "samples of the batch: network.eval() first"
            raise Wrong(f"the network in {checked}", rank=where, expected="evaluation mode",
                        got="training mode", cause=cause)  # fmt: skip
        if any(page["gradient"] for page in of_rank["pages"]):
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
        cause = "the numbers are right, but one process does all the work: prepare the loader"
        raise Wrong(f"the number of samples that go through the network in {checked}", rank=f"{rank} of {n}",
                    expected=f"about {size // n}", got=len(seen[rank]), cause=cause)  # fmt: skip


def judge_surroundings(checked, of_rank, where):
    """Raise Wrong unless everything that the answer was given is as before."""
    judge_inputs(checked, of_rank["changed"], where)
    if not of_rank["records"]:
        cause = "gradients are off for the rest of the program, so nothing can be trained: with torch.no_grad() "
        cause += (
            "switches them on again at its end, torch.set_grad_enabled(False) does not"
        )
        raise Wrong(f"torch.is_grad_enabled() after {checked}", rank=where, expected=True, got=False,
                    cause=cause)  # fmt: skip
    if not of_rank["trainable"]:
        cause = "the network can no longer be trained: with torch.no_grad() records nothing and leaves the "
        cause += "parameters alone, requires_grad_(False) does not"
        raise Wrong(f"requires_grad of the parameters after {checked}", rank=where, expected=True, got=False,
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
    filled = (
        math.ceil(size / (n * batch_size)) * n * batch_size
    )  # with the repeated samples, which are all right

    def all_are(first, second):
        return all(
            abs(pair[0] - first) < 1 and same_as(second)(pair[1]) for pair in totals
        )

    own = [torch.tensor([int(right[share].sum()), len(share)]) for share in seen]
    if len(seen[0]) < size and all(
        (pair - mine).abs().max() < 1e-6 for pair, mine in zip(totals, own)
    ):
        return "each process counts only its own samples: gather those of all processes"
    if all_are(size, correct):
        return "the two numbers are swapped: first the correct predictions, then the samples"
    if all_are(n * correct, n * size) and len(seen[0]) >= size:
        return "every process went through all samples, and then they were gathered: prepare the loader"
    if all_are(n * correct, n * size):
        return (
            "summed twice: after gather_for_metrics each process has the results of all"
        )
    if all_are(correct + filled - size, filled) or all_are(
        correct + filled - size, size
    ):
        cause = "samples that prepare repeats, to fill the last batches, are counted twice: "
        return (
            cause
            + "gather_for_metrics leaves them out, if you pass it one entry per sample and no sums"
        )
    if all_are((correct + filled - size) / n, filled / n):
        return "the counts are averaged over the processes: sum them"
    if all(pair[1] < size for pair in totals):
        return "samples are left out: include the last batch, which need not be full"
    if all(0 < pair[0] <= 1 for pair in totals):
        return (
            "this is an accuracy; return the number of correct predictions, an integer"
        )
    means = [part.double().mean() for part in right.split(n * batch_size)]
    accuracies = [sum(means) / len(means), (correct + filled - size) / filled]
    if any(all_are(size * accuracy, size) for accuracy in accuracies):
        cause = "it comes from a mean of accuracies, in which the few samples of a last batch count as much as "
        return (
            cause
            + "those of a full batch, or repeated samples count: sum the correct predictions"
        )
    return "do you compare the argmax of each sample with its own label, and count it once?"


# ---- 3: two copies ----


def copies(together, samples, batch_size, seed):
    """The result, Accelerate's number of processes, and what the network saw. No GPU is
    seen here.
    """
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_TORCH_DEVICE": "cpu"}
    from accelerate import PartialState

    data, network = Numbered(samples, seed), Diary(seed + int(os.environ["RANK"]))
    returned, end = together(network, data.inputs, data.labels, batch_size), None
    copied = False
    match returned:
        case (nn.Module() as network, int() as number) if isinstance(
            unwrapped(network), Diary
        ):
            returned, end = number, state(unwrapped(network))
            copied = never_trained(unwrapped(network))
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
        "copied": copied,
        "changed": changed(data, Numbered(samples, seed)),
    }


@question(
    "Print accelerator.num_processes in the function, run the check, and read what it says under `printed`. How "
    "many should there be? The reason is number 1 under `Break it` in the lesson.",
    "The other two bugs appear only with several processes. Follow the network, the loader and the optimizer: does "
    "each go through prepare, and does the loop use what prepare returns?",
    "accelerator = Accelerator(cpu=True); model, optimizer, loader = accelerator.prepare(network, optimizer, "
    "loader); and in the loop model(inputs): network(inputs) bypasses the averaging of gradients.",
)
def check_together(answer, draw):
    """The accelerator must count all processes; they must divide the samples and end
    with the parameters of one process.
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
            cause = "Accelerator() looks for GPUs: without GPUs, each process runs as if it were alone, "
            cause += "and trains its own copy, unless you pass cpu=True"
            raise Wrong(f"the accelerator's num_processes in {checked}", rank=where, expected=n,
                        got=of_rank["counted"], cause=cause)  # fmt: skip
        if of_rank["end"] is None or of_rank["returned"] != n:
            cause = "return both, as in the given program: network, accelerator.num_processes"
            raise Wrong(f"what comes back from {checked}", rank=where, expected=f"the network, and {n}",
                        got=of_rank["returned"], cause=cause)  # fmt: skip
        judge_inputs(checked, of_rank["changed"], where)
    trained = [of_rank["trained"] for of_rank in seen]
    judge_samples(checked, trained, samples, batch_size)

    def those_that(seeds=(seed,) * n, **mistakes):
        return ends(
            [Diary(one) for one in seeds], data, trained, LEARNING_RATE, **mistakes
        )

    looks = [
        ([{"averaged": False}], "the processes start from the same parameters, but do not average gradients: call "
         "the model that prepare returns, not the network inside it"),
        ([{"averaged": False, "seeds": range(seed, seed + n)}], "each process trains its own network from the "
         "beginning: prepare the network, too, and call what prepare returns"),
    ]  # fmt: skip
    judge_ends(
        checked,
        [of_rank["end"] for of_rank in seen],
        state(Diary(seed)),
        those_that,
        looks,
        copied=any(of_rank["copied"] for of_rank in seen),
    )
