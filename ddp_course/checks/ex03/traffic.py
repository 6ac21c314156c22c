"""Question 4: predict what travels."""

import math

import torch
from torch import nn

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.lesson02 import ring_all_reduce
from ddp_course.lesson03 import BucketedDDP
from ddp_course.ranks.environment import process_group


class Parameters(nn.Module):
    """Parameters of these sizes, each used once, the last ones last."""

    def __init__(self, sizes):
        super().__init__()
        self.values = nn.ParameterList(torch.ones(size) for size in sizes)

    def forward(self):
        return sum(value.sum() for value in self.values)


def predictions(traffic, cases):
    """For each case, what the answer returns."""
    with process_group() as (rank, n):
        seen = []
        for sizes, bucket_size in cases:
            with trying(f"traffic({sizes}, {bucket_size}, {n})"):
                seen.append(as_numbers(traffic(list(sizes), bucket_size, n)))
        return seen


def measurements(cases):
    """For each case, what this rank has counted."""
    with process_group():
        return [measured(*case) for case in cases]


def as_numbers(returned):
    try:
        return [float(number) for number in returned]
    except (TypeError, ValueError):
        return f"{returned!r}"


def measured(sizes, bucket_size):
    """(buckets, messages, bytes) of one step of the lesson's BucketedDDP, whose buckets
    then go through the ring of lesson 2.
    """
    model = BucketedDDP(Parameters(sizes), bucket_size / 2**20)
    with CheckedWatch() as watch:
        model().backward()
        model.finish_gradient_synchronization()
    buckets = [entry["bytes"] for entry in watch.log if entry["name"] == "allreduce"]
    with CheckedWatch() as watch:
        for size in buckets:
            ring_all_reduce(torch.ones(size // 4))
    sent = [entry["bytes"] for entry in watch.log if entry["name"] == "send"]
    return len(buckets), len(sent), sum(sent)


def buckets_of(sizes, is_full):
    """How many buckets these sizes fill, in this order. is_full(used, size): whether a
    bucket that holds `used` begins a new one before the next `size`.
    """
    buckets, used = 1, 0
    for size in sizes:
        if used and is_full(used, size):
            buckets, used = buckets + 1, 0
        used += size
    return buckets


def has_reached(bucket_size):
    """The rule of the lesson's class."""
    return lambda used, size: used >= bucket_size


def right_number(sizes, bucket_size):
    return buckets_of([4 * size for size in reversed(sizes)], has_reached(bucket_size))


def wrong_numbers(sizes, bucket_size):
    """{rule: number of buckets}, by rules that come to mind and are wrong."""
    last_first = [4 * size for size in reversed(sizes)]
    return {
        "first first": buckets_of(last_first[::-1], has_reached(bucket_size)),
        "never over": buckets_of(last_first, lambda used, size: used + size > bucket_size),
        "numbers": buckets_of(sizes[::-1], has_reached(bucket_size)),
        "divided": -(-sum(last_first) // bucket_size),
        "each alone": len(sizes),
        "must exceed": buckets_of(last_first, lambda used, size: used > bucket_size),
        "one is empty": buckets_of([*last_first, 4], has_reached(bucket_size)),
    }  # fmt: skip


WRONG_RULES = {
    "first first": "the class begins with the last parameters: the order matters",
    "never over": "in the lesson's class a bucket is full once it has reached its size: the parameter that exceeds it "
    "still goes in",
    "numbers": "bucket_size is in bytes, and a float32 has 4 of them",
    "divided": "a parameter is never divided between two buckets, so few are exactly full",
    "each alone": "a bucket holds several parameters",
    "must exceed": "a bucket that has exactly its size is full, too",
    "one is empty": "the last bucket is full, but no parameter is left to begin another one",
}
IN_GENERAL, IF_EXACTLY_FULL = list(WRONG_RULES)[:5], list(WRONG_RULES)[5:]


def draw_case(draw, tempting, exactly=False):
    """Sizes, and a bucket size with which each of the `tempting` rules has a result of
    its own. exactly: some buckets are filled to the last byte.
    """
    while True:
        sizes = [12 * draw.randint(1, 40) for _ in range(draw.randint(10, 16))]
        bucket_size = draw.randint(200, 3000)
        if exactly:
            bucket_size = 4 * sum(sizes[-draw.randint(2, 4) :])
        wrong = wrong_numbers(sizes, bucket_size)
        results = [right_number(sizes, bucket_size), *wrong.values()]
        if all(results.count(wrong[rule]) == 1 for rule in tempting):
            return sizes, bucket_size


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
        cases = [draw_case(draw, IN_GENERAL), draw_case(draw, IF_EXACTLY_FULL, exactly=True)]
        predicted = answer.on_ranks(predictions, cases, nproc=n)
        counted = answer.without(measurements, cases, nproc=n)
        for rank, of_rank in enumerate(zip(predicted, counted)):
            for case, *both in zip(cases, *of_rank):
                judge_prediction(*case, n, rank, *both)


def judge_prediction(sizes, bucket_size, n, rank, predicted, counted):
    where = f"{rank} of {n}"
    checked = f"traffic({sizes}, {bucket_size}, {n})"
    if not isinstance(predicted, list) or len(predicted) != 3:
        raise Wrong(checked, rank=where, expected="three numbers: buckets, messages, bytes", got=predicted,
                    cause="return three numbers")  # fmt: skip
    for what, got, expected in zip(("buckets", "messages", "bytes"), predicted, counted):
        if not math.isclose(got, expected):  # 2 * (n - 1) / n is not exact
            raise Wrong(f"{checked}: {what}, predicted and counted", rank=where, expected=f"{expected}, as counted",
                        got=f"{got:.12g}", cause=CAUSES[what](sizes, bucket_size, n, predicted, counted))  # fmt: skip


def cause_of_buckets(sizes, bucket_size, n, predicted, counted):
    otherwise = "when does the lesson's class begin a new bucket? Its first parameter is the last of the network"
    wrong = wrong_numbers(sizes, bucket_size)
    rules = [rule for rule in WRONG_RULES if wrong[rule] == predicted[0]]
    return WRONG_RULES[rules[0]] if rules else otherwise


def cause_of_messages(sizes, bucket_size, n, predicted, counted):
    buckets = counted[0]
    looks = [
        (buckets, "an all-reduce is not one message: in a ring, a rank sends in each of its steps"),
        (buckets * (n - 1), "the ring goes round twice: once to sum the pieces, and once to hand out the results"),
        (buckets * 2 * n, "a piece has to go on n - 1 times, not n times, in each round"),
        (buckets * 2 * (n - 1) * n, "these are the messages of all ranks: count those of one"),
    ]  # fmt: skip
    otherwise = "how many steps does the ring of lesson 2 take for one bucket, and how many buckets are there?"
    return next((text for value, text in looks if predicted[1] == value), otherwise)


def cause_of_bytes(sizes, bucket_size, n, predicted, counted):
    whole = 4 * sum(sizes)
    looks = [
        (counted[2] / 4, "these are numbers, not bytes: a float32 has 4 bytes"),
        (whole, "the gradients have that many bytes, but a ring sends 2 (n - 1) / n of them"),
        (2 * whole, "a ring sends 2 (n - 1) / n of the bytes, a little less than twice as many"),
        (whole * (n - 1) / n, "the ring goes round twice: once to sum the pieces, and once to hand out the results"),
        (counted[2] * n, "n times too many: each message is one piece, an n-th of the bucket, and only one rank's "
         "messages count"),
    ]  # fmt: skip
    otherwise = "in the ring, a rank sends one n-th of the bucket in each step: how many bytes is that in all steps?"
    return next((text for value, text in looks if predicted[2] == value), otherwise)


CAUSES = {"buckets": cause_of_buckets, "messages": cause_of_messages, "bytes": cause_of_bytes}
