"""Exercise 12: what a rank keeps, an optimizer that averages and clips and of which each
rank keeps a share, and a layer that gathers its weight to compute.
"""

import math
import time
from typing import NamedTuple

import torch
from torch import nn

from ddp_course.checks.differences import near, parted
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.watch import Watch, memory_timeline
from ddp_course.school.judge import Wrong, question, trying

COSTS = {
    "allreduce": 2
}  # what a ring sends, in units of the tensor's bytes; 1 for all other collectives
ROOM = 1024  # bytes, for what is small: counters of steps, flags


def least_in_use(timeline, enough):
    """The bytes in use, after a short wait, because a gloo thread may still hold what
    it has just sent.
    """
    patience = time.monotonic() + 1
    while True:
        torch.empty(0)  # one more operation, for the timeline
        if timeline[-1] <= enough or time.monotonic() > patience:
            return timeline[-1]
        time.sleep(0.01)


# ---- 1: what a rank keeps ----


def observe_kept(kept_bytes, cases):
    seen = []
    for case in cases:
        with trying(words(case)):
            seen.append(kept_bytes(**case))
    return seen


def words(case):
    return ", ".join(f"{name}={value}" for name, value in case.items())


def true_bytes(
    parameters,
    ranks,
    stage,
    mixed=False,
    buckets=False,
    shard=None,
    sizes=None,
    begin=(3, 2, 1),
    again=None,
):
    """The right answer; the other arguments are for wrong ones: another shard, other
    sizes, sharded from other stages.
    """
    shard = -(-parameters // ranks) if shard is None else shard
    sizes = sizes or ((2, 2, 12) if mixed else (4, 4, 8))
    kept = sum(
        size * (shard if stage >= sharded_from else parameters)
        for size, sharded_from in zip(sizes, begin)
    )
    return kept + (
        parameters * (sizes[1] if again is None else again) if buckets else 0
    )


@question(
    "Weights, gradients and the optimizer's state take three sizes for each parameter. Each of the three is either "
    "whole on every rank or a shard, depending on the stage.",
    "A shard has parameters / ranks parameters, rounded up: -(-parameters // ranks). The optimizer's state is a shard "
    "from stage 1 on, gradients from stage 2, weights from stage 3. In mixed precision the sizes are 2, 2 and 12.",
    "kept = weight * (shard if stage >= 3 else parameters), and so on for the others; buckets add gradient * parameters.",
)
def check_kept_bytes(answer, draw):
    """All stages, on one rank and on many, in both precisions, also with remainders and
    with DDP's buckets.
    """
    cases = []
    for stage in range(4):
        for mixed in (False, True):
            for ranks in (1, draw.randrange(3, 9), 64):
                parameters = ranks * draw.randrange(10, 10**6) + draw.randrange(
                    1, max(2, ranks)
                )
                case = {"parameters": parameters, "ranks": ranks, "stage": stage}
                # what is False may be left out
                case |= (
                    {"mixed": True} if mixed else draw.choice([{}, {"mixed": False}])
                )
                cases.append(case | draw.choice([{}, {"buckets": False}]))
                if stage == 0 and ranks > 1:
                    cases.append(case | {"buckets": True})
    [seen] = answer.on_ranks(observe_kept, cases)
    for case, got in zip(cases, seen):
        expected = true_bytes(**case)
        if got != expected:
            raise Wrong(f"kept_bytes({words(case)})", expected=f"{expected:,}", cause=cause_of_bytes(cases, seen, case),
                        got=f"{got:,}" if isinstance(got, int | float) else got)  # fmt: skip


def cause_of_bytes(cases, seen, case):
    """The mistake that explains all results, or this one."""
    looks = {
        "what is left out is False: mixed=False, buckets=False":
            lambda c: {"sizes": None if "mixed" in c else (2, 2, 12)},
        "a shard is rounded up: 10 parameters on 4 ranks are shards of 3, the last one padded":
            lambda c: {"shard": c["parameters"] // c["ranks"]},
        "a shard has a whole number of parameters: round up":
            lambda c: {"shard": c["parameters"] / c["ranks"]},
        "in mixed precision, the optimizer also has the master weights in fp32: 4 + 4 + 4 bytes":
            lambda c: {"sizes": (2, 2, 8) if c.get("mixed") else None},
        "in mixed precision weights and gradients are in 16 bits, 2 bytes each, and only the optimizer's three in fp32":
            lambda c: {"sizes": (4, 4, 8)},
        "in mixed precision gradients are in 16 bits, too":
            lambda c: {"sizes": (2, 4, 12) if c.get("mixed") else None},
        "Adam has two averages for each parameter, 8 bytes in fp32":
            lambda c: {"sizes": (2, 2, 8) if c.get("mixed") else (4, 4, 4)},
        "stage 1 shards the optimizer's state, 2 gradients, too, and 3 weights, too: here one of them is sharded too "
        "early or too late": lambda c: {"begin": (4, 3, 2)},
        "stage 1 shards the optimizer's state but not the gradients; stage 2 shards them, too":
            lambda c: {"begin": (3, 1, 2)},
        "stage 2 shards the gradients as well as the optimizer's state, stage 3 all three: a stage adds to the one before":
            None,
        "the buckets hold all gradients a second time, for any number of ranks, in the gradients' dtype":
            lambda c: {"again": 0},
        "the buckets hold gradients, in the gradients' dtype: 2 bytes each in mixed precision":
            lambda c: {"again": 4},
    }  # fmt: skip
    for cause, change in looks.items():
        if change is None:
            alike = all(one_at_a_time(c) == got for c, got in zip(cases, seen))
        else:
            alike = all(
                about(true_bytes(**c, **change(c)), got) for c, got in zip(cases, seen)
            )
        if alike:
            return cause
    if case.get("buckets"):
        return "the buckets hold all gradients a second time: gradient * parameters bytes on each rank"
    return f"stage {case['stage']}: weights, gradients and the optimizer's state, each either whole or a shard"


def about(bytes_, got):
    """Whether this is the number, or what int() or round() make of a fraction."""
    if not isinstance(got, int | float):
        return False
    return got in (bytes_, int(bytes_), round(bytes_))


def one_at_a_time(case):
    """The wrong answer in which each stage shards only one of the three."""
    shard = -(-case["parameters"] // case["ranks"])
    sizes = (2, 2, 12) if case.get("mixed") else (4, 4, 8)
    kept = sum(
        size * (shard if case["stage"] == stage else case["parameters"])
        for size, stage in zip(sizes, (3, 2, 1))
    )
    return kept + (sizes[1] * case["parameters"] if case.get("buckets") else 0)


# ---- 2: a sharded optimizer that averages and clips ----

SHAPES = [
    (18, 16),
    (32,),
    (14, 18),
    (36,),
    (16, 16),
    (6, 8, 5),
    (240,),
    (20,),
    (288,),
    (1,),
]
FEW = [(9, 8), (7,)]  # fewer than there are ranks
SIZE = 4  # bytes of a number in fp32
LENGTHS = (1, 8, 0.1)  # of the gradients of each step: the last is not clipped
STEPS = len(LENGTHS)


class Run(NamedTuple):
    """Some steps on n ranks. clips: whether max_norm shortens gradients."""

    seed: int
    lr: float
    n: int
    shapes: list
    clips: bool

    @property
    def max_norm(self):
        numbers = sum(math.prod(shape) for shape in self.shapes)
        return 0.5 * math.sqrt(numbers / self.n) if self.clips else 1e9

    def in_words(self):
        clipping = f"max_norm {self.max_norm:.4g}"
        many = f"{len(self.shapes)} parameters"
        return f"{STEPS} steps on {self.n} ranks with {many}, {clipping}"


def numbers_of(run, place):
    """Tensors of the run's shapes, the parameters for place 0."""
    generator = torch.Generator().manual_seed(run.seed + place)
    return [torch.randn(shape, generator=generator) for shape in run.shapes]


def gradients_of(run, step, rank):
    """A rank's own gradients in a step."""
    own = numbers_of(run, 1 + step * run.n + rank)
    return [LENGTHS[step] * gradient for gradient in own]


def share_of(parameters, n):
    """The bytes that a rank may keep: Adam's two averages, and perhaps a copy of the
    weights, of its share and of one more parameter.
    """
    sizes = [value.numel() for value in parameters]
    return 3 * SIZE * (sum(sizes) / n + max(sizes)) + ROOM


def observe_optimizer(kind, run):
    """Take steps on ranks; return the parameters after them, the bytes kept and sent,
    and whether gradients are gone.
    """
    run = Run(*run)
    with process_group(timeout=4) as (rank, n):
        parameters = [nn.Parameter(value) for value in numbers_of(run, 0)]
        gradients = [gradients_of(run, step, rank) for step in range(STEPS)]
        given = [parameter.untyped_storage() for parameter in parameters]
        left = []
        with memory_timeline() as timeline, Watch() as watched:
            optimizer = kind(parameters, run.lr, run.max_norm)
            for step in range(STEPS):
                for parameter, gradient in zip(parameters, gradients[step]):
                    parameter.grad = gradient
                with trying(f"step {step + 1}"):
                    optimizer.step()
                    optimizer.zero_grad()
                left.append(
                    sum(
                        one.grad is not None and bool(one.grad.any())
                        for one in parameters
                    )
                )
            moved = bytes_of_moved(parameters, given)
            kept = least_in_use(timeline, share_of(parameters, n) + moved) - moved
        end = [parameter.detach().clone() for parameter in parameters]
        sent = [[entry["name"], entry["whole"]] for entry in watched.log]
        return {"end": end, "kept": kept, "sent": sent, "left": left}


def bytes_of_moved(parameters, given):
    """The bytes of those parameters that are no longer in the storages of the beginning:
    their weights are new memory, and the old memory is free.
    """
    places = {storage.data_ptr() for storage in given}
    return sum(
        parameter.nbytes
        for parameter in parameters
        if parameter.untyped_storage().data_ptr() not in places
    )


@question(
    "Let each parameter have an owner, the same on all ranks: the largest goes first, each to the rank with the least "
    "so far. Then a step has four parts: gradients go to their owners, the norm, the owners' own steps, and weights "
    "come from their owners.",
    "The mean: divide by the number of ranks, and dist.reduce(parameter.grad, dst=owner), or one reduce_scatter. The "
    "norm: each rank sums the squares of its share; an all_reduce of that one number gives the square of the norm. The "
    "weights: dist.broadcast(parameter.detach(), src=owner) for each parameter, in the same order on all ranks.",
    "squares = sum of p.grad.pow(2).sum() for this rank's own; dist.all_reduce(squares); scale = min(1, max_norm / "
    "squares.sqrt()); multiply the own gradients by it; self.optimizer.step(), an AdamW of this rank's own parameters, "
    "or of [torch.empty(0)] where there are none. zero_grad: p.grad = None for all.",
)
def check_sharded_adamw(answer, draw):
    """After some steps with gradients of their own, all ranks must have what one process
    has that clips the mean, and none may keep or send more than needed.
    """
    lr, many = draw.choice([0.01, 0.03]), draw.sample(SHAPES, len(SHAPES))
    for n, shapes, clips in [
        (2, many, False),
        (draw.choice([3, 4]), many, True),
        (3, FEW, True),
    ]:
        run = Run(draw.randrange(10**6), lr, n, shapes, clips)
        expected = one_process(run)
        of_ranks = answer.on_ranks(observe_optimizer, list(run), nproc=n, timeout=10)
        for rank, seen in enumerate(of_ranks):
            judge_weights(run, rank, seen["end"], expected)
        for rank, seen in enumerate(of_ranks):
            judge_optimizer(run, rank, seen, expected)
        judge_balance(run.in_words(), [seen["kept"] for seen in of_ranks], expected)


def mean(gradients):
    return [torch.stack(of_ranks).mean(0) for of_ranks in zip(*gradients)]


def norm_of(gradients):
    """The norm of all of these together."""
    return float(torch.cat([gradient.flatten() for gradient in gradients]).norm())


def clipped(gradients, max_norm):
    """These gradients, shortened to this norm if they are longer together."""
    scale = min(1, max_norm / norm_of(gradients))
    return [gradient * scale for gradient in gradients]


def lengthened(gradients, norm):
    """These gradients, brought to this norm, also if they are shorter."""
    return [gradient * (norm / norm_of(gradients)) for gradient in gradients]


def one_process(run, combined=None, mixed=lambda new, old: new):
    """The parameters after the steps of torch's AdamW on clipped means.

    For wrong answers, combined: of all ranks' gradients, what to step with; mixed: what
    happens to a parameter after a step.
    """
    combined = combined or (lambda gradients: clipped(mean(gradients), run.max_norm))
    parameters = [nn.Parameter(value) for value in numbers_of(run, 0)]
    optimizer = torch.optim.AdamW(parameters, lr=run.lr)
    for step in range(STEPS):
        of_ranks = [gradients_of(run, step, rank) for rank in range(run.n)]
        old = [parameter.detach().clone() for parameter in parameters]
        for parameter, gradient in zip(parameters, combined(of_ranks)):
            parameter.grad = gradient
        optimizer.step()
        for parameter, before in zip(parameters, old):
            parameter.data = mixed(parameter.data, before)
    return [parameter.detach() for parameter in parameters]


def judge_weights(run, rank, end, expected):
    for number, (got, truth) in enumerate(zip(end, expected)):
        if near(got, truth):
            continue
        cause = cause_of_weights(run, number, got)
        truth, got = parted(truth, got, 1e-5, 1e-5)
        raise Wrong(f"{run.in_words()}: parameter {number}", rank=f"{rank} of {run.n}",
                    expected=truth, got=got, cause=cause)  # fmt: skip


def cause_of_weights(run, number, got):
    """The mistake that explains a parameter after the steps."""
    if torch.equal(got, numbers_of(run, 0)[number]):
        return (
            "this parameter has not changed here: after the step, its owner must "
            "broadcast it to all other ranks"
        )
    n, limit = run.n, run.max_norm
    looks = [
        ("it has grown: it is a sum of all ranks' values; use only the owner's value",
         {"mixed": lambda new, old: new + (n - 1) * old}),
        ("it is a mean of the owner's updated value and the others' old values: use only the owner's value",
         {"mixed": lambda new, old: (new + (n - 1) * old) / n}),
        ("the gradients were not clipped", {"combined": mean}),
        ("shorter gradients were lengthened to max_norm: clipping only shortens",
         {"combined": lambda all_: lengthened(mean(all_), limit)}),
        ("each parameter was clipped alone: the norm is that of all parameters together",
         {"combined": lambda all_: [clipped([one], limit)[0] for one in mean(all_)]}),
        ("each rank clipped its own gradients before the mean was taken: first take the mean, then clip it",
         {"combined": lambda all_: mean([clipped(own, limit) for own in all_])}),
        ("the gradients are a sum over the ranks, so their norm is too large: take the mean",
         {"combined": lambda all_: clipped([n * one for one in mean(all_)], limit)}),
    ]  # fmt: skip
    for rank in range(n):
        cause = f"the step was made with the gradients of rank {rank} alone: take the mean over the ranks first"
        for keep in (lambda own: own, lambda own: clipped(own, limit)):
            own = lambda all_, rank=rank, keep=keep: keep(all_[rank])
            looks.append((cause, {"combined": own}))
    for cause, how in looks:
        if near(got, one_process(run, **how)[number]):
            return cause
    if run.clips:  # the same answer was right without clipping
        return (
            "it is right without clipping, so look at the norm: it is that of the mean gradient of all parameters. "
            "Each rank has the squares of its share; sum them over the ranks, and then take the root"
        )
    return "these are not the numbers of torch.optim.AdamW(parameters, lr=lr) with the mean gradients"


def judge_optimizer(run, rank, seen, expected):
    checked, where, n = run.in_words(), f"{rank} of {run.n}", run.n
    if any(seen["left"]):
        cause = "zero_grad must clear all parameters: those of other owners have gradients here, too"
        raise Wrong(f"{checked}, after zero_grad()", rank=where, expected="no gradients",
                    got=f"{max(seen['left'])} parameters with one", cause=cause)  # fmt: skip
    sizes, share = [value.numel() for value in expected], share_of(expected, n)
    if seen["kept"] > share:
        cause = "a rank keeps more than its share: divide the parameters about evenly, by their sizes"
        if seen["kept"] >= 2 * SIZE * sum(sizes):
            cause = "this rank keeps Adam's state for all parameters: give its AdamW only the parameters that it owns"
        raise Wrong(f"{checked}: what is kept", rank=where, expected=f"at most {share:,.0f} bytes",
                    got=f"{seen['kept']:,} bytes", cause=cause)  # fmt: skip
    sent = sum(COSTS.get(name, 1) * size for name, size in seen["sent"])
    enough = STEPS * (2 * SIZE * sum(sizes) * 1.1 + ROOM)
    if sent > enough:
        kinds = ", ".join(sorted({name for name, _ in seen["sent"]}))
        cause = "the ranks send more than each gradient once to its owner and each weight once from its owner"
        if "allreduce" in kinds:
            cause = (
                "an all_reduce sends everything twice, to compute the sum and to return it to all: only the owner "
                "needs a gradient, so a reduce or reduce_scatter is enough, and for weights a broadcast from the owner"
            )
        raise Wrong(f"{checked}: what is sent", rank=where, expected=f"at most {enough:,.0f} bytes",
                    got=f"{sent:,} bytes, by {kinds}", cause=cause)  # fmt: skip


def judge_balance(checked, kept, parameters):
    """Raise Wrong where a rank keeps much more than another."""
    uneven = 3 * SIZE * max(value.numel() for value in parameters) + ROOM
    if max(kept) - min(kept) > uneven:
        most, least = kept.index(max(kept)), kept.index(min(kept))
        cause = (
            "the ranks share the state unevenly: divide the parameters about evenly, by "
            "their sizes, among all ranks"
        )
        raise Wrong(f"{checked}: what is kept", rank=f"{most} of {len(kept)}",
                    expected=f"at most {uneven:,} bytes more than another rank", cause=cause,
                    got=f"{kept[most]:,} bytes, and rank {least} has {kept[least]:,}")  # fmt: skip


# ---- 3: gather and free one layer ----


def layer_of(case, rank):
    """(the whole weight, this rank's x, the gradient that comes to this rank's y)."""
    generator = torch.Generator().manual_seed(case["seed"])
    weight = torch.randn(case["outputs"], case["inputs"], generator=generator)
    generator.manual_seed(case["seed"] + 1 + rank)
    x = torch.randn(case["batch"], case["inputs"], generator=generator)
    return weight, x, torch.randn(case["batch"], case["outputs"], generator=generator)


def observe_layer(kind, case, other):
    """Forward and backward on ranks: return the outputs, what is kept between the two,
    and what is sent in each. Another layer computes in between, as in a network.
    """
    with process_group(timeout=4) as (rank, n):
        weight, x, gradient = layer_of(case, rank)
        shard = weight.chunk(n)[rank].clone().requires_grad_()
        x.requires_grad_()
        with memory_timeline() as timeline, Watch() as watched:
            y = kind.apply(x, shard)
            kept = least_in_use(timeline, enough=y.nbytes + ROOM)
            forward = [[entry["name"], entry["whole"]] for entry in watched.log]
        between = observe_another(kind, other, rank, n)
        with Watch() as watched:
            y.backward(gradient)
            backward = [[entry["name"], entry["whole"]] for entry in watched.log]
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
    for n in draw.sample([2, 3, 4], 2):
        case, other = a_case(draw, n), a_case(draw, n)
        of_ranks = answer.on_ranks(observe_layer, case, other, nproc=n)
        for rank, seen in enumerate(of_ranks):
            judge_numbers(in_words(other, n), other, rank, n, seen["between"])
            judge_numbers(f"{in_words(case, n)}, between whose forward and backward another "
                          "layer computes", case, rank, n, seen)  # fmt: skip
            judge_bytes(in_words(case, n), case, rank, n, seen)


def a_case(draw, n):
    case = {"inputs": draw.randrange(24, 40), "outputs": n * draw.randrange(16, 24)}
    return case | {"batch": draw.randrange(3, 6), "seed": draw.randrange(10**6)}


def in_words(case, n):
    return f"a weight of {case['outputs']} × {case['inputs']} on {n} ranks"


def judge_numbers(checked, case, rank, n, seen):
    where, all_of = f"{rank} of {n}", [layer_of(case, number) for number in range(n)]
    weight, x, gradient = all_of[rank]
    truth = x @ weight.T
    if not near(seen["y"], truth):
        cause = (
            "y = x @ weight.T, with all rows of the weight, in the order of the ranks"
        )
        raise Wrong(
            f"{checked}: y", rank=where, expected=truth, got=seen["y"], cause=cause
        )
    if not near(seen["x"], gradient @ weight):
        cause = "the gradient of x must be gradient @ weight, with the whole weight, gathered again"
        means = sum(g @ weight for _, _, g in all_of)
        if near(seen["x"], means) or near(seen["x"], means / n):
            cause = "each rank has its own x, so the gradient of x must not be averaged"
        elif near(seen["x"], gradient @ weight / n):
            cause = "the gradient of x is this rank's own: only the weight's is divided by the number of ranks"
        raise Wrong(
            f"{checked}: the gradient of x",
            rank=where,
            expected=gradient @ weight,
            got=seen["x"],
            cause=cause,
        )
    judge_shard(checked, rank, n, seen["shard"], all_of)


def judge_bytes(checked, case, rank, n, seen):
    where, needed = f"{rank} of {n}", SIZE * case["inputs"] * case["outputs"]
    allowed = seen["y"].nbytes + ROOM
    if seen["kept"] > allowed:
        cause = (
            "you keep more for backward than necessary: x and the shard exist anyway"
        )
        if seen["kept"] >= allowed - ROOM + needed:
            cause = "the whole weight is still in memory: save x and the shard, and gather again in backward"
        raise Wrong(f"{checked}: what forward leaves", rank=where, expected=f"y, {seen['y'].nbytes:,} bytes",
                    got=f"{seen['kept']:,} bytes", cause=cause)  # fmt: skip
    for phase, times in {"forward": 1, "backward": 2}.items():
        sent = sum(COSTS.get(name, 1) * size for name, size in seen[phase])
        if sent > times * needed * 1.1 + ROOM:
            kinds = ", ".join(name for name, _ in seen[phase])
            cause = (
                "forward must gather the weight once; backward must gather it once and reduce-scatter its gradient "
                "once"
            )
            if "allreduce" in kinds:
                cause = "an all_reduce gives all ranks all rows of the gradient: reduce_scatter sends half of that"
            elif (
                phase == "backward"
                and kinds.count("allgather") > 1
                and "reduce_scatter" not in kinds
            ):
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
    elif near(got, (gradient.T @ x).chunk(n)[rank]) or near(
        got, (gradient.T @ x).chunk(n)[rank] / n
    ):
        cause = "this is the gradient of this rank's batch only: the other ranks' batches used the same weight"
    elif any(near(got, part) for part in whole.chunk(n)):
        cause = "these are another rank's rows: rank r has the r-th part of the weight, and of its gradient"
    elif isinstance(got, torch.Tensor) and got.shape == truth.shape and not got.any():
        cause = "it is zero: reduce_scatter(own, parts) writes to its first argument; return that"
    raise Wrong(
        f"{checked}: the gradient of the shard",
        rank=f"{rank} of {n}",
        expected=truth,
        got=got,
        cause=cause,
    )
