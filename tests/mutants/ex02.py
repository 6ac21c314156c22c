"""Exercise 02: ranks and collectives."""

import math
import os
import time

import torch
import torch.distributed as dist

from ddp_course import lesson02
from mutants import right, wrong

# ---- rank_arithmetic ----


def our_global_rank(node_rank, local_rank, ranks_per_node):
    return node_rank * ranks_per_node + local_rank


def our_node_and_local_rank(rank, ranks_per_node):
    return rank // ranks_per_node, rank % ranks_per_node


@right("rank_arithmetic", several=True)
def as_we_do():
    return our_global_rank, our_node_and_local_rank


@right("rank_arithmetic", several=True)
def with_divmod():
    def global_rank(node_rank, local_rank, ranks_per_node):
        print("node", node_rank, "local", local_rank)
        return sum([ranks_per_node] * node_rank, local_rank)

    def node_and_local_rank(rank, ranks_per_node):
        print("rank", rank)
        return divmod(rank, ranks_per_node)

    return global_rank, node_and_local_rank


@right("rank_arithmetic", several=True)
def by_counting():
    def global_rank(node_rank, local_rank, ranks_per_node):
        return torch.arange((node_rank + 1) * ranks_per_node).view(-1, ranks_per_node)[
            node_rank, local_rank
        ]

    def node_and_local_rank(rank, ranks_per_node):
        node_rank = 0
        while rank >= ranks_per_node:
            rank -= ranks_per_node
            node_rank += 1
        return [node_rank, rank]

    return global_rank, node_and_local_rank


@wrong(
    "rank_arithmetic",
    "cause +node rank and local rank are swapped",
    several=True,
)
def swaps_the_arguments():
    return (
        lambda node, local, per_node: local * per_node + node,
        our_node_and_local_rank,
    )


@wrong("rank_arithmetic", "multiply the node rank by ranks_per_node", several=True)
def multiplies_by_the_number_of_nodes():
    nodes = "GROUP_WORLD_SIZE"
    return (
        lambda node, local, per_node: node * int(os.environ[nodes]) + local,
        our_node_and_local_rank,
    )


@wrong("rank_arithmetic", "1 too high: all ranks are counted from 0", several=True)
def counts_from_one():
    return (
        lambda node, local, per_node: node * per_node + local + 1,
        our_node_and_local_rank,
    )


@wrong("rank_arithmetic", "a whole node too high", several=True)
def counts_this_node_too():
    return (
        lambda node, local, per_node: (node + 1) * per_node + local,
        our_node_and_local_rank,
    )


@wrong("rank_arithmetic", "the local rank is missing", several=True)
def forgets_the_local_rank():
    return lambda node, local, per_node: node * per_node, our_node_and_local_rank


@wrong("rank_arithmetic", "compute it from the arguments", several=True)
def asks_torch():
    return lambda node, local, per_node: dist.get_rank(), our_node_and_local_rank


@wrong("rank_arithmetic", "without a return", several=True)
def prints_and_does_not_return():
    return lambda node, local, per_node: print(
        node * per_node + local
    ), our_node_and_local_rank


@wrong("rank_arithmetic", "an integer: divide with //", several=True)
def divides_with_one_slash():
    return our_global_rank, lambda rank, per_node: (rank / per_node, rank % per_node)


@wrong("rank_arithmetic", "the two are swapped", several=True)
def returns_a_list_of_the_wrong_order():
    return our_global_rank, lambda rank, per_node: [rank % per_node, rank // per_node]


@wrong("rank_arithmetic", "right on node 1 only", several=True)
def subtracts_one_node():
    return our_global_rank, lambda rank, per_node: (rank // per_node, rank - per_node)


@wrong("rank_arithmetic", "local ranks begin at 0 on every node", several=True)
def forgets_to_subtract():
    return our_global_rank, lambda rank, per_node: (rank // per_node, rank)


@wrong("rank_arithmetic", "do not subtract 1", several=True)
def off_by_one_on_the_way_back():
    return our_global_rank, lambda rank, per_node: (
        (rank - 1) // per_node,
        rank % per_node,
    )


@wrong("rank_arithmetic", "divide with //", several=True)
def rounds():
    return our_global_rank, lambda rank, per_node: (
        round(rank / per_node),
        rank % per_node,
    )


@wrong("rank_arithmetic", "return two numbers", several=True)
def returns_the_node_only():
    return our_global_rank, lambda rank, per_node: rank // per_node


@wrong(
    "rank_arithmetic",
    "the node rank is wrong, but the other one is always right",
    several=True,
)
def asks_for_the_nodes_name():
    return our_global_rank, lambda rank, per_node: (
        os.uname().nodename,
        rank % per_node,
    )


@wrong("rank_arithmetic", "", status="not attempted", several=True)
def only_one_of_two():
    def node_and_local_rank(rank, ranks_per_node):
        raise NotImplementedError

    return our_global_rank, node_and_local_rank


# ---- broadcast ----


def me():
    return dist.get_rank(), dist.get_world_size()


@right("broadcast")
def doubling(tensor):
    rank, n = me()
    have = 1
    while have < n:
        if rank < have and rank + have < n:
            dist.send(tensor, rank + have)
        elif have <= rank < 2 * have:
            dist.recv(tensor, rank - have)
        have *= 2


@right("broadcast")
def halving(tensor):
    """The upper half's first rank gets it, then each half goes on by itself; received
    from whomever, into another tensor.
    """
    rank, n = me()
    low, high = 0, n
    while high - low > 1:
        middle = (low + high + 1) // 2
        if rank == low:
            print(f"{low} to {middle}")
            dist.isend(tensor.clone(), middle).wait()
        if rank == middle:
            received = torch.empty_like(tensor)
            dist.recv(received)
            tensor[:] = received
        low, high = (middle, high) if rank >= middle else (low, middle)
    return tensor


@right("broadcast")
def by_bits(tensor):
    """The tree of MPICH: receive from the rank without one's lowest bit, then serve
    those with a lower bit set.
    """
    rank, n = me()
    bit = 1
    while bit < n and not rank & bit:
        bit *= 2
    if rank:
        dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, rank - bit)])[0].wait()
    works = []
    while bit := bit // 2:
        if rank + bit < n:
            works.append(dist.isend(tensor, rank + bit))
    for work in works:
        work.wait()


@wrong("broadcast", "rank 0 sends to all other ranks itself")
def rank_zero_sends_to_all(tensor):
    rank, n = me()
    if rank == 0:
        for other in range(1, n):
            dist.send(tensor, other)
    else:
        dist.recv(tensor, 0)


@wrong("broadcast", "rank 0 sends to all other ranks itself")
def rank_zero_sends_to_all_at_once(tensor):
    rank, n = me()
    if rank == 0:
        for work in [dist.isend(tensor, other) for other in range(1, n)]:
            work.wait()
    else:
        dist.irecv(tensor, 0).wait()


@wrong("broadcast", "a chain")
def passes_it_down_a_chain(tensor):
    rank, n = me()
    if rank > 0:
        dist.recv(tensor, rank - 1)
    if rank < n - 1:
        dist.send(tensor, rank + 1)


@wrong("broadcast", "sends it first to ranks that cannot send it on")
def smallest_branch_first(tensor):
    rank, n = me()
    bits = [1 << k for k in range(n.bit_length())]
    if rank:
        dist.recv(tensor, rank & (rank - 1))
    for bit in bits:
        if (rank == 0 or bit < (rank & -rank)) and rank + bit < n:
            dist.send(tensor, rank + bit)


@wrong("broadcast", "messages, but .* are enough")
def everybody_sends_to_all_above(tensor):
    rank, n = me()
    for other in range(rank):
        dist.recv(tensor, other)
    for other in range(rank + 1, n):
        dist.send(tensor, other)


@wrong("broadcast", "one message is enough for the tensor")
def sends_its_length_first(tensor):
    rank, n = me()
    length, have = torch.tensor([tensor.numel()]), 1
    while have < n:
        for message in (length, tensor):
            if rank < have and rank + have < n:
                dist.send(message, rank + have)
            elif have <= rank < 2 * have:
                dist.recv(message, rank - have)
        have *= 2


@wrong("broadcast", "that is a collective")
def calls_broadcast(tensor):
    dist.broadcast(tensor, src=0)


@wrong("broadcast", "a barrier is a collective, too")
def waits_after_each_round(tensor):
    doubling(tensor)
    dist.barrier()


@wrong(
    "broadcast",
    "is not a power of two: .* the last round, with fewer pairs, is missing",
)
def forgets_the_last_ranks(tensor):
    rank, n = me()
    for k in range(int(math.log2(n))):
        if rank < 2**k:
            dist.send(tensor, rank + 2**k)
        elif rank < 2 ** (k + 1):
            dist.recv(tensor, rank - 2**k)


@wrong("broadcast", "a message was received, but not into the tensor")
def receives_into_a_copy(tensor):
    received = tensor.clone()
    doubling(received)


@wrong("broadcast", "you return the right values in another tensor")
def returns_another_tensor(tensor):
    received = tensor.clone()
    doubling(received)
    return received


@wrong("broadcast", "sent its own tensor")
def passes_on_its_own(tensor):
    mine = tensor.clone()
    rank, n = me()
    have = 1
    while have < n:
        if rank < have and rank + have < n:
            dist.send(mine, rank + have)
        elif have <= rank < 2 * have:
            dist.recv(tensor, rank - have)
        have *= 2


@wrong("broadcast", "another that does not come", status="timed out")
def sends_and_nobody_receives(tensor):
    rank, n = me()
    have = 1
    while have < n:
        if rank < have and rank + have < n:
            dist.send(tensor, rank + have)
        have *= 2


@wrong(
    "broadcast",
    "it never received. 9 is not a power of two: after 3 rounds only 8 ranks",
)
def always_three_rounds(tensor):
    rank, n = me()
    for have in (1, 2, 4):
        if rank < have and rank + have < n:
            dist.send(tensor, rank + have)
        elif have <= rank < 2 * have:
            dist.recv(tensor, rank - have)


@wrong(
    "broadcast",
    "rank 0 sends to rank 1, but there are 1 ranks",
    status="your code raised",
)
def is_never_alone(tensor):
    rank, n = me()
    if rank == 0:
        dist.send(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
    have = 2
    while have < n:
        if rank < have and rank + have < n:
            dist.send(tensor, rank + have)
        elif have <= rank < 2 * have:
            dist.recv(tensor, rank - have)
        have *= 2


@wrong(
    "broadcast",
    "has not ended. After isend or irecv, keep the work that it returns",
    status="timed out",
)
def forgets_to_wait_for_what_it_receives(tensor):
    rank, n = me()
    have = 1
    while have < n:
        if rank < have and rank + have < n:
            dist.send(tensor, rank + have)
        elif have <= rank < 2 * have:
            dist.irecv(tensor, rank - have)
        have *= 2


@wrong("broadcast", "but there are . ranks, from 0 on", status="your code raised")
def sends_to_ranks_that_are_not_there(tensor):
    rank, n = me()
    for k in range(math.ceil(math.log2(n)) + 1):
        if rank < 2**k:
            dist.send(tensor, rank + 2**k)
        elif rank < 2 ** (k + 1):
            dist.recv(tensor, rank - 2**k)


@wrong("broadcast", r"rank \d sends its own tensor before rank 0's has reached it")
def everybody_sends_up_and_then_receives(tensor):
    """Blocking sends: in truth a chain, since each waits for the next to receive."""
    rank, n = me()
    distance = 1
    while distance < n:
        if rank + distance < n:
            dist.send(tensor, rank + distance)
        if rank >= distance:
            dist.recv(tensor, rank - distance)
        distance *= 2


@wrong("broadcast", "sends it first to ranks that cannot send it on")
def binary_tree(tensor):
    """A heap: rank r sends to 2 r + 1 and 2 r + 2. The last of 7 comes in round 4."""
    rank, n = me()
    if rank:
        dist.recv(tensor, (rank - 1) // 2)
    for child in (2 * rank + 1, 2 * rank + 2):
        if child < n:
            dist.send(tensor, child)


@wrong("broadcast", "converted to a less precise type")
def in_32_bits(tensor):
    small = tensor.float()
    doubling(small)
    tensor.copy_(small)


@wrong(
    "broadcast", "converted to a less precise type|neither rank 0's tensor nor its own"
)
def in_16_bits_on_the_way(tensor):
    small = tensor.to(torch.bfloat16)
    doubling(small)
    if dist.get_rank():
        tensor.copy_(small)


@wrong("broadcast", "messages, but .* are enough|the same rank twice")
def in_two_halves(tensor):
    """Each half has its own tree, which is no faster and sends twice as often."""
    for half in tensor.view(-1).tensor_split(2):
        doubling(half)


@wrong("broadcast", "messages, but .* are enough")
def confirms_what_it_received(tensor):
    """Each rank answers with an empty message that the tensor has come."""
    rank, n = me()
    have = 1
    while have < n:
        if rank < have and rank + have < n:
            dist.send(tensor, rank + have)
            dist.recv(torch.empty(1), rank + have)
        elif have <= rank < 2 * have:
            dist.recv(tensor, rank - have)
            dist.send(torch.ones(1), rank - have)
        have *= 2


@wrong(
    "broadcast", "which rank should have sent to it|the last round, with fewer pairs"
)
def for_eight_ranks_at_most(tensor):
    rank, n = me()
    for sender, target in [(0, 1), (0, 2), (1, 3), (0, 4), (1, 5), (2, 6), (3, 7)]:
        if rank == sender and target < n:
            dist.send(tensor, target)
        if rank == target:
            dist.recv(tensor, sender)


@right("broadcast")
def by_the_ranks_above(tensor):
    """Recursion over a range: its owner sends to the first rank of the upper half."""

    def spread(low, high):
        if high - low < 2:
            return
        middle = high - (high - low) // 2
        if rank == low:
            dist.send(tensor, middle)
        if rank == middle:
            dist.recv(tensor, low)
        spread(low, middle) if rank < middle else spread(middle, high)

    rank, n = me()
    spread(0, n)


@right("broadcast")
def with_numpy_and_batches(tensor):
    import numpy as np

    rank, n = (np.int64(number) for number in me())
    for k in range(int(np.ceil(np.log2(n)))):
        operations = []
        if rank < 2**k and rank + 2**k < n:
            operations.append(dist.P2POp(dist.isend, tensor, int(rank + 2**k)))
        if 2**k <= rank < 2 ** (k + 1):
            operations.append(dist.P2POp(dist.irecv, tensor, int(rank - 2**k)))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()


# ---- ring_all_reduce ----


@right("ring_all_reduce")
def as_in_the_lesson(tensor):
    return lesson02.ring_all_reduce(tensor)


@right("ring_all_reduce")
def downwards_and_padded(tensor):
    rank, n = me()
    size = math.ceil(len(tensor) / n)
    padded = torch.zeros(n, size, dtype=tensor.dtype)
    padded.view(-1)[: len(tensor)] = tensor
    for half in range(2):
        for step in range(n - 1):
            print("step", step)
            piece = (rank + step - half) % n
            came = torch.empty(size, dtype=tensor.dtype)
            works = dist.batch_isend_irecv([
                dist.P2POp(dist.irecv, came, (rank + 1) % n),
                dist.P2POp(dist.isend, padded[piece], (rank - 1) % n),
            ])  # fmt: skip
            for work in works:
                work.wait()
            piece = (piece + 1) % n
            padded[piece] = came if half else padded[piece] + came
    tensor.copy_(padded.view(-1)[: len(tensor)])


@right("ring_all_reduce")
def in_turns(tensor):
    """Even ranks send and then receive, odd ones the reverse; the last piece takes the
    rest, empty ones stay at home.
    """
    rank, n = me()
    size = len(tensor) // n
    pieces = [
        tensor[i * size : (i + 1) * size if i < n - 1 else None] for i in range(n)
    ]
    for step in range(2 * (n - 1)):
        outgoing, incoming = pieces[(rank - step) % n], pieces[(rank - step - 1) % n]
        came = torch.empty_like(incoming)
        for sends in (True, False) if rank % 2 == 0 else (False, True):
            if sends and len(outgoing):
                dist.send(outgoing, (rank + 1) % n)
            if not sends and len(incoming):
                dist.recv(came, (rank - 1) % n)
        incoming[:] = incoming + came if step < n - 1 else came
    return tensor


def ring(
    tensor,
    pieces=None,
    steps=None,
    second=None,
    first_index=0,
    add=torch.Tensor.add_,
    copy=torch.Tensor.copy_,
):
    """A ring with places to go wrong. second: number that is added to the piece's in
    the second half.
    """
    rank, n = me()
    pieces = tensor.tensor_split(n) if pieces is None else pieces
    for step in range(2 * (n - 1) if steps is None else steps):
        shift = (second or 0) if step >= n - 1 else 0
        outgoing = pieces[(rank - step + shift) % n]
        incoming = pieces[(rank - step - 1 + shift + first_index) % n]
        came = torch.empty_like(incoming)
        work = dist.isend(outgoing.clone(), (rank + 1) % n)
        dist.recv(came, (rank - 1) % n)
        work.wait()
        (add if step < n - 1 else copy)(incoming, came)


@wrong("ring_all_reduce", "finished pieces must still travel round the ring")
def forgets_the_second_half(tensor):
    ring(tensor, steps=dist.get_world_size() - 1)


@wrong("ring_all_reduce", "added more than once")
def adds_in_the_second_half(tensor):
    ring(tensor, copy=torch.Tensor.add_)


@wrong("ring_all_reduce", "add the received pieces in the first half")
def copies_in_the_first_half(tensor):
    ring(tensor, add=torch.Tensor.copy_)


@wrong("ring_all_reduce", "pieces are mixed up")
def off_by_one_in_the_piece(tensor):
    ring(tensor, first_index=1)


@wrong("ring_all_reduce", "begin the second half by sending")
def begins_the_second_half_with_another_piece(tensor):
    ring(tensor, second=-1)


@wrong("ring_all_reduce", "the second half begins by sending it")
def begins_the_second_half_one_too_late(tensor):
    ring(tensor, second=1)


@wrong("ring_all_reduce", "different sizes", status="your code raised")
def receives_into_numbers_of_another_type(tensor):
    rank, n = me()
    pieces = tensor.tensor_split(n)
    for step in range(2 * (n - 1)):
        incoming = pieces[(rank - step - 1) % n]
        came = torch.empty(len(incoming))
        work = dist.isend(pieces[(rank - step) % n], (rank + 1) % n)
        dist.recv(came, (rank - 1) % n)
        work.wait()
        incoming.copy_(incoming + came if step < n - 1 else came)


@wrong("ring_all_reduce", "no rank has sent anything: .* empty")
def leaves_short_tensors_alone(tensor):
    if len(tensor) >= dist.get_world_size():
        ring(tensor)


@wrong("ring_all_reduce", "it is the mean")
def divides(tensor):
    ring(tensor)
    tensor /= dist.get_world_size()


@wrong("ring_all_reduce", "did you add into a copy")
def works_in_a_copy(tensor):
    ring(tensor.clone())


@wrong("ring_all_reduce", "you return the sum")
def returns_the_sum(tensor):
    total = tensor.clone()
    ring(total)
    return total


@wrong("ring_all_reduce", "does not divide .* in no piece")
def loses_the_rest(tensor):
    n = dist.get_world_size()
    size = len(tensor) // n
    ring(tensor, pieces=[tensor[i * size : (i + 1) * size] for i in range(n)])


@wrong("ring_all_reduce", "out of range", status="your code raised")
def has_fewer_pieces_than_ranks(tensor):
    ring(tensor, pieces=tensor.chunk(dist.get_world_size()))


@wrong("ring_all_reduce", "whole tensors travel round the ring")
def sends_whole_tensors_round(tensor):
    rank, n = me()
    outgoing = tensor.clone()
    for _ in range(n - 1):
        came = torch.empty_like(tensor)
        work = dist.isend(outgoing, (rank + 1) % n)
        dist.recv(came, (rank - 1) % n)
        work.wait()
        tensor += came
        outgoing = came


@wrong("ring_all_reduce", "whole tensors travel round the ring")
def sums_up_the_ring_and_down_again(tensor):
    rank, n = me()
    if n == 1:
        return
    came = torch.empty_like(tensor)
    if rank > 0:
        dist.recv(came, rank - 1)
        tensor += came
    dist.send(tensor, (rank + 1) % n)
    if rank < n - 1:
        dist.recv(tensor, (rank - 1) % n)
        if rank < n - 2:
            dist.send(tensor, rank + 1)


@wrong("ring_all_reduce", "all ranks send to all: this is an all_gather")
def gathers_from_all(tensor):
    rank, n = me()
    mine = tensor.clone()
    works = [dist.isend(mine, other) for other in range(n) if other != rank]
    for other in range(n):
        if other != rank:
            came = torch.empty_like(tensor)
            dist.recv(came, other)
            tensor += came
    for work in works:
        work.wait()


@wrong("ring_all_reduce", "all ranks send to rank 0, which sends the sum back")
def reduces_to_rank_zero_and_broadcasts(tensor):
    rank, n = me()
    if rank == 0:
        came = torch.empty_like(tensor)
        for other in range(1, n):
            dist.recv(came, other)
            tensor += came
        for other in range(1, n):
            dist.send(tensor, other)
    else:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)


@wrong("ring_all_reduce", "steps, but 2 .n - 1. are enough")
def goes_one_step_too_far(tensor):
    ring(tensor, steps=2 * dist.get_world_size() - 1)


@wrong("ring_all_reduce", "that is a collective")
def calls_all_reduce(tensor):
    dist.all_reduce(tensor)


@wrong("ring_all_reduce", "that is a collective")
def gathers(tensor):
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    tensor.copy_(sum(gathered))


@wrong(
    "ring_all_reduce", "nobody receives: isend only begins to send", status="timed out"
)
def everybody_sends_first(tensor):
    rank, n = me()
    pieces = tensor.tensor_split(n)
    for step in range(2 * (n - 1)):
        dist.send(pieces[(rank - step) % n], (rank + 1) % n)
        came = torch.empty_like(pieces[(rank - step - 1) % n])
        dist.recv(came, (rank - 1) % n)
        pieces[(rank - step - 1) % n].add_(came)


@wrong("ring_all_reduce", "once too often: the first half takes n - 1")
def first_half_is_a_step_too_long(tensor):
    rank, n = me()
    pieces = tensor.tensor_split(n)
    for step in range(2 * n - 1):
        work = dist.isend(pieces[(rank - step) % n], (rank + 1) % n)
        came = torch.empty_like(pieces[(rank - step - 1) % n])
        dist.recv(came, (rank - 1) % n)
        work.wait()
        if step < n:
            pieces[(rank - step - 1) % n].add_(came)
        else:
            pieces[(rank - step - 1) % n].copy_(came)


@wrong("ring_all_reduce", r"steps, but each half needs n - 1|n - 1 more steps")
def second_half_is_a_step_too_short(tensor):
    rank, n = me()
    pieces = tensor.tensor_split(n)
    for step in range(2 * n - 3):
        work = dist.isend(pieces[(rank - step) % n], (rank + 1) % n)
        came = torch.empty_like(pieces[(rank - step - 1) % n])
        dist.recv(came, (rank - 1) % n)
        work.wait()
        if step < n - 1:
            pieces[(rank - step - 1) % n].add_(came)
        else:
            pieces[(rank - step - 1) % n].copy_(came)


@wrong("ring_all_reduce", "does somebody send first", status="timed out")
def everybody_receives_first(tensor):
    rank, n = me()
    pieces = tensor.tensor_split(n)
    for step in range(2 * (n - 1)):
        came = torch.empty_like(pieces[(rank - step - 1) % n])
        dist.recv(came, (rank - 1) % n)
        dist.send(pieces[(rank - step) % n], (rank + 1) % n)
        pieces[(rank - step - 1) % n].add_(came)


@wrong(
    "ring_all_reduce",
    r"ZeroDivisionError[^$]*\(in \d+ numbers? of float64 on 1 rank\)",
    status="your code raised",
)
def cannot_be_alone(tensor):
    rank, n = me()
    if n == 1:
        tensor /= 1 // (n - 1)
    lesson02.ring_all_reduce(tensor)


@wrong("ring_all_reduce", "a loop does not end", status="timed out")
def never_ends(tensor):
    while True:
        time.sleep(0.1)


@wrong("ring_all_reduce", "", status="not attempted")
def not_begun(tensor):
    raise NotImplementedError
