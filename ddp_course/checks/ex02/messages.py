"""What the ranks of a question were given, and the messages that they sent."""

from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import Claim

ONE_TO_ONE = ("send", "recv", "recv_any_source")


def a_tensor(shape, dtype, seed):
    """Random numbers; for integer types, integers of up to 9 digits, or 17 in int64: too
    many for float64.
    """
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=dtype)
    most = 10**17 if dtype == torch.int64 else 10**9
    return torch.randint(-most, most, shape, generator=generator, dtype=dtype)


class CarefulWatch(CheckedWatch):
    """A Watch that raises an error if the peer rank does not exist, for which gloo
    would crash or wait.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d" and function._opname in ("send", "recv_"):
            verb, n = ("sends to", "receives from")[function._opname == "recv_"], dist.get_world_size()
            if not 0 <= args[2] < n:
                raise ValueError(f"rank {dist.get_rank()} {verb} rank {args[2]}, but there are {n} ranks, from 0 on")
        return super().__torch_dispatch__(function, types, args, kwargs)


def is_close(got, expected):
    """Whether `got` is a tensor with these numbers, up to the rounding of another order
    of summation.
    """
    same_kind = isinstance(got, torch.Tensor) and (got.shape, got.dtype) == (expected.shape, expected.dtype)
    if not same_kind or not expected.is_floating_point():
        return same_kind and torch.equal(got, expected)
    return torch.allclose(got, expected, rtol=1e-9, atol=1e-9)


def is_rounded(got, expected):
    """Whether `got` has these numbers as a less precise type would hold them."""
    same_kind = isinstance(got, torch.Tensor) and (got.shape, got.dtype) == (expected.shape, expected.dtype)
    return same_kind and torch.allclose(got.double(), expected.double(), rtol=1e-2, atol=1e-6)


def no_collectives(checked, seen):
    """The claim that a rank has called send and receive alone."""
    others = [entry["name"] for entry in seen["log"] if entry["name"] not in ONE_TO_ONE][:1]
    return Claim(
        checked, others, [], "that is a collective, and here you build one yourself: use only point-to-point calls "
        "(dist.send, dist.recv, dist.isend, dist.irecv)",
        [(["barrier"], "a barrier is a collective, too, and you do not need one: recv waits until the message has arrived")],
        told="send and recv only", shown=f"a call of {', '.join(others)}",
    )  # fmt: skip


def sends(of_ranks):
    """What each rank has sent, entries of its log."""
    return [[entry for entry in seen["log"] if entry["name"] == "send"] for seen in of_ranks]


def first_of(clues):
    """The cause of the first clue that is there. clues: pairs (whether it is there, cause)."""
    return next(cause for is_there, cause in clues if is_there)


class Message(NamedTuple):
    """A tensor that one rank sent to another. round: in logical time, from 1."""

    round: int
    source: int
    target: int
    bytes: int


def schedule(logs):
    """The Messages of all ranks in logical time, for logs in rank order.

    Each rank works in order, and each send takes one round. The k-th recv of b from a
    gets the k-th send from a to b, and the receiver continues in the next round.
    """
    now, todo = [0] * len(logs), [list(log) for log in logs]
    messages, on_the_way = [], []
    while any(todo):
        moved = False
        for rank, entries in enumerate(todo):
            while entries:
                peer = entries[0]["peer"]  # None: a receive from any rank
                if entries[0]["name"] == "send":
                    now[rank] += 1
                    messages.append(Message(now[rank], rank, peer, entries[0]["bytes"]))
                    on_the_way.append(messages[-1])
                else:
                    mine = [
                        message for message in on_the_way if message.target == rank and peer in (None, message.source)
                    ]
                    if not mine:
                        break
                    on_the_way.remove(mine[0])
                    now[rank] = max(now[rank], mine[0].round)
                entries.pop(0)
                moved = True
        if not moved:  # receives that were started before a send: skip them
            for entries in filter(None, todo):
                entries.pop(0)
    return sorted(messages)


def picture(of_ranks):
    """The messages of a case, drawn after the check has passed."""
    messages = schedule([seen["log"] for seen in of_ranks])
    described = [message._asdict() for message in messages]
    return "messages", {"messages": described, "ranks": len(of_ranks)}
