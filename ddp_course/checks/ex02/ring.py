"""Question 3: a ring reduce-scatter of pieces of any length."""

from functools import partial

import torch
import torch.distributed as dist

from ddp_course.checks.claims import hold, on_every_rank
from ddp_course.checks.ex02.messages import CarefulWatch, a_tensor, picture, sends
from ddp_course.checks.ex02.ring_messages import at_the_same_time, each_piece_once, to_a_neighbour
from ddp_course.checks.ex02.ring_piece import described, returned
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group


def observe(ring_reduce_scatter, cases):
    """For each case (lengths, dtype, seed): what the function returned on this rank, its
    two arguments afterwards, and the log.
    """
    seen = []
    with process_group() as (rank, n):
        for case in cases:
            lengths, dtype, seed = case
            tensor, given = a_tensor([sum(lengths)], dtype, seed + rank), list(lengths)
            with trying(described(case, n)), CarefulWatch() as watch:
                returned = ring_reduce_scatter(tensor, given)
            seen.append({
                "returned": returned, "tensor": tensor, "lengths": given, "log": watch.log,
            })  # fmt: skip
            dist.barrier()
    return seen


@question(
    "In each step, every rank sends the sum of one piece as far as it has come to the next rank, which adds its own "
    "numbers. A piece must end at its own rank. Where must its way round the ring begin?",
    "Piece p starts at rank p + 1, and comes back to rank p after n - 1 steps. So in step s, rank r sends piece "
    "(r - 1 - s) % n and receives piece (r - 2 - s) % n. Sum into copies: tensor.split(lengths) gives views of the "
    "given tensor. If all ranks call send first, no rank receives: use isend, and wait for it later.",
    "pieces = [piece.clone() for piece in tensor.split(lengths)]; for step in range(n - 1): isend "
    "pieces[(rank - 1 - step) % n] to (rank + 1) % n; recv into an empty tensor like pieces[(rank - 2 - step) % n] from "
    "(rank - 1) % n; wait; add it to that piece. Return pieces[rank]",
)
def check_ring_reduce_scatter(answer, draw):
    """Each rank returns the sum of its own piece, for any lengths; each rank sends every
    other piece once, to one neighbour.
    """
    first, second = draw.sample([3, 4, 5], 2)
    even = [[draw.randint(2, 5)] * first]
    ragged = [an_uneven_split(second, draw), an_uneven_split(second, draw, empty=True)]
    of_two = [an_uneven_split(2, draw), [0, 0], [0, 3]]
    of_one = [[draw.randint(1, 9)], [0]]
    for n, splits in [(first, even), (second, ragged), (2, of_two), (1, of_one)]:
        # integers come second: /= n raises an error for them, and "the mean" is the
        # better verdict
        cases = [(lengths, dtype, draw.randrange(10**6))
                 for lengths in splits for dtype in (torch.float64, torch.int64)]  # fmt: skip
        if splits is even:
            cases.pop()
        if splits is ragged:  # again, with other numbers
            cases.insert(1, (*cases[0][:2], draw.randrange(10**6)))
        seen = answer.on_ranks(observe, cases, nproc=n)
        for place, (case, of_ranks) in enumerate(zip(cases, zip(*seen))):
            again = any(case[:2] == earlier[:2] for earlier in cases[:place])
            on_every_rank(partial(returned, case, again), of_ranks)
            hold(to_a_neighbour(case, sends(of_ranks)))
            on_every_rank(partial(each_piece_once, case), sends(of_ranks))
            hold(at_the_same_time(case, of_ranks))
        if splits is even:
            drawn = picture(of_ranks)
    return drawn


def an_uneven_split(n, draw, empty=False):
    """n different lengths in random order, one of them 0 if wanted."""
    return draw.sample(range(1, 9), n - empty) + [0] * empty
