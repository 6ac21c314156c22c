"""A layer that gathers its weight to compute, and frees it."""

import math
from functools import partial

import torch

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import Between, Claim, on_every_rank
from ddp_course.checks.ex12.counted import ROOM, SIZE, bytes_sent, least_in_use, messages
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.watch import memory_timeline

DIGITS = 4.8  # of products in fp32
NAMES = "x", "the shard", "the gradient that backward gets"


def layer_of(case, rank):
    """(the whole weight, this rank's x, the gradient that comes to this rank's y)."""
    generator = torch.Generator().manual_seed(case["seed"])
    weight = torch.randn(case["outputs"], case["inputs"], generator=generator)
    generator.manual_seed(case["seed"] + 1 + rank)
    batch = case["batch"] + rank * case["longer"]
    x = torch.randn(batch, case["inputs"], generator=generator)
    return weight, x, torch.randn(batch, case["outputs"], generator=generator)


def observe_layer(kind, case, other, first):
    """Forward and backward on ranks: return the outputs, what is kept between the two,
    and what is sent in each. Another layer computes in between, as in a network; and a
    first one, whose x needs no gradient.
    """
    with process_group(timeout=4) as (rank, n):
        weight, x, gradient = layer_of(case, rank)
        shard = weight.chunk(n)[rank].clone().requires_grad_()
        x.requires_grad_()
        before = [value.detach().clone() for value in (x, shard, gradient)]
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
            "changed": [
                name for name, old, new in zip(NAMES, before, (x, shard, gradient)) if not torch.equal(old, new)
            ],
            "first": observe_another(kind, first, rank, n, needs=False),
        }


def observe_another(kind, case, rank, n, needs=True):
    weight, x, gradient = layer_of(case, rank)
    shard = weight.chunk(n)[rank].clone().requires_grad_()
    x.requires_grad_(needs)
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
        case, other, first = (a_case(draw, n, longer) for _ in range(3))
        case["batch"] = draw.randrange(14, 18)  # so that a copy of x is seen, and is less than the weight
        first |= {"batch": n - 1, "longer": -1} if longer else {}  # the last rank has no sample
        of_ranks = answer.on_ranks(observe_layer, case, other, first, nproc=n)
        on_every_rank(partial(claims, case, other, first), of_ranks)


def a_case(draw, n, longer):
    """longer: by how many rows each rank's batch is longer than the one before."""
    case = {"inputs": draw.randrange(24, 40), "outputs": n * draw.randrange(16, 24)}
    case |= {"batch": draw.randrange(3, 6), "seed": draw.randrange(10**6)}
    return case | {"longer": longer}


def in_words(case, n):
    return f"a weight of {case['outputs']} × {case['inputs']} on {n} ranks"


# ---- what is claimed ----


def claims(case, other, first, rank, of_ranks):
    seen, n = of_ranks[rank], len(of_ranks)
    yield from numbers(in_words(other, n), other, rank, n, seen["between"])
    between = f"{in_words(case, n)}, between whose forward and backward another layer computes"
    yield from numbers(between, case, rank, n, seen)
    yield Claim(f"{in_words(case, n)}: what changes", seen["changed"], [], "leave what you are given as it is: compute new "
                "tensors", told="nothing", shown=", ".join(seen["changed"]))  # fmt: skip
    yield from memory_and_messages(in_words(case, n), case, seen)
    words = f"{in_words(first, n)}, where x needs no gradient, as in a model's first layer"
    words += ", and the last rank has no sample" if first["longer"] < 0 else ""
    yield from numbers(words, first, rank, n, seen["first"], needs=False)


def numbers(checked, case, rank, n, seen, needs=True):
    all_of = [layer_of(case, number) for number in range(n)]
    weight, x, gradient = all_of[rank]
    of_x, own = gradient @ weight, gradient.T @ x
    whole = sum(each.T @ one for _, one, each in all_of) / n
    yield Claim(f"{checked}: y", seen["y"], x @ weight.T,
                "y = x @ weight.T, with all rows of the weight, in the order of the ranks", digits=DIGITS)  # fmt: skip
    total = sum(each @ weight for _, _, each in all_of) if not case["longer"] else None
    averaged = "each rank has its own x, so the gradient of x must not be averaged"
    if needs:
        yield Claim(f"{checked}: the gradient of x", seen["x"], of_x,
                "the gradient of x must be gradient @ weight, with the whole weight, gathered again", [
                    (of_x / n, "the gradient of x is this rank's own: only the weight's is divided by the number of ranks"),
                    *([] if total is None else [(total, averaged), (total / n, averaged)]),
                ], DIGITS)  # fmt: skip
    rows = own.chunk(n)[rank]
    alone = "this is the gradient of this rank's batch only: the other ranks' batches used the same weight"
    yield Claim(f"{checked}: the gradient of the shard", seen["shard"], whole.chunk(n)[rank],
                "it must be the mean over ranks of gradient.T @ x, of which this rank gets its rows", [
                    (n * whole.chunk(n)[rank], "this is the sum over ranks: divide by the number of ranks, as DDP does"),
                    (rows, alone), (rows / n, alone),
                    *[(part, "these are another rank's rows: rank r has the r-th part of the weight, and of its gradient")
                      for part in whole.chunk(n)],
                    (0 * rows, "it is zero: reduce_scatter(own, parts) writes to its first argument; return that"),
                ], DIGITS)  # fmt: skip


def memory_and_messages(checked, case, seen):
    needed, y = SIZE * case["inputs"] * case["outputs"], seen["y"].nbytes
    yield Claim(f"{checked}: what forward leaves", seen["kept"], Between(-math.inf, y + ROOM),
                "you keep more for backward than necessary: x and the shard exist anyway",
                [(Between(y + needed), "the whole weight is still in memory: save x and the shard, and gather again in "
                  "backward")],
                told=f"y, {y:,} bytes", shown=f"{seen['kept']:,} bytes")  # fmt: skip
    for phase, times in {"forward": 1, "backward": 2}.items():
        sent, kinds = bytes_sent(seen[phase]), ", ".join(name for name, _ in seen[phase])
        yield Claim(f"{checked}: what {phase} sends", sent, Between(0, times * needed * 1.1 + ROOM), cause_of(phase, kinds),
                    told=f"{times} times the weight, {times * needed:,} bytes",
                    shown=f"{sent:,} bytes, by {kinds}")  # fmt: skip


def cause_of(phase, kinds):
    """Why a phase sends too much."""
    if "allreduce" in kinds:
        return "an all_reduce gives all ranks all rows of the gradient: reduce_scatter sends half of that"
    if phase == "backward" and kinds.count("allgather") > 1 and "reduce_scatter" not in kinds:
        return "gathering all ranks' gradients sends n times as much as reduce_scatter, and keeps them all"
    return "forward must gather the weight once; backward must gather it once and reduce-scatter its gradient once"
