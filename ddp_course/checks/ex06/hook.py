"""Question 4: a communication hook that counts."""

import re
import time

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_course.checks.ex06.watching import agree, the_likely
from ddp_course.checks.training import Chain, a_batch, gradients_of, take_steps
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import RankError, RankTimeout
from ddp_course.school.judge import Wrong, question

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
