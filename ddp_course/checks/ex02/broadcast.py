"""Question 2: a broadcast from send and receive, in few rounds."""

import itertools
import operator

import torch

from ddp_course.checks.ex02.messages import (
    a_tensor,
    described,
    is_close,
    is_rounded,
    outcomes,
    picture,
    refuse_collectives,
    schedule,
)
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong


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
        seen = answer.on_ranks(outcomes, cases, nproc=n)
        for place, (case, of_ranks) in enumerate(zip(cases, zip(*seen))):
            compare_broadcast(case, of_ranks, again=place > 0)
        if n == ragged:
            drawn = picture(of_ranks)
    return drawn


def compare_broadcast(case, of_ranks, again):
    """Raise Wrong unless all ranks received rank 0's tensor in one message, in
    ceil(log2 n) rounds. again: whether the ranks have passed another case before.
    """
    n = len(of_ranks)
    shape, dtype, seed = case
    checked = f"broadcast, {described(shape, dtype, n)}"
    refuse_collectives(checked, of_ranks)
    before = [a_tensor(shape, dtype, seed + rank) for rank in range(n)]
    messages = schedule([seen["log"] for seen in of_ranks])

    for rank, seen in enumerate(of_ranks):
        if not is_close(seen["after"], before[0]):
            got, cause = why_broadcast(rank, seen, before)
            if again and not messages:
                cause = (
                    "no rank sent anything, although the call before this one was right: does something stay from one "
                    "call to the next?"
                )
            raise Wrong(checked, rank=f"{rank} of {n}", expected="rank 0's tensor", got=got, cause=cause)
    for rank, seen in enumerate(of_ranks[1:], start=1):
        received = sum(entry["bytes"] for entry in seen["log"] if entry["name"] != "send")
        if received < before[0].nbytes:
            cause = "the tensor is right, but it was not received with dist.recv"
            raise Wrong(checked, rank=f"{rank} of {n}", expected=f"{before[0].nbytes} bytes received",
                        got=f"{received} bytes", cause=cause)  # fmt: skip

    if len(messages) > n - 1:
        expected = f"{n - 1} message{'s' * (n > 2)}: each rank except 0 receives the whole tensor once"
        raise Wrong(f"the number of messages, {described(shape, dtype, n)}", expected=expected,
                    got=f"{len(messages)}: {in_rounds(messages)}", cause=why_so_many_messages(messages, n))  # fmt: skip
    fewest = (n - 1).bit_length()  # ceil(log2 n), exactly
    took = max((message.round for message in messages), default=0)
    if took > fewest:
        expected = f"at most {fewest} rounds: the number of ranks that have the tensor can double in each round"
        raise Wrong(f"the number of rounds, {described(shape, dtype, n)}", expected=expected,
                    got=f"{took} rounds: {in_rounds(messages)}", cause=why_so_many_rounds(messages))  # fmt: skip


def in_rounds(messages):
    """Messages in words: '0→1, then 0→2 and 1→3'."""
    rounds = itertools.groupby(messages, key=operator.attrgetter("round"))
    arrows = [[f"{message.source}→{message.target}" for message in of_round] for _, of_round in rounds]
    return ", then ".join(" and ".join(of_round) for of_round in arrows)


def why_broadcast(rank, seen, before):
    """What a rank has instead of rank 0's tensor, in words, and the likely cause."""
    n, after = len(before), seen["after"]
    if is_rounded(after, before[0]):
        return (
            "rank 0's numbers, rounded",
            "the numbers were converted to a less precise type on the way: send the tensor in its own type",
        )
    if rank == 0:
        return after, "rank 0 already has the tensor: it must only send"
    for other in range(1, n):
        if other != rank and is_close(after, before[other]):
            return (f"rank {other}'s tensor", f"rank {other} sent its own tensor: receive first, and then send")
    if not is_close(after, before[rank]):
        return (after, "neither rank 0's tensor nor its own: did you receive all of it, into the tensor itself?")
    got = "its own tensor, unchanged"
    if seen["moved"]:
        return (
            got,
            "the values are in other memory, which the tensor now uses (tensor.data = ..., or set_), so the caller's views "
            "of it still have the old values: receive into the tensor, or copy_ into it",
        )
    if is_close(seen["returned"], before[0]):
        return (got, "you return the right values in another tensor: receive into the given tensor, or copy_ into it")
    if any(entry["name"] != "send" for entry in seen["log"]):
        return (got, "a message was received, but not into the tensor: receive into it, or copy_ the message into it")
    full = n.bit_length() - 1
    if rank >= 2**full:
        so_far = f"after {full} round{'s' if full > 1 else ''} only {2**full} ranks have the tensor"
        return (
            got,
            f"it never received. {n} is not a power of two: {so_far}, and the last round, with fewer pairs, is missing",
        )
    return (got, "it never received: which rank should have sent to it, and in which round?")


def why_so_many_messages(messages, n):
    pairs = [(message.source, message.target) for message in messages]
    if len(pairs) > len(set(pairs)):
        return (
            "a rank sends to the same rank twice: one message is enough for the tensor, because all ranks know its "
            "shape"
        )
    early = first_sent_before_it_came(messages)
    if early is not None:
        return (
            f"rank {early} sends its own tensor before rank 0's has reached it: a rank must receive first, and then "
            "send. (As send waits for the receiver, the ranks also wait for each other, one after the other.)"
        )
    return f"{len(pairs)} messages, but {n - 1} are enough: every rank except 0 needs to receive only once"


def first_sent_before_it_came(messages):
    """The lowest rank that sent something before rank 0's tensor can have reached it, or
    None.
    """
    have = {0: 0}  # the round in which each rank received it
    for message in messages:
        if have.get(message.source, message.round) < message.round:
            have.setdefault(message.target, message.round)
    early = [message.source for message in messages if have.get(message.source, message.round) >= message.round]
    return min(early, default=None)


def why_so_many_rounds(messages):
    senders = [message.source for message in messages]
    if set(senders) == {0}:
        return (
            "rank 0 sends to all other ranks itself, while ranks that already have the tensor are idle: let them "
            "send it on, too"
        )
    if len(set(senders)) == len(senders):
        return (
            "a chain: each rank sends the tensor on once and is then idle; let it keep sending until all ranks have it"
        )
    return (
        "in some round, a rank that has the tensor is idle, or sends it first to ranks that cannot send it on: in "
        "every round, each rank that has the tensor must send it to one that does not"
    )
