"""What question 3 claims of the piece that a rank returns."""

import itertools
from functools import partial

import torch

from ddp_course.checks.claims import Claim
from ddp_course.checks.ex02.messages import a_tensor, first_of, is_close, is_rounded, no_collectives, sends


def described(case, n):
    """A case in words."""
    lengths, dtype, _ = case
    kind = str(dtype).removeprefix("torch.")
    return f"lengths={list(lengths)} of {kind} on {n} rank{'s' if n > 1 else ''}"


def returned(case, again, rank, of_ranks):
    """That a rank returns the sum of its piece, and leaves its arguments as they were. again:
    whether the ranks have passed a case of these lengths and this type before.
    """
    for claim in of_the_piece(case, rank, of_ranks):
        stays = "the first call with these lengths was right: does something stay from one call to the next?"
        yield claim._replace(otherwise=stays, mistakes=()) if again else claim


def of_the_piece(case, rank, of_ranks):
    """The same, of a call that repeats none."""
    (lengths, dtype, seed), n, seen = case, len(of_ranks), of_ranks[rank]
    checked, got, own = f"ring_reduce_scatter, {described(case, n)}", seen["returned"], lengths[rank]
    whole = torch.stack([a_tensor([sum(lengths)], dtype, seed + other) for other in range(n)])
    pieces = whole.split(list(lengths), dim=1)  # of each piece: (n, its length)
    told = f"the sum of all ranks' pieces {rank}, {own} numbers" if n > 1 else "its own numbers: there is one rank"
    yield no_collectives(checked, seen)
    begin = sum(lengths[:rank])
    in_place = is_close(seen["tensor"].flatten()[begin : begin + own], pieces[rank].sum(dim=0))
    yield Claim(
        checked, isinstance(got, torch.Tensor), True, first_of([
            (in_place, "the finished piece is in the given tensor, but it must be returned, and the tensor left unchanged"),
            (True, "return this rank's finished piece, a tensor"),
        ]),
        told=told, shown="nothing (None)" if got is None else got,
    )  # fmt: skip
    yield Claim(
        checked, got.dtype == dtype, True, "the piece must have the type of the given tensor",
        told=told, shown=f"numbers of {got.dtype}",
    )  # fmt: skip
    shapes = [getattr(each["returned"], "shape", None) for each in of_ranks]
    evenly = shapes in [[part.shape for part in parts] for parts in (whole[0].tensor_split(n), whole[0].chunk(n))]
    yield Claim(
        checked, got.shape, pieces[rank][0].shape, first_of([
            (got.shape == whole[0].shape, f"it is the whole tensor: return piece {rank} alone"),
            (evenly, "the pieces have about equal lengths: cut the tensor by `lengths`, as tensor.split(lengths) does"),
            (True, f"piece {rank} has lengths[{rank}] = {own} numbers: where does each piece begin, and where does it end? "
             "tensor.split(lengths) cuts the tensor"),
        ]),
        told=told, shown=f"shape {tuple(got.shape)}",
    )  # fmt: skip
    yield Claim(
        checked, content(got, pieces, rank), f"the sum of all ranks' pieces {rank}",
        partial(why_unfinished, got, pieces, rank, [len(sent) for sent in sends(of_ranks)]),
        [(MEAN, "it is the mean: this must be the sum, so do not divide"),
         (ROUNDED, "the numbers were converted to a less precise type on the way: keep the tensor's own"),
         *((f"the sum of all ranks' pieces {other}", f"it is finished, but it is piece {other}: rank {rank} must end with "
            f"piece {rank}, so each piece must start one rank further") for other in range(n))],
        told=told,
    )  # fmt: skip
    yield Claim(
        f"the given tensor after {checked}", torch.equal(seen["tensor"], whole[rank]), True,
        "the caller still needs the given tensor: sum into copies of its pieces (split and tensor_split give views of it)",
        told="unchanged", shown="changed",
    )  # fmt: skip
    yield Claim(
        f"the given list of lengths after {checked}", seen["lengths"], list(lengths),
        "the caller still needs the list: do not change it",
    )  # fmt: skip


MEAN, ROUNDED = "the sum of all, divided by the number of ranks", "the sum, rounded"


def content(got, pieces, rank):
    """What the numbers that a rank returned are, in words."""
    sums = [piece.sum(dim=0) for piece in pieces]
    for piece in [rank, *range(len(sums))]:
        if is_close(got, sums[piece]):
            return f"the sum of all ranks' pieces {piece}"
    if is_close(got.double(), sums[rank].double() / len(sums)):
        return MEAN
    return ROUNDED if is_rounded(got, sums[rank]) else in_words(made_of(got, pieces[rank]))


IN_FLIGHT = "And nothing may be written to a tensor that isend still sends: its work has to be waited for first"


def why_unfinished(got, pieces, rank, steps):
    """Why the numbers that a rank returned are no finished sum. steps: sends by rank."""
    n, held = len(pieces), made_of(got, pieces[rank])
    sums = [counts for counts in held if counts]
    return first_of([
        (n == 1, "a single rank has no peer to send to: return its own numbers"),
        (not any(steps), "no rank has sent anything: the numbers of all ranks must be added"),
        (max(steps) < n - 1, f"{max(steps)} steps, but a piece needs n - 1 = {n - 1} to collect the numbers of all ranks"),
        (set(held) == {tuple(int(other == rank) for other in range(n))}, "it is this rank's own piece: what it received was "
         "not added to it, or added to another piece"),
        (None in held and len({piece.shape for piece in pieces}) > 1, "the sum was right when all pieces had the same "
         "length: where does each piece begin? tensor.split(lengths) cuts the tensor, and what a rank receives is as long "
         f"as the piece that its neighbour sends. {IN_FLIGHT}"),
        (None in held, "it is no sum of numbers of this piece: in each step, a rank adds what it receives to the piece "
         f"that its neighbour sends in that step, which is not the piece that it sends itself. {IN_FLIGHT}"),
        (any(max(counts) > 1 for counts in sums), "some rank's numbers were added more than once: each piece goes round "
         "once, in n - 1 steps"),
        (all(sum(counts) == 1 for counts in sums), "it comes from one rank alone: add what is received to this rank's "
         "numbers, and send the sum on"),
        (True, "the sum is not finished: a piece must collect the numbers of all ranks on its way, so each rank sends on "
         "the sum that it has just made, and piece p starts at rank p + 1"),
    ])  # fmt: skip


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
    for counts, places in itertools.groupby(range(len(held)), key=held.__getitem__):
        places = list(places)
        where = f"{places[0]} to {places[-1]}" if len(places) > 1 else f"{places[0]}"
        if counts is None:
            what = "a mixture"
        elif set(counts) == {1} and len(counts) > 1:
            what = "the sum of all"
        else:
            what = " + ".join(f"{f'{times} × ' if times > 1 else ''}rank {rank}"
                              for rank, times in enumerate(counts) if times) or "0"  # fmt: skip
        words.append(f"{where}: {what}")
    return "numbers " + "; ".join(words)
