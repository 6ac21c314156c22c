"""A sharded optimizer that averages and clips."""

import math
from typing import NamedTuple

import torch
from torch import nn

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.differences import near, parted
from ddp_course.checks.ex12.counted import ROOM, SIZE, bytes_sent, least_in_use, messages
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.watch import memory_timeline

# as many matrices as vectors, so that equally many parameters may be of very unequal
# sizes, and a single matrix is a small part of them all
MATRICES = [(18, 16), (14, 18), (16, 16), (6, 8, 5), (15, 17), (12, 22), (13, 19)]
MATRICES += [(21, 12), (17, 15), (20, 14)]
VECTORS = [(32,), (36,), (20,), (1,), (14,), (24,), (12,), (16,), (28,), (8,)]
FEW = [(9, 8), (7,)]  # fewer than there are ranks
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
        with memory_timeline() as timeline, CheckedWatch() as watched:
            optimizer = kind(parameters, run.lr, run.max_norm)
            for step in range(STEPS):
                for parameter, gradient in zip(parameters, gradients[step]):
                    parameter.grad = gradient
                with trying(f"step {step + 1}"):
                    optimizer.step()
                    optimizer.zero_grad()
                left.append(
                    ["zeros" if not one.grad.any() else "a gradient" for one in parameters if one.grad is not None]
                )
            moved = bytes_of_moved(parameters, given)
            kept = least_in_use(timeline, share_of(parameters, n) + moved) - moved
        end = [parameter.detach().clone() for parameter in parameters]
        sent = messages(watched.log, n)
        return {"end": end, "kept": kept, "sent": sent, "left": left}


def bytes_of_moved(parameters, given):
    """The bytes of those parameters that are no longer in the storages of the beginning:
    their weights are new memory, and the old memory is free.
    """
    places = {storage.data_ptr() for storage in given}
    return sum(parameter.nbytes for parameter in parameters if parameter.untyped_storage().data_ptr() not in places)


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
    lr = draw.choice([0.01, 0.03])
    matrices = draw.sample(MATRICES, len(MATRICES))
    vectors = draw.sample(VECTORS, len(VECTORS))
    in_turn = [shape for pair in zip(matrices, vectors) for shape in pair]
    for n, shapes, clips in [(2, in_turn, False), (draw.choice([3, 4]), matrices + vectors, True), (3, FEW, True)]:
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
        cause = cause_of_weights(run, number, end)
        truth, got = parted(truth, got, 1e-5, 1e-5)
        raise Wrong(f"{run.in_words()}: parameter {number}", rank=f"{rank} of {run.n}",
                    expected=truth, got=got, cause=cause)  # fmt: skip


def cause_of_weights(run, number, end):
    """The mistake that explains all parameters after the steps, of which the one with
    this number is wrong.
    """
    got = end[number]
    if torch.equal(got, numbers_of(run, 0)[number]):
        return "this parameter has not changed here: after the step, its owner must broadcast it to all other ranks"
    n, limit = run.n, run.max_norm
    of_one = [
        ("it has grown: it is a sum of all ranks' values; use only the owner's value",
         {"mixed": lambda new, old: new + (n - 1) * old}),
        ("it is a mean of the owner's updated value and the others' old values: use only the owner's value",
         {"mixed": lambda new, old: (new + (n - 1) * old) / n}),
    ]  # fmt: skip
    of_all = [
        ("the steps are as if no gradient had been clipped, or all by the same factor: each step has a norm of its own",
         {"combined": mean}),
        ("shorter gradients were lengthened to max_norm: clipping only shortens",
         {"combined": lambda all_: lengthened(mean(all_), limit)}),
        ("each parameter was clipped alone: the norm is that of all parameters together",
         {"combined": lambda all_: [clipped([one], limit)[0] for one in mean(all_)]}),
        ("each rank clipped its own gradients before the mean was taken: first take the mean, then clip it",
         {"combined": lambda all_: mean([clipped(own, limit) for own in all_])}),
        ("the gradients are a sum over the ranks, so their norm is too large: take the mean",
         {"combined": lambda all_: clipped([n * one for one in mean(all_)], limit)}),
    ]  # fmt: skip
    of_owner = []  # last: a number may be near to another mistake's by chance
    for rank in range(n):
        cause = f"the step was made with the gradients of rank {rank} alone: take the mean over the ranks first"
        for keep in (lambda own: own, lambda own: clipped(own, limit)):
            own = lambda all_, rank=rank, keep=keep: keep(all_[rank])
            of_owner.append((cause, {"combined": own}))
    for cause, how in of_one:
        if near(got, one_process(run, **how)[number]):
            return cause
    for cause, how in of_all:  # Adam hardly sees a factor: one parameter proves little
        if all(map(near, end, one_process(run, **how))):
            return cause
    for cause, how in of_owner:
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
    for left in filter(None, seen["left"]):
        kind, cause = ("zeros", "zeros take as much memory as gradients: set each parameter's grad to None")
        if "a gradient" in left:
            kind = "a gradient"
            cause = "zero_grad must clear all parameters: those of other owners have gradients here, too"
        raise Wrong(f"{checked}, after zero_grad()", rank=where, expected="None as the grad of all parameters",
                    got=f"{left.count(kind)} parameters with {kind}", cause=cause)  # fmt: skip
    sizes, share = [value.numel() for value in expected], share_of(expected, n)
    if seen["kept"] > share:
        cause = "a rank keeps more than its share: divide the parameters about evenly, by their sizes"
        if seen["kept"] >= 2 * SIZE * sum(sizes):
            cause = "this rank keeps Adam's state for all parameters: give its AdamW only the parameters that it owns"
        raise Wrong(f"{checked}: what is kept", rank=where, expected=f"at most {share:,.0f} bytes",
                    got=f"{seen['kept']:,} bytes", cause=cause)  # fmt: skip
    sent = bytes_sent(seen["sent"])
    enough = STEPS * (2 * SIZE * sum(sizes) * 1.1 + ROOM)
    if sent > enough:
        kinds = ", ".join(sorted({name for name, _ in seen["sent"]}))
        cause = "the ranks send more than each gradient once to its owner and each weight once from its owner"
        summed = sum(size for name, size in seen["sent"] if name == "allreduce")
        if summed > ROOM * STEPS:  # more than norms
            cause = (
                "an all_reduce sends everything twice, to compute the sum and to return it to all: only the owner "
                "needs a gradient, so a reduce or reduce_scatter is enough, and for weights a broadcast from the owner"
            )
        raise Wrong(f"{checked}: what is sent", rank=where, expected=f"at most {enough:,.0f} bytes",
                    got=f"{sent:,} bytes, by {kinds}", cause=cause)  # fmt: skip


def judge_balance(checked, kept, parameters):
    """Raise Wrong where a rank keeps much more than another. One may have the largest
    parameter more than its share, and another one less.
    """
    uneven = 2 * 3 * SIZE * max(value.numel() for value in parameters) + ROOM
    if max(kept) - min(kept) > uneven:
        most, least = kept.index(max(kept)), kept.index(min(kept))
        cause = (
            "the ranks share the state unevenly: divide the parameters about evenly, by their sizes, among all ranks"
        )
        raise Wrong(f"{checked}: what is kept", rank=f"{most} of {len(kept)}",
                    expected=f"at most {uneven:,} bytes more than another rank", cause=cause,
                    got=f"{kept[most]:,} bytes, and rank {least} has {kept[least]:,}")  # fmt: skip
