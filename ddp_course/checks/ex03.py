"""Exercise 03: average gradients after backward, during it, and in buckets."""

import time

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.checks.training import (
    Chain,
    a_batch,
    close,
    fill,
    gradients_of,
    state,
    take_steps,
)
from ddp_course.checks.works import noting_works
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.watch import Watch
from ddp_course.school.judge import Wrong, question, trying

# ---- the network that the answers are tested with ----


class Tied(nn.Module):
    """A small network with everything that makes averaging difficult: tied weights, a
    frozen parameter, a buffer, and layers that are not used in the order of their
    definition.
    """

    def __init__(self, width, seed):
        super().__init__()
        self.middle, self.last, self.first = (nn.Linear(width, width) for _ in range(3))
        self.last.weight = self.first.weight
        self.middle.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(width) + seed % 7)
        fill(self, seed)

    def forward(self, x):
        return self.last(
            torch.tanh(self.middle(torch.tanh(self.first(x * self.scale))))
        )


# ---- 1: after backward ----


def gradients_before_and_after(average_gradients, widths, seed):
    """What one call does to each of several networks, one of each width."""
    with process_group() as (rank, world_size):
        return [
            averaged(average_gradients, Tied(width, seed), width, seed + rank)
            for width in widths
        ]


def averaged(average_gradients, model, width, seed):
    model(a_batch(4, width, seed)).pow(2).mean().backward()
    before, values = gradients_of(model), state(model)
    views = {
        name: parameter.grad.view(-1)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    with Watch() as watch:
        average_gradients(model)
    after = gradients_of(model)
    moved = [
        name
        for name, value in model.state_dict().items()
        if not torch.equal(values[name], value)
    ]
    replaced = [
        name
        for name, view in views.items()
        if after[name] is not None and not torch.equal(view, after[name].view(-1))
    ]
    return {
        "before": before, "after": after, "moved": moved, "replaced": replaced,
        "messages": [entry["name"] for entry in watch.log],
    }  # fmt: skip


@question(
    "Two steps: turn all gradients into one long vector, and later cut the vector into gradients again. Only the "
    "vector is sent.",
    "Collect the gradients that are not None. torch.cat joins flattened tensors; split(sizes) divides the result; "
    "view_as gives a piece the shape of its gradient; copy_ writes into a tensor that exists.",
    "flat = torch.cat([gradient.flatten() for gradient in gradients]); all_reduce it and divide it by "
    "dist.get_world_size(); then for each gradient and its piece of flat.split([g.numel() for g in gradients]): "
    "gradient.copy_(piece.view_as(gradient))",
)
def check_average_gradients(answer, draw):
    """Every gradient must become its mean over the ranks, in place and in one message,
    also that of a tied parameter; a frozen parameter has none.
    """
    for n in draw.sample([2, 3, 4], 2):
        widths, seed = draw.sample(range(2, 7), 2), draw.randrange(10**6)
        seen = answer.on_ranks(gradients_before_and_after, widths, seed, nproc=n)
        for number in range(len(widths)):
            judge_averages([of_rank[number] for of_rank in seen])


def judge_averages(seen):
    n = len(seen)
    checked = (
        f"the gradients of a small network on {n} ranks, after average_gradients(model)"
    )
    for rank, of_rank in reversed(
        list(enumerate(seen))
    ):  # rank 0 is often right by accident
        where = f"{rank} of {n}"
        if of_rank["moved"]:
            raise Wrong(
                checked,
                rank=where,
                expected="unchanged parameters and buffers",
                got=f"{of_rank['moved'][0]} has changed",
                cause="average_gradients must change only parameter.grad; the optimizer changes the parameters",
            )
        for name, got in of_rank["after"].items():
            locals_ = [other["before"][name] for other in seen]
            compare_gradient(f"{checked}: {name}", where, rank, locals_, got)
        if of_rank["replaced"]:
            raise Wrong(f"{checked}: {of_rank['replaced'][0]}, seen through a view of its gradient that was made before",
                        rank=where, expected="the mean, in the memory of the gradient", got="the old numbers",
                        cause="parameter.grad is now another tensor: change the given one in place, with /=, div_ or "
                        "copy_")  # fmt: skip
        if len(sent := of_rank["messages"]) != 1:
            cause = "join the gradients into one tensor, and all-reduce this tensor"
            if len(sent) == sum(
                value is not None for value in of_rank["before"].values()
            ):
                cause = f"the means are right, but each gradient is sent alone: {cause}"
            raise Wrong(f"the collectives of average_gradients(model) on {n} ranks", rank=where, expected="one",
                        got=f"{len(sent)}: {', '.join(sent)}", cause=cause)  # fmt: skip


def compare_gradient(checked, where, rank, of_all, got):
    """Raise Wrong unless `got` is the mean of the ranks' own gradients; name the likely
    mistake.
    """
    if of_all[0] is None:
        if got is not None:
            cause = "this parameter is frozen and has no gradient: leave it alone"
            raise Wrong(
                checked, rank=where, expected="no gradient (None)", got=got, cause=cause
            )
        return
    mean, total = sum(of_all) / len(of_all), sum(of_all)
    if not isinstance(got, torch.Tensor) or got.shape != mean.shape:
        raise Wrong(
            checked,
            rank=where,
            expected=mean,
            got=got,
            cause="a gradient has the shape of its parameter",
        )
    if close(got, mean):
        return
    looks = [
        (total, "it is the sum over the ranks: divide by the number of ranks, once"),
        (total / len(of_all) ** 2, "it was divided by the number of ranks twice"),
        (of_all[rank], "it is still this rank's own gradient: nothing was averaged"),
        (of_all[rank] / len(of_all), "it was divided, but not summed over the ranks"),
        (of_all[0], "it is rank 0's gradient: a broadcast is not a mean"),
        (torch.zeros_like(mean), "it is zero"),
    ]
    likely = [cause for value, cause in looks if close(got, value)]
    if not likely and torch.allclose(got.double(), mean, rtol=1e-2, atol=1e-3):
        error = (got.double() - mean).abs().max().item()
        raise Wrong(checked, rank=where, expected="the mean, in 64 bits", got=f"numbers that are off by up to {error:.1e}",
                    cause="the numbers have lost digits on their way: keep the precision of the gradients")  # fmt: skip
    cause = (
        likely[0]
        if likely
        else "does each rank sum each gradient exactly once, and then divide?"
    )
    raise Wrong(checked, rank=where, expected=mean, got=got, cause=cause)


# ---- 2 and 3: during backward, in buckets ----


def train_wrapped(wrapper, options, network, seed, batches, lateness):
    """Wrap a network that differs on each rank, record its state, watch one slow
    backward, then train.
    """
    with process_group() as (rank, world_size):
        model = wrapper(network(seed + rank), **options)
        if not isinstance(getattr(model, "module", None), nn.Module):
            return {"module": False}
        start = state(model.module)

        parts = [batch.chunk(world_size)[rank] for batch in batches]
        first = parts[0].clone().requires_grad_(True)
        ends = []
        first.register_hook(
            lambda gradient: ends.append(time.perf_counter())
        )  # the last gradient of backward
        loss = model(first).pow(2).mean()
        dist.barrier()
        if rank == world_size - 1:
            time.sleep(lateness)
        begin = time.perf_counter()
        with Watch() as watch, noting_works() as works:
            loss.backward()
            blocked = time.perf_counter() - begin
            model.finish_gradient_synchronization()
        collectives = [entry for entry in watch.log if entry["name"] == "allreduce"]
        in_time = [entry for entry in collectives if entry["at"] < ends[0]]
        moved = [
            name
            for name, value in model.module.state_dict().items()
            if not torch.equal(value, start[name])
        ]
        gradients = gradients_of(model.module)

        model.module.zero_grad()
        in_first_step = [work.waited for work in works]
        history = take_steps(model, parts, model.finish_gradient_synchronization)
        again = [work.waited > before for work, before in zip(works, in_first_step)]
        return {
            "module": True, "start": start, "moved": moved, "gradients": gradients, "history": history,
            "blocked": blocked, "all": [entry["name"] for entry in watch.log], "count": len(collectives),
            "in_time": len(in_time), "forgotten": in_first_step.count(0), "again": sum(again),
            "bytes": sum(entry["bytes"] for entry in collectives),
        }  # fmt: skip


def check_wrapper(answer, draw, name, network, width, options, n, timed=True):
    """What both wrappers must do: start from the same parameters, and train like one
    process; if timed, start early and not wait.
    """
    seed, lateness = draw.randrange(10**6), 0.5 * timed
    batches = [a_batch(4 * n, width, seed + 100 + step) for step in range(5)]
    seen = answer.on_ranks(
        train_wrapped, options, network, seed, batches, lateness, nproc=n
    )
    given = ", ".join(f"{option}={value:.4g}" for option, value in options.items())
    call = f"{name}(model{', ' if given else ''}{given})"

    alone = network(seed)
    # the buffer last
    expected_start = dict(
        sorted(state(alone).items(), key=lambda item: item[0] == "scale")
    )
    alone(batches[0]).pow(2).mean().backward()
    expected_gradients = {key: value.grad for key, value in alone.named_parameters()}
    alone.zero_grad()
    expected_history = take_steps(alone, batches)

    of_each = [(f"{rank} of {n}", of_rank) for rank, of_rank in enumerate(seen)]
    for where, of_rank in of_each:
        if not of_rank["module"]:
            cause = "keep the network: self.module = module, in __init__"
            raise Wrong(
                call,
                rank=where,
                expected="the wrapped network as .module",
                got="no such attribute",
                cause=cause,
            )
    for where, of_rank in of_each:
        for key, expected in expected_start.items():
            if not torch.equal(got := of_rank["start"][key], expected):
                kind = "buffer" if key == "scale" else "parameter"
                checked = f"{kind} {key} after {call}, with a different one on each rank before"
                cause = f"the ranks must start from the same parameters and buffers: broadcast every {kind} from rank 0"
                raise Wrong(
                    checked, rank=where, expected=expected, got=got, cause=cause
                )
    one_backward = "after one backward and finish_gradient_synchronization()"
    for where, of_rank in of_each:
        if of_rank["moved"]:
            cause = "the parameter was all-reduced instead of its gradient: use parameter.grad"
            raise Wrong(
                f"{of_rank['moved'][0]} {one_backward}, with no step",
                rank=where,
                expected="unchanged",
                got="changed",
                cause=cause,
            )
        if of_rank["count"] > (
            trained := sum(value is not None for value in expected_gradients.values())
        ):
            raise Wrong(f"all-reduces in a step of {call}", rank=where, expected=f"at most {trained}, one per gradient",
                        got=of_rank["count"], cause="a gradient is sent twice: a tied weight has two names, but it is "
                        "one parameter; module.parameters() gives it once")  # fmt: skip
        for key, expected in expected_gradients.items():
            compare_with_joined(
                f"the gradient of {key} {one_backward}",
                where,
                expected,
                of_rank["gradients"][key],
                n,
            )
    for where, of_rank in of_each:
        if of_rank["forgotten"]:
            raise Wrong(f"finish_gradient_synchronization() of {call}", rank=where, expected="a wait() for each all-reduce",
                        got=f"{of_rank['forgotten']} of {of_rank['count']} not waited for",
                        cause="each all_reduce(..., async_op=True) returns its own work: keep all of them, and wait for "
                        "each")  # fmt: skip
    for where, of_rank in of_each:
        for step, (expected, got) in enumerate(
            zip(expected_history, of_rank["history"])
        ):
            for key in expected:
                if not close(got[key], expected[key]):
                    checked = f"{key} after step {step + 1} of training with {call}"
                    cause = "the first step was right, but a later one is not: what is left over from the step before?"
                    raise Wrong(
                        checked,
                        rank=where,
                        expected=expected[key],
                        got=got[key],
                        cause=cause,
                    )

        if of_rank["again"]:
            raise Wrong(f"the works that later steps of {call} wait for", rank=where, expected="only those of the "
                                                                                               "same step",
                        got=f"also {of_rank['again']} of the first step", cause="the list of works keeps growing: clear "
                        "it at the end of finish_gradient_synchronization()")  # fmt: skip

    early = seen[0]
    if not timed:
        return
    if early["in_time"] == 0:
        raise Wrong("when the first all-reduce was started, on rank 0", rank=f"0 of {n}", expected="during backward",
                    got="after backward had ended" if early["count"] else f"no all-reduce at all: {early['all']}",
                    cause="start the all-reduce in a hook: parameter.register_post_accumulate_grad_hook(...)")  # fmt: skip
    if early["blocked"] > lateness / 2:
        raise Wrong(f"how long backward took on rank 0, while rank {n - 1} came {lateness} s late", rank=f"0 of {n}",
                    expected="almost no time: backward continues, and only finish_gradient_synchronization() waits",
                    got=f"{early['blocked']:.1f} s", cause="the hook waits for its all-reduce: pass async_op=True, "
                    "and keep the returned work to wait for it later")  # fmt: skip


def compare_with_joined(checked, where, expected, got, n):
    """Raise Wrong unless a gradient equals that of one process on the joined batch."""
    if expected is None or got is None:
        if (expected is None) != (got is None):
            raise Wrong(
                checked,
                rank=where,
                expected=expected,
                got=got,
                cause="a frozen parameter has no gradient",
            )
        return
    if close(got, expected):
        return
    if close(got, expected * n):
        raise Wrong(checked, rank=where, expected=expected, got=got,
                    cause="it is the sum over the ranks, not the mean: divide by the number of ranks")  # fmt: skip
    cause = "did you send every gradient after it was complete, wait for it, and copy it back to its own parameter?"
    raise Wrong(checked, rank=where, expected=expected, got=got, cause=cause)


@question(
    "parameter.register_post_accumulate_grad_hook(function) calls function(parameter) once parameter.grad is complete.",
    "dist.all_reduce(tensor, async_op=True) returns a work immediately; work.wait() waits for the all-reduce. "
    "Collect the works.",
    "__init__: broadcast parameters and buffers, and register the hook on the parameters with requires_grad. The "
    "hook: divide, all_reduce with async_op=True, append. finish_gradient_synchronization: wait for all, and clear "
    "the list.",
)
def check_overlapped(answer, draw):
    """Every rank starts with rank 0's parameters; gradients are averaged during
    backward; training equals one process.
    """
    width = draw.randint(2, 6)
    for n in (2, 3):
        check_wrapper(
            answer, draw, "Overlapped", lambda seed: Tied(width, seed), width, {}, n
        )


@question(
    "Walk through the parameters in reverse order and begin a new bucket when the current one is full.",
    "A bucket can be sent when its last gradient is complete: count the missing gradients in the hook. torch.cat "
    "joins tensors, and split divides them again.",
    "For each bucket, count the missing gradients. At 0: torch.cat([p.grad.flatten() for p in bucket]), divide, "
    "all_reduce with async_op=True. At the end: wait, split, view_as, copy into p.grad, and reset the counts.",
)
def check_bucketed(answer, draw):
    """As above, with as few all-reduces as the bucket size allows."""
    width = draw.randint(2, 6)
    tied = lambda seed: Tied(width, seed)
    check_wrapper(answer, draw, "Bucketed", tied, width, {"bucket_size_mb": 1e-5}, 2)
    check_wrapper(
        answer, draw, "Bucketed", tied, width, {"bucket_size_mb": 1.0}, 2, timed=False
    )

    width, layers = draw.randint(6, 10), 12
    size = 8 * width**2  # bytes of a layer
    network = lambda seed: Chain(width, layers, seed)  # noqa: E731
    check_wrapper(
        answer,
        draw,
        "Bucketed",
        network,
        width,
        {"bucket_size_mb": 4 * size / 2**20},
        2,
    )
    cases = [
        (4, 3, 4),
        (0.5, 12, 12),
        (100, 1, 1),
        (5, 3, 3),
    ]  # layers in a bucket: fewest and most all-reduces
    counts = answer.on_ranks(
        count_collectives,
        [layers_in * size for layers_in, _, _ in cases],
        width,
        layers,
        nproc=2,
    )[0]
    for (layers_in, fewest, most), (count, first_bytes) in zip(cases, counts):
        if not fewest <= count <= most:
            expected = f"{fewest}" if fewest == most else f"{fewest} or {most}"
            cause = "do you begin a new bucket when the current one is full, measured in bytes, numel() * element_size()?"
            cause = (
                "every gradient is sent alone: wait until its bucket is full"
                if count == layers
                else cause
            )
            cause = (
                "all gradients share one bucket: bucket_size_mb is ignored"
                if count == 1
                else cause
            )
            checked = f"all-reduces in a step, {layers} layers of {size} bytes in buckets of {layers_in * size:.0f} bytes"
            raise Wrong(
                checked, rank="0 of 2", expected=expected, got=count, cause=cause
            )
        if layers_in == 5 and first_bytes < 5 * size:
            raise Wrong(
                f"bytes of the first all-reduce, {layers} layers in buckets of 5",
                rank="0 of 2",
                expected=f"{5 * size}, the last five layers",
                got=first_bytes,
                cause="the buckets begin with the first layers, whose gradients come "
                "last in backward: go through the parameters in reverse order",
            )


def count_collectives(wrapper, bucket_sizes, width, layers):
    counts = []
    with process_group() as (rank, world_size):
        for size in bucket_sizes:
            model = wrapper(Chain(width, layers, seed=0), bucket_size_mb=size / 2**20)
            with trying(f"bucket_size_mb={size / 2**20:.3g}"), Watch() as watch:
                model(a_batch(4, width, rank)).pow(2).mean().backward()
                model.finish_gradient_synchronization()
            sent = [entry for entry in watch.log if entry["name"] == "allreduce"]
            counts.append((len(sent), sent[0]["bytes"] if sent else 0))
    return counts
