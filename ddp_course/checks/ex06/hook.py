"""Question 4: a communication hook that weighs the ranks by their items."""

import math
import re
import time
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import Claim, OneOf, alike, on_every_rank
from ddp_course.checks.training import Chain, a_batch, descend, gradients_of
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import RankError, RankTimeout

DTYPES = [torch.float64, torch.float32]


def hooked_trainings(hook, width, layers, seed, batches, items, lateness, placeholder):
    """Train a network of each dtype with the hook, each with its own state. Rank 0
    starts backward late. placeholder: a factor of the loss of a rank with 0 items.
    """
    with process_group() as (rank, world_size):
        own = [of_ranks[rank] for of_ranks in items]
        seen = []
        for dtype in DTYPES:
            parts = [batch.to(dtype).chunk(world_size)[rank] for batch in batches]
            network = Chain(width, layers, seed).to(dtype)
            late = lateness if rank == 0 else 0
            seen.append(hooked_training(hook, network, parts, own, late, placeholder))
        return seen


def hooked_training(hook, network, batches, items, lateness, placeholder):
    """For each step: the gradients, the buckets' sizes, what was sent, and the state."""
    layer = next(network.parameters()).nbytes
    model = DistributedDataParallel(network, bucket_cap_mb=1.5 * layer / 2**20)
    state, buckets, seen = {"items": 0, "bytes": 0}, [], []

    def observed(state, bucket):
        buckets.append([bucket.buffer().numel(), bucket.buffer().element_size()])
        future = hook(state, bucket)
        # DDP would crash without a message if the hook returned None.
        if not isinstance(future, torch._C.Future):
            raise TypeError(f"{NO_FUTURE} {type(future).__name__}")
        size = buckets[-1][0]
        return future.then(lambda future: looked_at(future, size))

    def looked_at(future, size):
        value = future.value()
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{NO_TENSOR} {type(value).__name__}")
        if value.numel() != size:
            raise TypeError(f"{NO_SIZE} {value.numel()} elements")
        return value

    model.register_comm_hook(state, observed)
    for step, (batch, number) in enumerate(zip(batches, items), 1):
        state["items"] = number
        buckets.clear()
        loss = model(batch).pow(2).mean() * (1.0 if number else placeholder)
        time.sleep(lateness)
        with trying(f"step {step} of training"), CheckedWatch() as watch:
            loss.backward()
        seen.append(
            {
                "gradients": gradients_of(network),
                "buckets": list(buckets),
                "sent": [[entry["name"], entry["bytes"]] for entry in watch.log],
                "state": {what: in_number(state.get(what)) for what in UNTOUCHED},
            }
        )
        descend(network)
    return seen


NO_FUTURE, NO_TENSOR = "the hook returned a", "the future's value is a"
NO_SIZE = "the future's tensor has"
UNTOUCHED = {"items": 0, "bytes": 0}


def in_number(value):
    """A number, also one of NumPy or torch, as Python's; None for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return int(number) if number.is_integer() else number


def items_of_steps(draw, n, steps):
    """The numbers of items, per step, per rank: all different, none of them the number of
    ranks, and in one step a 0.
    """
    items = [draw.sample(range(4, 16), n) for _ in range(steps)]
    items[draw.randrange(1, steps)][draw.randrange(n)] = 0
    return items


def hooked(answer, n, *arguments):
    """`hooked_trainings` on n ranks. If DDP cannot use the hook's return value, raise
    Wrong with that cause.
    """
    checked, expected = (f"a backward with weighing_hook, {n} ranks", "a torch.futures.Future of a tensor")
    try:
        return answer.on_ranks(hooked_trainings, *arguments, nproc=n)
    except RankTimeout as late:
        if str(late).count("_engine_run_backward") == n:
            cause = "DDP waits for the future, but nothing completes it: return the work's future, or call set_result"
            raise Wrong(checked, expected=expected, got="one that never completes", cause=cause) from None
        raise
    except RankError as error:
        said = next(iter(error.message.splitlines()), "")
        a_list = "the value of a work's future is a list of one tensor: use then and value()[0]"
        causes = {
            f"{NO_FUTURE} NoneType": "return a future of the averaged gradients: DDP waits for it",
            f"{NO_FUTURE} Work": "a work is not a future, but work.get_future() returns one",
            NO_FUTURE: "DDP continues with backward and needs the tensor later: return a future of it",
            NO_TENSOR: a_list,
            NO_SIZE: "the tensor in the future replaces the buffer and must have its size: leave out the items",
            "running the callback.*'list'": a_list,
        }
        for text, cause in causes.items():
            if re.search(text, said):
                raise Wrong(checked, rank=f"{error.rank} of {n}", expected=expected,
                            got=re.sub(".*Error: ", "", said), cause=cause) from None  # fmt: skip
        raise


def gradients_of_ranks(network, batches, items):
    """Train in one process; return for each step the gradients of each rank's own mean,
    [{name: tensor}, ...].
    """
    steps, n = [], len(items[0])
    for batch, numbers in zip(batches, items):
        own = []
        for part in batch.chunk(n):
            network.zero_grad()
            network(part).pow(2).mean().backward()
            own.append(gradients_of(network))
        for name, parameter in network.named_parameters():
            parameter.grad = mean_over_items([of_rank[name] for of_rank in own], numbers)
        descend(network)
        steps.append(own)
    return steps


def mean_over_items(own, numbers):
    return sum(number * one for number, one in zip(numbers, own)) / sum(numbers)


# ---- what is claimed ----


def means_of(call, step, own, items, digits, why_nan):
    """For each rank: its gradients in a step, from 1, are the means over all items. own:
    those of each rank; items: per step, per rank; why_nan: the cause of nan.
    """
    numbers = items[step - 1]

    def claims(rank, of_ranks):
        for name, got in of_ranks[rank][step - 1]["gradients"].items():
            gradients = [of_rank[name] for of_rank in own]
            yield Claim(
                f"{call}: the gradient of {name} in step {step}, with items per rank: {numbers}", got,
                mean_over_items(gradients, numbers), cause_of_mean(got, gradients, numbers, step, why_nan),
                partial(mistakes_in_mean, rank, gradients, items, step), digits,
            )  # fmt: skip

    return claims


def sent_and_counted(call, items):
    """For each rank: it has sent each bucket once, and counted the bytes."""

    def claims(rank, of_ranks):
        for step, seen in enumerate(of_ranks[rank], 1):
            yield from sent_once(f"{call}: what was sent in step {step}", seen)
        yield from counted(call, rank, of_ranks, [numbers[rank] for numbers in items])

    return claims


NOTHING_BY_NOTHING = "a rank may have 0 items, and 0/0 is nan: divide by the items of all ranks together"
NAN_TIMES_NOTHING = (
    "a rank has 0 items and gradients of nan here, and nan times 0 is nan: put zeros in their place before they are sent"
)  # fmt: skip
BY_ITEMS = "each rank must count according to its items"


def cause_of_mean(got, own, numbers, step, why_nan):
    """Why a gradient is wrong, where none of the usual mistakes leads to it."""
    if got is None:
        return "it is missing: what does the future contain?"
    if got.isnan().any():
        return why_nan
    if alike(got, sum(own) / len(own), 0.02):
        return f"it is about the plain mean of the ranks' gradients, but rounded: {BY_ITEMS}"
    if alike(got, mean_over_items(own, numbers), 0.02):
        return "it is about right, but rounded: send the type of the buffer"
    if step > 1:
        return (
            "step 1, with one bucket, was right, but this one, with several, is not: does each bucket get the same "
            "treatment?"
        )  # fmt: skip
    return "is each rank's gradient multiplied by its items, summed, and divided by the sum of all items?"


def mistakes_in_mean(rank, own, items, step):
    """own: the gradient of each rank. items: per step, per rank."""
    n, numbers = len(own), items[step - 1]
    total, mine, weight = sum(numbers), own[rank], numbers[rank]
    sums, plain = total * mean_over_items(own, numbers), sum(own)
    at_least_one = [max(number, 1) for number in numbers]
    as_if_one = sum(at_least_one) * mean_over_items(own, at_least_one)
    return [
        (plain / n, f"it is the plain mean of the ranks' gradients: {BY_ITEMS}"),
        (plain, f"it is the plain sum of the ranks' gradients: {BY_ITEMS}"),
        (sums, "it is the sum of items times gradient over the ranks: divide it by the items of all ranks"),
        (sums / n, f"it is divided by {n}, the number of ranks: divide by the items of all ranks"),
        (OneOf([sums / total / n, sums / total / n**2]), "it is divided by the items of all ranks, and then by "
         f"{n}, the number of ranks: the former is enough"),
        (sums / total * n, f"{n} times too large: the items of all ranks are their sum, not their mean"),
        (OneOf([plain / total, plain / total / n]), "it is divided by the items, but was not multiplied by them: each "
         "rank multiplies its gradients by its own items before the all-reduce"),
        (OneOf([sums / max(weight, 1), plain / max(weight, 1)]), "each rank divides by its own items: divide by those "
         "of all ranks"),
        (OneOf([] if weight else [mine * 0]), "a rank with 0 items needs the same gradients as the others: it takes the "
         "same step"),
        (OneOf([as_if_one / sum(at_least_one), as_if_one / total]), "a rank with 0 items counts, as if it had 1"),
        (mine, "it is still this rank's own gradient: the value of the future must be the result of all_reduce"),
        (OneOf([mine * weight, mine * weight / total, mine / n]), "it has only this rank's own gradient: the future must "
         "complete only after the all-reduce, like work.get_future()"),
        (OneOf([mean_over_items(own, others) for others in (items[0], items[step - 2]) if step > 1]),
         "these are the items of an earlier step: read state['items'] in each call"),
    ]  # fmt: skip


def sent_once(what, seen):
    """Claims that each bucket was sent once, with at most one element more."""
    names, sent = [name for name, _ in seen["sent"]], sum(size for _, size in seen["sent"])
    buckets, least = len(seen["buckets"]), sum(number * size for number, size in seen["buckets"])
    most = least + sum(size for _, size in seen["buckets"])
    yield Claim(
        what, names, ["allreduce"] * buckets, "send nothing else: the number of items can travel with the bucket, in one "
        "more element of its tensor",
        told=f"one all-reduce for each of {buckets} buckets", shown=f"{', '.join(sorted(set(names)))}: {len(names)}",
    )  # fmt: skip
    yield Claim(
        what, sent, range(least, most + 1), "the number of items needs one more element per bucket, of the buffer's type, "
        "not more", [(range(least), "numbers were sent with fewer digits: send the type of the buffer")],
        told=f"at most {most} bytes", shown=f"{sent} bytes",
    )  # fmt: skip


def counted(call, rank, of_ranks, items):
    """Claims that a rank has counted its bytes and left its items, after each step."""
    truth, mine = 0, of_ranks[rank]
    nothing = "state has not changed: change the given dict, state['bytes'] += ..."
    if of_ranks[0][-1]["state"]["bytes"]:
        nothing = "only rank 0 has counted: the hook runs on every rank, each with its own state"
    for step, (seen, number) in enumerate(zip(mine, items), 1):
        truth += sum(size for _, size in seen["sent"])
        yield Claim(
            f"state['items'] after step {step}, {call}", seen["state"]["items"], number,
            "it belongs to the training loop: do not change it",
        )  # fmt: skip
        yield Claim(
            f"state['bytes'] after step {step}, {call}", seen["state"]["bytes"], truth, "it must be the sum of the bytes of "
            "all tensors that were sent; count in the hook itself: callbacks run in several threads at once, so counts get "
            "lost", [(0, nothing), *mistakes_in_bytes(truth, mine[:step], len(of_ranks))],
        )  # fmt: skip


def mistakes_in_bytes(truth, steps, n):
    """steps: what this rank did up to now."""
    buckets = [bucket for step in steps for bucket in step["buckets"]]
    size, numbers = buckets[0][1], sum(number for number, _ in buckets)
    sent = [bytes_sent for _, bytes_sent in steps[-1]["sent"]]
    others = [each * (numbers + more) for more in (0, len(buckets)) for each in (1, 4, 8)]
    return [
        (numbers * size, "these are the bytes of the buffers alone: the number of items is sent, too"),
        (OneOf(others), f"a number of this type has {size} bytes: tensor.numel() * tensor.element_size()"),
        (OneOf([2 * (n - 1) * truth // n] if n > 2 else []), "count the tensor that you give to all_reduce, not what a ring "
         "sends of it"),
        (OneOf([truth * n, numbers * size * n]), "each rank counts only what it gives to its own all-reduces: do not "
         "multiply by world_size"),
        (OneOf([sent[-1], sum(sent)]), "it contains only the last call or the last step: add to the value in state with +="),
    ]  # fmt: skip


@question(
    "The mean over all items is the sum over the ranks of items times gradient, divided by the sum of the items. These "
    "are two sums over the ranks. How can one all-reduce compute both? And what is nan times 0?",
    "Send one tensor: torch.cat of the buffer times state['items'], or of zeros if there are 0 items, and of "
    "state['items'] itself. dist.all_reduce(tensor, async_op=True) returns a work, and its get_future() a future whose "
    "value is a list of one tensor. future.then(function) returns a future with the value of function(future): divide "
    "there.",
    "weighted = buffer * items if items else torch.zeros_like(buffer); sent = torch.cat([weighted, "
    "buffer.new_tensor([items])]); state['bytes'] += sent.nbytes; future = dist.all_reduce(sent, "
    "async_op=True).get_future(); return future.then(mean), where mean(future) takes sums = future.value()[0] and "
    "returns sums[:-1] / sums[-1].",
)
def check_weighing_hook(answer, draw):
    """With the hook, DDP must train like one process that has all items, with one
    all-reduce per bucket, and every rank must count the bytes that it sent.
    """
    for n, lateness, placeholder, why_nan in ((2, 0.1, 1.0, NOTHING_BY_NOTHING), (3, 0.0, math.nan, NAN_TIMES_NOTHING)):
        width, layers = draw.randint(4, 7), draw.choice([5, 6])
        seed = draw.randrange(10**6)
        batches = [a_batch(3 * n, width, seed + 1 + step) for step in range(4)]
        items = items_of_steps(draw, n, len(batches))
        seen = hooked(answer, n, width, layers, seed, batches, items, lateness, placeholder)
        steps = gradients_of_ranks(Chain(width, layers, seed), batches, items)
        for place, dtype in enumerate(DTYPES):
            call = f"a network of {dtype} under DDP with weighing_hook, {n} ranks"
            of_ranks, digits = [of_rank[place] for of_rank in seen], 5 if dtype == torch.float64 else 4
            for step, own in enumerate(steps, 1):  # a rank that is wrong in one may spoil others in the next
                on_every_rank(means_of(call, step, own, items, digits, why_nan), of_ranks)
            on_every_rank(sent_and_counted(call, items), of_ranks)
