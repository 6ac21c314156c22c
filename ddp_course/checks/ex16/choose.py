"""Question 4: the bucket size and the accumulation for a given network."""

import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.lesson16 import StepProfile, exposed_seconds
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import NETWORK
from ddp_course.school.judge import Wrong, question, trying

TOLERANCE = 0.02  # of an update's time
ONE_BUCKET = 10**12

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


def measure(choose, case, target):
    """Ask for the choice, and time updates with it and with one bucket, in turn."""
    with trying(in_words(case)):
        cap, count = chosen(choose(**case, efficiency=target))
    os.environ[NETWORK] = f"{case['alpha']} {1 / case['beta']}"
    with process_group(timeout=10):
        caps, times = {"yours": cap, "one bucket": ONE_BUCKET}, {}
        models = {
            name: DistributedDataParallel(
                Sleepy(case["gradients"]), bucket_cap_mb=max(of, 1) / 2**20
            )
            for name, of in caps.items()
        }
        for number in range(5):
            for name, model in models.items():
                dist.barrier()
                begin = time.perf_counter()
                model(torch.zeros(1, requires_grad=True)).sum().backward()
                if number >= 2:  # DDP arranges its buckets in the first two
                    times.setdefault(name, []).append(time.perf_counter() - begin)
        return {name: statistics.median(of) for name, of in times.items()}


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
        case = a_profile(draw) | dict(
            zip(("alpha", "beta", "ranks", "efficiency"), network)
        )
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
    backward = gradients[-1][0]
    return {"gradients": gradients, "forward": round(backward / 2, 6), "backward": backward}  # fmt: skip


def a_case_for_the_laboratory(draw):
    """Large gradients, a slow network, and a backward of a third of a second. Several
    buckets are much better than one.
    """
    gradients = [
        (round(0.04 * (place + 1), 3), 4 * draw.randrange(40_000, 60_000))
        for place in range(8)
    ]
    return {"gradients": gradients, "forward": 0.1, "backward": 0.32, "ranks": 2,
            "alpha": 2e-3, "beta": 0.25 / sum(size for _, size in gradients)}  # fmt: skip


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
    pretend network, against one large bucket.
    """
    cases = [
        a_case(draw, 5e-5, 1e-9, 8, 0.9),
        a_case(draw, 4e-4, 2e-9, 4, 0.8),
        a_case(draw, 2e-3, 1e-10, 16, 0.95),
        a_case(draw, 1e-6, 1e-8, 2, 0.5),
        a_case(draw, 2e-4, 4e-9, 64, 0.9),
        a_case(draw, 1e-3, 1e-9, 1, 0.9),
    ]
    [found] = answer.on_ranks(answers, cases, timeout=10)
    for case, got in zip(cases, found):
        judge_choice(case, got)
    case = a_case_for_the_laboratory(draw)
    of_ranks = answer.on_ranks(measure, case, 0.9, nproc=2, timeout=20)
    times = {name: max(ranks[name] for ranks in of_ranks) for name in of_ranks[0]}
    if times["yours"] > 0.95 * times["one bucket"]:
        raise Wrong(f"measured in the laboratory: {in_words(case)}", expected="faster than with one bucket",
                    got=f"{1e3 * times['yours']:.0f} ms, and {1e3 * times['one bucket']:.0f} ms with one bucket",
                    cause="with one bucket, all communication is exposed")  # fmt: skip
    shown = {name: 1e3 * seconds for name, seconds in times.items()}
    title = "Your buckets, measured on a pretend network"
    return "bars", {
        "values": shown,
        "xlabel": "ms per step",
        "title": title,
        "unit": " ms",
    }


def judge_choice(case, got):
    checked = in_words(case)
    if isinstance(got, str):
        raise Wrong(checked, expected="(bytes of a bucket, number of micro-batches)", got=got,
                    cause="return two numbers, and a whole number of micro-batches")  # fmt: skip
    cap, count = got
    if not cap > 0 or count < 1:
        raise Wrong(checked, expected="a size above 0, and at least one micro-batch", got=got,
                    cause="a bucket needs a size, and an update needs a micro-batch")  # fmt: skip
    best, own = least(case), exposed(case, cap)
    one = case["forward"] + case["backward"]
    if own > best + TOLERANCE * (one + best):
        raise Wrong(f"the bucket size: {checked}", expected=f"{1e3 * best:.3f} ms exposed",
                    got=f"{1e3 * own:.3f} ms exposed, with {cap:,.0f} bytes", cause=cause_of_size(case, cap))  # fmt: skip
    right = {micro_batches(case, best), micro_batches(case, own)}
    if count not in right:
        raise Wrong(f"the micro-batches: {checked}", expected=" or ".join(map(str, sorted(right))), got=count,
                    cause=cause_of_count(case, own, count))  # fmt: skip


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
        few = f"{count} micro-batches have an efficiency of {efficiency:.1%}"
        return f"{few}: communication is exposed once per update, and computing is k * (forward + backward)"
    return f"{count - 1} micro-batches are efficient enough, too: more of them make updates rarer than necessary"


def in_words(case):
    network = f"{case['ranks']} ranks, alpha {case['alpha']:g} s, beta {case['beta']:.3g} s/byte"
    target = f", efficiency {case['efficiency']}" if "efficiency" in case else ""
    size = sum(size for _, size in case["gradients"])
    profile = f"{len(case['gradients'])} gradients of {size:,} bytes in {1e3 * case['backward']:.1f} ms of backward"
    return f"{profile}, {network}{target}"
