"""Question 2: a broadcast from send and receive, in few rounds."""

import itertools
import operator
from functools import partial

import torch
import torch.distributed as dist

from ddp_course.checks.claims import Between, Claim, hold, on_every_rank
from ddp_course.checks.ex02.messages import (
    CarefulWatch,
    a_tensor,
    first_of,
    is_close,
    is_rounded,
    no_collectives,
    picture,
    schedule,
    sends,
)
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group

# ---- what the ranks observe ----


def observe(broadcast, cases):
    """For each case (shape, dtype, seed): the tensor after `broadcast(tensor)` on this
    rank, whether it was given other memory, the returned value, and the log.
    """
    seen = []
    with process_group() as (rank, n):
        for case in cases:
            shape, dtype, seed = case
            tensor = a_tensor(shape, dtype, seed + rank)
            memory = tensor.view_as(tensor)  # as a caller may hold it, too
            with trying(described(case, n)), CarefulWatch() as watch:
                returned = broadcast(tensor)
            seen.append({
                "after": memory, "moved": tensor.data_ptr() != memory.data_ptr(), "returned": returned, "log": watch.log,
            })  # fmt: skip
            dist.barrier()
    return seen


def described(case, n):
    """A case in words."""
    shape, dtype, _ = case
    numbers = " × ".join(map(str, shape)) + (" number" if tuple(shape) == (1,) else " numbers")
    return f"{numbers} of {str(dtype).removeprefix('torch.')} on {n} rank{'s' if n > 1 else ''}"


# ---- what is claimed of a rank ----

OWN, ROUNDED = "its own tensor, unchanged", "rank 0's numbers, rounded"


def received(case, again, rank, of_ranks):
    """That a rank has rank 0's tensor, and received it. again: whether the ranks have passed
    another case before.
    """
    (shape, dtype, seed), n, seen = case, len(of_ranks), of_ranks[rank]
    checked, before = f"broadcast, {described(case, n)}", [a_tensor(shape, dtype, seed + other) for other in range(n)]
    yield no_collectives(checked, seen)
    forgets = again and not any(sends(of_ranks))
    otherwise = "neither rank 0's tensor nor its own: did you receive all of it, into the tensor itself?"
    mistakes = [
        (ROUNDED, "the numbers were converted to a less precise type on the way: send the tensor in its own type"),
        (OWN, why_unchanged(seen, rank, n, before[0], forgets)),
        *((f"rank {other}'s tensor", f"rank {other} sent its own tensor: receive first, and then send")
          for other in range(n)),
    ]  # fmt: skip
    if rank == 0:
        mistakes, otherwise = mistakes[:1], "rank 0 already has the tensor: it must only send"
    yield Claim(checked, content(seen["after"], before, rank), "rank 0's tensor", otherwise, mistakes)
    size, got = before[0].nbytes, sum(entry["bytes"] for entry in seen["log"] if entry["name"] != "send")
    yield Claim(
        checked, got, Between(size * (rank > 0)), "the tensor is right, but it was not received with dist.recv",
        told=f"{size} bytes received", shown=f"{got} bytes",
    )  # fmt: skip


def content(after, before, rank):
    """Whose numbers a rank has at the end, in words; the tensor, if they are nobody's."""
    if is_close(after, before[rank]) and not is_close(after, before[0]):
        return OWN
    words = (f"rank {other}'s tensor" for other, tensor in enumerate(before) if is_close(after, tensor))
    return next(words, ROUNDED if is_rounded(after, before[0]) else after)


def why_unchanged(seen, rank, n, right, forgets):
    """Why a rank has its own tensor still. forgets: whether a call that was right once does
    nothing now.
    """
    whole = n.bit_length() - 1  # rounds in which each rank that has the tensor sends it
    so_far = f"after {whole} round{'s' * (whole > 1)} only {2**whole} ranks have the tensor"
    return first_of([
        (forgets, "no rank sent anything, although the call before this one was right: does something stay from one call to "
         "the next?"),
        (seen["moved"], "the values are in other memory, which the tensor now uses (tensor.data = ..., or set_), so the "
         "caller's views of it still have the old values: receive into the tensor, or copy_ into it"),
        (is_close(seen["returned"], right), "you return the right values in another tensor: receive into the given tensor, "
         "or copy_ into it"),
        (any(entry["name"] != "send" for entry in seen["log"]), "a message was received, but not into the tensor: receive "
         "into it, or copy_ the message into it"),
        (rank >= 2**whole, f"it never received. {n} is not a power of two: {so_far}, and the last round, with fewer pairs, "
         "is missing"),
        (True, "it never received: which rank should have sent to it, and in which round?"),
    ])  # fmt: skip


# ---- what is claimed of all messages together ----


def in_few_rounds(case, of_ranks):
    """That the tensor came to each rank once, and in ceil(log2 n) rounds."""
    n, logs = len(of_ranks), [seen["log"] for seen in of_ranks]
    messages = schedule(logs)
    pairs, senders = [message[1:3] for message in messages], {message.source for message in messages}
    early = [rank for rank, log in enumerate(logs) if rank and log and log[0]["name"] == "send"]
    yield Claim(
        f"the number of messages, {described(case, n)}", len(messages), range(n), first_of([
            (len(pairs) > len(set(pairs)), "a rank sends to the same rank twice: one message is enough for the tensor, "
             "because all ranks know its shape"),
            (early, f"rank {min(early, default=0)} sends its own tensor before rank 0's has reached it: a rank must receive "
             "first, and then send. (As send waits for the receiver, the ranks also wait for each other, one after the "
             "other.)"),
            (True, f"{len(pairs)} messages, but {n - 1} are enough: every rank except 0 needs to receive only once"),
        ]),
        told=f"{n - 1} message{'s' * (n > 2)}: each rank except 0 receives the whole tensor once",
        shown=f"{len(messages)}: {in_rounds(messages)}",
    )  # fmt: skip
    fewest, took = (n - 1).bit_length(), max((message.round for message in messages), default=0)
    yield Claim(
        f"the number of rounds, {described(case, n)}", took, range(fewest + 1), first_of([
            (senders == {0}, "rank 0 sends to all other ranks itself, while ranks that already have the tensor are "
             "idle: let them send it on, too"),
            (len(senders) == len(messages), "a chain: each rank sends the tensor on once and is then idle; let it keep "
             "sending until all ranks have it"),
            (True, "in some round, a rank that has the tensor is idle, or sends it first to ranks that cannot send it on: "
             "in every round, each rank that has the tensor must send it to one that does not"),
        ]),
        told=f"at most {fewest} rounds: the number of ranks that have the tensor can double in each round",
        shown=f"{took} rounds: {in_rounds(messages)}",
    )  # fmt: skip


def in_rounds(messages):
    """Messages in words: '0→1, then 0→2 and 1→3'."""
    rounds = itertools.groupby(messages, key=operator.attrgetter("round"))
    arrows = [[f"{message.source}→{message.target}" for message in of_round] for _, of_round in rounds]
    return ", then ".join(" and ".join(of_round) for of_round in arrows)


@question(
    "In the first round only rank 0 has the tensor. How many ranks can have it after the second round, and after "
    "the third?",
    "Before round k, counted from 0, the ranks below 2**k have the tensor: each of them sends it to the rank that is "
    "2**k above it, if there is one. isend and irecv only start a transfer: keep the work that they return, and wait "
    "for it.",
    "have = 1; while have < n: a rank below `have` sends to rank + have, where that is below n; a rank from `have` "
    "to 2 * have - 1 receives from rank - have, into the tensor itself; the others do nothing in this round; have *= "
    "2",
)
def check_broadcast(answer, draw):
    """Every rank must end with rank 0's tensor, in place, with send and recv only, in
    ceil(log2 n) rounds.
    """
    ragged = draw.choice([5, 6])  # not a power of two: fewer pairs in the last round
    # on 7 and 8 ranks a binary tree needs a round more than a binomial one;
    # a single rank comes last: it is the least likely to fail
    for n in (draw.choice([2, 3]), 4, ragged, draw.choice([7, 8]), 9, 1):
        cases = []
        for dtype in draw.sample([torch.float32, torch.float64, torch.int32, torch.int64], 2):
            shape = [draw.randint(2, 5) for _ in range(draw.randint(1, 3))]
            cases.append((shape, dtype, draw.randrange(10**6)))
        seen = answer.on_ranks(observe, cases, nproc=n)
        for place, (case, of_ranks) in enumerate(zip(cases, zip(*seen))):
            on_every_rank(partial(received, case, place > 0), of_ranks)
            hold(in_few_rounds(case, of_ranks))
        if n == ragged:
            drawn = picture(of_ranks)
    return drawn
