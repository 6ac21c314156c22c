"""Exercise 06: one step for a window of micro-batches, where no_sync belongs, and a
hook that counts bytes.
"""

import re
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_course.checks.training import (
    Chain,
    a_batch,
    fill,
    gradients_of,
    take_steps,
)
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import SYMPTOMS, RankError, RankTimeout
from ddp_course.ranks.watch import Watch
from ddp_course.school.judge import Wrong, question, trying

FEATURES, CLASSES, LEARNING_RATE = 4, 3, 0.1
IGNORED = (
    -100
)  # the label of an item without a loss; cross_entropy's default ignore_index

# ---- what happens to the micro-batches ----


def follow(model):
    """A list that gets an entry for each later forward and backward of the network in a
    DDP model.

    what: 'forward' or 'backward'; size: of the batch; alone: whether this was inside
    no_sync.
    """
    events = []

    def forward(network, inputs, output):
        def happens(what):
            alone = not model.require_backward_grad_sync
            events.append({"what": what, "size": len(output), "alone": alone})

        happens("forward")
        if output.requires_grad:
            output.register_hook(lambda gradient: happens("backward"))

    model.module.register_forward_hook(forward)
    return events


def only(what, events):
    return [event for event in events if event["what"] == what]


def judge_memory(checked, where, window, events):
    """Raise Wrong if a rank had several micro-batches in memory at once; all
    micro-batches of the window have items.
    """
    expected = "forward and backward of one micro-batch, then of the next"
    forwards, largest = (
        only("forward", events),
        max(len(inputs) for inputs, _ in window),
    )
    for event in forwards:
        if event["size"] > largest:
            cause = "micro-batches were joined, which takes too much memory: process them one by one"
            got = f"a forward of {event['size']} at once, but the largest micro-batch has {largest}"
            raise Wrong(checked, rank=where, expected=expected, got=got, cause=cause)
    if len(forwards) > 1 and events[: len(forwards)] == forwards:
        cause = (
            "a forward keeps its activations until its backward, so here the activations of all micro-batches are "
            "in memory: call "
        )
        cause += "backward for each micro-batch before the forward of the next"
        got = f"{len(forwards)} forwards, and only then backward"
        raise Wrong(checked, rank=where, expected=expected, got=got, cause=cause)


def copies_of(window):
    return [[tensor.clone() for tensor in batch] for batch in window]


def changed(window, before, model):
    """What an answer has changed and not put back, in words.

    before: `copies_of` the window.
    """
    pairs = [pair for batches in zip(window, before) for pair in zip(*batches)]
    found = {
        "the micro-batches": not all(torch.equal(*pair) for pair in pairs),
        "whether gradients are recorded": not torch.is_grad_enabled(),
        "the mode of the model": not all(part.training for part in model.modules()),
        "model.require_backward_grad_sync": not model.require_backward_grad_sync,
    }
    return [text for text, is_changed in found.items() if is_changed]


CAUSES_OF_CHANGE = {
    "the micro-batches": "they belong to the caller, who may use them again in the next epoch: masked_fill_, "
    "clamp_ and assignments to labels[...] write into the given tensors",
    "whether gradients are recorded": "this setting belongs to the whole program: change it for a block at most, as "
    "`with torch.no_grad():` does",
    "the mode of the model": "the model was in training mode and must be so afterwards",
    "model.require_backward_grad_sync": "no_sync has to end before the function returns: otherwise later backward "
    "passes send nothing",
}  # fmt: skip


def judge_changes(checked, where, texts):
    for text in texts:
        raise Wrong(f"{text}, after {checked}", rank=where, expected="as before the call", got="changed",
                    cause=CAUSES_OF_CHANGE[text])  # fmt: skip


def joined(tensors):
    """Their values as one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def agree(got, expected, tolerance=1e-5):
    """Whether two tensors are equal up to the rounding of a factor in 32 bits."""
    return (
        got.shape == expected.shape
        and (got - expected).norm() <= tolerance * expected.norm()
    )


def the_likely(looks, got, otherwise):
    """The first cause that has a value like `got`. looks: pairs of values, a list, and
    their cause.
    """
    return next(
        (
            cause
            for values, cause in looks
            if any(agree(got, value) for value in values)
        ),
        otherwise,
    )


# ---- 1: one step per window ----


def items_of_windows(draw, n):
    """The number of items with a loss in each of four windows: per rank, per
    micro-batch.
    """
    lengths = [draw.choice([5, 6]), 3, 2, 1]
    # At least 4 items, to which a_window adds at most 4: fewer than twice as many
    # labels, because n is at least 2.
    items = [
        [[draw.randint(4, 10) for _ in range(length)] for _ in range(n)]
        for length in lengths
    ]
    first, second, third, _ = items
    for numbers in (map(sum, first), map(sum, zip(*first)), *first):
        if len(set(numbers)) < 2:
            return items_of_windows(
                draw, n
            )  # if all have the same number, a mean of means is right
    one, other = draw.sample(range(n), 2)
    second[one][draw.randrange(2)] = second[other][2] = 0
    third[draw.randrange(n)] = [0, 0]
    return items


def a_window(items, seed):
    """Micro-batches with these numbers of items with a loss, and a few items without."""
    generator, window = torch.Generator().manual_seed(seed), []
    for number in items:
        size = number + int(torch.randint(2, 5, (), generator=generator))
        inputs = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
        labels = torch.randint(CLASSES, (size,), generator=generator)
        labels[torch.randperm(size, generator=generator)[number:]] = IGNORED
        window.append((inputs, labels))
    return window


def windows_of(rank, items, seed):
    return [
        a_window(of_ranks[rank], seed + 10 * place + rank)
        for place, of_ranks in enumerate(items)
    ]


def a_classifier(seed):
    return fill(
        nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)), seed
    )


def steps_of_windows(window_step, items, seed, stop_at_gap=False):
    """Train on the windows in order; return for each the parameters after it and what
    happened in it.
    """
    with process_group(timeout=4) as (rank, _):
        model = DistributedDataParallel(a_classifier(seed))
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        events, steps, seen = follow(model), [], []
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        for number, window in enumerate(windows_of(rank, items, seed), 1):
            events.clear()
            steps.clear()
            before = copies_of(window)
            with trying(f"window {number}, of {len(window)}"):
                window_step(model, window, optimizer)
            if stop_at_gap and (backwards := len(only("backward", events))) < len(
                window
            ):
                raise RuntimeError(
                    f"{GAP}: {backwards} for {len(window)} in window {number}"
                )
            seen.append(
                {
                    "end": joined(model.parameters()),
                    "steps": len(steps),
                    "events": list(events),
                    "changed": changed(window, before, model),
                }
            )
        return seen


GAP = "fewer backwards than micro-batches"


@question(
    "Sums can be added up, but means cannot: compute the sum of the losses of each micro-batch with "
    "F.cross_entropy(..., reduction='sum'), and divide it by one number that is the same in all micro-batches of "
    "all ranks.",
    "That number is the count of labels other than -100 in the whole window, on all ranks: count your own, then "
    "call dist.all_reduce once, before the first backward. DDP divides the sum over the ranks by the number of "
    "ranks: undo this division. A rank without items must take part in everything.",
    "optimizer.zero_grad(); items = sum((labels != -100).sum() for _, labels in window); "
    "dist.all_reduce(items). For each micro-batch: loss = F.cross_entropy(model(inputs), labels, "
    "reduction='sum'), and (loss * dist.get_world_size() / items).backward(). After the last one, "
    "optimizer.step().",
)
def check_window_step(answer, draw):
    """After each of several windows, the parameters must be those of one process with
    all items in one batch.
    """
    for n in (2, 3):
        items, seed = items_of_windows(draw, n), draw.randrange(10**6)
        judge_windows(stepped(answer, items, seed, n), items, seed)


def stepped(answer, items, seed, n):
    """`steps_of_windows` on n ranks. If they wait for a rank that left something out,
    name that cause.
    """
    try:
        return answer.on_ranks(steps_of_windows, items, seed, nproc=n)
    except RankError as error:
        symptoms = [*SYMPTOMS, "SIGABRT", "gloo"]
        if isinstance(error, RankTimeout) or any(
            text in str(error) for text in symptoms
        ):
            try:
                answer.on_ranks(steps_of_windows, items, seed, True, nproc=n)
            except RankError as other:
                if GAP in other.message:
                    cause = "a micro-batch without items was left out, so the other ranks wait in its "
                    cause += "backward: it adds only zeros, but it must take part"
                    raise Wrong(f"window_step with {len(items)} windows in a row, {n} ranks", cause=cause,
                                rank=f"{other.rank} of {n}", expected="a backward for each micro-batch",
                                got=other.message.removeprefix("RuntimeError: ")) from None  # fmt: skip
        raise


def judge_windows(seen, items, seed):
    n, network, before = len(seen), a_classifier(seed), 0
    for number, of_ranks in enumerate(items):
        length = len(of_ranks[0])
        checked = f"window {number + 1}, of {length} micro-batch{'es' * (length > 1)}, {n} ranks"
        for rank, of_rank in reversed(list(enumerate(seen))):
            if (steps := of_rank[number]["steps"]) != 1:
                cause = "the step is missing: every rank must call optimizer.step() at the end of the window"
                if steps > 1:
                    cause = "the optimizer steps inside the window: let the gradients add up, and step once"
                raise Wrong(f"{checked}: steps of the optimizer", rank=f"{rank} of {n}", expected=1,
                            got=steps, cause=cause)  # fmt: skip
        start = joined(network.parameters())
        windows = [windows_of(rank, items, seed)[number] for rank in range(n)]
        gradients = [
            [gradient_of_sum(network, *pair) for pair in window] for window in windows
        ]
        truth = sum(map(sum, gradients)) / sum(map(sum, of_ranks))
        for rank, of_rank in reversed(list(enumerate(seen))):
            got = (start - of_rank[number]["end"]) / LEARNING_RATE
            if not agree(got, truth):
                labels = sum(len(labels) for window in windows for _, labels in window)
                cause = cause_of_step(got, rank, gradients, of_ranks, labels, before)
                raise Wrong(f"{checked}: the gradient of the step, for all parameters",
                            rank=f"{rank} of {n}", expected=truth, got=got, cause=cause)  # fmt: skip
        before = before + truth
        nn.utils.vector_to_parameters(
            start - LEARNING_RATE * truth, network.parameters()
        )
    for rank, of_rank in enumerate(seen):
        for number, of_window in enumerate(of_rank, 1):
            judge_changes(f"window {number}", f"{rank} of {n}", of_window["changed"])
        window = windows_of(rank, items, seed)[0]
        checked = (
            f"the calls for the {len(window)} micro-batches of window 1, {n} ranks"
        )
        judge_memory(checked, f"{rank} of {n}", window, of_rank[0]["events"])


def gradient_of_sum(network, inputs, labels):
    """The gradient of the sum of all items' losses, for all parameters as one vector."""
    loss = F.cross_entropy(
        network(inputs), labels, ignore_index=IGNORED, reduction="sum"
    )
    return joined(torch.autograd.grad(loss, list(network.parameters())))


def cause_of_step(got, rank, gradients, items, labels, before):
    """The likely cause of a wrong step.

    gradients: of each rank, of the sum of each micro-batch; items: how many of its
    items have a loss; labels: how many labels it has; before: the sum of the gradients
    of the windows before.
    """
    if got.isnan().any():
        return "a micro-batch without items has no mean: 0/0 is nan, and nan times 0 is nan. Its sum is 0"
    n, length, total = len(items), len(items[0]), sum(map(sum, items))
    own = [sum(of_rank) for of_rank in gradients]
    of_micro_batches = [sum(of_ranks) for of_ranks in zip(*gradients)]
    truth = sum(own) / total
    means = sum(sum(map(mean_of, *of_rank)) for of_rank in zip(gradients, items)) / n
    means_of_ranks = sum(map(mean_of, own, map(sum, items))) / n
    one_by_one = sum(map(mean_of, of_micro_batches, map(sum, zip(*items))))
    few = "so an item counts for more in a micro-batch with few items"
    looks = [
        ([truth / n], f"{n} times too small: DDP divides the sum over all ranks by {n}, so "
         "multiply the loss by it"),
        ([truth / n**2], f"{n * n} times too small: DDP divides by {n} anyway, so multiply the loss by it"),
        ([truth * n], f"{n} times too large: divide by the number of items on all ranks, not by its mean"),
        ([truth / length], f"{length} times too small: the number of items already covers the whole window, so do "
         f"not divide by the {length} micro-batches, too"),
        ([truth * total / labels], "labels of -100 were counted: they have no loss and are not items"),
        ([of_micro_batches[-1] / total], "it contains only the last micro-batch: call zero_grad once per window"),
        ([truth + before], "it still contains the gradients of earlier windows: call zero_grad"),
        ([means, means / length], f"it is a mean of the micro-batches' means, {few}: use sums, and divide by the "
         "number of all items"),
        ([means_of_ranks, means_of_ranks * n], f"each rank divides by its own number of items, {few}: sum this "
         "number over the ranks before the first backward"),
        ([one_by_one, one_by_one / length], f"each micro-batch is divided by its own number of items, {few}: count "
         "the items of the whole window"),
        ([n * own[rank] / total], "each rank uses its own gradients, which were not averaged: at least the last "
         "micro-batch must go through the DDP model, outside no_sync"),
    ]  # fmt: skip
    otherwise = "does it contain the loss of each item once, divided by the number of items of the whole window?"
    return the_likely(looks, got, otherwise)


def mean_of(gradient, items):
    return gradient / max(1, items)


# ---- 2: where no_sync belongs ----


def pairs_of(sizes, width, seed):
    """Micro-batches of these sizes: [(inputs, target), ...]."""
    seeds = range(seed, seed + 2 * len(sizes), 2)
    return [
        (a_batch(size, width, one), a_batch(size, width, one + 1))
        for size, one in zip(sizes, seeds)
    ]


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
        model = DistributedDataParallel(
            Chain(width, layers, seed), bucket_cap_mb=1.5 * layer / 2**20
        )
        for _ in range(
            2
        ):  # DDP knows the order of the gradients only after its first step
            loss = model(a_batch(2, width, seed)).sum()
            with Watch() as watch:
                loss.backward()
        once, events, windows = sent(watch), follow(model), []
        for number, of_ranks in enumerate(sizes):
            model.zero_grad()
            events.clear()
            window = pairs_of(of_ranks[rank], width, seed_of(seed, rank, number))
            before = copies_of(window)
            with trying(f"a window of {len(window)}"), Watch() as watch:
                accumulate(model, window, loss_of)
            gradients = [
                torch.zeros_like(value) if value.grad is None else value.grad
                for value in model.parameters()
            ]
            windows.append(
                {
                    "sent": sent(watch),
                    "events": list(events),
                    "gradients": joined(gradients),
                    "changed": changed(window, before, model),
                }
            )
        return {"once": once, "windows": windows}


def sent(watch):
    return sorted([entry["name"], entry["bytes"]] for entry in watch.log)


@question(
    "Inside `with model.no_sync():`, gradients add up on each rank and nothing is sent. The first micro-batch "
    "outside it sends the accumulated gradients. Which micro-batch should that be?",
    "DDP decides in the forward whether it sends, so all of `loss_of(model(inputs), target).backward()` belongs "
    "inside. In a window of one micro-batch, nothing belongs inside.",
    "*others, last = window. Inside model.no_sync(), call forward and backward for each of the others; then, "
    "outside it, call forward and backward for the last.",
)
def check_accumulate(answer, draw):
    """The gradients of a window must be averaged over the ranks, and each of DDP's
    buckets sent once.
    """
    for n in (2, 3):
        width, layers, seed = draw.randint(4, 7), 6, draw.randrange(10**6)
        lengths = [draw.choice([5, 6]), 1, 3]
        sizes = [
            [[draw.randint(2, 5) for _ in range(length)] for _ in range(n)]
            for length in lengths
        ]
        seen = answer.on_ranks(accumulations, sizes, width, layers, seed, nproc=n)
        for number, of_ranks in enumerate(sizes):
            windows = [
                pairs_of(of_ranks[rank], width, seed_of(seed, rank, number))
                for rank in range(n)
            ]
            of_window = [of_rank["windows"][number] for of_rank in seen]
            judge_accumulation(
                Chain(width, layers, seed), windows, seen[0]["once"], of_window
            )


def judge_accumulation(network, windows, once, seen):
    n, length = len(seen), len(windows[0])
    checked = f"accumulate with a window of {length}, {n} ranks"
    own = [[gradient_of_loss(network, *pair) for pair in window] for window in windows]
    truth = sum(map(sum, own)) / n
    for rank, of_rank in reversed(list(enumerate(seen))):
        if not agree(got := of_rank["gradients"], truth):
            raise Wrong(f"the gradients after {checked}, as one vector", rank=f"{rank} of {n}", expected=truth,
                        got=got, cause=cause_of_gradients(got, rank, own))  # fmt: skip
    for rank, of_rank in enumerate(seen):
        if of_rank["sent"] != once:
            cause = cause_of_sending(of_rank, once, length)
            raise Wrong(f"what was sent in {checked}", rank=f"{rank} of {n}", expected=in_words(once),
                        got=in_words(of_rank["sent"]), cause=cause)  # fmt: skip
    for rank, of_rank in enumerate(seen):
        judge_changes(checked, f"{rank} of {n}", of_rank["changed"])
        judge_memory(
            f"the calls in {checked}",
            f"{rank} of {n}",
            windows[rank],
            of_rank["events"],
        )


def gradient_of_loss(network, inputs, target):
    return joined(
        torch.autograd.grad(
            loss_of(network(inputs), target), list(network.parameters())
        )
    )


def in_words(log):
    names, sizes = (
        ", ".join(sorted({name for name, _ in log})),
        ", ".join(str(size) for _, size in log),
    )
    return f"{names}: {len(log)}, of {sizes} bytes" if log else "nothing"


def cause_of_gradients(got, rank, own):
    """The likely cause of wrong gradients. own: per rank, per micro-batch."""
    n, length, mine = len(own), len(own[0]), own[rank]
    means = [sum(of_ranks) / n for of_ranks in zip(*own)]
    looks = [
        ([sum(mine)], "each rank still has its own gradients: the last micro-batch must be outside no_sync, and "
         "sends the accumulated gradients"),
        ([sum(mine[:-1]), sum(means[:-1])], "the last micro-batch is missing: it belongs outside no_sync, but it "
         "needs a forward and backward, too"),
        *(([sum(means[:k] + mine[k:])], f"they were sent with micro-batch {k} of {length}, and later gradients "
           "stayed on their rank: the last micro-batch must send") for k in range(1, length)),
        ([means[-1]], "they contain only the last micro-batch: gradients must add up, so do not call zero_grad in "
                      "between"),
        ([sum(means) * n], f"{n} times too large: DDP already averages them; do not sum over the ranks, too"),
        ([sum(means) / length], f"{length} times too small: loss_of already scales the loss"),
    ]  # fmt: skip
    return the_likely(
        looks,
        got,
        "does each micro-batch go through forward and backward exactly once?",
    )


def cause_of_sending(of_rank, once, length):
    """Why the ranks sent more or less than in one backward, though the gradients are
    right.
    """
    times = len(of_rank["sent"]) // len(once)
    if of_rank["sent"] != sorted(once * times):
        return "not all of it was sent by DDP, which averages on its own: do not call collectives yourself"
    forwards, backwards = (
        only("forward", of_rank["events"]),
        only("backward", of_rank["events"]),
    )
    if any(event["alone"] for event in backwards) and not any(
        event["alone"] for event in forwards
    ):
        return "no_sync is around backward only, but the forward decides whether DDP sends: put both inside"
    return f"{times} of {length} micro-batches were sent: all but the last belong inside no_sync"


# ---- 3: a hook that counts ----

DTYPES = [torch.float64, torch.float32]


def hooked_trainings(hook, width, layers, seed, batches, lateness):
    """Train a network of each dtype with the hook, each with its own dict. Rank 0
    starts backward late.
    """
    with process_group() as (rank, world_size):
        seen = []
        for dtype in DTYPES:
            parts = [batch.to(dtype).chunk(world_size)[rank] for batch in batches]
            network = Chain(width, layers, seed).to(dtype)
            seen.append(
                hooked_training(hook, network, parts, lateness if rank == 0 else 0)
            )
        return seen


def hooked_training(hook, network, batches, lateness):
    """The first gradients, the `state` after each step, the hook's counts, and the true
    counts.
    """
    layer = next(network.parameters()).nbytes
    model = DistributedDataParallel(network, bucket_cap_mb=1.5 * layer / 2**20)
    counts, truth = (
        {"calls": 0, "bytes": 0},
        {"calls": 0, "bytes": 0, "numbers": 0, "last": 0},
    )

    def observed(state, bucket):
        buffer = bucket.buffer()
        truth["calls"] += 1
        truth["bytes"] += buffer.nbytes
        truth["numbers"] += buffer.numel()
        truth["last"] = buffer.nbytes
        future = hook(state, bucket)
        if not isinstance(
            future, torch._C.Future
        ):  # a hook that returns None would crash torch
            raise TypeError(f"{NO_FUTURE} {type(future).__name__}")
        return future.then(looked_at)

    def looked_at(future):
        if not isinstance(future.value(), torch.Tensor):
            raise TypeError(f"{NO_TENSOR} {type(future.value()).__name__}")
        return future.value()

    model.register_comm_hook(counts, observed)
    loss = model(batches[0]).pow(2).mean()
    time.sleep(lateness)
    loss.backward()
    gradients = gradients_of(network)
    model.zero_grad()
    history = take_steps(model, batches)
    return {
        "gradients": gradients,
        "history": history,
        "counts": counts,
        "truth": truth,
    }


NO_FUTURE, NO_TENSOR = "the hook returned a", "the future's value is a"


@question(
    "bucket.buffer() is one tensor with all gradients of the bucket: numel() numbers of element_size() bytes each. "
    "state['calls'] += 1 changes the dict that DDP passes in.",
    "dist.all_reduce(tensor, async_op=True) returns a work. Its get_future() returns a future whose value is a list "
    "of one tensor. future.then(function) returns a future with the value of function(future). And where do you "
    "divide?",
    "Count. Then buffer = bucket.buffer() / dist.get_world_size(); future = dist.all_reduce(buffer, "
    "async_op=True).get_future(); return future.then(lambda future: future.value()[0]).",
)
def check_counting_hook(answer, draw):
    """DDP must train with the hook as without it, and every rank must count its calls
    and bytes.
    """
    for n, lateness in ((2, 0.3), (3, 0.0)):
        width, layers, seed = (
            draw.randint(4, 7),
            draw.choice([5, 6]),
            draw.randrange(10**6),
        )
        batches = [a_batch(3 * n, width, seed + 1 + step) for step in range(3)]
        seen = hooked(answer, n, width, layers, seed, batches, lateness)
        for place, dtype in enumerate(DTYPES):
            checked = f"a network of {dtype} under DDP with counting_hook, {n} ranks"
            of_ranks = [of_rank[place] for of_rank in seen]
            tolerance = 1e-5 if dtype == torch.float64 else 1e-3
            judge_averages(
                checked, of_ranks, Chain(width, layers, seed), batches, tolerance
            )
            judge_counts(checked, of_ranks, dtype)


def hooked(answer, n, *arguments):
    """`hooked_trainings` on n ranks. If DDP cannot use the hook's return value, raise
    Wrong with that cause.
    """
    checked, expected = (
        f"a backward with counting_hook, {n} ranks",
        "a torch.futures.Future of a tensor",
    )
    try:
        return answer.on_ranks(hooked_trainings, *arguments, nproc=n)
    except RankTimeout as late:
        if str(late).count("_engine_run_backward") == n:
            cause = "DDP waits for the future, but nothing completes it: return the work's future, or call set_result"
            raise Wrong(
                checked, expected=expected, got="one that never completes", cause=cause
            ) from None
        raise
    except RankError as error:
        said = next(iter(error.message.splitlines()), "")
        a_list = "the value of a work's future is a list of one tensor: use then and value()[0]"
        causes = {
            f"{NO_FUTURE} NoneType": "return a future of the averaged gradients: DDP waits for it",
            f"{NO_FUTURE} Work": "a work is not a future, but work.get_future() returns one",
            NO_FUTURE: "DDP continues with backward and needs the tensor later: return a future of it",
            NO_TENSOR: a_list,
            "running the callback.*'list'": a_list,
        }
        for text, cause in causes.items():
            if re.search(text, said):
                raise Wrong(checked, rank=f"{error.rank} of {n}", expected=expected,
                            got=re.sub(".*Error: ", "", said), cause=cause) from None  # fmt: skip
        raise


def judge_averages(checked, of_ranks, network, batches, tolerance):
    """Raise Wrong unless the first gradients are means over the ranks and training
    equals one process.
    """
    n, own = len(of_ranks), []
    for part in batches[0].chunk(n):
        network.zero_grad()
        network(part).pow(2).mean().backward()
        own.append(gradients_of(network))
    network.zero_grad()
    # Rank 0 does not come first: it is late, and the others have already sent their
    # gradients.
    for rank, of_rank in reversed(list(enumerate(of_ranks))):
        for name, got in of_rank["gradients"].items():
            mean, mine = sum(gradients[name] for gradients in own) / n, own[rank][name]
            looks = [
                ([mean * n], "it is the sum over the ranks: with your own hook, DDP does not divide, so divide in "
                             "the hook"),
                ([mean / n], "it was divided by the number of ranks twice"),
                ([mine], "it is still this rank's own gradient: the value of the future must be the result of all_reduce"),
                ([mine / n], "it is this rank's own gradient, divided, without the other ranks' gradients: the "
                 "future must complete only after the all-reduce, like work.get_future()"),
            ]  # fmt: skip
            if not agree(got, mean, tolerance):
                otherwise = "it is neither the sum nor the mean of the ranks' gradients: what else happens to them?"
                raise Wrong(f"{checked}: the gradient of {name} after one backward", rank=f"{rank} of {n}",
                            expected=mean, got=got, cause=the_likely(looks, got, otherwise))  # fmt: skip
    for step, expected in enumerate(take_steps(network, batches)):
        for rank, of_rank in enumerate(of_ranks):
            for name, got in of_rank["history"][step].items():
                if not agree(got, expected[name], tolerance):
                    cause = "the first backward, with one bucket, was right, but this one, with several, is not: "
                    cause += "do you average each bucket?"
                    raise Wrong(f"{checked}: {name} after step {step + 1}", rank=f"{rank} of {n}",
                                expected=expected[name], got=got, cause=cause)  # fmt: skip


def judge_counts(checked, of_ranks, dtype):
    """Raise Wrong unless each rank has counted its hook's calls and its buckets' bytes."""
    n, counts = len(of_ranks), [in_numbers(of_rank["counts"]) for of_rank in of_ranks]
    for rank, of_rank in reversed(list(enumerate(of_ranks))):
        truth, got = of_rank["truth"], counts[rank]
        numbers, size = truth["numbers"], truth["bytes"] // truth["numbers"]
        of_numbers = f"a number of {dtype} has {size} bytes: buffer.numel() * buffer.element_size()"
        looks = {
            truth["bytes"]
            * n: "each rank must count only its own buckets, not those of all ranks: do not multiply by world_size",
            **dict.fromkeys((numbers, 4 * numbers, 8 * numbers), of_numbers),
            truth[
                "last"
            ]: "it contains only the last call: add to the value in state with +=",
        }
        threads = "count in the hook itself: callbacks run in several threads at once, so counts get lost"
        bytes_of_all = f"it must be the sum of the bytes of bucket.buffer() over all calls; {threads}"
        likely = {
            "bytes": looks.get(got["bytes"], bytes_of_all),
            "calls": f"it must be the number of times that DDP calls the hook, once per bucket per backward; {threads}",
        }
        for what, cause in likely.items():
            if got[what] == truth[what]:
                continue
            if got == UNTOUCHED:
                cause = (
                    "state has not changed: change the given dict, state['calls'] += 1"
                )
                if counts[0] != UNTOUCHED:
                    cause = "only rank 0 has counted: the hook runs on every rank, each with its own state"
            raise Wrong(f"state[{what!r}] after {checked}", rank=f"{rank} of {n}", expected=truth[what],
                        got=of_rank["counts"].get(what), cause=cause)  # fmt: skip


UNTOUCHED = {"calls": 0, "bytes": 0}


def in_numbers(counts):
    """The two counts; None for a value that is not a number."""
    found = {}
    for what in UNTOUCHED:
        value = counts.get(what)
        value = (
            value.item()
            if isinstance(value, torch.Tensor) and value.numel() == 1
            else value
        )
        found[what] = value if isinstance(value, int | float) else None
    return found
