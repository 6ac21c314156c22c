"""Question 4: predict what travels."""

from functools import partial

import torch
from torch import nn

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import Claim, on_every_rank
from ddp_course.checks.predictions import numbers
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.lesson02 import ring_all_reduce
from ddp_course.lesson03 import BucketedDDP
from ddp_course.ranks.environment import process_group

# ---- what the ranks predict and count ----


def predicted(traffic, cases):
    """For each case, the three numbers that the answer returns."""
    with process_group() as (_, n):
        seen = []
        for sizes, bucket_size in cases:
            with trying(f"traffic({sizes}, {bucket_size}, {n})"):
                seen.append(numbers(traffic(list(sizes), bucket_size, n), 3))
        return seen


class Parameters(nn.Module):
    """Parameters of these sizes, each used once, the last ones last."""

    def __init__(self, sizes):
        super().__init__()
        self.values = nn.ParameterList(torch.ones(size) for size in sizes)

    def forward(self):
        return sum(value.sum() for value in self.values)


def counted(cases):
    """For each case, the buckets, messages and bytes of one step of the lesson's
    BucketedDDP, whose buckets then go through the ring of lesson 2.
    """
    seen = []
    with process_group():
        for sizes, bucket_size in cases:
            model = BucketedDDP(Parameters(sizes), bucket_size / 2**20)
            with CheckedWatch() as watch:
                model().backward()
                model.finish_gradient_synchronization()
            buckets = [entry["bytes"] for entry in watch.log if entry["name"] == "allreduce"]
            with CheckedWatch() as watch:
                for size in buckets:
                    ring_all_reduce(torch.ones(size // 4))
            sent = [entry["bytes"] for entry in watch.log if entry["name"] == "send"]
            seen.append([len(buckets), len(sent), sum(sent)])
    return seen


# ---- what is claimed ----


def buckets_of(sizes, most, is_full=lambda used, size, most: used >= most):
    """How many buckets of `most` bytes these sizes fill, in this order. is_full: whether a
    bucket that holds `used` begins a new one before the next `size`.
    """
    buckets, used = 1, 0
    for size in sizes:
        if used and is_full(used, size, most):
            buckets, used = buckets + 1, 0
        used += size
    return buckets


# wrong rules that come to mind: what each gives for the bytes of the parameters, last first, and its cause
IN_GENERAL = [
    (lambda sizes, most: buckets_of(sizes[::-1], most), "the class begins with the last parameters: the order matters"),
    (lambda sizes, most: buckets_of(sizes, most, lambda used, size, most: used + size > most), "in the lesson's class a "
     "bucket is full once it has reached its size: the parameter that exceeds it still goes in"),
    (lambda sizes, most: buckets_of(sizes, 4 * most), "bucket_size is in bytes, and a float32 has 4 of them"),
    (lambda sizes, most: -(-sum(sizes) // most), "a parameter is never divided between two buckets, so few are "
     "exactly full"),
    (lambda sizes, most: len(sizes), "a bucket holds several parameters"),
    (lambda sizes, most: buckets_of(sizes, most - 1), "a bucket is not full while a single byte of it is free: another "
     "parameter still goes in"),
]  # fmt: skip
IF_EXACTLY_FULL = [
    (lambda sizes, most: buckets_of(sizes, most, lambda used, size, most: used > most), "a bucket that has exactly its size "
     "is full, too"),
    (lambda sizes, most: buckets_of([*sizes, 4], most), "the last bucket is full, but no parameter is left to begin another "
     "one"),
]  # fmt: skip


def claims(case, rank, of_ranks):
    """That a rank has predicted what it has counted."""
    (sizes, bucket_size), n, (got, true) = case, len(of_ranks), of_ranks[rank]
    call, three = f"traffic({sizes}, {bucket_size}, {n})", "three numbers: buckets, messages, bytes"
    yield Claim(call, isinstance(got, list), True, "return three numbers", told=three, shown=got)
    whole, steps = 4 * sum(sizes), 2 * (n - 1)
    twice = "the ring goes round twice: once to sum the pieces, and once to hand out the results"
    about = {
        "buckets": (
            "when does the lesson's class begin a new bucket? Its first parameter is the last of the network",
            [(rule(in_bytes(sizes), bucket_size), cause) for rule, cause in IN_GENERAL + IF_EXACTLY_FULL],
        ),
        "messages": ("how many steps does the ring of lesson 2 take for one bucket, and how many buckets are there?", [
            (true[0], "an all-reduce is not one message: in a ring, a rank sends in each of its steps"),
            (true[0] * (n - 1), twice),
            (true[0] * 2 * n, "a piece has to go on n - 1 times, not n times, in each round"),
            (true[0] * steps * n, "these are the messages of all ranks: count those of one"),
        ]),
        "bytes": ("in the ring, a rank sends one n-th of the bucket in each step: how many bytes is that in all steps?", [
            (true[2] / 4, "these are numbers, not bytes: a float32 has 4 bytes"),
            (whole, "the gradients have that many bytes, but a ring sends 2 (n - 1) / n of them"),
            (2 * whole, "a ring sends 2 (n - 1) / n of the bytes, a little less than twice as many"),
            (whole * (n - 1) / n, twice),
            (true[2] * n, "n times too many: each message is one piece, an n-th of the bucket, and only one rank's messages "
             "count"),
        ]),
    }  # fmt: skip
    for (what, (otherwise, mistakes)), own, right in zip(about.items(), got, true):
        yield Claim(
            f"{call}: {what}, predicted and counted", own, float(right), otherwise,
            [(float(value), cause) for value, cause in mistakes], told=f"{right}, as counted", shown=f"{own:.12g}",
        )  # fmt: skip


def in_bytes(sizes):
    """The bytes of the parameters, last first."""
    return [4 * size for size in reversed(sizes)]


@question(
    "Do it with pencil and paper first: three parameters, two ranks, a bucket of a few bytes. When does the lesson's "
    "class begin a new bucket, and at which end of the parameters does it begin?",
    "A bucket gets parameters until it has reached its size, so it may become larger; a number has 4 bytes. In the ring "
    "of lesson 2, a rank sends one piece, an n-th of the bucket, in each of 2 (n - 1) steps.",
    "Go through reversed(sizes) with the room that is left in the bucket; begin a new one if room <= 0. Then messages = "
    "buckets * 2 * (world_size - 1), and bytes = 4 * sum(sizes) * 2 * (world_size - 1) // world_size.",
)
def check_traffic(answer, draw):
    """The prediction must be what is counted on real ranks."""
    for n in (3, 4):  # with two ranks, several mistakes have the same result
        cases = [draw_case(draw, IN_GENERAL, free=1), draw_case(draw, IF_EXACTLY_FULL, free=0)]
        of_ranks = answer.on_ranks(predicted, cases, nproc=n), answer.without(counted, cases, nproc=n)
        for place, case in enumerate(cases):
            on_every_rank(partial(claims, case), [(got[place], true[place]) for got, true in zip(*of_ranks)])


def draw_case(draw, tempting, free):
    """Sizes, and a bucket size with which each of the `tempting` rules has a result of
    its own. free: the bytes that are left in a bucket of the last two to four parameters.
    """
    while True:
        sizes = [12 * draw.randint(1, 40) for _ in range(draw.randint(10, 16))]
        bucket_size = 4 * sum(sizes[-draw.randint(2, 4) :]) + free
        given = in_bytes(sizes), bucket_size
        results = [buckets_of(*given), *(rule(*given) for rule, _ in IN_GENERAL + IF_EXACTLY_FULL)]
        if all(results.count(rule(*given)) == 1 for rule, _ in tempting):
            return sizes, bucket_size
