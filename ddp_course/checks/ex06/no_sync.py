"""Question 2: where no_sync belongs."""

from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import Claim, OneOf, on_every_rank
from ddp_course.checks.ex06.watching import changed, copies_of, follow, joined, one_by_one, only, unchanged
from ddp_course.checks.recording import changed as changed_tensors
from ddp_course.checks.recording import unmoved
from ddp_course.checks.training import Chain, a_batch, state
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group


def pairs_of(sizes, width, seed):
    """Micro-batches of these sizes: [(inputs, target), ...]."""
    seeds = range(seed, seed + 2 * len(sizes), 2)
    return [(a_batch(size, width, one), a_batch(size, width, one + 1)) for size, one in zip(sizes, seeds)]


def stream(window, drawn, events):
    """Yield the micro-batches one by one. `drawn` gets, for each, how many are in memory
    then: itself, and those before it without a backward.
    """
    for batch in window:
        drawn.append(len(drawn) + 1 - len(only("backward", events)))
        yield batch


def seed_of(seed, rank, window):
    return seed + 1000 * rank + 100 * window


def loss_of(output, target):
    return 0.3 * (output - target).pow(2).sum()


def accumulations(accumulate, sizes, width, layers, seed):
    """Accumulate windows of these sizes in order. Return what one plain backward sends,
    and for each window what was sent, the calls, and the gradients.
    """
    with process_group() as (rank, _):
        layer = 8 * width**2  # its bytes
        model = DistributedDataParallel(Chain(width, layers, seed), bucket_cap_mb=1.5 * layer / 2**20)
        for _ in range(2):  # DDP knows the order of the gradients only after its first step
            loss = model(a_batch(2, width, seed)).sum()
            with CheckedWatch() as watch:
                loss.backward()
        once, events, windows = sent(watch), follow(model), []
        for number, of_ranks in enumerate(sizes):
            model.zero_grad()
            events.clear()
            window = pairs_of(of_ranks[rank], width, seed_of(seed, rank, number))
            before, start, drawn = copies_of(window), state(model.module), []
            with trying(f"an update of {len(window)}"), CheckedWatch() as watch:
                accumulate(model, stream(window, drawn, events), loss_of)
            gradients = [torch.zeros_like(value) if value.grad is None else value.grad for value in model.parameters()]
            windows.append(
                {
                    "sent": sent(watch),
                    "events": list(events),
                    "gradients": joined(gradients),
                    "changed": changed(window, before, model),
                    "moved": changed_tensors(start, model.module.state_dict()),
                    "ahead": max(drawn, default=0),
                }
            )
        return {"once": once, "windows": windows}


def sent(watch):
    return sorted([entry["name"], entry["bytes"]] for entry in watch.log)


# ---- what is claimed ----


def claims_about(network, windows, once):
    """For each rank: its gradients are the mean of what the ranks have added up, sent `once`,
    by one micro-batch after the other. windows: the micro-batches of each rank.
    """
    n, lengths = len(windows), [len(window) for window in windows]
    call = f"accumulate with micro-batches per rank: {lengths}, {n} ranks"
    own = [[gradient_of_loss(network, *pair) for pair in window] for window in windows]
    mistakes, otherwise = mistakes_in_sums, "does each micro-batch go through forward and backward exactly once?"
    if len(set(lengths)) > 1:
        mistakes = mistakes_with_uneven_lengths
        otherwise = (
            "each rank sends once, with the last of its own micro-batches: the ranks have different numbers of them"
        )

    def claims(rank, of_ranks):
        mine = of_ranks[rank]
        yield Claim(
            f"the gradients after {call}, as one vector", mine["gradients"], sum(map(sum, own)) / n, otherwise,
            partial(mistakes, rank, own), digits=6,
        )  # fmt: skip
        yield unmoved(call, mine)
        yield Claim(
            f"what was sent in {call}", mine["sent"], once, cause_of_sending(mine, once, lengths[rank]),
            told=in_words(once), shown=in_words(mine["sent"]),
        )  # fmt: skip
        yield from unchanged(call, mine["changed"])
        yield from one_by_one(f"the calls in {call}", windows[rank], mine["events"])
        yield Claim(
            f"the forward passes in {call}", len(only("forward", mine["events"])), lengths[rank],
            "each micro-batch goes through the network once: the last one can send",
        )  # fmt: skip
        yield Claim(
            call, mine["ahead"], range(3), "the stream was read ahead, which takes too much memory: draw only one "
            "micro-batch more than those that are done",
            told="at most two micro-batches in memory: the current one and the next",
        )  # fmt: skip

    return claims


def gradient_of_loss(network, inputs, target):
    return joined(torch.autograd.grad(loss_of(network(inputs), target), list(network.parameters())))


def in_words(log):
    names, sizes = (", ".join(sorted({name for name, _ in log})), ", ".join(str(size) for _, size in log))
    return f"{names}: {len(log)}, of {sizes} bytes" if log else "nothing"


def mistakes_in_sums(rank, own):
    """own: the gradient of each micro-batch of each rank, equally many of them."""
    n, length, mine = len(own), len(own[rank]), own[rank]
    means = [sum(of_ranks) / n for of_ranks in zip(*own)]
    return [
        (sum(mine), "each rank still has its own gradients: the last micro-batch must be outside no_sync, and sends the "
         "accumulated gradients"),
        (OneOf([sum(mine[:-1]), sum(means[:-1])]), "the last micro-batch is missing: it belongs outside no_sync, but it "
         "needs a forward and backward, too"),
        *((sum(means[:k] + mine[k:]), f"they were sent with micro-batch {k} of {length}, and later gradients stayed on "
           "their rank: the last micro-batch must send") for k in range(1, length)),
        (means[-1], "they contain only the last micro-batch: gradients must add up, so do not call zero_grad in between"),
        (sum(means) * n, f"{n} times too large: DDP already averages them; do not sum over the ranks, too"),
        (sum(means) / length, f"{length} times too small: loss_of already scales the loss"),
        (0 * sum(means), "they are zero: the caller takes the step, and clears the gradients after it"),
    ]  # fmt: skip


def mistakes_with_uneven_lengths(rank, own):
    n, shortest = len(own), min(map(len, own))
    total = sum(map(sum, own))
    return [
        (sum(own[rank]), "each rank still has its own gradients: the last micro-batch must be outside no_sync"),
        (sum(sum(of_rank[:shortest]) for of_rank in own) / n, "what a rank has more than the others is missing"),
        (OneOf([total / sum(map(len, own)), sum(sum(of_rank) / len(of_rank) for of_rank in own) / n]),
         "it was divided by a number of micro-batches: loss_of already scales the loss"),
    ]  # fmt: skip


def cause_of_sending(of_rank, once, length):
    """Why the ranks sent more or less than in one backward, though the gradients are
    right.
    """
    times = len(of_rank["sent"]) // len(once)
    if of_rank["sent"] != sorted(once * times):
        return "not all of it was sent by DDP, which averages on its own: do not call collectives yourself"
    forwards, backwards = (only("forward", of_rank["events"]), only("backward", of_rank["events"]))
    if any(event["alone"] for event in backwards) and not any(event["alone"] for event in forwards):
        return "no_sync is around backward only, but the forward decides whether DDP sends: put both inside"
    return f"{times} of {length} micro-batches were sent: all but the last belong inside no_sync"


@question(
    "Inside `with model.no_sync():`, gradients add up on each rank and nothing is sent. The first micro-batch "
    "outside it sends the accumulated gradients. Which micro-batch should that be, and how do you know that it is this "
    "one while you hold it?",
    "You know that a micro-batch is not the last when you have drawn the next one: so keep one back. DDP decides in the "
    "forward whether it sends, so all of `loss_of(model(inputs), target).backward()` belongs inside no_sync. With a "
    "single micro-batch, nothing belongs inside.",
    "current = next(stream). Then, for each further one from the stream: forward and backward of current inside "
    "model.no_sync(), and the further one becomes current. After the loop, forward and backward of current, outside.",
)
def check_accumulate(answer, draw):
    """The gradients of an update must be averaged over the ranks, and each of DDP's
    buckets sent once, whether the ranks have equally many micro-batches or not.
    """
    for n in (2, 3):
        width, layers, seed = draw.randint(4, 7), 6, draw.randrange(10**6)
        even = [[length] * n for length in (draw.choice([5, 6]), 1, 3)]
        uneven = [draw.sample(range(1, 6), n) for _ in range(2)]
        for lengths in (even, uneven):
            sizes = [[[draw.randint(2, 5) for _ in range(length)] for length in of_ranks] for of_ranks in lengths]
            seen = answer.on_ranks(accumulations, sizes, width, layers, seed, nproc=n)
            for number, of_ranks in enumerate(sizes):
                windows = [pairs_of(of_ranks[rank], width, seed_of(seed, rank, number)) for rank in range(n)]
                claims = claims_about(Chain(width, layers, seed), windows, seen[0]["once"])
                on_every_rank(claims, [of_rank["windows"][number] for of_rank in seen])
