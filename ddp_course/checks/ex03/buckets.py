"""Question 3: average in buckets."""

import time

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.checks.ex03.networks import Tied
from ddp_course.checks.training import (
    Chain,
    a_batch,
    close,
    gradients_of,
    state,
    take_steps,
)
from ddp_course.checks.works import noting_works
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.watch import Watch
from ddp_course.school.judge import Wrong, question, trying


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
        answer, draw, "Bucketed", tied, width, {"bucket_size_mb": 1.0}, 3, timed=False
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
