"""Question 3: buckets that travel in bfloat16, with error feedback."""

import time

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.checks.ex03.readiness import noting_what_is_sent
from ddp_course.checks.training import gradients_of, state
from ddp_course.checks.works import noting_works
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.watch import Watch

STEPS = 60
WIDTH = 12

# ---- the networks that the answers are tried on ----


class SideBySide(nn.Module):
    """Linear layers that all get the same inputs. The gradients do not depend on the
    parameters, so they are the same in each step if the inputs are.

    With `mixed`, one layer is frozen, and the first is called before and after the
    others.
    """

    def __init__(self, outputs, seed, mixed=False):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, size, bias=False) for size in outputs
        )
        self.mixed = mixed
        if mixed:
            self.layers[1].weight.requires_grad_(False)
        self.register_buffer("scale", torch.full((WIDTH,), 1.0 + seed % 7))
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, x):
        used = [*self.layers, self.layers[0]] if self.mixed else self.layers
        return torch.cat([layer(x * self.scale) for layer in used], dim=1)


def total_of(model, inputs, factors):
    return (model(inputs) * factors).sum()


def some_inputs(seed, rank, n, alone):
    """Inputs of a rank, (4, WIDTH). alone: only every n-th column is not zero, others
    on each rank, so that the ranks' gradients can be summed without rounding.
    """
    generator = torch.Generator().manual_seed(100 * seed + rank)
    inputs = torch.randn(4, WIDTH, generator=generator)
    if alone:
        inputs[:, torch.arange(WIDTH) % n != rank] = 0
    return inputs


def some_factors(outputs, seed):
    """For each output a factor. Those of one layer are large, of another tiny: a 16-bit
    format with few bits for the exponent cannot hold them.
    """
    generator = torch.Generator().manual_seed(seed)
    factors = torch.rand(sum(outputs) + outputs[0], generator=generator) + 0.5
    factors[: outputs[0]] *= 1e-7
    factors[-outputs[0] :] *= 1e-7
    factors[sum(outputs[:2]) : sum(outputs[:3])] *= 1e6
    return factors


def own_gradients(outputs, seed, rank, n, alone):
    """What one rank computes in a step, {name: gradient in 64 bits, or None}."""
    network = SideBySide(outputs, seed, mixed=True).double()
    inputs = some_inputs(seed, rank, n, alone).double()
    total_of(network, inputs, some_factors(outputs, seed).double()).backward()
    return gradients_of(network)


# ---- what the ranks observe ----


def train_bucketed(wrapper, outputs, size_mb, seed, lateness):
    """Wrap a network that differs on each rank; watch one step in which the last rank
    is late; then add up the gradients of further steps.
    """
    with process_group() as (rank, n):
        model = wrapper(SideBySide(outputs, seed + rank, True), bucket_size_mb=size_mb)
        if not isinstance(getattr(model, "module", None), nn.Module):
            return {"module": False}
        network, factors = model.module, some_factors(outputs, seed)
        start = state(network)
        loss = total_of(model, some_inputs(seed, rank, n, False), factors)
        dist.barrier()
        if rank == n - 1:
            time.sleep(lateness)
        begin = time.perf_counter()
        with Watch() as watch, noting_works() as works, trying("step 1"):
            loss.backward()
            ended = time.perf_counter()
            model.finish_gradient_synchronization()
        gradients = gradients_of(network)
        after_one, forgotten = state(network), [work.waited for work in works].count(0)

        inputs = some_inputs(seed, rank, n, True)
        nothing = [inputs * 0] * 3  # steps that send what is left over, and no more
        added_up(model, nothing, factors)
        once = added_up(model, [inputs, *nothing], factors)
        often = added_up(model, [inputs] * STEPS, factors)
        collectives = [entry for entry in watch.log if entry["name"] == "allreduce"]
        return {
            "module": True, "start": start, "after_one": after_one, "gradients": gradients,
            "once": once, "often": often,
            "blocked": ended - begin, "in_time": sum(entry["at"] < ended for entry in collectives),
            "all": [entry["name"] for entry in watch.log], "count": len(collectives),
            "bytes": sum(entry["bytes"] for entry in collectives), "forgotten": forgotten,
        }  # fmt: skip


def added_up(model, batches, factors):
    """The gradients of one step per batch, added up in 64 bits: {name: tensor or None}."""
    steps = []
    for number, inputs in enumerate(batches, 1):
        model.module.zero_grad()
        with trying(f"step {number} of {len(batches)} after the first one"):
            total_of(model, inputs, factors).backward()
            model.finish_gradient_synchronization()
        steps.append(gradients_of(model.module))
    return {
        name: None if value is None else sum(step[name].double() for step in steps)
        for name, value in steps[0].items()
    }


def count_buckets(wrapper, cases):
    """For each case, the outputs of some layers and the size of a bucket in bytes, what
    is sent: the bytes of each all-reduce, and what `noting_what_is_sent` gives.
    """
    seen = []
    with process_group() as (rank, n):
        for outputs, size in cases:
            model = wrapper(SideBySide(outputs, 0), bucket_size_mb=size / 2**20)
            with trying(f"bucket_size_mb={size / 2**20:.3g}"), Watch() as watch:
                loss = total_of(model, some_inputs(0, rank, n, False), 1.0)
                with noting_what_is_sent(model.module.parameters(), watch) as noted:
                    loss.backward()
                model.finish_gradient_synchronization()
            sent = [e["bytes"] for e in watch.log if e["name"] == "allreduce"]
            seen.append((sent, noted))
    return seen


# ---- how it is judged ----


def judge_start(call, of_each, start):
    for where, of_rank in of_each:
        if not of_rank["module"]:
            raise Wrong(call, rank=where, expected="the wrapped network as .module", got="no such attribute",
                        cause="keep the network: self.module = module, in __init__")  # fmt: skip
    for where, of_rank in of_each:
        for name, expected in start.items():
            if not torch.equal(got := of_rank["start"][name], expected):
                raise Wrong(f"{name} after {call}, with a different one on each rank before", rank=where,
                            expected=expected, got=got, cause="the ranks must start from the same parameters and "
                            "buffers: broadcast them all from rank 0")  # fmt: skip


def judge_first_step(call, of_each, own):
    trained = [value for value in own[0].values() if value is not None]
    numbers = sum(value.numel() for value in trained)
    for rank, (where, of_rank) in enumerate(of_each):
        for name, value in of_rank["after_one"].items():
            if not torch.equal(value, of_rank["start"][name]):
                raise Wrong(f"{name} after a backward with {call}, with no step", rank=where, expected="unchanged",
                            got="changed", cause="only the gradients should be averaged: use parameter.grad")  # fmt: skip
        if not of_rank["count"]:
            raise Wrong(f"all-reduces in a step of {call}", rank=where, expected="one per bucket",
                        got=f"none: {of_rank['all']}", cause="send each bucket with dist.all_reduce")  # fmt: skip
        if of_rank["bytes"] != 2 * numbers:
            cause = "send each gradient once, as bfloat16, which has 2 bytes per number"
            if of_rank["bytes"] == 4 * numbers:
                cause = "the gradients travel in 32 bits: round each bucket to bfloat16 before it is sent"
            raise Wrong(f"bytes that are all-reduced in a step of {call}, for {numbers} gradients", rank=where,
                        expected=2 * numbers, got=of_rank["bytes"], cause=cause)  # fmt: skip
        for name in own[0]:
            compare_rounded(f"the gradient of {name} after the first step of {call}", where, rank,
                            [gradients[name] for gradients in own], of_rank["gradients"][name])  # fmt: skip
        if of_rank["forgotten"]:
            raise Wrong(f"finish_gradient_synchronization() of {call}", rank=where, expected="a wait() for each all-reduce",
                        got=f"{of_rank['forgotten']} of {of_rank['count']} not waited for",
                        cause="each all_reduce(..., async_op=True) returns its own work: keep all of them, and wait for "
                        "each")  # fmt: skip


def compare_rounded(checked, where, rank, own, got):
    """Raise Wrong unless `got` is the mean of the ranks' own gradients, but for the
    rounding to bfloat16.
    """
    if own[0] is None:
        if got is not None:
            raise Wrong(checked, rank=where, expected="no gradient (None)", got=got,
                        cause="this parameter is frozen: leave it out of the buckets")  # fmt: skip
        return
    n, mean = len(own), sum(own) / len(own)
    if got is None or got.shape != mean.shape:
        raise Wrong(checked, rank=where, expected=mean, got="None" if got is None else got,
                    cause="a gradient has the shape of its parameter")  # fmt: skip
    got = got.double()
    largest = max(value.abs().max().item() for value in own)
    tolerance = 2**-6 * largest
    near = lambda value: (got - value).abs().max().item() <= tolerance  # noqa: E731
    if near(mean):
        return
    cause = "did you send every gradient after it was complete, wait for it, and copy it back to its own parameter?"
    looks = [
        (sum(own), "it is the sum over the ranks: divide by the number of ranks, once"),
        (mean / n, "it was divided by the number of ranks twice"),
        (own[rank], "it is still this rank's own gradient: the mean was not copied back"),
        (own[rank] / n, "this rank's own gradient was divided, but the sum over the ranks was not copied back"),
        (own[rank] * 0, "it is zero"),
    ]  # fmt: skip
    too_small = largest < 1e-5 and (got - mean).abs().max().item() < 2**-22
    if too_small or not got.isfinite().all():
        cause = (
            "float16 cannot hold these numbers: it ends at 65,504, and next to zero its numbers are 6e-8 apart. bfloat16 "
            "has the range of float32"
        )  # fmt: skip
    else:
        cause = next((text for value, text in looks if near(value)), cause)
    raise Wrong(checked, rank=where, expected=mean, got=got, cause=cause)


def judge_feedback(call, of_each, own):
    """Raise Wrong unless the rounding errors of all steps together are not much larger
    than those of one.
    """
    for where, of_rank in of_each:
        for name, total in of_rank["often"].items():
            if total is None:
                continue
            mean = sum(gradients[name] for gradients in own) / len(own)
            checked = f"the gradients of {name}, the same in {STEPS} steps of {call}, added up"
            plain = rms(mean - mean.bfloat16().double())
            error = rms(total - STEPS * mean)
            if error <= STEPS / 6 * plain:
                continue
            cause = (
                "the rounding errors do not cancel out: the error to keep is (gradient + error kept before) - what was "
                "sent, and after the sum over the ranks nothing may be rounded again, so divide in 32 bits"
            )  # fmt: skip
            if error <= 1.5 * STEPS * plain and error >= 0.5 * STEPS * plain:
                cause = (
                    "every step loses the same digits again: keep what rounding to bfloat16 has cut off, and add it to "
                    "the gradient of the next step"
                )  # fmt: skip
            if not total.isfinite().all() or error > 10 * STEPS * plain:
                cause = "the first step was right, but later ones are not: what is left over from the step before?"
            raise Wrong(checked, rank=where, expected=f"off by about one rounding error, {plain:.1e} on average",
                        got=f"off by {error:.1e}", cause=cause)  # fmt: skip


def judge_kept_digits(call, of_each, own):
    """Raise Wrong unless steps without any gradient send all of what a step before them
    has kept.
    """
    for where, of_rank in of_each:
        for name, total in of_rank["once"].items():
            if total is None:
                continue
            mean = sum(gradients[name] for gradients in own) / len(own)
            error = rms(total - mean)
            # 1/20,000 if the errors are kept in 32 bits, 1/700 if in 16 bits
            if error <= rms(mean - mean.bfloat16().double()) / 3000:
                continue
            raise Wrong(f"the gradients of {name} in a step of {call} and in three more, in which they are zero, added up",
                        rank=where, expected="the mean, in 32 bits: each step sends the error that the one before has kept",
                        got=f"off by {error:.1e}", cause="the kept errors have lost digits: keep them in float32, as "
                        "total - message.float()")  # fmt: skip


def rms(numbers):
    return numbers.pow(2).mean().sqrt().item()


def judge_times(call, where, of_rank, lateness, n):
    if of_rank["blocked"] > lateness / 2:
        raise Wrong(f"how long backward took, while rank {n - 1} came {lateness} s late", rank=where,
                    expected="almost no time: backward continues, and only finish_gradient_synchronization() waits",
                    got=f"{of_rank['blocked']:.1f} s", cause="the hook waits for its all-reduce: pass async_op=True, "
                    "and keep the returned work to wait for it later")  # fmt: skip
    late = of_rank["count"] - of_rank["in_time"]
    if late or not of_rank["count"]:
        got = f"{late} of {of_rank['count']} after backward had ended"
        cause = "start the all-reduce in a hook, when the last gradient of a bucket is ready: "
        cause += "parameter.register_post_accumulate_grad_hook(...)"
        raise Wrong(f"when {call} started its all-reduces", rank=where, expected="all of them during backward",
                    got=got, cause=cause)  # fmt: skip


SIZE = 4 * 4 * WIDTH  # bytes of the gradient of a layer with 4 outputs
CASES = [  # outputs of layers, bytes in a bucket, fewest and most all-reduces
    ([4] * 12, 4 * SIZE, 3, 4),
    ([4] * 12, SIZE // 2, 12, 12),
    # in buckets that are 2% smaller, the large layer would be alone
    ([1, 48], 4 * WIDTH * (1 + 48) + 4, 1, 1),
    ([4] * 12, 100 * SIZE, 1, 1),
    ([4] * 12, 5 * SIZE, 3, 3),
]


def judge_counts(seen):
    for (outputs, size, fewest, most), (sent, noted) in zip(CASES, seen):
        layers, where = len(outputs), "0 of 2"
        in_bytes = dict.fromkeys(4 * WIDTH * count for count in outputs)
        layout = f"{layers} layers of {' and '.join(map(str, in_bytes))} bytes in buckets of {size} bytes"
        checked = f"all-reduces in a step, {layout}"
        if not fewest <= len(sent) <= most:
            cause = (
                "a bucket is full when its gradients, in 32 bits, have reached bucket_size_mb MiB: numel() * "
                "element_size() of the parameters"
            )  # fmt: skip
            if len(sent) == layers:
                cause = "every gradient is sent alone: wait until its bucket is full"
            if layers == 2:
                cause = "the buckets are too small: bucket_size_mb is in MiB, which have 2**20 bytes, not 10**6"
            if len(sent) == 1:
                cause = "all gradients share one bucket: bucket_size_mb is ignored"
            raise Wrong(checked, rank=where, expected=str(fewest) if fewest == most else f"{fewest} or {most}",
                        got=len(sent), cause=cause)  # fmt: skip
        if size == 5 * SIZE and sent[0] < 5 * SIZE / 2:
            raise Wrong(f"bytes of the first all-reduce, {layout}", rank=where,
                        expected=f"{5 * SIZE // 2}, the last five layers", got=sent[0], cause="the buckets begin with the "
                        "first layers, whose gradients come last in backward: go through the parameters in reverse "
                        "order")  # fmt: skip
        if size == 4 * SIZE:
            judge_waiting(layout, where, noted)


def judge_waiting(layout, where, noted):
    """Raise Wrong if full buckets wait. noted: for buckets of four layers."""
    waiting = max(
        ready - sum(sent) // (SIZE // 2)  # half of the bytes travel
        for ready, sent in enumerate(noted, 1)
    )
    if waiting > 5:  # four in a bucket, and one if the answer's hook runs after ours
        raise Wrong(f"gradients that are ready and not yet sent, {layout}", rank=where,
                    expected="at most the four of one bucket at a time", got=f"up to {waiting} at a time",
                    cause="full buckets wait: start the all-reduce of a bucket in the hook of its last gradient, so that "
                    "it travels while backward continues")  # fmt: skip


@question(
    "Build the buckets first: walk through the parameters in reverse order, begin a new bucket when the current one is "
    "full, and send a bucket when its last gradient is ready. Then think about one number: what is the difference "
    "between it and the number that you send, and who must remember this difference?",
    "Keep one float32 tensor per bucket, zero at first. Joined gradients + kept errors is what you want to send; its "
    "bfloat16() is what you can send; the difference of the two, in float32, is the new kept error. Received numbers "
    "are converted with .float() before anything else happens.",
    "At the bucket's last gradient: total = torch.cat([p.grad.flatten() for p in bucket]) / world_size + error[index]; "
    "message = total.bfloat16(); error[index] = total - message; all_reduce(message, async_op=True). At the end: wait, "
    "split message.float(), view_as, copy into p.grad, and reset the counts, but not the errors.",
)
def check_bucketed(answer, draw):
    """Few messages of 16-bit numbers, started during backward; the mean over the ranks;
    and over many steps no more than one rounding error.
    """
    outputs = [draw.randint(3, 9) for _ in range(5)]
    lateness = 0.5
    for n, size in draw.sample([(2, 300), (3, 500)], 2):
        seed = draw.randrange(10**5)
        args = (outputs, size / 2**20, seed, lateness)
        seen = answer.on_ranks(train_bucketed, *args, nproc=n)
        call = f"Bucketed(model, bucket_size_mb={size / 2**20:.2g})"
        of_each = [(f"{rank} of {n}", of_rank) for rank, of_rank in enumerate(seen)]
        judge_start(call, of_each, state(SideBySide(outputs, seed, True)))
        own = [own_gradients(outputs, seed, rank, n, False) for rank in range(n)]
        judge_first_step(call, of_each, own)
        judge_times(call, *of_each[0], lateness, n)
        own = [own_gradients(outputs, seed, rank, n, True) for rank in range(n)]
        judge_feedback(call, of_each, own)
        judge_kept_digits(call, of_each, own)
    cases = [(outputs, size) for outputs, size, *_ in CASES]
    judge_counts(answer.on_ranks(count_buckets, cases, nproc=2)[0])
