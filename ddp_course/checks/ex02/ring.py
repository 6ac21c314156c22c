"""Question 3: a ring reduce-scatter of pieces of any length."""

import itertools

import torch
import torch.distributed as dist

from ddp_course.checks.ex02.messages import (
    CarefulWatch,
    a_tensor,
    is_close,
    is_rounded,
    picture,
    refuse_collectives,
    schedule,
)
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.environment import process_group


def scattered(ring_reduce_scatter, cases):
    """For each case (lengths, dtype, seed): what the function returned on this rank, its
    two arguments afterwards, and the log.
    """
    seen = []
    with process_group() as (rank, n):
        for lengths, dtype, seed in cases:
            tensor, given = a_tensor([sum(lengths)], dtype, seed + rank), list(lengths)
            with trying(described(lengths, dtype, n)), CarefulWatch() as watch:
                returned = ring_reduce_scatter(tensor, given)
            seen.append({
                "returned": returned, "tensor": tensor, "lengths": given, "log": watch.log,
            })  # fmt: skip
            dist.barrier()
    return seen


def described(lengths, dtype, n):
    """A case in words."""
    kind = str(dtype).removeprefix("torch.")
    return f"lengths={list(lengths)} of {kind} on {n} rank{'s' if n > 1 else ''}"


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
        seen = answer.on_ranks(scattered, cases, nproc=n)
        for place, (case, of_ranks) in enumerate(zip(cases, zip(*seen))):
            again = any(case[:2] == earlier[:2] for earlier in cases[:place])
            compare_ring(case, of_ranks, again)
        if splits is even:
            drawn = picture(of_ranks)
    return drawn


def an_uneven_split(n, draw, empty=False):
    """n different lengths in random order, one of them 0 if wanted."""
    return draw.sample(range(1, 9), n - empty) + [0] * empty


def compare_ring(case, of_ranks, again):
    """Raise Wrong unless each rank returned the sum of its piece, left its arguments as
    they were, and sent to one neighbour no more than a ring needs. again: whether they
    have passed a case of these lengths and this type before.
    """
    n, (lengths, dtype, seed) = len(of_ranks), case
    checked = f"ring_reduce_scatter, {described(lengths, dtype, n)}"
    refuse_collectives(checked, of_ranks)
    whole = torch.stack([a_tensor([sum(lengths)], dtype, seed + rank) for rank in range(n)])
    pieces = whole.split(list(lengths), dim=1)  # of each piece: (n, its length)
    sends = [[entry for entry in seen["log"] if entry["name"] == "send"] for seen in of_ranks]
    for rank, seen in enumerate(of_ranks):
        here = f"{rank} of {n}"
        total = pieces[rank].sum(dim=0)
        if not is_close(seen["returned"], total):
            got, cause = why_ring(rank, seen, pieces, [len(sent) for sent in sends])
            expected = f"the sum of all ranks' pieces {rank}, {len(total)} numbers"
            if again:
                cause = "the first call with these lengths was right: does something stay from one call to the next?"
            if n == 1:
                expected = "its own numbers: there is one rank"
            raise Wrong(checked, rank=here, expected=expected, got=got, cause=cause)
        if not torch.equal(seen["tensor"], whole[rank]):
            cause = (
                "the caller still needs the given tensor: sum into copies of its pieces (split and tensor_split give "
                "views of it)"
            )
            where = f"the given tensor after {checked}"
            raise Wrong(where, rank=here, expected="unchanged", got="changed", cause=cause)
        if seen["lengths"] != list(lengths):
            where = f"the given list of lengths after {checked}"
            cause = "the caller still needs the list: do not change it"
            raise Wrong(where, rank=here, expected=list(lengths), got=seen["lengths"], cause=cause)

    if n > 1 and sum(map(bool, lengths)):
        compare_neighbours(f"the ranks that each rank sends to: {checked}", sends)
    compare_bytes(f"the bytes that each rank sends: {checked}", sends, lengths, dtype)
    compare_rounds(f"the number of rounds: {checked}", of_ranks)


def compare_neighbours(checked, sends):
    n = len(sends)
    peers = [sorted({entry["peer"] for entry in sent}) for sent in sends]
    expected = "each rank sends to one neighbour only: all to rank + 1, or all to rank - 1"
    if not any(peers):
        raise Wrong(
            checked, expected=expected, got="nobody sends", cause="the sum is right, but it was not sent with dist.send"
        )
    for rank, of_rank in enumerate(peers):
        if len(of_rank) <= 1:
            continue
        cause = "in a ring, a rank sends to the same neighbour in every step"
        if all(len(some) == len(sent) == n - 1 for some, sent in zip(peers, sends)):
            cause = (
                "each rank sends to all others, straight to where the numbers are needed (an all_to_all): in a ring, it "
                "sends sums to one neighbour, which adds its own numbers and sends them on"
            )
        elif rank == 0 and all(some == [0] for some in peers[1:]):
            cause = (
                "all ranks send to rank 0, which sends the sum back: rank 0 has n times the load, while the others wait"
            )
        got = f"rank {rank} sends to ranks {', '.join(map(str, of_rank))}"
        raise Wrong(checked, rank=f"{rank} of {n}", expected=expected, got=got, cause=cause)
    for direction in (1, n - 1):
        if all(of_rank in ([], [(rank + direction) % n]) for rank, of_rank in enumerate(peers)):
            return
    got = ", ".join(f"{rank}→{of_rank[0]}" for rank, of_rank in enumerate(peers) if of_rank)
    cause = "each rank sends to one rank only, but not all of them to the same neighbour: (rank + 1) % n"
    raise Wrong(checked, expected=expected, got=got, cause=cause)


def compare_bytes(checked, sends, lengths, dtype):
    """Raise Wrong unless each rank sent every piece but its own, and nothing else."""
    n, itemsize = len(sends), torch.empty(0, dtype=dtype).element_size()
    whole = sum(lengths) * itemsize
    for rank, sent in enumerate(sends):
        size, most = (sum(entry["bytes"] for entry in sent), whole - lengths[rank] * itemsize)
        if size <= most and len(sent) <= n - 1:
            continue
        sizes = [entry["bytes"] for entry in sent]
        padded = max(lengths) * itemsize
        if size <= most:
            cause = "n - 1 steps are enough, and a rank sends one piece in each: what are the other messages?"
        elif n > 2 and sum(one >= whole for one in sizes) > 1:
            cause = "whole tensors travel round the ring: send one piece per step"
        elif len(sent) == 2 * (n - 1):
            cause = (
                "these are the steps of an all-reduce. Its second half, in which the finished pieces travel round, is "
                "not needed: after n - 1 steps, each rank can have its own finished piece"
            )
        elif len(sent) == n:
            cause = (
                "there is one step too many: let piece p start at rank p + 1, so that it is at rank p, and finished, "
                "after n - 1 steps"
            )
        elif len(sent) > n - 1:
            cause = f"{len(sent)} messages, but n - 1 = {n - 1} are enough: one piece per step"
        elif all(one == padded for one in sizes):
            cause = "every piece is sent as if it were as long as the longest: send each in its own length"
        else:
            cause = "a rank sends every piece once, except its own: what else do you send?"
        expected = f"at most {most}, in {n - 1} message{'s' if n != 2 else ''}: every piece except its own, once"
        got = f"{size}, in {len(sent)} message{'s' if len(sent) != 1 else ''}"
        raise Wrong(checked, rank=f"{rank} of {n}", expected=expected, got=got, cause=cause)


def compare_rounds(checked, of_ranks):
    """Raise Wrong if most ranks wait while one piece travels."""
    n = len(of_ranks)
    messages = schedule([seen["log"] for seen in of_ranks])
    took = max((message.round for message in messages), default=0)
    if n > 2 and took > 2 * (n - 1):
        cause = (
            "one piece goes round after the other, while most ranks wait: in each step, every rank sends one piece and "
            "receives another"
        )
        expected = f"n - 1 = {n - 1}, or at most {2 * (n - 1)} if ranks take turns in sending and receiving"
        raise Wrong(checked, expected=expected, got=took, cause=cause)


def why_ring(rank, seen, pieces, steps):
    """What a rank returned, in words, and the likely cause. pieces: of each piece, (n,
    its length); steps: sends by rank.
    """
    n, returned, before = len(pieces), seen["returned"], pieces[rank]
    total = before.sum(dim=0)
    if not isinstance(returned, torch.Tensor):
        got = "nothing (None)" if returned is None else returned
        place = sum(piece.shape[1] for piece in pieces[:rank])
        if is_close(seen["tensor"][place : place + len(total)], total):
            return (
                got,
                "the finished piece is in the given tensor, but it must be returned, and the tensor left unchanged",
            )
        return got, "return this rank's finished piece, a tensor"
    if returned.dtype != before.dtype:
        return (f"numbers of {returned.dtype}", "the piece must have the type of the given tensor")
    if returned.shape != total.shape:
        return f"shape {tuple(returned.shape)}", why_shape(rank, returned, pieces)
    if n > 1 and is_close(returned.double(), before.double().sum(dim=0) / n):
        return (f"the sum of all, divided by {n}", "it is the mean: this must be the sum, so do not divide")
    for other, piece in enumerate(pieces):
        if other != rank and is_close(returned, piece.sum(dim=0)) and len(total):
            return (
                f"the sum of all ranks' pieces {other}",
                f"it is finished, but it is piece {other}: rank {rank} must end with piece {rank}, so each piece must "
                "start one rank further",
            )
    if is_rounded(returned, total):
        return (
            "the sum, rounded",
            "the numbers were converted to a less precise type on the way: keep the tensor's own",
        )
    held = made_of(returned, before)
    even = len({piece.shape[1] for piece in pieces}) == 1
    return in_words(held), why_mixture(rank, held, n, steps, even)


def why_shape(rank, returned, pieces):
    whole = sum(piece.shape[1] for piece in pieces)
    if returned.shape == (whole,):
        return f"it is the whole tensor: return piece {rank} alone"
    if len({piece.shape[1] for piece in pieces}) > 1:
        even = {len(part) for part in torch.empty(whole).tensor_split(len(pieces))}
        if returned.shape[0:1] and len(returned) in even:
            return "the pieces have about equal lengths: cut the tensor by `lengths`, as tensor.split(lengths) does"
    return f"piece {rank} has lengths[{rank}] = {pieces[rank].shape[1]} numbers"


IN_FLIGHT = "And nothing may be written to a tensor that isend still sends: its work has to be waited for first"


def why_mixture(rank, held, n, steps, even):
    """The likely cause of numbers that are no finished sum. held: see made_of; even:
    whether all pieces have the same length.
    """
    own = tuple(int(other == rank) for other in range(n))
    if n == 1:
        return "a single rank has no peer to send to: return its own numbers"
    if not any(steps):
        return "no rank has sent anything: the numbers of all ranks must be added"
    if max(steps) < n - 1:
        return f"{max(steps)} steps, but a piece needs n - 1 = {n - 1} to collect the numbers of all ranks"
    if set(held) == {own}:
        return "it is this rank's own piece: what it received was not added to it, or added to another piece"
    if None in held and not even:
        return (
            "the sum was right when all pieces had the same length: where does each piece begin? tensor.split(lengths) "
            f"cuts the tensor, and what a rank receives is as long as the piece that its neighbour sends. {IN_FLIGHT}"
        )
    if None in held:
        return (
            "it is no sum of numbers of this piece: in each step, a rank adds what it receives to the piece that its "
            f"neighbour sends in that step, which is not the piece that it sends itself. {IN_FLIGHT}"
        )
    if any(max(content) > 1 for content in held):
        return "some rank's numbers were added more than once: each piece goes round once, in n - 1 steps"
    if all(sum(content) == 1 for content in held):
        return "it comes from one rank alone: add what is received to this rank's numbers, and send the sum on"
    return (
        "the sum is not finished: a piece must collect the numbers of all ranks on its way, so each rank sends on the "
        "sum that it has just made, and piece p starts at rank p + 1"
    )


def made_of(after, before):
    """For each number, how often each rank's number is in it: a list of tuples, with
    None for a number that is no such sum.
    """
    n = len(before)
    counts = sorted(itertools.product(range(n + 1), repeat=n), key=sum)
    sums = torch.tensor(counts, dtype=torch.float64) @ before.double()
    fits = torch.isclose(sums, after.double(), rtol=1e-9, atol=1e-9)
    which = fits.int().argmax(dim=0).tolist()
    return [counts[row] if fits[row, column] else None for column, row in enumerate(which)]


def in_words(held):
    """What the numbers consist of: 'numbers 0 to 3: rank 0 + rank 2; 4 to 7: the sum of
    all'.
    """
    words = []
    for content, places in itertools.groupby(range(len(held)), key=held.__getitem__):
        places = list(places)
        where = f"{places[0]} to {places[-1]}" if len(places) > 1 else f"{places[0]}"
        if content is None:
            what = "a mixture"
        elif set(content) == {1} and len(content) > 1:
            what = "the sum of all"
        else:
            what = " + ".join(f"{f'{times} × ' if times > 1 else ''}rank {rank}"
                              for rank, times in enumerate(content) if times) or "0"  # fmt: skip
        words.append(f"{where}: {what}")
    return "numbers " + "; ".join(words)
