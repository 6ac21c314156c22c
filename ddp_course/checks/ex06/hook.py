"""Question 4: a communication hook that weighs the ranks by their items."""

import re
import time

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.ex06.watching import agree, the_likely
from ddp_course.checks.training import Chain, a_batch, descend, gradients_of
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import RankError, RankTimeout

DTYPES = [torch.float64, torch.float32]


def hooked_trainings(hook, width, layers, seed, batches, items, lateness):
    """Train a network of each dtype with the hook, each with its own state. Rank 0
    starts backward late.
    """
    with process_group() as (rank, world_size):
        own = [of_ranks[rank] for of_ranks in items]
        seen = []
        for dtype in DTYPES:
            parts = [batch.to(dtype).chunk(world_size)[rank] for batch in batches]
            network = Chain(width, layers, seed).to(dtype)
            late = lateness if rank == 0 else 0
            seen.append(hooked_training(hook, network, parts, own, late))
        return seen


def hooked_training(hook, network, batches, items, lateness):
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
        loss = model(batch).pow(2).mean()
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


@question(
    "The mean over all items is the sum over the ranks of items times gradient, divided by the sum of the items. These "
    "are two sums over the ranks. How can one all-reduce compute both?",
    "Send one tensor: torch.cat of the buffer times state['items'] and of state['items'] itself. dist.all_reduce(tensor, "
    "async_op=True) returns a work, and its get_future() a future whose value is a list of one tensor. "
    "future.then(function) returns a future with the value of function(future): divide there.",
    "sent = torch.cat([buffer * items, buffer.new_tensor([items])]); state['bytes'] += sent.nbytes; future = "
    "dist.all_reduce(sent, async_op=True).get_future(); return future.then(mean), where mean(future) takes sums = "
    "future.value()[0] and returns sums[:-1] / sums[-1].",
)
def check_weighing_hook(answer, draw):
    """With the hook, DDP must train like one process that has all items, with one
    all-reduce per bucket, and every rank must count the bytes that it sent.
    """
    for n, lateness in ((2, 0.1), (3, 0.0)):
        width, layers = draw.randint(4, 7), draw.choice([5, 6])
        seed = draw.randrange(10**6)
        batches = [a_batch(3 * n, width, seed + 1 + step) for step in range(4)]
        items = items_of_steps(draw, n, len(batches))
        seen = hooked(answer, n, width, layers, seed, batches, items, lateness)
        for place, dtype in enumerate(DTYPES):
            checked = f"a network of {dtype} under DDP with weighing_hook, {n} ranks"
            of_ranks = [of_rank[place] for of_rank in seen]
            tolerance = 1e-5 if dtype == torch.float64 else 1e-3
            network = Chain(width, layers, seed)
            judge_means(checked, of_ranks, network, batches, items, tolerance)
            judge_messages(checked, of_ranks)
            judge_state(checked, of_ranks, items)


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


def gradients_of_ranks(network, batch, n):
    """Each rank's own gradients of its mean, {name: tensor}."""
    own = []
    for part in batch.chunk(n):
        network.zero_grad()
        network(part).pow(2).mean().backward()
        own.append(gradients_of(network))
    network.zero_grad()
    return own


def judge_means(checked, of_ranks, network, batches, items, tolerance):
    """Raise Wrong unless the gradients of each step are the means over all items."""
    n, order = len(of_ranks), reversed(range(len(of_ranks)))
    order = list(order)  # rank 0 is late, so another rank shows more of a mistake
    for step, batch in enumerate(batches):
        own, numbers = gradients_of_ranks(network, batch, n), items[step]
        total = sum(numbers)
        for name, parameter in network.named_parameters():
            mean = sum(k * of_rank[name] for k, of_rank in zip(numbers, own)) / total
            parameter.grad = mean
            for rank in order:
                got = of_ranks[rank][step]["gradients"][name]
                if got is not None and agree(got, mean, tolerance):
                    continue
                gradients = [of_rank[name] for of_rank in own]
                cause = cause_of_mean(got, rank, gradients, items, step)
                with_items = f"items per rank: {numbers}"
                raise Wrong(f"{checked}: the gradient of {name} in step {step + 1}, {with_items}",
                            rank=f"{rank} of {n}", expected=mean, got=got, cause=cause)  # fmt: skip
        descend(network)


def cause_of_mean(got, rank, own, items, step):
    """The likely cause of a wrong gradient. own: the gradient, per rank."""
    n, numbers = len(own), items[step]
    if got is None:
        return "it is missing: what does the future contain?"
    if got.isnan().any():
        return "a rank may have 0 items, and 0/0 is nan: divide by the items of all ranks together"
    total, mine, weight = sum(numbers), own[rank], numbers[rank]
    sums, plain = sum(k * one for k, one in zip(numbers, own)), sum(own)
    before = items[step - 1] if step else items[0]
    earlier = [sum(k * one for k, one in zip(others, own)) / sum(others) for others in (items[0], before)]
    at_least_one = [max(k, 1) for k in numbers]
    counts_nothing = sum(k * one for k, one in zip(at_least_one, own))
    by_items = "each rank must count according to its items"
    looks = [
        ([plain / n], f"it is the plain mean of the ranks' gradients: {by_items}"),
        ([plain], f"it is the plain sum of the ranks' gradients: {by_items}"),
        ([sums], "it is the sum of items times gradient over the ranks: divide it by the items of all ranks"),
        ([sums / n], f"it is divided by {n}, the number of ranks: divide by the items of all ranks"),
        ([sums / total / n, sums / total / n**2], "it is divided by the items of all ranks, and then by "
         f"{n}, the number of ranks: the former is enough"),
        ([sums / total * n], f"{n} times too large: the items of all ranks are their sum, not their mean"),
        ([plain / total, plain / total / n], "it is divided by the items, but was not multiplied by them: each "
         "rank multiplies its gradients by its own items before the all-reduce"),
        ([sums / max(weight, 1), plain / max(weight, 1)], "each rank divides by its own items: divide by those "
         "of all ranks"),
        ([mine * 0] if not weight else [], "a rank with 0 items needs the same gradients as the others: it takes the "
         "same step"),
        ([counts_nothing / sum(at_least_one), counts_nothing / total], "a rank with 0 items counts, as if it had 1"),
        ([mine], "it is still this rank's own gradient: the value of the future must be the result of all_reduce"),
        ([mine * weight, mine * weight / total, mine / n], "it has only this rank's own gradient: the future must "
         "complete only after the all-reduce, like work.get_future()"),
        *(([value], "these are the items of an earlier step: read state['items'] in each call") for value in
          earlier if step),
    ]  # fmt: skip
    otherwise = "is each rank's gradient multiplied by its items, summed, and divided by the sum of all items?"
    if agree(got, plain / n, 0.02):
        otherwise = f"it is about the plain mean of the ranks' gradients, but rounded: {by_items}"
    elif agree(got, sums / total, 0.02):
        otherwise = "it is about right, but rounded: send the type of the buffer"
    elif step:
        otherwise = (
            "step 1, with one bucket, was right, but this one, with several, is not: does each bucket get the same "
            "treatment?"
        )  # fmt: skip
    return the_likely(looks, got, otherwise)


def judge_messages(checked, of_ranks):
    """Raise Wrong unless each bucket was sent once, with at most one element more."""
    n = len(of_ranks)
    for rank, of_rank in enumerate(of_ranks):
        for step, seen in enumerate(of_rank, 1):
            names = [name for name, _ in seen["sent"]]
            allowed = sum((numbers + 1) * size for numbers, size in seen["buckets"])
            sent = sum(bytes_sent for _, bytes_sent in seen["sent"])
            buckets = len(seen["buckets"])
            where = f"{checked}: what was sent in step {step}"
            if names != ["allreduce"] * buckets:
                raise Wrong(where, rank=f"{rank} of {n}", expected=f"one all-reduce for each of {buckets} buckets",
                            got=f"{', '.join(sorted(set(names)))}: {len(names)}", cause="send nothing else: the "
                            "number of items can travel with the bucket, in one more element of its tensor")  # fmt: skip
            if sent < sum(numbers * size for numbers, size in seen["buckets"]):
                raise Wrong(where, rank=f"{rank} of {n}", expected=f"{allowed} bytes", got=f"{sent} bytes",
                            cause="numbers were sent with fewer digits: send the type of the buffer")  # fmt: skip
            if sent > allowed:
                raise Wrong(where, rank=f"{rank} of {n}", expected=f"at most {allowed} bytes",
                            got=f"{sent} bytes", cause="the number of items needs one more element per bucket, of the "
                            "buffer's type, not more")  # fmt: skip


def judge_state(checked, of_ranks, items):
    """Raise Wrong unless each rank has counted its bytes and left its items."""
    n, last = len(of_ranks), len(items) - 1
    untouched = [of_rank[last]["state"]["bytes"] == 0 for of_rank in of_ranks]
    for rank, of_rank in reversed(list(enumerate(of_ranks))):
        truth = 0
        for step, seen in enumerate(of_rank):
            where = f"{rank} of {n}"
            truth += sum(bytes_sent for _, bytes_sent in seen["sent"])
            left, given = seen["state"]["items"], items[step][rank]
            if left != given:
                raise Wrong(f"state['items'] after step {step + 1}, {checked}", rank=where, expected=given,
                            got=left, cause="it belongs to the training loop: do not change it")  # fmt: skip
            got = seen["state"]["bytes"]
            if got == truth:
                continue
            cause = cause_of_bytes(got, truth, of_rank[: step + 1], n)
            if untouched[rank]:
                cause = "state has not changed: change the given dict, state['bytes'] += ..."
                if not untouched[0]:
                    cause = "only rank 0 has counted: the hook runs on every rank, each with its own state"
            raise Wrong(f"state['bytes'] after step {step + 1}, {checked}", rank=where, expected=truth, got=got,
                        cause=cause)  # fmt: skip


def cause_of_bytes(got, truth, steps, n):
    """The likely cause of a wrong count. steps: what this rank did up to now."""
    buckets = [bucket for step in steps for bucket in step["buckets"]]
    size, numbers = buckets[0][1], sum(number for number, _ in buckets)
    sent = [bytes_sent for _, bytes_sent in steps[-1]["sent"]]
    of_buffers = [numbers, 4 * numbers, 8 * numbers]
    more = [each * (numbers + len(buckets)) for each in (1, 4, 8)]
    looks = [
        ([numbers * size], "these are the bytes of the buffers alone: the number of items is sent, too"),
        (of_buffers + more, f"a number of this type has {size} bytes: tensor.numel() * tensor.element_size()"),
        ([2 * (n - 1) * truth // n] if n > 2 else [], "count the tensor that you give to all_reduce, not what a ring "
         "sends of it"),
        ([truth * n, numbers * size * n], "each rank counts only what it gives to its own all-reduces: do not "
         "multiply by world_size"),
        ([sent[-1], sum(sent)], "it contains only the last call or the last step: add to the value in state with +="),
    ]  # fmt: skip
    threads = "count in the hook itself: callbacks run in several threads at once, so counts get lost"
    otherwise = f"it must be the sum of the bytes of all tensors that were sent; {threads}"
    return next((cause for values, cause in looks if got in values), otherwise)
