"""Exercise 02: rank arithmetic, and a broadcast in rounds and a ring all-reduce, both
built from send and receive alone.
"""

import itertools
import operator
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_course.ranks.environment import process_group
from ddp_course.ranks.watch import Watch
from ddp_course.school.judge import Wrong, question, trying

ONE_TO_ONE = ("send", "recv", "recv_any_source")

# ---- 1: rank arithmetic ----


def results_of(global_rank, node_and_local_rank, name, cases):
    function = {"global_rank": global_rank, "node_and_local_rank": node_and_local_rank}[
        name
    ]
    with process_group():
        results = []
        for case in cases:
            with trying(f"{name}{case}"):
                results.append(as_int(function(*case)))
        return results


def as_int(value):
    """An integer of any kind, also NumPy's or a tensor's, as an int; the items of a
    tuple as well; anything else unchanged.
    """
    if isinstance(value, list | tuple):
        return [as_int(item) for item in value]
    with suppress(TypeError):
        return operator.index(value)
    return value


def equal(got, expected):
    """Whether two results are equal and of the same type: 2.0 is not a rank."""
    return repr(got) == repr(expected)


@question(
    "All ranks of nodes 0 and 1 come before the first rank of node 2. How many ranks are these?",
    "global_rank: count ranks_per_node for each node before this one, and add the local rank. The way back is a "
    "division: how many whole nodes fit into the rank, and what is the remainder?",
    "node_rank * ranks_per_node + local_rank; and back: rank // ranks_per_node, rank % ranks_per_node",
)
def check_rank_arithmetic(answer, draw):
    """From node rank and local rank to the global rank, and back, for any number of
    ranks per node.
    """
    places = []
    for per_node in draw.sample(range(3, 9), 2):
        nodes = draw.choice([number for number in range(3, 8) if number != per_node])
        places += [
            (1, 2, per_node),
            (0, per_node - 1, per_node),
            (1, 0, per_node),
            (0, 0, per_node),
        ]
        places += [
            (draw.randrange(nodes), draw.randrange(per_node), per_node)
            for _ in range(4)
        ]
        places += [(nodes - 1, per_node - 1, per_node)]
    places += [(draw.randint(2, 9), 0, 1)]

    seen = answer.on_ranks(results_of, "global_rank", places)[0]
    for (node, local, per_node), got in zip(places, seen):
        if not equal(got, expected := node * per_node + local):
            checked = f"global_rank(node_rank={node}, local_rank={local}, ranks_per_node={per_node})"
            cause = why_global_rank(places, seen, got)
            raise Wrong(checked, expected=expected, got=named(got), cause=cause)

    ranks = [(node * per_node + local, per_node) for node, local, per_node in places]
    seen = answer.on_ranks(results_of, "node_and_local_rank", ranks)[0]
    for (rank, per_node), got in zip(ranks, seen):
        if not equal(got, list(divmod(rank, per_node))):
            checked = f"node_and_local_rank(rank={rank}, ranks_per_node={per_node})"
            cause = why_node_and_local_rank(ranks, seen, got)
            raise Wrong(
                checked, expected=divmod(rank, per_node), got=named(got), cause=cause
            )


def named(got):
    if got is None:
        return "nothing (None)"
    return tuple(got) if isinstance(got, list) else got


def why_global_rank(places, seen, got):
    """The likely mistake: the formula that explains all results."""
    if got is None:
        return "the function ends without a return statement"
    looks = [
        (lambda node, local, per: local * per + node, "node rank and local rank are swapped"),
        (lambda node, local, per: node + local, "each node before this one holds ranks_per_node ranks, not one: "
                                                "multiply the node rank by ranks_per_node"),
        (lambda node, local, per: node * per, "that is the first rank of the node: the local rank is missing"),
        (lambda node, local, per: (node + 1) * per + local, "it is a whole node too high: node ranks begin at 0"),
        (lambda node, local, per: (node - 1) * per + local, "it is a whole node too low: node ranks begin at 0"),
        (lambda node, local, per: node * per + local + 1, "it is 1 too high: all ranks are counted from 0"),
        (lambda node, local, per: node * per + local - 1, "it is 1 too low: all ranks are counted from 0"),
        (lambda node, local, per: node * (per - 1) + local, "a node holds ranks_per_node ranks, not one fewer"),
        (lambda node, local, per: node * (per + 1) + local, "a node holds ranks_per_node ranks, not one more"),
        (lambda node, local, per: 0, "it is always 0, like this process's own rank: compute it from the arguments"),
    ]  # fmt: skip
    for formula, cause in looks:
        if all(equal(result, formula(*place)) for place, result in zip(places, seen)):
            return cause
    if not isinstance(got, int):
        return "return one integer"
    return "count the ranks on all nodes before this one, and then the ranks before it on its own node"


def why_node_and_local_rank(ranks, seen, got):
    if got is None:
        return "the function ends without a return statement"
    if not isinstance(got, list) or len(got) != 2:
        return "return two numbers: return node_rank, local_rank"

    def is_always(formula):
        return all(
            equal(result, list(formula(*rank))) for rank, result in zip(ranks, seen)
        )

    looks = [
        (lambda rank, per: (rank % per, rank // per), "the two are swapped: node rank first, then local rank"),
        (lambda rank, per: (rank / per, rank % per), "/ gives a fraction, but a node rank is an integer: divide with //"),
        (lambda rank, per: (rank // per + 1, rank % per), "the node rank is 1 too high: the first node is node 0"),
        (lambda rank, per: (rank // per, rank % per + 1), "the local rank is 1 too high: local ranks begin at 0 on "
                                                          "each node"),
        (lambda rank, per: (rank // per + 1, rank % per + 1), "both are 1 too high: all ranks are counted from 0"),
        (lambda rank, per: ((rank - 1) // per, rank % per), "the first rank of each node is counted to the node "
                                                            "before: do not subtract 1 before dividing"),
        (lambda rank, per: (round(rank / per), rank % per), "round() rounds up from the middle of a node: divide with //"),
        (lambda rank, per: (-(-rank // per), rank % per), "the quotient is rounded up: count only whole nodes, "
                                                          "divide with //"),
        (lambda rank, per: (rank // per, rank - per), "subtracting one node is right on node 1 only: take the "
                                                      "remainder of dividing by ranks_per_node"),
        (lambda rank, per: (rank // per, rank), "local ranks begin at 0 on every node: take the remainder of "
                                                "dividing by ranks_per_node"),
        (lambda rank, per: (0, 0), "both are always 0, like this process's own ranks: compute them from the arguments"),
    ]  # fmt: skip
    for formula, cause in looks:
        if is_always(formula):
            return cause
    if any(isinstance(number, float) for number in got):
        return "both must be integers: divide with //, not with /"
    right = [
        all(equal(pair[i], divmod(*rank)[i]) for rank, pair in zip(ranks, seen))
        for i in (0, 1)
    ]
    if any(right):
        return f"the {'local' if right[0] else 'node'} rank is wrong, but the other one is always right"
    return (
        "how many whole nodes come before this rank, and how many ranks are left over?"
    )


# ---- 2 and 3: the cases, and what the ranks did ----


def a_tensor(shape, dtype, seed):
    """Random numbers; for integer types, integers of up to nine digits."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randint(-(10**9), 10**9, shape, generator=generator, dtype=dtype)


class CarefulWatch(Watch):
    """A Watch that raises an error if the peer rank does not exist, for which gloo
    would crash or wait.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d" and function._opname in ("send", "recv_"):
            verb, n = (
                ("sends to", "receives from")[function._opname == "recv_"],
                dist.get_world_size(),
            )
            if not 0 <= args[2] < n:
                raise ValueError(
                    f"rank {dist.get_rank()} {verb} rank {args[2]}, but there are {n} ranks, from 0 on"
                )
        return super().__torch_dispatch__(function, types, args, kwargs)


def outcomes(function, cases):
    """For each case (shape, dtype, seed): the tensor after `function(tensor)` on this
    rank, the returned value, and the log.
    """
    seen = []
    with process_group() as (rank, world_size):
        for shape, dtype, seed in cases:
            tensor = a_tensor(shape, dtype, seed + rank)
            with trying(described(shape, dtype, world_size)), CarefulWatch() as watch:
                returned = function(tensor)
            seen.append({"after": tensor, "returned": returned, "log": watch.log})
            dist.barrier()
    return seen


def described(shape, dtype, n):
    """A case in words."""
    numbers = " × ".join(map(str, shape)) + (
        " number" if tuple(shape) == (1,) else " numbers"
    )
    return f"{numbers} of {str(dtype).removeprefix('torch.')} on {n} rank{'s' if n > 1 else ''}"


def is_close(got, expected):
    """Whether `got` is a tensor with these numbers, up to the rounding of another order
    of summation.
    """
    same_kind = isinstance(got, torch.Tensor) and (got.shape, got.dtype) == (
        expected.shape,
        expected.dtype,
    )
    if not same_kind or not expected.is_floating_point():
        return same_kind and torch.equal(got, expected)
    return torch.allclose(got, expected, rtol=1e-9, atol=1e-9)


def is_rounded(got, expected):
    """Whether `got` has these numbers as a less precise type would hold them."""
    same_kind = isinstance(got, torch.Tensor) and (got.shape, got.dtype) == (
        expected.shape,
        expected.dtype,
    )
    return same_kind and torch.allclose(
        got.double(), expected.double(), rtol=1e-2, atol=1e-6
    )


def refuse_collectives(checked, of_ranks):
    """Raise Wrong if a rank called anything other than send and receive."""
    for rank, seen in enumerate(of_ranks):
        for entry in seen["log"]:
            if entry["name"] not in ONE_TO_ONE:
                cause = (
                    "that is a collective, and here you build one yourself: use only point-to-point calls "
                    "(dist.send, dist.recv, dist.isend, dist.irecv)"
                )
                if entry["name"] == "barrier":
                    cause = (
                        "a barrier is a collective, too, and you do not need one: recv waits until the message has "
                        "arrived"
                    )
                raise Wrong(checked, rank=f"{rank} of {len(of_ranks)}", expected="send and recv only",
                            got=f"a call of {entry['name']}", cause=cause)  # fmt: skip


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
                        message
                        for message in on_the_way
                        if message.target == rank and peer in (None, message.source)
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


# ---- 2: broadcast ----


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
        for dtype in draw.sample(
            [torch.float32, torch.float64, torch.int32, torch.int64], 2
        ):
            shape = [draw.randint(2, 5) for _ in range(draw.randint(1, 3))]
            cases.append((shape, dtype, draw.randrange(10**6)))
        seen = answer.on_ranks(outcomes, cases, nproc=n)
        for case, of_ranks in zip(cases, zip(*seen)):
            compare_broadcast(case, of_ranks)
        if n == ragged:
            drawn = picture(of_ranks)
    return drawn


def compare_broadcast(case, of_ranks):
    """Raise Wrong unless all ranks received rank 0's tensor in one message, in
    ceil(log2 n) rounds.
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
            raise Wrong(
                checked,
                rank=f"{rank} of {n}",
                expected="rank 0's tensor",
                got=got,
                cause=cause,
            )
    for rank, seen in enumerate(of_ranks[1:], start=1):
        received = sum(
            entry["bytes"] for entry in seen["log"] if entry["name"] != "send"
        )
        if received < before[0].nbytes:
            cause = "the tensor is right, but it was not received with dist.recv"
            raise Wrong(checked, rank=f"{rank} of {n}", expected=f"{before[0].nbytes} bytes received",
                        got=f"{received} bytes", cause=cause)  # fmt: skip

    if len(messages) > n - 1:
        expected = (
            f"{n - 1} messages: each rank except 0 receives the whole tensor once"
        )
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
    arrows = [
        [f"{message.source}→{message.target}" for message in of_round]
        for _, of_round in rounds
    ]
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
            return (
                f"rank {other}'s tensor",
                f"rank {other} sent its own tensor: receive first, and then send",
            )
    if not is_close(after, before[rank]):
        return (
            after,
            "neither rank 0's tensor nor its own: did you receive all of it, into the tensor itself?",
        )
    got = "its own tensor, unchanged"
    if is_close(seen["returned"], before[0]):
        return (
            got,
            "you return the right values in another tensor: receive into the given tensor, or copy_ into it",
        )
    if any(entry["name"] != "send" for entry in seen["log"]):
        return (
            got,
            "a message was received, but not into the tensor: receive into it, or copy_ the message into it",
        )
    full = n.bit_length() - 1
    if rank >= 2**full:
        so_far = f"after {full} round{'s' if full > 1 else ''} only {2**full} ranks have the tensor"
        return (
            got,
            f"it never received. {n} is not a power of two: {so_far}, and the last round, with fewer pairs, is missing",
        )
    return (
        got,
        "it never received: which rank should have sent to it, and in which round?",
    )


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
    early = [
        message.source
        for message in messages
        if have.get(message.source, message.round) >= message.round
    ]
    return min(early, default=None)


def why_so_many_rounds(messages):
    senders = [message.source for message in messages]
    if set(senders) == {0}:
        return (
            "rank 0 sends to all other ranks itself, while ranks that already have the tensor are idle: let them "
            "send it on, too"
        )
    if len(set(senders)) == len(senders):
        return "a chain: each rank sends the tensor on once and is then idle; let it keep sending until all ranks have it"
    return (
        "in some round, a rank that has the tensor is idle, or sends it first to ranks that cannot send it on: in "
        "every round, each rank that has the tensor must send it to one that does not"
    )


# ---- 3: ring all-reduce ----


@question(
    "Cut the tensor into n pieces (tensor_split always gives n pieces, some of them empty if necessary). In the first "
    "half, partial sums travel round the ring; in the second half, the finished pieces do. Each half takes n - 1 steps.",
    "In step s of the first half, rank r sends piece (r - s) % n to r + 1 and adds the piece received from r - 1 to "
    "piece (r - s - 1) % n. After the first half, rank r has the finished piece (r + 1) % n. If all ranks call send "
    "first, no rank receives: use isend, and wait for it later.",
    "for step in range(2 * (n - 1)): isend piece (r - step) % n to (r + 1) % n; recv into an empty tensor from (r - 1) "
    "% n; wait; piece (r - step - 1) % n += the received piece, or copy_ it, if step is n - 1 or more",
)
def check_ring_all_reduce(answer, draw):
    """The sum over all ranks, in place, for any length; each rank sends one piece at a
    time to one neighbour.
    """
    first, second = draw.sample([3, 4, 5], 2)
    even = [first * draw.randint(2, 5)]
    ragged = [
        second * draw.randint(2, 5) + draw.randrange(1, second),
        draw.randrange(1, second),
        0,
    ]
    of_two = [2 * draw.randint(2, 9) + 1, 1]
    of_one = [draw.randint(1, 9), 0]
    for n, lengths in [(first, even), (second, ragged), (2, of_two), (1, of_one)]:
        # integers come second: /= n raises an error for them, and "the mean" is the
        # better verdict
        cases = [((length,), dtype, draw.randrange(10**6))
                 for length in lengths for dtype in (torch.float64, torch.int64)]  # fmt: skip
        if lengths is even:
            cases.pop()
        seen = answer.on_ranks(outcomes, cases, nproc=n)
        for case, of_ranks in zip(cases, zip(*seen)):
            compare_ring(case, of_ranks)
        if lengths is even:
            drawn = picture(of_ranks)
    return drawn


def compare_ring(case, of_ranks):
    """Raise Wrong unless all ranks have the sum, and each sent to one neighbour no more
    than a ring needs.
    """
    n = len(of_ranks)
    shape, dtype, seed = case
    checked = f"ring_all_reduce, {described(shape, dtype, n)}"
    refuse_collectives(checked, of_ranks)
    before = torch.stack([a_tensor(shape, dtype, seed + rank) for rank in range(n)])
    total = before.sum(dim=0)
    sends = [
        [entry for entry in seen["log"] if entry["name"] == "send"] for seen in of_ranks
    ]

    wrong = [
        rank for rank, seen in enumerate(of_ranks) if not is_close(seen["after"], total)
    ]
    if wrong:
        rank = wrong[0]
        got, cause = why_ring(
            rank, of_ranks[rank], before, [len(sent) for sent in sends]
        )
        expected = (
            f"the sum of all {n} ranks' numbers"
            if n > 1
            else "its own numbers, unchanged"
        )
        raise Wrong(
            checked, rank=f"{rank} of {n}", expected=expected, got=got, cause=cause
        )

    if n > 1 and len(total):
        compare_neighbours(f"the ranks that each rank sends to: {checked}", sends)
    compare_bytes(f"the bytes that each rank sends: {checked}", sends, total)


def compare_neighbours(checked, sends):
    n = len(sends)
    peers = [sorted({entry["peer"] for entry in sent}) for sent in sends]
    expected = (
        "each rank sends to one neighbour only: all to rank + 1, or all to rank - 1"
    )
    if not any(peers):
        raise Wrong(
            checked,
            expected=expected,
            got="nobody sends",
            cause="the sum is right, but it was not sent with dist.send",
        )
    for rank, of_rank in enumerate(peers):
        if len(of_rank) <= 1:
            continue
        cause = "in a ring, a rank sends to the same neighbour in every step"
        if all(len(some) == n - 1 for some in peers):
            cause = "all ranks send to all: this is an all_gather, in which each rank sends more the more ranks there are"
        elif rank == 0 and all(some == [0] for some in peers[1:]):
            cause = (
                "all ranks send to rank 0, which sends the sum back: rank 0 has n times the load, while the others "
                "wait"
            )
        got = f"rank {rank} sends to ranks {', '.join(map(str, of_rank))}"
        raise Wrong(
            checked, rank=f"{rank} of {n}", expected=expected, got=got, cause=cause
        )
    for direction in (1, n - 1):
        if all(
            of_rank in ([], [(rank + direction) % n])
            for rank, of_rank in enumerate(peers)
        ):
            return
    got = ", ".join(
        f"{rank}→{of_rank[0]}" for rank, of_rank in enumerate(peers) if of_rank
    )
    cause = "each rank sends to one rank only, but not all of them to the same neighbour: (rank + 1) % n"
    raise Wrong(checked, expected=expected, got=got, cause=cause)


def compare_bytes(checked, sends, total):
    n, itemsize = len(sends), total.element_size()
    piece = -(-len(total) // n) * itemsize  # of n equal pieces, rounded up
    most = 2 * (n - 1) * piece
    for rank, sent in enumerate(sends):
        size = sum(entry["bytes"] for entry in sent)
        if size <= most:
            continue
        if sum(entry["bytes"] >= total.nbytes for entry in sent) > 1:
            cause = (
                "whole tensors travel round the ring, as in an all_gather: cut the tensor into n pieces, and send "
                "one piece per step"
            )
        elif len(sent) > 2 * (n - 1):
            cause = f"{len(sent)} steps, but 2 (n - 1) are enough: after n - 1 steps, a piece has been on every rank"
        else:
            cause = "a ring needs 2 (n - 1) steps, with one piece of about equal size per step: what else do you send?"
        expected = f"at most {most}: 2 (n - 1) pieces of {piece}, of the tensor's {total.nbytes}"
        got = f"{size}, in {len(sent)} message{'s' if len(sent) > 1 else ''}"
        raise Wrong(
            checked, rank=f"{rank} of {n}", expected=expected, got=got, cause=cause
        )


def why_ring(rank, seen, before, steps):
    """What a rank's numbers consist of, in words, and the likely cause. before: (n,
    length); steps: sends by rank.
    """
    n, length = before.shape
    after = seen["after"]
    if not isinstance(after, torch.Tensor) or (after.shape, after.dtype) != (
        before[0].shape,
        before.dtype,
    ):
        return (
            after,
            "the shape or type of the tensor has changed: change only its numbers",
        )
    if n > 1 and is_close(after, before.sum(dim=0) / n):
        return (
            f"the sum of all, divided by {n}",
            "it is the mean: this all-reduce must give the sum, so do not divide",
        )
    held = made_of(after, before)
    if n == 1:
        return in_words(held), "a single rank has no peer to send to, and nothing to do"
    own = tuple(int(other == rank) for other in range(n))
    finished = (1,) * n
    got = in_words(held)
    if set(held) == {own}:
        if is_close(seen["returned"], before.sum(dim=0)):
            return (
                got,
                "you return the sum, but the given tensor is unchanged: work in place",
            )
        if not any(steps):
            short = ", even if some pieces are empty" if length < n else ""
            return (
                got,
                f"no rank has sent anything: the numbers of all ranks must be added{short}",
            )
        return (
            got,
            "the tensor is unchanged: did you add into a copy? Work on pieces of the tensor itself",
        )
    whole = length - length % n
    if (
        whole < length
        and set(held[:whole]) <= {finished}
        and set(held[whole:]) == {own}
    ):
        what = "number is" if length - whole == 1 else f"{length - whole} numbers are"
        return (
            got,
            f"{n} does not divide {length}: the last {what} in no piece; tensor_split leaves no numbers out",
        )
    half = n - 1
    if finished in held and max(steps) <= half:
        return (
            got,
            "the first half is right, but the finished pieces must still travel round the ring: copy them in n - 1 "
            "more steps",
        )
    if finished in held and half < max(steps) < 2 * half:
        return got, f"{max(steps)} steps, but each half needs n - 1 = {half}"
    if None in held and not before.is_floating_point():
        return got, (
            "it is right with float64 and wrong with int64: does the tensor that you receive into have the type of "
            "the piece? torch.empty_like(piece) has it"
        )
    if None in held:
        return got, (
            "the pieces are mixed up: in each step, a rank receives the piece that its neighbour sends in that "
            "step, which is not the piece that it sends itself; check the number of the piece"
        )
    if (
        any(sum(content) > n or max(content) > 1 for content in held)
        and max(steps) > 2 * half
    ):
        return (
            got,
            f"a piece was added once too often: the first half takes n - 1 = {half} steps, not n steps",
        )
    if any(sum(content) > n or max(content) > 1 for content in held):
        return (
            got,
            "something was added more than once: in the second half, copy the finished pieces instead of adding them",
        )
    if all(sum(content) == 1 for content in held):
        return got, (
            "each piece comes from one rank alone: do you add the received pieces in the first half, and begin the "
            "second half by sending the finished piece, which was received last?"
        )
    return got, (
        "some pieces are not finished: after the first half, each rank has one finished piece, the last one that it "
        "received, and the second half begins by sending it"
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
    return [
        counts[row] if fits[row, column] else None for column, row in enumerate(which)
    ]


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
