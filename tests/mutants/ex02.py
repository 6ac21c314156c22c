"""Exercise 02: ranks and collectives."""

import itertools
import math
import os
import time
from collections import Counter
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch
import torch.distributed as dist
from ddp_course import lesson02
from torch.utils._python_dispatch import _disable_current_modes

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
        return torch.arange((node_rank + 1) * ranks_per_node).view(-1, ranks_per_node)[node_rank, local_rank]

    def node_and_local_rank(rank, ranks_per_node):
        node_rank = 0
        while rank >= ranks_per_node:
            rank -= ranks_per_node
            node_rank += 1
        return [node_rank, rank]

    return global_rank, node_and_local_rank


@wrong("rank_arithmetic", "cause +node rank and local rank are swapped", several=True)
def swaps_the_arguments():
    return (lambda node, local, per_node: local * per_node + node, our_node_and_local_rank)


@wrong("rank_arithmetic", "multiply the node rank by ranks_per_node", several=True)
def multiplies_by_the_number_of_nodes():
    nodes = "GROUP_WORLD_SIZE"
    return (lambda node, local, per_node: node * int(os.environ[nodes]) + local, our_node_and_local_rank)


@wrong("rank_arithmetic", "1 too high: all ranks are counted from 0", several=True)
def counts_from_one():
    return (lambda node, local, per_node: node * per_node + local + 1, our_node_and_local_rank)


@wrong("rank_arithmetic", "a whole node too high", several=True)
def counts_this_node_too():
    return (lambda node, local, per_node: (node + 1) * per_node + local, our_node_and_local_rank)


@wrong("rank_arithmetic", "the local rank is missing", several=True)
def forgets_the_local_rank():
    return lambda node, local, per_node: node * per_node, our_node_and_local_rank


@wrong("rank_arithmetic", "compute it from the arguments", several=True)
def asks_torch():
    return lambda node, local, per_node: dist.get_rank(), our_node_and_local_rank


@wrong("rank_arithmetic", "without a return", several=True)
def prints_and_does_not_return():
    return lambda node, local, per_node: print(node * per_node + local), our_node_and_local_rank


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
    return our_global_rank, lambda rank, per_node: ((rank - 1) // per_node, rank % per_node)


@wrong("rank_arithmetic", "divide with //", several=True)
def rounds():
    return our_global_rank, lambda rank, per_node: (round(rank / per_node), rank % per_node)


@wrong("rank_arithmetic", "return two numbers", several=True)
def returns_the_node_only():
    return our_global_rank, lambda rank, per_node: rank // per_node


@wrong("rank_arithmetic", "the node rank is wrong, but the other one is always right", several=True)
def asks_for_the_nodes_name():
    return our_global_rank, lambda rank, per_node: (os.uname().nodename, rank % per_node)


@wrong("rank_arithmetic", "", status="not attempted", several=True)
def only_one_of_two():
    def node_and_local_rank(rank, ranks_per_node):
        raise NotImplementedError

    return our_global_rank, node_and_local_rank


@wrong("rank_arithmetic", r"expected +\d+\s+got +'\d+'(.|\n)*return one integer", several=True)
def ranks_as_text():
    def global_rank(node_rank, local_rank, ranks_per_node):
        return f"{our_global_rank(node_rank, local_rank, ranks_per_node)}"

    return global_rank, our_node_and_local_rank


@wrong("rank_arithmetic", "the local rank is wrong, but the other one", several=True)
def by_masking():
    return our_global_rank, lambda rank, per_node: (rank // per_node, rank & (per_node - 1))


@wrong("rank_arithmetic", "a node does not always hold 4 ranks", several=True)
def as_in_the_picture():
    return lambda node, local, per_node: 4 * node + local, our_node_and_local_rank


@wrong("rank_arithmetic", "a node does not always hold 1 rank", several=True)
def by_the_local_world_size():
    local_world_size = "LOCAL_WORLD_SIZE"
    return our_global_rank, lambda rank, per_node: divmod(rank, int(os.environ[local_world_size]))


@wrong("rank_arithmetic", "only the node rank is multiplied", several=True)
def brackets():
    return (lambda node, local, per_node: (node + local) * per_node, our_node_and_local_rank)


@right("rank_arithmetic", several=True)
def with_numpys_indices():
    def global_rank(node_rank, local_rank, ranks_per_node):
        shape = node_rank + 1, ranks_per_node
        return np.ravel_multi_index((node_rank, local_rank), shape)

    def node_and_local_rank(rank, ranks_per_node):
        return np.unravel_index(rank, (rank // ranks_per_node + 1, ranks_per_node))

    return global_rank, node_and_local_rank


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


@wrong("broadcast", "that is a collective")
def the_lessons_broadcast(tensor):
    lesson02.broadcast(tensor, *me())


@wrong("broadcast", "a barrier is a collective, too")
def waits_after_each_round(tensor):
    doubling(tensor)
    dist.barrier()


@wrong("broadcast", "is not a power of two: .* the last round, with fewer pairs, is missing")
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


@wrong("broadcast", "it never received. 9 is not a power of two: after 3 rounds only 8 ranks")
def always_three_rounds(tensor):
    rank, n = me()
    for have in (1, 2, 4):
        if rank < have and rank + have < n:
            dist.send(tensor, rank + have)
        elif have <= rank < 2 * have:
            dist.recv(tensor, rank - have)


@wrong("broadcast", "rank 0 sends to rank 1, but there are 1 ranks", status="your code raised")
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


@wrong("broadcast", "has not ended. After isend or irecv, keep the work that it returns", status="timed out")
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


@wrong("broadcast", "converted to a less precise type|neither rank 0's tensor nor its own")
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


@wrong("broadcast", "which rank should have sent to it|the last round, with fewer pairs")
def for_eight_ranks_at_most(tensor):
    rank, n = me()
    for sender, target in [(0, 1), (0, 2), (1, 3), (0, 4), (1, 5), (2, 6), (3, 7)]:
        if rank == sender and target < n:
            dist.send(tensor, target)
        if rank == target:
            dist.recv(tensor, sender)


@wrong("broadcast", "views of it still have the old values")
def gives_the_tensor_other_memory(tensor):
    received = tensor.clone()
    doubling(received)
    tensor.data = received


@wrong("broadcast", "converted to a less precise type|rank 0 already has")
def in_64_bits_of_floating_point(tensor):
    wide = tensor.double()
    doubling(wide)
    tensor.copy_(wide if tensor.dtype != torch.float64 else wide.float())


@wrong("broadcast", "the same rank twice")
def as_an_object(tensor):
    rank, n = me()
    have = 1
    while have < n:
        if rank < have and rank + have < n:
            dist.send_object_list([tensor], rank + have)
        elif have <= rank < 2 * have:
            received = [None]
            dist.recv_object_list(received, rank - have)
            tensor.copy_(received[0])
        have *= 2


HAVE_SENT = []


@wrong("broadcast", "does something stay from one call to the next")
def once_and_for_all(tensor):
    if not HAVE_SENT:
        HAVE_SENT.append(True)
        doubling(tensor)


@wrong("broadcast", "sends its own tensor before rank 0's has reached it")
def exchanges_with_a_partner(tensor):
    """Pairs by one bit of the rank, as in a butterfly, whether or not they have it."""
    rank, n = me()
    bit = 1
    while bit < n:
        if rank ^ bit < n:
            (dist.send if rank < rank ^ bit else dist.recv)(tensor, rank ^ bit)
        bit *= 2


@right("broadcast")
def farthest_first(tensor):
    rank, n = me()
    for distance in (2**k for k in reversed(range((n - 1).bit_length()))):
        if rank % (2 * distance) == distance:
            dist.recv(tensor, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < n:
            dist.send(tensor, rank + distance)


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


# ---- ring_reduce_scatter ----


@right("ring_reduce_scatter")
def with_split(tensor, lengths):
    rank, n = me()
    pieces = [piece.clone() for piece in tensor.split(lengths)]
    for step in range(n - 1):
        outgoing, incoming = (pieces[(rank - 1 - step) % n], pieces[(rank - 2 - step) % n])
        came = torch.empty_like(incoming)
        work = dist.isend(outgoing, (rank + 1) % n)
        dist.recv(came, (rank - 1) % n)
        work.wait()
        incoming += came
    return pieces[rank]


@right("ring_reduce_scatter")
def downwards_and_one_sum(tensor, lengths):
    """Down the ring, with one running sum, and pieces by their places."""
    rank, n = me()
    ends = list(itertools.accumulate(lengths, initial=0))

    def mine(piece):
        return tensor[ends[piece] : ends[piece + 1]]

    total = mine((rank + 1) % n)
    for step in range(1, n):
        print("step", step)
        piece = (rank + 1 + step) % n
        came = tensor.new_empty(lengths[piece])
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.irecv, came, (rank + 1) % n),
            dist.P2POp(dist.isend, total, (rank - 1) % n),
        ])  # fmt: skip
        for work in works:
            work.wait()
        total = came + mine(piece)
    return total.clone()


@right("ring_reduce_scatter")
def in_turns(tensor, lengths):
    """Even ranks send and then receive, odd ones the reverse; empty pieces stay at home."""
    rank, n = me()
    pieces = list(tensor.clone().split(lengths))
    for step in range(n - 1):
        outgoing, incoming = (pieces[(rank - 1 - step) % n], pieces[(rank - 2 - step) % n])
        came = torch.empty_like(incoming)
        for sends in (True, False) if rank % 2 == 0 else (False, True):
            if sends and len(outgoing):
                dist.send(outgoing, (rank + 1) % n)
            if not sends and len(incoming):
                dist.recv(came, (rank - 1) % n)
        incoming += came
    return pieces[rank]


@right("ring_reduce_scatter")
def in_numpy(tensor, lengths):
    rank, n = me()
    pieces = np.split(tensor.numpy().copy(), np.cumsum(lengths)[:-1])
    for step in range(n - 1):
        outgoing, incoming = (pieces[(rank - 1 - step) % n], pieces[(rank - 2 - step) % n])
        came = torch.from_numpy(np.empty_like(incoming))
        work = dist.isend(torch.from_numpy(outgoing), (rank + 1) % n)
        dist.irecv(came, (rank - 1) % n).wait()
        work.wait()
        incoming += came.numpy()
    return torch.from_numpy(pieces[rank])


def ring(tensor, lengths, steps=None, start=1, add=torch.Tensor.add_, cut=None, into=0,
         returned=None):  # fmt: skip
    """A ring with places to go wrong. start: how far behind its rank each piece begins;
    into: where a rank adds what came.
    """
    rank, n = me()
    cut = cut or (lambda tensor: [piece.clone() for piece in tensor.split(lengths)])
    pieces = cut(tensor)
    for step in range(n - 1 if steps is None else steps):
        outgoing = pieces[(rank - start - step) % n]
        incoming = pieces[(rank - start - 1 - step) % n]
        came = torch.empty_like(incoming)
        work = dist.isend(outgoing.clone(), (rank + 1) % n)
        dist.recv(came, (rank - 1) % n)
        work.wait()
        add(pieces[(rank - start - 1 - step + into) % n], came)
    return pieces[rank if returned is None else (rank + returned) % n]


@wrong("ring_reduce_scatter", "TypeError", status="your code raised")
def the_lessons_own(tensor, lengths):
    return lesson02.ring_all_reduce(tensor, lengths)


@wrong("ring_reduce_scatter", "but the given list is|second half|given tensor|not needed|straight|changed")
def the_lessons_own_and_a_cut(tensor, lengths):
    total = tensor.clone()
    lesson02.ring_all_reduce(total)
    return total.split(lengths)[dist.get_rank()]


@wrong("ring_reduce_scatter", "it is finished, but it is piece|must have|numbers")
def the_first_half_of_the_lessons_own(tensor, lengths):
    total, n = tensor.clone(), dist.get_world_size()
    lesson02.ring_all_reduce(total, n - 1)
    return total.split(lengths)[dist.get_rank()]


@wrong("ring_reduce_scatter", "that is a collective")
def torchs_reduce_scatter(tensor, lengths):
    pieces = [*tensor.split(lengths)]
    mine = torch.empty_like(pieces[dist.get_rank()])
    dist.reduce_scatter(mine, pieces)
    return mine


@wrong("ring_reduce_scatter", "that is a collective")
def all_reduce_and_a_cut(tensor, lengths):
    total = tensor.clone()
    dist.all_reduce(total)
    return total.split(lengths)[dist.get_rank()]


@wrong("ring_reduce_scatter", "torch's dispatcher was not told of", status="your code raised")
def a_ring_for_show(tensor, lengths):
    total = tensor.clone()
    with _disable_current_modes():
        dist.all_reduce(total)
    ring(torch.zeros_like(tensor), lengths)
    return total.split(lengths)[dist.get_rank()]


@wrong("ring_reduce_scatter", "torch's dispatcher was not told of", status="your code raised")
def messages_for_show(tensor, lengths):
    """Rank 0 collects and distributes, in messages that only the backend sees."""
    rank, n = me()
    backend, total = dist.group.WORLD._get_backend(tensor.device), tensor.clone()
    for other in range(1, n):
        came = torch.empty_like(tensor)
        if rank == other:
            backend.send([total], 0, 1).wait()
            backend.recv([total], 0, 2).wait()
        elif rank == 0:
            backend.recv([came], other, 1).wait()
            total += came
    if rank == 0:
        for other in range(1, n):
            backend.send([total], other, 2).wait()
    ring(torch.zeros_like(tensor), lengths)
    return total.split(lengths)[rank]


@wrong("ring_reduce_scatter", "but it is piece|numbers")
def starts_where_the_lesson_starts(tensor, lengths):
    """Piece r starts at rank r, as in the lesson: rank r ends with piece r + 1."""
    return ring(tensor, lengths, start=0, returned=1)


@wrong("ring_reduce_scatter", "not finished|one rank alone|rank's own piece")
def returns_its_piece_too_soon(tensor, lengths):
    return ring(tensor, lengths, start=0)


@wrong("ring_reduce_scatter", "there is one step too many")
def goes_one_step_further(tensor, lengths):
    return ring(tensor, lengths, start=0, steps=dist.get_world_size() % 10**6 if (
        dist.get_world_size() > 1) else 0, add=adds_or_copies())  # fmt: skip


def adds_or_copies():
    """Adds n - 1 times, and copies in the step after that."""
    left = [dist.get_world_size() - 1]

    def take(piece, came):
        left[0] -= 1
        return piece.add_(came) if left[0] >= 0 else piece.copy_(came)

    return take


@wrong("ring_reduce_scatter", "second half, in which the finished pieces travel round, is not needed")
def goes_round_twice(tensor, lengths):
    steps = 2 * (dist.get_world_size() - 1)
    return ring(tensor, lengths, start=0, steps=steps, add=adds_or_copies())


@wrong("ring_reduce_scatter", "steps, but a piece needs n - 1")
def goes_a_step_too_few(tensor, lengths):
    return ring(tensor, lengths, steps=max(0, dist.get_world_size() - 2))


@wrong("ring_reduce_scatter", "from one rank alone")
def copies_what_came(tensor, lengths):
    return ring(tensor, lengths, add=torch.Tensor.copy_)


@wrong("ring_reduce_scatter", "no sum of numbers of this piece|rank's own piece|must match|size")
def adds_to_another_piece(tensor, lengths):
    return ring(tensor, [len(tensor) // len(lengths)] * len(lengths), into=1)


@wrong("ring_reduce_scatter", "it is the mean")
def divides(tensor, lengths):
    return ring(tensor, lengths) / dist.get_world_size()


@wrong("ring_reduce_scatter", "sum into copies of its pieces")
def sums_in_the_given_tensor(tensor, lengths):
    return ring(tensor, lengths, cut=lambda tensor: tensor.split(lengths))


@wrong("ring_reduce_scatter", "must be returned, and the tensor left unchanged")
def works_in_place(tensor, lengths):
    ring(tensor, lengths, cut=lambda tensor: tensor.split(lengths))


@wrong("ring_reduce_scatter", "do not change it")
def pops_the_lengths(tensor, lengths):
    pieces, begin = [], 0
    while lengths:
        length = lengths.pop(0)
        pieces.append(tensor[begin : begin + length].clone())
        begin += length
    return ring(tensor, lengths, cut=lambda tensor: pieces)


@wrong("ring_reduce_scatter", "return piece . alone")
def returns_all_pieces(tensor, lengths):
    rank = dist.get_rank()
    pieces = [torch.zeros(length, dtype=tensor.dtype) for length in lengths]
    pieces[rank] = ring(tensor, lengths)
    return torch.cat(pieces)


@wrong("ring_reduce_scatter", "cut the tensor by `lengths`|has lengths")
def ignores_the_lengths(tensor, lengths):
    n = dist.get_world_size()
    cut = lambda tensor: [piece.clone() for piece in tensor.tensor_split(n)]
    return ring(tensor, lengths, cut=cut)


@wrong("ring_reduce_scatter", "as if it were as long as the longest")
def pads_every_piece(tensor, lengths):
    longest = max(lengths)

    def cut(tensor):
        padded = [tensor.new_zeros(longest) for _ in lengths]
        for piece, padding in zip(tensor.split(lengths), padded):
            padding[: len(piece)] = piece
        return padded

    return ring(tensor, lengths, cut=cut)[: lengths[dist.get_rank()]]


@wrong("ring_reduce_scatter", "the sum, rounded|less precise type")
def sums_in_32_bits(tensor, lengths):
    return ring(tensor.float(), lengths).to(tensor.dtype)


@wrong("ring_reduce_scatter", "must have the type of the given tensor")
def always_in_64_bits(tensor, lengths):
    return ring(tensor.double(), lengths)


@wrong("ring_reduce_scatter", "an all_to_all")
def sends_to_each_owner(tensor, lengths):
    """The right bytes, but no ring."""
    rank, n = me()
    pieces = [piece.clone() for piece in tensor.split(lengths)]
    works = [dist.isend(pieces[other], other) for other in range(n) if other != rank]
    total = pieces[rank].clone()
    for other in range(n):
        if other != rank:
            came = torch.empty_like(total)
            dist.recv(came, other)
            total += came
    for work in works:
        work.wait()
    return total


@wrong("ring_reduce_scatter", "whole tensors travel round the ring")
def sends_whole_tensors_round(tensor, lengths):
    rank, n = me()
    outgoing, total = tensor.clone(), tensor.clone()
    for _ in range(n - 1):
        came = torch.empty_like(tensor)
        work = dist.isend(outgoing, (rank + 1) % n)
        dist.recv(came, (rank - 1) % n)
        work.wait()
        total += came
        outgoing = came
    return total.split(lengths)[rank]


@wrong("ring_reduce_scatter", "same neighbour in every step|sends the sum back|whole")
def rank_zero_sums_and_scatters(tensor, lengths):
    rank, n = me()
    if rank == 0:
        total, came = tensor.clone(), torch.empty_like(tensor)
        for other in range(1, n):
            dist.recv(came, other)
            total += came
        pieces = total.split(lengths)
        for other in range(1, n):
            dist.send(pieces[other].clone(), other)
        return pieces[0].clone()
    dist.send(tensor, 0)
    mine = tensor.new_empty(lengths[rank])
    dist.recv(mine, 0)
    return mine


@wrong("ring_reduce_scatter", "one piece goes round after the other, while most ranks wait")
def one_piece_after_the_other(tensor, lengths):
    """The right bytes to the right neighbour."""
    rank, n = me()
    pieces = [piece.clone() for piece in tensor.split(lengths)]
    for piece in range(n if n > 1 else 0):
        if rank != (piece + 1) % n:
            came = torch.empty_like(pieces[piece])
            dist.recv(came, (rank - 1) % n)
            pieces[piece] += came
        if rank != piece:
            dist.send(pieces[piece], (rank + 1) % n)
    return pieces[rank]


@wrong("ring_reduce_scatter", "one piece in each: what are the other messages")
def in_half_pieces(tensor, lengths):
    rank, n = me()
    pieces = [piece.clone() for piece in tensor.split(lengths)]
    for step in range(n - 1):
        outgoing, incoming = (pieces[(rank - 1 - step) % n], pieces[(rank - 2 - step) % n])
        for half, into in zip(outgoing.tensor_split(2), incoming.tensor_split(2)):
            came = torch.empty_like(into)
            work = dist.isend(half, (rank + 1) % n)
            dist.recv(came, (rank - 1) % n)
            work.wait()
            into += came
    return pieces[rank]


@wrong("ring_reduce_scatter", "different sizes", status="your code raised")
def receives_as_much_as_its_own_piece(tensor, lengths):
    rank, n = me()
    pieces = [piece.clone() for piece in tensor.split(lengths)]
    for step in range(n - 1):
        came = tensor.new_empty(lengths[rank])
        work = dist.isend(pieces[(rank - 1 - step) % n], (rank + 1) % n)
        dist.recv(came, (rank - 1) % n)
        work.wait()
        pieces[(rank - 2 - step) % n] += came
    return pieces[rank]


@wrong("ring_reduce_scatter", "the sum, rounded")
def integers_in_floating_point(tensor, lengths):
    return ring(tensor.double(), lengths).to(tensor.dtype)


@wrong("ring_reduce_scatter", "where does each piece begin")
def begins_at_multiples_of_its_own_length(tensor, lengths):
    cut = lambda tensor: [tensor[place * length : (place + 1) * length].clone() for place, length in enumerate(lengths)]
    fitting = lambda piece, came: piece.add_(came[: len(piece)])
    return ring(tensor, lengths, cut=cut, add=fitting)


@wrong("ring_reduce_scatter", "nothing may be written to a tensor that isend still sends")
def receives_into_what_it_sends(tensor, lengths):
    """From the second step on, into the one buffer from which isend still sends."""
    rank, n = me()
    pieces = tensor.split(lengths)
    outgoing, buffer = pieces[(rank - 1) % n], tensor.new_empty(max(lengths))
    for step in range(n - 1):
        mine = pieces[(rank - 2 - step) % n]
        came = buffer[: len(mine)]
        work = dist.isend(outgoing, (rank + 1) % n)
        dist.recv(came, (rank - 1) % n)
        came += mine
        work.wait()
        outgoing = came
    return outgoing.clone()


@wrong("ring_reduce_scatter", "cut the tensor by `lengths`|has lengths")
def with_chunk(tensor, lengths):
    n = dist.get_world_size()
    cut = lambda tensor: [piece.clone() for piece in tensor.chunk(n)]
    return ring(tensor, lengths, cut=cut)


KEPT = {}


@wrong("ring_reduce_scatter", "does something stay from one call to the next")
def keeps_its_buffers(tensor, lengths):
    """Allocated once for each cut, and never set to 0."""
    key = tuple(lengths), tensor.dtype
    buffers = KEPT.setdefault(key, torch.zeros_like(tensor)).split(lengths)

    def cut(tensor):
        for buffer, piece in zip(buffers, tensor.split(lengths)):
            buffer += piece
        return buffers

    return ring(tensor, lengths, cut=cut).clone()


@wrong("ring_reduce_scatter", "a rank sends to the same neighbour in every step")
def both_ways_at_once(tensor, lengths):
    """Half of each piece goes up the ring, the other half down."""
    rank, n = me()
    halves = [piece.clone().tensor_split(2) for piece in tensor.split(lengths)]
    for step in range(n - 1):
        works, sums = [], []
        for half, way in (0, 1), (1, -1):
            outgoing = halves[(rank - way * (1 + step)) % n][half]
            incoming = halves[(rank - way * (2 + step)) % n][half]
            came = torch.empty_like(incoming)
            works.append(dist.isend(outgoing, (rank + way) % n, tag=half))
            works.append(dist.irecv(came, (rank - way) % n, tag=half))
            sums.append((incoming, came))
        for work in works:
            work.wait()
        for incoming, came in sums:
            incoming += came
    return torch.cat(halves[rank])


@wrong("ring_reduce_scatter", "a tensor")
def returns_numbers(tensor, lengths):
    return ring(tensor, lengths).tolist()


@right("ring_reduce_scatter")
def from_the_last_step_to_the_first(tensor, lengths):
    rank, n = me()
    pieces = dict(enumerate(map(torch.clone, torch.split(tensor, tuple(lengths)))))
    for ahead in reversed(range(1, n)):
        incoming = (rank + ahead - 1) % n
        came = torch.zeros_like(pieces[incoming])
        work = dist.irecv(came, src=(rank - 1) % n, tag=ahead)
        dist.isend(pieces[(rank + ahead) % n], (rank + 1) % n, tag=ahead).wait()
        work.wait()
        pieces[incoming] = pieces[incoming] + came
    return pieces[rank]


@right("ring_reduce_scatter")
def without_empty_messages(tensor, lengths):
    rank, n = me()
    pieces = [piece.clone() for piece in torch.split(tensor, list(lengths))]
    for step in range(n - 1):
        outgoing, incoming = (pieces[(rank - 1 - step) % n], pieces[(rank - 2 - step) % n])
        works, came = [], torch.empty_like(incoming)
        if len(outgoing):
            works.append(dist.isend(outgoing, (rank + 1) % n))
        if len(incoming):
            works.append(dist.irecv(came, (rank - 1) % n))
        for work in works:
            work.wait()
        incoming += came
    return pieces[rank]


@wrong("ring_reduce_scatter", "no rank has sent anything")
def sums_nothing(tensor, lengths):
    return tensor.split(lengths)[dist.get_rank()].clone()


@wrong("ring_reduce_scatter", "nobody receives: isend only begins to send", status="timed out")
def everybody_sends_first(tensor, lengths):
    rank, n = me()
    pieces = [piece.clone() for piece in tensor.split(lengths)]
    for step in range(n - 1):
        dist.send(pieces[(rank - 1 - step) % n], (rank + 1) % n)
        came = torch.empty_like(pieces[(rank - 2 - step) % n])
        dist.recv(came, (rank - 1) % n)
        pieces[(rank - 2 - step) % n] += came
    return pieces[rank]


@wrong("ring_reduce_scatter", "does somebody send first", status="timed out")
def everybody_receives_first(tensor, lengths):
    rank, n = me()
    pieces = [piece.clone() for piece in tensor.split(lengths)]
    for step in range(n - 1):
        came = torch.empty_like(pieces[(rank - 2 - step) % n])
        dist.recv(came, (rank - 1) % n)
        dist.send(pieces[(rank - 1 - step) % n], (rank + 1) % n)
        pieces[(rank - 2 - step) % n] += came
    return pieces[rank]


@wrong("ring_reduce_scatter", r"\(in lengths=\[\d\] of float64 on 1 rank\)", status="your code raised")
def cannot_be_alone(tensor, lengths):
    rank, n = me()
    neighbours = {(rank - 1) % n, (rank + 1) % n} - {rank}
    assert neighbours
    return ring(tensor, lengths)


@wrong("ring_reduce_scatter", "a loop does not end", status="timed out")
def never_ends(tensor, lengths):
    while True:
        time.sleep(0.1)


@wrong("ring_reduce_scatter", "", status="not attempted")
def not_begun(tensor, lengths):
    raise NotImplementedError


# ---- crossover ----


def rounds_of(n):
    return (n - 1).bit_length()


@right("crossover")
def solved(n, alpha, beta):
    rounds = rounds_of(n)
    return alpha * (n - 1 - rounds) / (beta * (rounds - (n - 1) / n))


@right("crossover")
def by_bisection(n, alpha, beta):
    """With the lesson's formulas: the size at which the tree is no longer faster."""
    low, high = 0.0, 1e12
    for _ in range(200):
        middle = (low + high) / 2
        ring = lesson02.ring_seconds(middle, n, alpha, beta)
        if ring < lesson02.tree_seconds(middle, n, alpha, beta):
            high = middle
        else:
            low = middle
    return np.float64(high)


@right("crossover")
def from_two_lines(n, alpha, beta):
    """Both are lines over the bytes; rounded up to whole bytes."""
    if n <= 3:
        return 0
    ways = lesson02.tree_seconds, lesson02.ring_seconds
    begin = [way(0, n, alpha, beta) for way in ways]
    slope = [way(1, n, alpha, beta) - at for way, at in zip(ways, begin)]
    return math.ceil((begin[1] - begin[0]) / (slope[0] - slope[1]))


@right("crossover")
def as_a_tensor(n, alpha, beta):
    rounds = torch.tensor(float(n)).log2().ceil()
    return alpha * (n - 1 - rounds) / (beta * (rounds - 1 + 1 / n))


@wrong("crossover", "TypeError|missing", status="your code raised")
def the_lessons_ring_seconds(n, alpha, beta):
    return lesson02.ring_seconds(n, alpha, beta)


@wrong("crossover", "seconds of both equal")
def seconds_of_a_megabyte(n, alpha, beta):
    return lesson02.ring_seconds(2**20, n, alpha, beta)


@wrong("crossover", "latency and bytes of one message take equally long")
def alpha_over_beta(n, alpha, beta):
    return alpha / beta


@wrong("crossover", "whole number of rounds")
def forgets_to_round(n, alpha, beta):
    rounds = math.log2(n)
    return alpha * (n - 1 - rounds) / (beta * (rounds - (n - 1) / n)) if n > 2 else 0.0


@wrong("crossover", "rounded up, not down")
def rounds_down(n, alpha, beta):
    rounds = int(math.log2(n))
    return alpha * (n - 1 - rounds) / (beta * (rounds - (n - 1) / n))


@wrong("crossover", "not one more")
def a_round_too_many(n, alpha, beta):
    rounds = n.bit_length()
    return max(0.0, alpha * (n - 1 - rounds) / (beta * (rounds - (n - 1) / n)))


@wrong("crossover", "in the ring, the bytes cost time, too")
def the_ring_is_free(n, alpha, beta):
    return alpha * (n - 1 - rounds_of(n)) / (beta * rounds_of(n))


@wrong("crossover", "numbers of 8 bytes")
def in_numbers(n, alpha, beta):
    return solved(n, alpha, beta) / 8


@wrong("crossover", "in kilobytes")
def in_kilobytes(n, alpha, beta):
    return solved(n, alpha, beta) / 1024


@wrong("crossover", "the tree has to come back as well")
def a_tree_that_goes_up_only(n, alpha, beta):
    rounds, steps = rounds_of(n), 2 * (n - 1)
    below = beta * (rounds - steps / n)
    return alpha * (steps - rounds) / below if below else 0.0


@wrong("crossover", "the ring goes round twice")
def a_ring_that_goes_round_once(n, alpha, beta):
    rounds = 2 * rounds_of(n)
    return max(0.0, alpha * (n - 1 - rounds) / (beta * (rounds - (n - 1) / n)))


@wrong("crossover", "the size of one piece")
def size_of_a_piece(n, alpha, beta):
    return solved(n, alpha, beta) / n


@wrong("crossover", "multiply it by the bytes|seconds per byte")
def beta_as_a_bandwidth(n, alpha, beta):
    rounds = rounds_of(n)
    return alpha * beta * (n - 1 - rounds) / (rounds - (n - 1) / n)


@wrong("crossover", "the sign is wrong")
def the_wrong_way_round(n, alpha, beta):
    return -solved(n, alpha, beta)


@wrong("crossover", "it is always 0, but from 4 ranks on")
def the_ring_is_always_faster(n, alpha, beta):
    return 0.0


@wrong("crossover", "is 0 divided by 0")
def not_a_number(n, alpha, beta):
    return float("nan")


@wrong("crossover", "return one number")
def returns_the_faster_one(n, alpha, beta):
    return "ring" if n > 4 else "tree"


@wrong("crossover", "without a return")
def prints_the_size(n, alpha, beta):
    print(solved(n, alpha, beta))


@wrong("crossover", "seconds of both equal")
def more_than_enough(n, alpha, beta):
    return 1.5 * solved(n, alpha, beta)


@wrong("crossover", "log₂, not the natural logarithm")
def natural_logarithm(n, alpha, beta):
    rounds = math.ceil(math.log(n))
    return alpha * (n - 1 - rounds) / (beta * (rounds - (n - 1) / n))


@right("crossover")
def as_a_fraction(n, alpha, beta):
    alpha, beta, rounds = Fraction(alpha), Fraction(beta), rounds_of(n)
    return alpha * (n - 1 - rounds) / (beta * (rounds - Fraction(n - 1, n)))


@right("crossover")
def as_a_decimal(n, alpha, beta):
    return Decimal(solved(n, alpha, beta))


@right("crossover")
def as_an_array(n, alpha, beta):
    return np.array(solved(n, alpha, beta))


@wrong("crossover", "in megabytes")
def in_megabytes(n, alpha, beta):
    return solved(n, alpha, beta) / 2**20


@wrong("crossover", "α and β are swapped")
def swaps_alpha_and_beta(n, alpha, beta):
    return solved(n, beta, alpha)


@wrong("crossover", "has b / n bytes, not b")
def whole_tensors_in_the_ring(n, alpha, beta):
    more = n - 1 - rounds_of(n)
    return -alpha * more / (beta * more) if more else 0.0


@wrong("crossover", "the same for different α and β")
def remembers_the_first_link(n, alpha, beta):
    return SIZES.setdefault(n, solved(n, alpha, beta))


SIZES = {}


@wrong("crossover", "tree and ring have the same number of messages in a row")
def no_size_for_few_ranks(n, alpha, beta):
    return solved(n, alpha, beta) or math.inf


@wrong("crossover", "the lesson's formulas, which also held")
def for_up_to_eight_ranks(n, alpha, beta):
    rounds = [0, 0, 1, 2, 2, 3, 3, 3, 3][min(n, 8)]
    return alpha * (n - 1 - rounds) / (beta * (rounds - (n - 1) / n))


@wrong("crossover", "seconds of both equal")
def the_root_of_the_ranks(n, alpha, beta):
    """Rounded up, it is the number of rounds for 4, 5, 6, 7 and 20 ranks, and for none after 36."""
    rounds = math.ceil(math.sqrt(n))
    return max(0.0, alpha * (n - 1 - rounds) / (beta * (rounds - (n - 1) / n)))


@wrong("crossover", "return one number, the bytes")
def sometimes_a_text(n, alpha, beta):
    return solved(n, alpha, beta) if n > 3 else "always"


@right("crossover")
def as_two_equations(n, alpha, beta):
    """Seconds and bytes as two unknowns of two lines."""
    tree, ring = 2 * rounds_of(n), 2 * (n - 1)
    rows = np.array([[1, -tree * beta], [1, -ring * beta / n]])
    return np.linalg.solve(rows, np.array([tree * alpha, ring * alpha]))[1]


@wrong("crossover", "the same for different α and β")
def known_by_heart(n, alpha, beta):
    return 40_000


@wrong("crossover", "ZeroDivisionError", status="your code raised")
def cannot_be_two(n, alpha, beta):
    rounds = rounds_of(n)
    return alpha * (n - 1 - rounds) / (beta * (rounds - (n - 1) / n) * (n > 3))


@wrong("crossover", "", status="not attempted")
def solves_nothing(n, alpha, beta):
    raise NotImplementedError


# ---- count_classes ----


class Counts:
    """What the answers below share: all right."""

    def __call__(self, labels, least):
        self.rank, self.n, self.least = dist.get_rank(), dist.get_world_size(), least
        return self.first(labels), self.classes(labels)

    def first(self, labels):
        lengths = self.room()
        dist.all_gather(lengths, torch.tensor([len(labels)]))
        return self.before([length.item() for length in lengths])

    def room(self):
        return [torch.empty(1, dtype=torch.int64) for _ in range(self.n)]

    def before(self, lengths):
        return sum(lengths[: self.rank])

    def classes(self, labels):
        counts = self.own(labels)
        named = [None] * self.n
        dist.all_gather_object(named, self.names(counts))
        order = self.order(counts, named)
        totals = torch.tensor([counts.get(label, 0) for label in order])
        self.add_up(totals)
        return self.frequent(dict(zip(order, totals.tolist())))

    def own(self, labels):
        return Counter(labels)

    def names(self, counts):
        return list(counts)

    def order(self, counts, named):
        return sorted(set().union(*named))

    def add_up(self, totals):
        dist.all_reduce(totals)

    def frequent(self, totals):
        return {label: total for label, total in totals.items() if total >= self.least}


def counts(kind):
    """As a function, which is what the question asks for."""

    def count_classes(labels, least):
        return kind()(labels, least)

    count_classes.__name__, count_classes.__module__ = kind.__name__, kind.__module__
    return count_classes


def right_counts(kind):
    right("count_classes")(counts(kind))
    return kind


def wrong_counts(*given, **options):
    def register(kind):
        wrong("count_classes", *given, **options)(counts(kind))
        return kind

    return register


ONE_TENSOR, TOO_EARLY, OWN_ORDER = "the same tensor n times", "has dropped the classes", "the same order"


@wrong("count_classes", ONE_TENSOR)
def classes_as_given(labels, least):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    lengths = [torch.zeros(1, dtype=torch.int64)] * world_size
    dist.all_gather(lengths, torch.tensor([len(labels)]))
    first = sum(length.item() for length in lengths[:rank])

    counts = Counter(labels)
    rare = [label for label, count in counts.items() if count < least]
    for label in rare:
        del counts[label]
    of_ranks = [None] * world_size
    dist.all_gather_object(of_ranks, list(counts))
    for label in itertools.chain(*of_ranks):
        counts.setdefault(label, 0)
    totals = torch.tensor(list(counts.values()))
    dist.all_reduce(totals)
    classes = dict(zip(counts, totals.tolist()))
    return first, classes


class OneTensor(Counts):
    def room(self):
        return [torch.empty(1, dtype=torch.int64)] * self.n


class TooEarly(Counts):
    def own(self, labels):
        return {label: count for label, count in Counter(labels).items() if count >= self.least}

    def frequent(self, totals):
        return totals


class OwnOrder(Counts):
    def order(self, counts, named):
        return list(dict.fromkeys(itertools.chain(counts, *named)))


@wrong_counts(ONE_TENSOR)
class CountsInOneTensor(OneTensor):
    pass


@wrong_counts(TOO_EARLY)
class CountsDroppedTooEarly(TooEarly):
    pass


@wrong_counts(OWN_ORDER)
class CountsInTheirOwnOrder(OwnOrder):
    pass


@wrong_counts(ONE_TENSOR)
class CountsOrderRepaired(OneTensor, TooEarly):
    pass


@wrong_counts(ONE_TENSOR)
class CountsDroppingRepaired(OneTensor, OwnOrder):
    pass


@wrong_counts(OWN_ORDER)
class CountsLengthsRepaired(OwnOrder, TooEarly):
    pass


@wrong_counts(TOO_EARLY)
class CountsDroppedTwice(TooEarly):
    def frequent(self, totals):
        return Counts.frequent(self, totals)


@wrong_counts(OWN_ORDER)
class CountsDroppedTwiceInTheirOwnOrder(OwnOrder, TooEarly):
    def frequent(self, totals):
        return Counts.frequent(self, totals)


@wrong_counts(OWN_ORDER)
class CountsOwnSortedFirst(Counts):
    def order(self, counts, named):
        return list(dict.fromkeys(itertools.chain(sorted(counts), *named)))


@wrong_counts(OWN_ORDER)
class CountsInASet(Counts):
    def order(self, counts, named):
        known = set(counts)
        for names in named:
            known.update(names)
        return list(known)


@wrong_counts("no single rank has `least` samples")
class CountsNamesOfFrequentOnes(Counts):
    def names(self, counts):
        return [label for label, count in counts.items() if count >= self.least]


@wrong_counts("on ranks with .*, .*, .* samples(?s:.*)is missing, which only rank 2 has")
class CountsNamesOfTwoRanks(Counts):
    def order(self, counts, named):
        return sorted(set(named[0] + named[1]))


@wrong_counts("is missing, which only rank . has")
class CountsNamesOfThisAndRankZero(Counts):
    """Ranks that name different classes must not add them, so each goes through all of them."""

    def order(self, counts, named):
        self.named = set(named[0] + named[self.rank])
        return super().order(counts, named)

    def frequent(self, totals):
        return {label: total for label, total in super().frequent(totals).items() if label in self.named}


@wrong_counts(OWN_ORDER)
class CountsOfASet(Counts):
    """The order of a set is not the same on all ranks, even if it has the same classes."""

    def order(self, counts, named):
        for label in itertools.chain(*named):
            counts.setdefault(label, 0)
        return list(set(counts))


@wrong_counts("drop them, once the counts")
class CountsAll(Counts):
    def frequent(self, totals):
        return totals


@wrong_counts("exactly `least`")
class CountsMoreThanLeast(Counts):
    def frequent(self, totals):
        return {label: total for label, total in totals.items() if total > self.least}


@wrong_counts("less than its share of `least`")
class CountsItsShareOfLeast(Counts):
    """A rank drops what it has less of than its share."""

    def own(self, labels):
        return {label: count for label, count in Counter(labels).items() if count * self.n >= self.least}


@wrong_counts("after the last")
class CountsItselfBeforeItself(Counts):
    def before(self, lengths):
        return sum(lengths[: self.rank + 1])


@wrong_counts("were all parts taken to be of equal length")
class CountsEqualParts(Counts):
    def first(self, labels):
        return self.rank * len(labels)


@wrong_counts("only rank 0's samples")
class CountsFromZero(Counts):
    def before(self, lengths):
        return 0


@wrong_counts("all ranks need the result|other classes|did each rank")
class CountsAtRankZero(Counts):
    def add_up(self, totals):
        dist.reduce(totals, dst=0)


@wrong_counts("all ranks need the result")
class CountsForRankZero(Counts):
    def frequent(self, totals):
        return super().frequent(totals) if self.rank == 0 else {}


@wrong_counts("this rank's own samples: the counts of all")
class CountsOwnSamplesOnly(Counts):
    def add_up(self, totals):
        pass


@wrong_counts("did each rank")
class CountsTwice(Counts):
    def add_up(self, totals):
        totals *= 2
        dist.all_reduce(totals)

    def frequent(self, totals):
        return {label: total for label, total in totals.items() if total >= 2 * self.least}


@wrong_counts("too many to send")
class CountsAllLabels(Counts):
    def classes(self, labels):
        of_ranks = [None] * self.n
        dist.all_gather_object(of_ranks, labels)
        return self.frequent(Counter(itertools.chain(*of_ranks)))


@wrong_counts("too many to send")
class CountsAllLabelsAtRankZero(Counts):
    def classes(self, labels):
        of_ranks = [None] * self.n if self.rank == 0 else None
        dist.gather_object(labels, of_ranks, dst=0)
        found = [self.frequent(Counter(itertools.chain(*(of_ranks or []))))]
        dist.broadcast_object_list(found, src=0)
        return found[0]


@wrong_counts("too many to send")
class CountsAllLabelsInHalfTheBits(Counts):
    def classes(self, labels):
        longest = torch.tensor(len(labels))
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        padded = torch.full((longest.item(),), -1, dtype=torch.int32)
        padded[: len(labels)] = torch.tensor(labels)
        of_ranks = [torch.empty_like(padded) for _ in range(self.n)]
        dist.all_gather(of_ranks, padded)
        every = Counter(torch.cat(of_ranks).tolist())
        del every[-1]
        return self.frequent(every)


@wrong_counts("a place for each label that there might be")
class CountsAPlaceForEachLabel(Counts):
    def classes(self, labels):
        longest = torch.tensor(max(labels) + 1)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        totals = torch.bincount(torch.tensor(labels), minlength=longest.item())
        dist.all_reduce(totals)
        found = totals.nonzero().flatten().tolist()
        return self.frequent(dict(zip(found, totals[found].tolist())))


@wrong("count_classes", "return two things")
def returns_the_classes_only(labels, least):
    return Counts()(labels, least)[1]


@wrong("count_classes", "return two things")
def classes_as_a_list(labels, least):
    first, classes = Counts()(labels, least)
    return first, sorted(classes)


@wrong("count_classes", "return two things")
def prints_the_classes(labels, least):
    print(Counts()(labels, least))


@wrong("count_classes", "", status="timed out|your code raised")
def only_rank_zero_counts(labels, least):
    return Counts()(labels, least) if dist.get_rank() == 0 else (0, {})


@wrong("count_classes", "", status="not attempted")
def counts_nothing(labels, least):
    raise NotImplementedError


@right_counts
class CountsRepaired(Counts):
    pass


@right("count_classes")
def classes_repaired_in_place(labels, least):
    """As little as possible is changed in the given program."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(lengths, torch.tensor([len(labels)]))
    first = sum(length.item() for length in lengths[:rank])
    counts = Counter(labels)
    of_ranks = [None] * world_size
    dist.all_gather_object(of_ranks, list(counts))
    for label in itertools.chain(*of_ranks):
        counts.setdefault(label, 0)
    counts = dict(sorted(counts.items()))
    totals = torch.tensor(list(counts.values()))
    dist.all_reduce(totals)
    classes = dict(zip(counts, totals.tolist()))
    for label in [label for label, count in classes.items() if count < least]:
        del classes[label]
    return first, classes


@right_counts
class CountsAsObjects(Counts):
    """Counters are added up; a Counter is a dict."""

    def first(self, labels):
        lengths = [None] * self.n
        dist.all_gather_object(lengths, len(labels))
        return self.before(lengths)

    def classes(self, labels):
        of_ranks = [None] * self.n
        dist.all_gather_object(of_ranks, Counter(labels))
        total = sum(of_ranks, Counter())
        return Counter({label: total[label] for label in total if total[label] >= self.least})


@right_counts
class CountsInTheOrderOfRanks(Counts):
    """All ranks go through what the ranks have sent in the same order."""

    def first(self, labels):
        lengths = torch.zeros(self.n, dtype=torch.int64)
        lengths[self.rank] = len(labels)
        dist.all_reduce(lengths)
        return lengths[: self.rank].sum()

    def order(self, counts, named):
        return list(dict.fromkeys(itertools.chain(*named)))


@right_counts
class CountsOneByOne(Counts):
    """One all-reduce for each class."""

    def first(self, labels):
        lengths = torch.empty(self.n, dtype=torch.int64)
        dist.all_gather_into_tensor(lengths, torch.tensor([len(labels)]))
        return lengths.cumsum(0)[self.rank].item() - len(labels)

    def add_up(self, totals):
        for total in totals:
            dist.all_reduce(total)


@right_counts
class CountsWithUnique(Counts):
    """Rank 0 names the classes in an order of its own; totals stay tensors."""

    def classes(self, labels):
        names, numbers = torch.tensor(labels).unique(return_counts=True)
        counts = dict(zip(names.tolist(), numbers))
        named = [None] * self.n if self.rank == 0 else None
        dist.gather_object(list(counts), named)
        order = [sorted(set().union(*named), reverse=True) if self.rank == 0 else None]
        dist.broadcast_object_list(order)
        totals = torch.stack([counts.get(label, torch.tensor(0)) for label in order[0]])
        dist.all_reduce(totals)
        return {label: total for label, total in zip(order[0], totals) if total >= self.least}


@right_counts
class CountsAsTensorsInObjects(Counts):
    """Each rank sends its classes and counts as one pickled tensor."""

    def classes(self, labels):
        of_ranks = [None] * self.n
        dist.all_gather_object(of_ranks, torch.stack(torch.unique(torch.tensor(labels), return_counts=True)))
        totals = Counter()
        for names, numbers in of_ranks:
            totals.update(dict(zip(names.tolist(), numbers.tolist())))
        return self.frequent(totals)


@wrong_counts("takes hundreds of bytes for each")
class CountsAsADictOfTensors(Counts):
    """Each rank sends a dict of tensors without dimensions, one for each class."""

    def classes(self, labels):
        names, numbers = torch.tensor(labels).unique(return_counts=True)
        of_ranks, totals = [None] * self.n, Counter()
        dist.all_gather_object(of_ranks, dict(zip(names.tolist(), numbers)))
        for counts in of_ranks:
            totals.update(counts)
        return self.frequent(totals)


@right_counts
class CountsWithAPassedOnLength(Counts):
    """Each rank tells the next one where it ends; the pair is a list."""

    def __call__(self, labels, least):
        return list(super().__call__(labels, least))

    def first(self, labels):
        place = torch.zeros(1, dtype=torch.int64)
        if self.rank:
            dist.recv(place, self.rank - 1)
        if self.rank + 1 < self.n:
            dist.send(place + len(labels), self.rank + 1)
        return place.item()
