"""A sharded optimizer that averages and clips."""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import Between, Claim, agree, hold, on_every_rank
from ddp_course.checks.ex12.counted import ROOM, SIZE, bytes_sent, least_in_use, messages
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.watch import memory_timeline

# as many matrices as vectors, so that equally many parameters may be of very unequal
# sizes, and a single matrix is a small part of them all
MATRICES = [(18, 16), (14, 18), (16, 16), (6, 8, 5), (15, 17), (12, 22), (13, 19)]
MATRICES += [(21, 12), (17, 15), (20, 14)]
VECTORS = [(32,), (36,), (20,), (1,), (14,), (24,), (12,), (16,), (28,), (8,)]
FEW = [(9, 8), (7,)]  # fewer than there are ranks
LENGTHS = (1, 0.1, 8)  # of the gradients of each step: the second is not clipped
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

        def zero_grad():
            optimizer.zero_grad()
            left.append(["zeros" if not one.grad.any() else "a gradient" for one in parameters if one.grad is not None])

        with memory_timeline() as timeline, CheckedWatch() as watched:
            optimizer = kind(parameters, run.lr, run.max_norm)
            give(parameters, gradients_of(run, 0, rank))
            with trying("zero_grad() before the first step"):  # which may have dropped gradients
                zero_grad()
            for step in range(STEPS):
                give(parameters, gradients[step])
                with trying(f"step {step + 1}"):
                    optimizer.step()
                    zero_grad()
            moved = bytes_of_moved(parameters, given)
            kept = least_in_use(timeline, share_of(parameters, n) + moved) - moved
        end = [parameter.detach().clone() for parameter in parameters]
        sent = messages(watched.log, n)
        return {"end": end, "kept": kept, "sent": sent, "left": left}


def give(parameters, gradients):
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient


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
        on_every_rank(partial(weights, run, expected), of_ranks)
        on_every_rank(partial(bytes_and_gradients, run, expected), of_ranks)
        hold(balance(run.in_words(), [seen["kept"] for seen in of_ranks], expected))


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


# ---- what is claimed ----


def weights(run, expected, rank, of_ranks):
    end = of_ranks[rank]["end"]
    otherwise = "these are not the numbers of torch.optim.AdamW(parameters, lr=lr) with the mean gradients"
    if run.clips:  # the same answer was right without clipping
        otherwise = (
            "it is right without clipping, so look at the norm: it is that of the mean gradient of all parameters. "
            "Each rank has the squares of its share; sum them over the ranks, and then take the root"
        )
    for number, (got, truth) in enumerate(zip(end, expected)):
        yield Claim(f"{run.in_words()}: parameter {number}", got, truth, otherwise, partial(mistakes, run, number, end),
                    digits=5, scale=1)  # fmt: skip


def mistakes(run, number, end):
    """What each would make of the parameter with this number. end: all that the answer has
    made.
    """
    n, limit = run.n, run.max_norm
    yield (
        numbers_of(run, 0)[number],
        ("this parameter has not changed here: after the step, its owner must broadcast it to all other ranks"),
    )
    for cause, mixed in {
        "it has grown: it is a sum of all ranks' values; use only the owner's value": lambda new, old: new + (n - 1) * old,
        "it is a mean of the owner's updated value and the others' old values: use only the owner's value":
            lambda new, old: (new + (n - 1) * old) / n,
    }.items():  # fmt: skip
        yield one_process(run, mixed=mixed)[number], cause
    for cause, combined in {
        "the steps are as if no gradient had been clipped, or all by the same factor: each step has a norm of its own": mean,
        "shorter gradients were lengthened to max_norm: clipping only shortens": lambda all_: lengthened(mean(all_), limit),
        "each parameter was clipped alone: the norm is that of all parameters together":
            lambda all_: [clipped([one], limit)[0] for one in mean(all_)],
        "each rank clipped its own gradients before the mean was taken: first take the mean, then clip it":
            lambda all_: mean([clipped(own, limit) for own in all_]),
        "the gradients are a sum over the ranks, so their norm is too large: take the mean":
            lambda all_: clipped([n * one for one in mean(all_)], limit),
    }.items():  # fmt: skip
        made = one_process(run, combined)
        # Adam hardly sees a factor: one parameter proves little
        if all(agree(got, one, digits=5, scale=1) for got, one in zip(end, made)):
            yield made[number], cause
    for rank in range(n):  # last: a number may be near to another mistake's by chance
        cause = f"the step was made with the gradients of rank {rank} alone: take the mean over the ranks first"
        yield one_process(run, lambda all_, rank=rank: all_[rank])[number], cause
        yield one_process(run, lambda all_, rank=rank: clipped(all_[rank], limit))[number], cause


def bytes_and_gradients(run, expected, rank, of_ranks):
    """Claims that a rank keeps its share, sends no more than needed, and clears gradients."""
    seen, checked, n = of_ranks[rank], run.in_words(), run.n
    for left in seen["left"]:
        kind = "a gradient" if "a gradient" in left else "zeros"
        yield Claim(f"{checked}, after zero_grad()", left, [], CLEAR[kind], told="None as the grad of all parameters",
                    shown=f"{left.count(kind)} parameters with {kind}")  # fmt: skip
    numbers, share = sum(value.numel() for value in expected), share_of(expected, n)
    yield Claim(f"{checked}: what is kept", seen["kept"], Between(-math.inf, share),
                "a rank keeps more than its share: divide the parameters about evenly, by their sizes",
                [(Between(2 * SIZE * numbers), "this rank keeps Adam's state for all parameters, or a copy of all weights "
                  "or gradients: give its AdamW only the parameters that it owns, and keep nothing else")],
                told=f"at most {share:,.0f} bytes", shown=f"{seen['kept']:,} bytes")  # fmt: skip
    sent, enough = bytes_sent(seen["sent"]), STEPS * (2 * SIZE * numbers * 1.1 + ROOM)
    kinds = ", ".join(sorted({name for name, _ in seen["sent"]}))
    summed = sum(size for name, size in seen["sent"] if name == "allreduce")
    yield Claim(f"{checked}: what is sent", sent, Between(0, enough), ALL_REDUCED if summed > ROOM * STEPS else "the ranks "
                "send more than each gradient once to its owner and each weight once from its owner",
                told=f"at most {enough:,.0f} bytes", shown=f"{sent:,} bytes, by {kinds}")  # fmt: skip


CLEAR = {
    "zeros": "zeros take as much memory as gradients: set each parameter's grad to None",
    "a gradient": "zero_grad must clear all parameters: those of other owners have gradients here, too, also if no step "
    "came before",
}
ALL_REDUCED = (  # more than norms
    "an all_reduce sends everything twice, to compute the sum and to return it to all: only the owner needs a gradient, so "
    "a reduce or reduce_scatter is enough, and for weights a broadcast from the owner"
)


def balance(checked, kept, parameters):
    """The claim that no rank keeps much more than another. One may have the largest
    parameter more than its share, and another one less.
    """
    uneven = 2 * 3 * SIZE * max(value.numel() for value in parameters) + ROOM
    most, least = kept.index(max(kept)), kept.index(min(kept))
    yield Claim(f"{checked}: what rank {most} keeps", kept[most] - kept[least], Between(0, uneven), "the ranks share the "
                "state unevenly: divide the parameters about evenly, by their sizes, among all ranks",
                told=f"at most {uneven:,} bytes more than another rank",
                shown=f"{kept[most]:,} bytes, and rank {least} has {kept[least]:,}")  # fmt: skip
