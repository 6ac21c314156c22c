"""A layer that gathers its weight to compute, and frees it."""

import torch

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.differences import near
from ddp_course.checks.ex12.counted import ROOM, SIZE, bytes_sent, least_in_use, messages
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.watch import memory_timeline


def layer_of(case, rank):
    """(the whole weight, this rank's x, the gradient that comes to this rank's y)."""
    generator = torch.Generator().manual_seed(case["seed"])
    weight = torch.randn(case["outputs"], case["inputs"], generator=generator)
    generator.manual_seed(case["seed"] + 1 + rank)
    batch = case["batch"] + rank * case["longer"]
    x = torch.randn(batch, case["inputs"], generator=generator)
    return weight, x, torch.randn(batch, case["outputs"], generator=generator)


def observe_layer(kind, case, other):
    """Forward and backward on ranks: return the outputs, what is kept between the two,
    and what is sent in each. Another layer computes in between, as in a network.
    """
    with process_group(timeout=4) as (rank, n):
        weight, x, gradient = layer_of(case, rank)
        shard = weight.chunk(n)[rank].clone().requires_grad_()
        x.requires_grad_()
        with memory_timeline() as timeline, CheckedWatch() as watched:
            y = kind.apply(x, shard)
            kept = least_in_use(timeline, enough=y.nbytes + ROOM)
            forward = messages(watched.log, n)
        between = observe_another(kind, other, rank, n)
        with CheckedWatch() as watched:
            y.backward(gradient)
            backward = messages(watched.log, n)
        return {
            "y": y,
            "x": x.grad,
            "shard": shard.grad,
            "kept": kept,
            "forward": forward,
            "backward": backward,
            "between": between,
        }


def observe_another(kind, case, rank, n):
    weight, x, gradient = layer_of(case, rank)
    shard = weight.chunk(n)[rank].clone().requires_grad_()
    x.requires_grad_()
    y = kind.apply(x, shard)
    y.backward(gradient)
    return {"y": y, "x": x.grad, "shard": shard.grad}


@question(
    "forward: make room for n shards, dist.all_gather(rows, shard), weight = torch.cat(rows). For backward save x and the "
    "shard, with ctx.save_for_backward, and not the weight.",
    "backward: gather again. The gradient of x is gradient @ weight. The gradient of the weight is gradient.T @ x, on "
    "each rank for its own batch: cut it into n parts by rows, and dist.reduce_scatter(own, parts) gives each rank "
    "the sum for its rows.",
    "of_weight = gradient.T @ x / n; own = torch.empty_like(shard); dist.reduce_scatter(own, list(of_weight.chunk(n))); "
    "return gradient @ weight, own.",
)
def check_gathered_linear(answer, draw):
    """Output and gradients must be the whole layer's; its weight must be freed in
    between, and sent no more than needed.
    """
    # first with equally long batches, where it is easier to say what is wrong
    for longer, n in enumerate(draw.sample([2, 3, 4], 2)):
        case, other = a_case(draw, n, longer), a_case(draw, n, longer)
        of_ranks = answer.on_ranks(observe_layer, case, other, nproc=n)
        for rank, seen in enumerate(of_ranks):
            judge_numbers(in_words(other, n), other, rank, n, seen["between"])
            judge_numbers(f"{in_words(case, n)}, between whose forward and backward another "
                          "layer computes", case, rank, n, seen)  # fmt: skip
            judge_bytes(in_words(case, n), case, rank, n, seen)


def a_case(draw, n, longer):
    """longer: by how many rows each rank's batch is longer than the one before."""
    case = {"inputs": draw.randrange(24, 40), "outputs": n * draw.randrange(16, 24)}
    case |= {"batch": draw.randrange(3, 6), "seed": draw.randrange(10**6)}
    return case | {"longer": longer}


def in_words(case, n):
    return f"a weight of {case['outputs']} × {case['inputs']} on {n} ranks"


def judge_numbers(checked, case, rank, n, seen):
    where, all_of = f"{rank} of {n}", [layer_of(case, number) for number in range(n)]
    weight, x, gradient = all_of[rank]
    truth = x @ weight.T
    if not near(seen["y"], truth):
        cause = "y = x @ weight.T, with all rows of the weight, in the order of the ranks"
        raise Wrong(f"{checked}: y", rank=where, expected=truth, got=seen["y"], cause=cause)
    if not near(seen["x"], gradient @ weight):
        cause = "the gradient of x must be gradient @ weight, with the whole weight, gathered again"
        if near(seen["x"], gradient @ weight / n):
            cause = "the gradient of x is this rank's own: only the weight's is divided by the number of ranks"
        elif not case["longer"]:
            total = sum(g @ weight for _, _, g in all_of)
            if near(seen["x"], total) or near(seen["x"], total / n):
                cause = "each rank has its own x, so the gradient of x must not be averaged"
        raise Wrong(f"{checked}: the gradient of x", rank=where, expected=gradient @ weight, got=seen["x"], cause=cause)
    judge_shard(checked, rank, n, seen["shard"], all_of)


def judge_bytes(checked, case, rank, n, seen):
    where, needed = f"{rank} of {n}", SIZE * case["inputs"] * case["outputs"]
    allowed = seen["y"].nbytes + ROOM
    if seen["kept"] > allowed:
        cause = "you keep more for backward than necessary: x and the shard exist anyway"
        if seen["kept"] >= allowed - ROOM + needed:
            cause = "the whole weight is still in memory: save x and the shard, and gather again in backward"
        raise Wrong(f"{checked}: what forward leaves", rank=where, expected=f"y, {seen['y'].nbytes:,} bytes",
                    got=f"{seen['kept']:,} bytes", cause=cause)  # fmt: skip
    for phase, times in {"forward": 1, "backward": 2}.items():
        sent = bytes_sent(seen[phase])
        if sent > times * needed * 1.1 + ROOM:
            kinds = ", ".join(name for name, _ in seen[phase])
            cause = (
                "forward must gather the weight once; backward must gather it once and reduce-scatter its gradient once"
            )
            if "allreduce" in kinds:
                cause = "an all_reduce gives all ranks all rows of the gradient: reduce_scatter sends half of that"
            elif phase == "backward" and kinds.count("allgather") > 1 and "reduce_scatter" not in kinds:
                cause = "gathering all ranks' gradients sends n times as much as reduce_scatter, and keeps them all"
            raise Wrong(f"{checked}: what {phase} sends", rank=where, got=f"{sent:,} bytes, by {kinds}",
                        expected=f"{times} times the weight, {times * needed:,} bytes", cause=cause)  # fmt: skip


def judge_shard(checked, rank, n, got, all_of):
    whole = sum(gradient.T @ x for _, x, gradient in all_of) / n
    truth = whole.chunk(n)[rank]
    if near(got, truth):
        return
    _, x, gradient = all_of[rank]
    cause = "it must be the mean over ranks of gradient.T @ x, of which this rank gets its rows"
    if near(got, n * truth):
        cause = "this is the sum over ranks: divide by the number of ranks, as DDP does"
    elif near(got, (gradient.T @ x).chunk(n)[rank]) or near(got, (gradient.T @ x).chunk(n)[rank] / n):
        cause = "this is the gradient of this rank's batch only: the other ranks' batches used the same weight"
    elif any(near(got, part) for part in whole.chunk(n)):
        cause = "these are another rank's rows: rank r has the r-th part of the weight, and of its gradient"
    elif isinstance(got, torch.Tensor) and got.shape == truth.shape and not got.any():
        cause = "it is zero: reduce_scatter(own, parts) writes to its first argument; return that"
    raise Wrong(f"{checked}: the gradient of the shard", rank=f"{rank} of {n}", expected=truth, got=got, cause=cause)
