"""Exercise 02: who is who, a broadcast in rounds and an all-reduce round a ring, from
send and receive alone.
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

# ---- 1: who is who ----


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
    """A whole number of whatever kind, numpy's or a tensor's, as an int; also those in
    a tuple; all else as it is.
    """
    if isinstance(value, list | tuple):
        return [as_int(item) for item in value]
    with suppress(TypeError):
        return operator.index(value)
    return value


def equal(got, expected):
    """Whether two results are equal, and whole numbers: 2.0 is no rank."""
    return repr(got) == repr(expected)


@question(
    "Before the first rank of node 2 come all the ranks of nodes 0 and 1. How many are these?",
    "global_rank: ranks_per_node for each node before this one, and the local rank on top. The way back is a division: "
    "how many whole nodes fit into the rank, and what is left over?",
    "node_rank * ranks_per_node + local_rank; and back: rank // ranks_per_node, rank % ranks_per_node",
)
def check_rank_arithmetic(answer, draw):
    """From node rank and local rank to the rank in the whole job, and back, for any
    number of ranks on a node.
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
    """The likely mistake: the formula that gives all that was seen."""
    if got is None:
        return "the function ends without a return"
    looks = [
        (lambda node, local, per: local * per + node, "node rank and local rank have changed places"),
        (lambda node, local, per: node + local, "each node before this one holds ranks_per_node ranks, not one: "
                                                "multiply the node rank by ranks_per_node"),
        (lambda node, local, per: node * per, "that is the first rank of the node: the local rank is missing"),
        (lambda node, local, per: (node + 1) * per + local, "it is a whole node too far: node ranks begin at 0"),
        (lambda node, local, per: (node - 1) * per + local, "it is a whole node too low: node ranks begin at 0"),
        (lambda node, local, per: node * per + local + 1, "it is 1 too high: ranks begin at 0, all of them"),
        (lambda node, local, per: node * per + local - 1, "it is 1 too low: ranks begin at 0, all of them"),
        (lambda node, local, per: node * (per - 1) + local, "a node holds ranks_per_node ranks, not one fewer"),
        (lambda node, local, per: node * (per + 1) + local, "a node holds ranks_per_node ranks, not one more"),
        (lambda node, local, per: 0, "it is 0 for every place, as this process's own rank is: compute from the arguments"),
    ]  # fmt: skip
    for formula, cause in looks:
        if all(equal(result, formula(*place)) for place, result in zip(places, seen)):
            return cause
    if not isinstance(got, int):
        return "a rank is one whole number, an int"
    return "count the ranks on all the nodes before this one, and then those before it on its own node"


def why_node_and_local_rank(ranks, seen, got):
    if got is None:
        return "the function ends without a return"
    if not isinstance(got, list) or len(got) != 2:
        return "it is to return two numbers: return node_rank, local_rank"

    def is_always(formula):
        return all(
            equal(result, list(formula(*rank))) for rank, result in zip(ranks, seen)
        )

    looks = [
        (lambda rank, per: (rank % per, rank // per), "the two have changed places: node rank first, then local rank"),
        (lambda rank, per: (rank / per, rank % per), "/ gives a fraction, and a node rank is whole: divide with //"),
        (lambda rank, per: (rank // per + 1, rank % per), "the node rank is 1 too high: the first node is node 0"),
        (lambda rank, per: (rank // per, rank % per + 1), "the local rank is 1 too high: on each node they begin at 0"),
        (lambda rank, per: (rank // per + 1, rank % per + 1), "both are 1 too high: ranks begin at 0, all of them"),
        (lambda rank, per: ((rank - 1) // per, rank % per), "the first rank of each node is counted to the node "
                                                            "before: do not subtract 1 before dividing"),
        (lambda rank, per: (round(rank / per), rank % per), "round goes up from the middle of a node on: divide with //"),
        (lambda rank, per: (-(-rank // per), rank % per), "it was rounded up: count only whole nodes, divide with //"),
        (lambda rank, per: (rank // per, rank - per), "subtracting one node is right on node 1 only: take what is left "
                                                      "over from dividing by ranks_per_node"),
        (lambda rank, per: (rank // per, rank), "local ranks begin at 0 again on every node: take what is left over "
                                                "from dividing by ranks_per_node"),
        (lambda rank, per: (0, 0), "it is 0 for every rank, as this process's own are: compute from the arguments"),
    ]  # fmt: skip
    for formula, cause in looks:
        if is_always(formula):
            return cause
    if any(isinstance(number, float) for number in got):
        return "both are whole numbers: divide with //, not with /"
    right = [
        all(equal(pair[i], divmod(*rank)[i]) for rank, pair in zip(ranks, seen))
        for i in (0, 1)
    ]
    if any(right):
        return f"the {'local' if right[0] else 'node'} rank is wrong, the other one is always right"
    return (
        "how many whole nodes come before this rank, and how many ranks are left over?"
    )


# ---- 2 and 3: what the ranks are given, and what they did ----


def a_tensor(shape, dtype, seed):
    """Random numbers; whole ones of up to nine digits for whole types."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randint(-(10**9), 10**9, shape, generator=generator, dtype=dtype)


class CarefulWatch(Watch):
    """A Watch that says so where the other rank does not exist: gloo crashes, or waits
    for it.
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
    """What `function(tensor)` did on this rank in each case (shape, dtype, seed):
    tensor after it, what it returned, log.
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
    """Whether something is a tensor with these numbers, whatever the order in which
    they were summed.
    """
    same_kind = isinstance(got, torch.Tensor) and (got.shape, got.dtype) == (
        expected.shape,
        expected.dtype,
    )
    if not same_kind or not expected.is_floating_point():
        return same_kind and torch.equal(got, expected)
    return torch.allclose(got, expected, rtol=1e-9, atol=1e-9)


def refuse_collectives(checked, of_ranks):
    """Raise Wrong where a rank did anything but send and receive."""
    for rank, seen in enumerate(of_ranks):
        for entry in seen["log"]:
            if entry["name"] not in ONE_TO_ONE:
                cause = "that is a collective, and here you build one: use dist.send, dist.recv and their kin only"
                if entry["name"] == "barrier":
                    cause = "a barrier is a collective, too, and none is needed: recv waits until the message is there"
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

    A rank does what it does in order, and each send takes it one round. The k-th send
    from a to b is what the k-th recv of b from a gets, and the receiver goes on in the
    round after that.
    """
    now, todo = [0] * len(logs), [list(log) for log in logs]
    messages, on_the_way = [], []
    while any(todo):
        moved = False
        for rank, entries in enumerate(todo):
            while entries:
                peer = entries[0]["peer"]  # None: a receive from any
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
        if not moved:  # receives that were begun before a send: go past them
            for entries in filter(None, todo):
                entries.pop(0)
    return sorted(messages)


def picture(of_ranks):
    """The messages of a case, to be drawn once all has passed."""
    messages = schedule([seen["log"] for seen in of_ranks])
    described = [message._asdict() for message in messages]
    return "messages", {"messages": described, "ranks": len(of_ranks)}


# ---- 2: broadcast ----


@question(
    "In the first round only rank 0 has the tensor. How many can have it after the second round, and after the third?",
    "In round k, the ranks below 2**k have it: each of them sends to the rank that is 2**k above it, if there is one. Where "
    "you use isend or irecv: they only begin, so keep the work that they return, and wait for it.",
    "have = 1; while have < n: a rank below `have` sends to rank + have, where that is below n; a rank from `have` to "
    "2 * have - 1 receives from rank - have, into the tensor itself; the others wait for their turn; have *= 2",
)
def check_broadcast(answer, draw):
    """Every rank ends with rank 0's tensor, in place, by send and recv alone, in
    ceil(log2 n) rounds.
    """
    ragged = draw.choice([5, 6])  # no power of two: in the last round, fewer pairs
    # alone comes last: it is the least likely to matter
    for n in (draw.choice([2, 3]), 4, ragged, 9, 1):
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
    """Raise Wrong unless all have what rank 0 had, it came by messages, and these fit
    into ceil(log2 n) rounds.
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
            cause = "the tensor is right, but it did not come by dist.recv"
            raise Wrong(checked, rank=f"{rank} of {n}", expected=f"{before[0].nbytes} bytes received",
                        got=f"{received} bytes", cause=cause)  # fmt: skip

    fewest, took = (
        (n - 1).bit_length(),
        max((message.round for message in messages), default=0),
    )  # ceil(log2 n), exactly
    if took > fewest:
        ways = [
            [
                f"{message.source}→{message.target}"
                for message in messages
                if message.round == now
            ]
            for now in range(1, took + 1)
        ]
        rounds = ", then ".join(" and ".join(way) for way in ways)
        expected = (
            f"at most {fewest} rounds, since in each the ranks that have it can double"
        )
        raise Wrong(f"the rounds that it takes, {described(shape, dtype, n)}", expected=expected,
                    got=f"{took} rounds: {rounds}", cause=why_so_many_rounds(messages, n))  # fmt: skip


def why_broadcast(rank, seen, before):
    """What a rank has in place of rank 0's tensor, in words, and the likely cause."""
    n, after = len(before), seen["after"]
    if rank == 0:
        return after, "rank 0 has what the others need, and keeps it: it only sends"
    for other in range(1, n):
        if other != rank and is_close(after, before[other]):
            return (
                f"rank {other}'s tensor",
                f"rank {other} passed on its own tensor: receive first, and then send",
            )
    if not is_close(after, before[rank]):
        return (
            after,
            "neither rank 0's tensor nor its own: was all of it received, into the tensor itself?",
        )
    got = "its own tensor, as it was before"
    if is_close(seen["returned"], before[0]):
        return (
            got,
            "what you return is right, but it is another tensor: receive into the given one, or copy_ into it",
        )
    if any(entry["name"] != "send" for entry in seen["log"]):
        return (
            got,
            "something was received, but not into the tensor: receive into it, or copy_ what came into it",
        )
    full = n.bit_length() - 1
    if rank >= 2**full:
        so_far = f"after {full} round{'s' if full > 1 else ''} only {2**full} ranks have the tensor"
        return (
            got,
            f"it never received. {n} is not a power of two: {so_far}, and a last one, with fewer pairs, is missing",
        )
    return got, "it never received: who should have sent to it, and in which round?"


def why_so_many_rounds(messages, n):
    pairs = [(message.source, message.target) for message in messages]
    if len(pairs) > len(set(pairs)):
        return "some rank sends to the same rank twice: the tensor goes in one message, its shape is known to all"
    if len(pairs) > n - 1:
        return f"{len(pairs)} messages, where {n - 1} are enough: every rank but 0 needs to receive only once"
    senders = [a for a, _ in pairs]
    if set(senders) == {0}:
        return "rank 0 sends to everybody itself, while those who have the tensor stand by: let them pass it on, too"
    if len(set(senders)) == len(senders):
        return "a chain: each rank passes it on once and then stands by; let it go on sending until all have it"
    return (
        "in some round a rank has the tensor and stands by, or serves those first who have nobody to pass it on to: "
        "in every round, all that have it send to one that has not"
    )


# ---- 3: ring all-reduce ----


@question(
    "Cut the tensor into n pieces (tensor_split always gives n, empty ones if need be). First sums go round and grow, then "
    "the finished pieces go round. Each half takes n - 1 steps.",
    "In step s of the first half, rank r sends piece (r - s) % n to r + 1 and adds what comes from r - 1 to piece "
    "(r - s - 1) % n. Then it holds piece (r + 1) % n, finished. If all call send first, nobody receives: isend, and wait.",
    "for step in range(2 * (n - 1)): isend piece (r - step) % n to (r + 1) % n; recv into an empty tensor from (r - 1) % n; "
    "wait; piece (r - step - 1) % n += what came, or, once step is n - 1 or more, copy_ it",
)
def check_ring_all_reduce(answer, draw):
    """The sum over all ranks, in place, any length, sending one piece at a time to one
    neighbour.
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
        # whole numbers come second: /= n on them raises an error, and "the mean" is the
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
    """Raise Wrong unless all have the sum, each sent to the same neighbour, and no more
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
            else "its own numbers, as they were"
        )
        raise Wrong(
            checked, rank=f"{rank} of {n}", expected=expected, got=got, cause=cause
        )

    if n > 1 and len(total):
        compare_neighbours(f"whom each rank sends to: {checked}", sends)
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
            cause="the sum is right, but not by dist.send",
        )
    for rank, of_rank in enumerate(peers):
        if len(of_rank) <= 1:
            continue
        cause = "in a ring, a rank speaks to the same neighbour at every step"
        if all(len(some) == n - 1 for some in peers):
            cause = "all ranks send to all: an all_gather in disguise, and the more ranks, the more each has to send"
        elif rank == 0 and all(some == [0] for some in peers[1:]):
            cause = "all send to rank 0, which sends back the sum: it carries n times the load, while the others wait"
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
    cause = "each speaks to one rank only, but it is not the same neighbour for all: (rank + 1) % n"
    raise Wrong(checked, expected=expected, got=got, cause=cause)


def compare_bytes(checked, sends, total):
    n, itemsize = len(sends), total.element_size()
    piece = -(-len(total) // n) * itemsize  # of n equal ones, rounded up
    most = 2 * (n - 1) * piece
    for rank, sent in enumerate(sends):
        size = sum(entry["bytes"] for entry in sent)
        if size <= most:
            continue
        if sum(entry["bytes"] >= total.nbytes for entry in sent) > 1:
            cause = "whole tensors go round, as in an all_gather: cut the tensor into n pieces, and send one a step"
        elif len(sent) > 2 * (n - 1):
            cause = f"{len(sent)} steps, where 2 (n - 1) are enough: after n - 1 steps a piece has been everywhere"
        else:
            cause = "pieces of about equal size, one a step, 2 (n - 1) steps: what else is sent?"
        expected = f"at most {most}: 2 (n - 1) pieces of {piece}, of the tensor's {total.nbytes}"
        got = f"{size}, in {len(sent)} message{'s' if len(sent) > 1 else ''}"
        raise Wrong(
            checked, rank=f"{rank} of {n}", expected=expected, got=got, cause=cause
        )


def why_ring(rank, seen, before, steps):
    """What the numbers of a rank are made of, in words, and the likely cause. before:
    (n, length); steps: sends by rank.
    """
    n, length = before.shape
    after = seen["after"]
    if not isinstance(after, torch.Tensor) or (after.shape, after.dtype) != (
        before[0].shape,
        before.dtype,
    ):
        return (
            after,
            "the tensor has another shape or type than before: only its numbers are to change",
        )
    if n > 1 and is_close(after, before.sum(dim=0) / n):
        return (
            f"the sum of all, divided by {n}",
            "it is the mean: an all-reduce gives the sum, so do not divide",
        )
    held = made_of(after, before)
    if n == 1:
        return in_words(
            held
        ), "a rank that is alone has nobody to send to, and nothing to do"
    own = tuple(int(other == rank) for other in range(n))
    finished = (1,) * n
    got = in_words(held)
    if set(held) == {own}:
        if is_close(seen["returned"], before.sum(dim=0)):
            return (
                got,
                "what you return is the sum, but the tensor that was given is as before: work in place",
            )
        if not any(steps):
            short = ", also where some pieces are empty" if length < n else ""
            return (
                got,
                f"nobody has sent anything: the numbers of all ranks must come together{short}",
            )
        return (
            got,
            "the tensor is as before: were the sums made in a copy? Work on pieces of the tensor itself",
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
            f"{n} does not divide {length}: the last {what} in no piece; tensor_split leaves none out",
        )
    half = n - 1
    if finished in held and max(steps) <= half:
        return (
            got,
            "the first half is done, the finished pieces must still go round: n - 1 more steps, copying",
        )
    if finished in held and half < max(steps) < 2 * half:
        return got, f"{max(steps)} steps, where each half needs n - 1 = {half}"
    if None in held and not before.is_floating_point():
        return got, (
            "right with float64, wrong with int64: has the tensor into which you receive the same type as the piece? "
            "torch.empty_like(piece) has"
        )
    if None in held:
        return got, (
            "pieces are mixed up: what a rank receives is the piece that its neighbour sent at that very step, "
            "one place further than its own; check the piece's number"
        )
    if (
        any(sum(content) > n or max(content) > 1 for content in held)
        and max(steps) > 2 * half
    ):
        return (
            got,
            f"a piece was added once too often: the first half takes n - 1 = {half} steps, not n",
        )
    if any(sum(content) > n or max(content) > 1 for content in held):
        return (
            got,
            "something was added more than once: in the second half, finished pieces are copied, not added",
        )
    if all(sum(content) == 1 for content in held):
        return got, (
            "each piece is of one rank alone: is what comes added in the first half, and does the second half begin "
            "with sending the finished piece, the one that was received last?"
        )
    return got, (
        "some pieces are not finished: after the first half each rank has one finished piece, the one that it received "
        "last, and the second half begins with sending that one"
    )


def made_of(after, before):
    """For each number, how often each rank's number is in it: a list of tuples, None
    where it is no such sum.
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
    """What the numbers are made of: 'numbers 0 to 3: rank 0 + rank 2; 4 to 7: the sum
    of all'.
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
