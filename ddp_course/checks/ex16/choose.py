"""Question 4: the bucket size and the accumulation for a given network."""

import os
import time
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.checks.claims import Between, Claim, hold
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.lesson16 import StepProfile, exposed_seconds, take_turns
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.variables import NETWORK

TOLERANCE = 0.02  # of an update's time
ONE_BUCKET = 10**12
MOST_MEASURED = 8  # micro-batches of an update in the laboratory
# what is measured there, per micro-batch
COMPUTING, ONE, BUCKETS, YOURS = (
    "no communication",
    "one bucket, 1 micro-batch",
    "your buckets, 1 micro-batch",
    "your choice",
)

# ---- the laboratory: a model that sleeps, so that its times are known ----


class Sleep(torch.autograd.Function):
    """Adds a parameter to x; backward takes so many seconds, and needs no core."""

    @staticmethod
    def forward(ctx, x, weight, seconds):
        ctx.seconds, ctx.shape = seconds, weight.shape
        return x + weight.sum()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, gradient.expand(ctx.shape), None


class Sleepy(nn.Module):
    """Layers whose backward takes known times. gradients: as choose() is given them."""

    def __init__(self, gradients):
        super().__init__()
        ends = [0.0] + [ready for ready, _ in gradients]
        self.seconds = [end - begin for begin, end in zip(ends, ends[1:])][::-1]
        sizes = [size // 4 for _, size in reversed(gradients)]
        self.weights = nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self, x):
        for weight, seconds in zip(self.weights, self.seconds):
            x = Sleep.apply(x, weight, seconds)
        return x


def measure(case, cap, count):
    """The seconds per micro-batch of updates, of each round, by the names above. cap,
    count: what choose has chosen.
    """
    os.environ[NETWORK] = f"{case['alpha']} {1 / case['beta']}"
    with process_group(timeout=20):
        yours, one_bucket = (
            DistributedDataParallel(Sleepy(case["gradients"]), bucket_cap_mb=size / 2**20)
            for size in (min(max(cap, 1), ONE_BUCKET), ONE_BUCKET)
        )
        for model in (yours, one_bucket) * 2:  # DDP arranges its buckets in two steps
            an_update(model, 1, case["forward"])
        updates = {
            COMPUTING: lambda: an_update(yours, 1, case["forward"], sends=False),
            ONE: lambda: an_update(one_bucket, 1, case["forward"]),
            BUCKETS: lambda: an_update(yours, 1, case["forward"]),
            YOURS: lambda: an_update(yours, count, case["forward"]),
        }
        times = take_turns(updates, rounds=3, warm_up=0)
        times[YOURS] = [seconds / count for seconds in times[YOURS]]
        return times


def an_update(model, count, forward, sends=True):
    """Some micro-batches, of which only the last one communicates."""
    for left in reversed(range(count)):
        with nullcontext() if sends and not left else model.no_sync():
            time.sleep(forward)
            model(torch.zeros(1, requires_grad=True)).sum().backward()


def answers(choose, cases):
    """What the answer chooses in each case: [bytes, micro-batches], or a text."""
    found = []
    for case in cases:
        with trying(in_words(case)):
            returned = choose(**case)
        try:
            found.append(chosen(returned))
        except (TypeError, ValueError):
            found.append(repr(returned))
    return found


def chosen(returned):
    cap, count = returned
    if isinstance(count, bool) or count != int(count):
        raise ValueError
    return [float(cap), int(count)]


# ---- what is right ----


def exposed(case, cap):
    profile = StepProfile(0.0, case["backward"], case["gradients"])
    return exposed_seconds(profile, cap, case["ranks"], case["alpha"], case["beta"])


def all_caps(gradients):
    """Bucket sizes, of which each other one has the same buckets as one of these."""
    sizes = [size for _, size in gradients]
    ends = range(1, len(sizes) + 1)
    return sorted({sum(sizes[a:b]) for b in ends for a in range(b)}) + [ONE_BUCKET]


def least(case):
    return min(exposed(case, cap) for cap in all_caps(case["gradients"]))


def micro_batches(case, exposed_time):
    """The smallest number of micro-batches with the wanted efficiency."""
    one, count = case["forward"] + case["backward"], 1
    while count * one < case["efficiency"] * (count * one + exposed_time) - 1e-12:
        count += 1
    return count


def a_case(draw, *network):
    """A profile, and a network, for which a coarse search finds a good size, too."""
    while True:
        case = a_profile(draw) | dict(zip(("alpha", "beta", "ranks", "efficiency"), network))
        whole = sum(size for _, size in case["gradients"])
        coarse = min(exposed(case, whole * part / 300) for part in range(1, 301))
        one = case["forward"] + case["backward"]
        if coarse - least(case) < TOLERANCE / 2 * (one + least(case)):
            return case


def a_profile(draw, layers=12):
    ready, gradients = 0.0, []
    for _ in range(layers):
        ready += draw.uniform(0.5e-3, 2e-3)
        gradients.append((round(ready, 6), 4 * draw.randrange(20_000, 120_000)))
    # the input's gradient comes after that of the last parameter
    backward = round(ready + draw.uniform(1e-3, 4e-3), 6)
    return {"gradients": gradients, "forward": round(backward / 2, 6), "backward": backward}  # fmt: skip


def a_case_for_counting(micro_batches):
    """One gradient, in numbers without any rounding, for which so many micro-batches
    would have exactly the efficiency: a fraction must be rounded up, and a whole number
    must not.
    """
    exposed_time, efficiency = 2**-7, 0.5
    one = exposed_time * efficiency / (1 - efficiency) / micro_batches
    return {"gradients": [(one / 2, 2**22)], "forward": one / 2, "backward": one / 2, "ranks": 2,
            "alpha": 2**-9, "beta": 2**-30, "efficiency": efficiency}  # fmt: skip


def a_case_for_the_laboratory(draw):
    """Large gradients, a slow network, and times that can be slept. Several buckets are
    much better than one, and five micro-batches much better than one.
    """
    gradients = [(round(0.012 * (place + 1), 3), 4 * draw.randrange(40_000, 60_000)) for place in range(8)]
    return {"gradients": gradients, "forward": 0.024, "backward": 0.096, "ranks": 2, "alpha": 2e-3,
            "beta": 0.15 / sum(size for _, size in gradients), "efficiency": 0.85}  # fmt: skip


@question(
    "lesson16.exposed_seconds predicts the exposed time for one bucket size. Which sizes do you have to try? There are "
    "only finitely many different ways to fill buckets.",
    "Different sizes matter only where a bucket ends elsewhere: try the sums of neighbouring gradients, all of them, and "
    "take the one with the least exposed time. For the accumulation: only the last micro-batch of an update communicates, "
    "so k micro-batches compute k * (forward + backward) and expose the time once.",
    "best = min(sizes, key=lambda size: exposed_seconds(profile, size, ranks, alpha, beta)). An update is efficient "
    "enough if k * one >= efficiency * (k * one + exposed), so k is at least efficiency * exposed / ((1 - efficiency) * "
    "one): round that up, and take 1 at least.",
)
def check_choose(answer, draw):
    """The choice is compared with the best of all bucket sizes, and then measured on a
    pretend network, against one large bucket and against one micro-batch.
    """
    cases = [
        a_case(draw, 5e-5, 1e-9, 8, 0.9),
        a_case(draw, 4e-4, 2e-9, 4, 0.8),
        a_case(draw, 2e-3, 1e-10, 16, 0.95),
        a_case(draw, 1e-6, 1e-8, 2, 0.5),
        a_case(draw, 2e-4, 4e-9, 64, 0.9),
        a_case(draw, 1e-3, 1e-9, 1, 0.9),
        a_case_for_counting(2),
        a_case_for_counting(3.25),
        a_case_for_counting(200),
        a_case_for_the_laboratory(draw),
    ]
    [found] = answer.on_ranks(answers, cases, timeout=10)
    for case, got in zip(cases[:-1], found):
        hold(choice(case, got))
    case, got = cases[-1], found[-1]
    hold(form(case, got))
    cap, count = got[0], min(got[1], MOST_MEASURED)
    of_ranks = answer.without(measure, case, cap, count, nproc=2, timeout=30)
    best = {name: min(seconds) for name, seconds in of_ranks[0].items()}
    calm = is_calm(case, cap, count, best)
    if calm:
        hold(measured(case, cap, count, best))
    hold(choice(case, got))
    return picture_of(count, best) if calm else None


def is_calm(case, cap, count, best):
    """Whether no update took much longer than it must, in its best round. If one did, the
    machine is too busy to measure anything, and the formula alone decides.
    """
    must = dict.fromkeys(best, case["forward"] + case["backward"])
    must[ONE] += exposed(case, ONE_BUCKET)
    must[BUCKETS] += exposed(case, cap)
    must[YOURS] += exposed(case, cap) / count
    return all(best[name] < 1.2 * must[name] for name in best)


# ---- what is claimed ----


def form(case, got):
    yield Claim(in_words(case), isinstance(got, list), True, "return two numbers, and a whole number of micro-batches",
                told="(bytes of a bucket, number of micro-batches)", shown=got)  # fmt: skip
    yield Claim(in_words(case), got[0] > 0 and got[1] >= 1, True, "a bucket needs a size, and an update needs a micro-batch",
                told="a size above 0, and at least one micro-batch", shown=got)  # fmt: skip


def choice(case, got):
    yield from form(case, got)
    cap, count = got
    best, own = least(case), exposed(case, cap)
    allowed = TOLERANCE * (case["forward"] + case["backward"] + best)
    yield Claim(f"the bucket size: {in_words(case)}", own, Between(0, best + allowed), cause_of_size(case, cap),
                told=f"{1e3 * best:.3f} ms exposed", shown=f"{1e3 * own:.3f} ms exposed, with {cap:,.0f} bytes")  # fmt: skip
    right = {micro_batches(case, best), micro_batches(case, own)}
    yield Claim(f"the micro-batches: {in_words(case)}", count in right, True, cause_of_count(case, own, count),
                told=" or ".join(map(str, sorted(right))), shown=count)  # fmt: skip


def measured(case, cap, count, best):
    """A part of what a right choice gains is enough. The formula only tells the likely
    cause.
    """
    checked = f"measured on a pretend network: {in_words(case)}"
    gain = best[ONE] / best[BUCKETS]  # with the best size 1.3
    yield Claim(f"the bucket size, {checked}", gain, Between(1.05), cause_of_size(case, cap), told="faster than with one "
                "bucket", shown=f"{gain:.2f} times as fast with {cap:,.0f} bytes")  # fmt: skip
    gain = best[BUCKETS] / best[YOURS]  # with the right number 1.5
    yield Claim(f"the micro-batches, {checked}", gain, Between(1.1), cause_of_count(case, exposed(case, cap), count),
                told="less time per micro-batch than with one per update",
                shown=f"{gain:.2f} times as fast with {count}")  # fmt: skip


def picture_of(count, best):
    names = {ONE: ONE, BUCKETS: BUCKETS, YOURS: f"your buckets, {count} micro-batches"}
    return "bars", {
        "values": {shown: 100 * best[COMPUTING] / best[name] for name, shown in names.items()},
        "xlabel": "efficiency (%)",
        "title": "Your choice, measured on a pretend network",
        "unit": " %",
    }


def cause_of_size(case, cap):
    sizes = [size for _, size in case["gradients"]]
    if cap >= sum(sizes):
        return "one bucket: it is sent when backward is over, and nothing is hidden"
    if cap <= min(sizes):
        return "each gradient is sent alone, and each message costs 2 (n - 1) alpha"
    if cap > 0.9 * 2**20:
        return "that is a size that is often used, but this network and these gradients need another one"
    return "try all sums of neighbouring gradients: buckets that end at a good moment hide more"


def cause_of_count(case, own, count):
    one, target = case["forward"] + case["backward"], case["efficiency"]
    efficiency = count * one / (count * one + own)
    if case["ranks"] == 1 and count > 1:
        return "one rank has nothing to send: a single micro-batch is enough"
    if count == max(1, -(-own * target // ((1 - target) * case["backward"]))):
        return "a micro-batch computes forward and backward"
    if efficiency < target:
        return (
            f"with k = {count} the efficiency is {efficiency:.1%}: communication is exposed once per update, and "
            "computing is k * (forward + backward)"
        )
    return f"{count - 1} micro-batches are efficient enough, too: more of them make updates rarer than necessary"


def in_words(case):
    network = f"{case['ranks']} ranks, alpha {case['alpha']:g} s, beta {case['beta']:.3g} s/byte"
    target = f", efficiency {case['efficiency']}" if "efficiency" in case else ""
    size = sum(size for _, size in case["gradients"])
    profile = f"{len(case['gradients'])} gradients of {size:,} bytes in {1e3 * case['backward']:.1f} ms of backward"
    return f"{profile}, {network}{target}"
