"""What question 3 claims of the messages that the ranks send."""

from ddp_course.checks.claims import Claim, OneOf
from ddp_course.checks.ex02.messages import first_of, schedule
from ddp_course.checks.ex02.ring_piece import described


def to_a_neighbour(case, sent):
    """That all ranks send to the next one, or all to the previous one."""
    n, to = len(sent), [sorted({entry["peer"] for entry in of_rank}) for of_rank in sent]
    checked = f"the ranks that each rank sends to: ring_reduce_scatter, {described(case, n)}"
    told = "each rank sends to one neighbour only: all to rank + 1, or all to rank - 1"
    yield Claim(
        checked, any(to) or n == 1 or not any(case[0]), True, "the sum is right, but it was not sent with dist.send",
        told=told, shown="nobody sends",
    )  # fmt: skip
    several = max(map(len, to)) > 1
    yield Claim(
        checked, to, OneOf([[OneOf([[], [(rank + way) % n]]) for rank in range(n)] for way in (1, -1)]), first_of([
            (several and all(len(some) == len(own) == n - 1 for some, own in zip(to, sent)), "each rank sends to all "
             "others, straight to where the numbers are needed (an all_to_all): in a ring, it sends sums to one neighbour, "
             "which adds its own numbers and sends them on"),
            (several and all(some == [0] for some in to[1:]), "all ranks send to rank 0, which sends the sum back: rank 0 "
             "has n times the load, while the others wait"),
            (several, "in a ring, a rank sends to the same neighbour in every step"),
            (True, "each rank sends to one rank only, but not all of them to the same neighbour: (rank + 1) % n"),
        ]),
        told=told, shown="; ".join(f"{rank}→{', '.join(map(str, some))}" for rank, some in enumerate(to) if some),
    )  # fmt: skip


def each_piece_once(case, rank, sent):
    """That a rank sends every piece but its own, one per message, and nothing else."""
    (lengths, dtype, _), n, sizes = case, len(sent), [entry["bytes"] for entry in sent[rank]]
    checked = f"the bytes that each rank sends: ring_reduce_scatter, {described(case, n)}"
    whole, longest, own = (numbers * dtype.itemsize for numbers in (sum(lengths), max(lengths), lengths[rank]))
    told = f"at most {whole - own}, in {n - 1} message{'s' * (n != 2)}: every piece except its own, once"
    shown = f"{sum(sizes)}, in {len(sizes)} message{'s' * (len(sizes) != 1)}"
    yield Claim(
        checked, sum(sizes), range(whole - own + 1), first_of([
            (n > 2 and sum(size >= whole for size in sizes) > 1, "whole tensors travel round the ring: send one piece "
             "per step"),
            (len(sizes) == 2 * (n - 1), "these are the steps of an all-reduce. Its second half, in which the finished "
             "pieces travel round, is not needed: after n - 1 steps, each rank can have its own finished piece"),
            (len(sizes) == n, "there is one step too many: let piece p start at rank p + 1, so that it is at rank p, and "
             "finished, after n - 1 steps"),
            (len(sizes) > n - 1, f"{len(sizes)} messages, but n - 1 = {n - 1} are enough: one piece per step"),
            (all(size == longest for size in sizes), "every piece is sent as if it were as long as the longest: send each "
             "in its own length"),
            (True, "a rank sends every piece once, except its own: what else do you send?"),
        ]),
        told=told, shown=shown,
    )  # fmt: skip
    yield Claim(
        checked, len(sizes), range(n), "n - 1 steps are enough, and a rank sends one piece in each: what are the other "
        "messages?", told=told, shown=shown,
    )  # fmt: skip


def at_the_same_time(case, of_ranks):
    """That the ranks do not wait while one piece travels."""
    n, messages = len(of_ranks), schedule([seen["log"] for seen in of_ranks])
    yield Claim(
        f"the number of rounds: ring_reduce_scatter, {described(case, n)}",
        max((message.round for message in messages), default=0), range(2 * n - 1),
        "one piece goes round after the other, while most ranks wait: in each step, every rank sends one piece and receives "
        "another", told=f"n - 1 = {n - 1}, or at most {2 * (n - 1)} if ranks take turns in sending and receiving",
    )  # fmt: skip
