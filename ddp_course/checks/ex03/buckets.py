"""Question 3: buckets that travel in bfloat16, with error feedback."""

import time

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import Between, Claim, hold, on_every_rank
from ddp_course.checks.ex03.readiness import noting_what_is_sent
from ddp_course.checks.recording import mean_gradient, recording, started_alike, unmoved, waited, wraps
from ddp_course.checks.training import gradients_of, state
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group

STEPS, WIDTH = 60, 12
LATE = 1.5  # seconds that the last rank comes late to backward: half are for a busy machine

# ---- the networks that the answers are tried on ----


class SideBySide(nn.Module):
    """Linear layers that all get the same inputs. The gradients do not depend on the
    parameters, so they are the same in each step if the inputs are.

    With `mixed`, one layer is frozen, and the first is called before and after the
    others.
    """

    def __init__(self, outputs, seed, mixed=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, size, bias=False) for size in outputs)
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


def own_gradients(outputs, seed, n, alone):
    """What each rank computes in a step, [{name: gradient in 64 bits, or None}, ...]."""
    factors, found = some_factors(outputs, seed).double(), []
    for rank in range(n):
        network = SideBySide(outputs, seed, mixed=True).double()
        total_of(network, some_inputs(seed, rank, n, alone).double(), factors).backward()
        found.append(gradients_of(network))
    return found


# ---- what the ranks observe ----


def observe(wrapper, outputs, size_mb, seed):
    """Wrap a network that differs on each rank; record one step to which the last rank
    comes late; then add up the gradients of further steps.
    """
    with process_group() as (rank, n):
        model = wrapper(SideBySide(outputs, seed + rank, True), bucket_size_mb=size_mb)
        if not isinstance(getattr(model, "module", None), nn.Module):
            return {"module": False}
        start, factors = state(model.module), some_factors(outputs, seed)
        loss = total_of(model, some_inputs(seed, rank, n, False), factors)
        dist.barrier()
        time.sleep(LATE * (rank == n - 1))
        begin = time.perf_counter()
        with recording(model.module) as record, trying("step 1"):
            loss.backward()
            ended = time.perf_counter()
            model.finish_gradient_synchronization()
        del record["works"]
        inputs = some_inputs(seed, rank, n, True)
        nothing = [inputs * 0] * 3  # steps that send what is left over, and no more
        added_up(model, nothing, factors)
        sent = [entry for entry in record.pop("log") if entry["name"] == "allreduce"]
        return record | {
            "module": True, "start": start, "blocked": ended - begin,
            "all-reduced": sum(entry["bytes"] for entry in sent),
            "late": sum(entry["at"] >= ended for entry in sent),
            "once": added_up(model, [inputs, *nothing], factors),
            "often": added_up(model, [inputs] * STEPS, factors),
        }  # fmt: skip


def added_up(model, batches, factors):
    """The gradients of one step per batch, added up in 64 bits: {name: tensor or None}."""
    sums = {}
    for number, inputs in enumerate(batches, 1):
        model.module.zero_grad()
        with trying(f"step {number} of {len(batches)} after the first one"):
            total_of(model, inputs, factors).backward()
            model.finish_gradient_synchronization()
        for name, value in gradients_of(model.module).items():
            sums[name] = None if value is None else sums.get(name, 0) + value.double()
    return sums


def count_buckets(wrapper, cases):
    """For each case, the bytes of each all-reduce, and what `noting_what_is_sent` gives."""
    seen = []
    with process_group() as (rank, n):
        for outputs, size in cases:
            model = wrapper(SideBySide(outputs, 0), bucket_size_mb=size / 2**20)
            with trying(f"bucket_size_mb={size / 2**20:.3g}"), CheckedWatch() as watch:
                loss = total_of(model, some_inputs(0, rank, n, False), 1.0)
                with noting_what_is_sent(model.module.parameters(), watch.log) as noted:
                    loss.backward()
                model.finish_gradient_synchronization()
            seen.append(([e["bytes"] for e in watch.log if e["name"] == "allreduce"], noted))
    return seen


# ---- what is claimed ----


def claims_about(call, start, own, exact):
    """For each rank: it starts like rank 0, sends each gradient once in 16 bits, during
    backward, and loses no digits in the long run.
    """
    numbers = sum(value.numel() for value in own[0].values() if value is not None)
    means = {name: value if value is None else sum(each[name] for each in exact) / len(exact)
             for name, value in exact[0].items()}  # fmt: skip

    def of_rank(rank, of_ranks):
        mine, n = of_ranks[rank], len(of_ranks)
        yield wraps(call, mine)
        yield from started_alike(call, mine, start)
        yield unmoved(f"a backward with {call}, without a step", mine)
        yield Claim(f"bytes that are all-reduced in a step of {call}, for {numbers} gradients", mine["all-reduced"],
                    2 * numbers, "send each gradient once, as bfloat16, which has 2 bytes per number", [
                        (0, "send each bucket with dist.all_reduce"),
                        (4 * numbers, "the gradients travel in 32 bits: round each bucket to bfloat16 before it is sent"),
                    ])  # fmt: skip
        for name, got in mine["gradients"].items():
            yield rounded(mean_gradient(f"the gradient of {name} after the first step of {call}", got,
                                        [each[name] for each in own], rank, digits=1.8))  # fmt: skip
        yield waited(call, mine)
        if rank == 0:
            yield Claim(f"seconds that backward took, while rank {n - 1} came {LATE} s late", mine["blocked"],
                        Between(0, LATE / 2), "the hook waits for its all-reduce: pass async_op=True, and keep the "
                        "returned work to wait for it in finish_gradient_synchronization()", told="almost none")  # fmt: skip
            yield Claim(f"all-reduces of {call} that start after backward has ended", mine["late"], 0, "start the "
                        "all-reduce in a hook, when the last gradient of a bucket is ready: "
                        "parameter.register_post_accumulate_grad_hook(...)")  # fmt: skip
        for name, mean in means.items():
            if mean is not None:
                yield from digits_kept(name, call, mean, mine)

    return of_rank


def rounded(claim):
    """A claim about numbers that may be rounded to bfloat16; float16 rounds worse."""
    got, mean = claim.got, claim.expected
    if not isinstance(got, torch.Tensor) or mean is None:
        return claim
    tiny = mean.abs().max() < 1e-5 and (got - mean).abs().max() < 2**-22
    if got.isfinite().all() and not tiny:
        return claim
    return claim._replace(mistakes=(), otherwise="float16 cannot hold these numbers: it ends at 65,504, and next to zero "
                          "its numbers are 6e-8 apart. bfloat16 has the range of float32")  # fmt: skip


def digits_kept(name, call, mean, mine):
    """Claims that many steps together lose no more than one, and that what a step has
    kept is sent by the next ones.
    """
    plain = rms(mean - mean.bfloat16().double())  # one rounding error
    yield Claim(f"the gradients of {name}, the same in {STEPS} steps of {call}, added up: rounding errors",
                rms(mine["often"][name] - STEPS * mean) / plain, Between(0, STEPS / 6),
                "the rounding errors do not cancel out: the error to keep is (gradient + error kept before) - what was "
                "sent, and after the sum over the ranks nothing may be rounded again, so divide in 32 bits", [
                    (Between(0.5 * STEPS, 3 * STEPS), "every step loses the same digits again: keep what rounding to "
                     "bfloat16 has cut off, and add it to the gradient of the next step"),
                    (Between(10 * STEPS), "the first step was right, but later ones are not: what is left over from the "
                     "step before?"),
                ], told="about one")  # fmt: skip
    # 1/20,000 if the errors are kept in 32 bits, 1/700 if in 16 bits
    yield Claim(f"the gradients of {name} in a step of {call} and three more, in which they are zero, added up: rounding "
                "errors", rms(mine["once"][name] - mean) / plain, Between(0, 1 / 3000), "the kept errors have lost "
                "digits: keep them in float32, as total - message.float()", told="none")  # fmt: skip


def rms(numbers):
    return numbers.pow(2).mean().sqrt().item()


SIZE = 4 * 4 * WIDTH  # bytes of the gradient of a layer with 4 outputs
CASES = [  # outputs of layers, bytes in a bucket, fewest and most all-reduces
    ([4] * 12, 4 * SIZE, 3, 4),
    ([4] * 12, SIZE // 2, 12, 12),
    # in buckets that are 2% smaller, the large layer would be alone
    ([1, 48], 4 * WIDTH * (1 + 48) + 4, 1, 1),
    ([4] * 12, 100 * SIZE, 1, 1),
    ([4] * 12, 5 * SIZE, 3, 3),
]


def counts(seen):
    for (outputs, size, fewest, most), (sent, noted) in zip(CASES, seen):
        in_bytes = " and ".join(str(4 * WIDTH * count) for count in dict.fromkeys(outputs))
        layout = f"{len(outputs)} layers of {in_bytes} bytes in buckets of {size} bytes"
        mega = "the buckets are too small: bucket_size_mb is in MiB, which have 2**20 bytes, not 10**6"
        yield Claim(f"all-reduces in a step, {layout}", len(sent), range(fewest, most + 1),
                    "a bucket is full when its gradients, in 32 bits, have reached bucket_size_mb MiB: numel() * "
                    "element_size() of the parameters", [
                        (1, "all gradients share one bucket: bucket_size_mb is ignored"),
                        *([(2, mega)] if len(outputs) == 2 else []),
                        (12, "every gradient is sent alone: wait until its bucket is full"),
                    ], told=fewest)  # fmt: skip
        if size == 5 * SIZE:
            yield Claim(f"bytes of the first all-reduce, {layout}: the last five layers", sent[0], Between(5 * SIZE / 2),
                        "the buckets begin with the first layers, whose gradients come last in backward: go through the "
                        "parameters in reverse order", told=5 * SIZE // 2)  # fmt: skip
        if size == 4 * SIZE:
            # four in a bucket, and one if the answer's hook runs after ours
            waiting = max(ready - sum(each) // (SIZE // 2) for ready, each in enumerate(noted, 1))
            yield Claim(f"gradients that are ready and not yet sent, {layout}", waiting, Between(-99, 5),
                        "full buckets wait: start the all-reduce of a bucket in the hook of its last gradient, so that "
                        "it travels while backward continues", told="at most the four of one bucket")  # fmt: skip


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
    for n, size in draw.sample([(2, 300), (3, 500)], 2):
        seed, size_mb = draw.randrange(10**5), size / 2**20
        of_ranks = answer.on_ranks(observe, outputs, size_mb, seed, nproc=n)
        start = state(SideBySide(outputs, seed, True))
        own, exact = (own_gradients(outputs, seed, n, alone) for alone in (False, True))
        call = f"Bucketed(model, bucket_size_mb={size_mb:.2g})"
        on_every_rank(claims_about(call, start, own, exact), of_ranks)
    cases = [case[:2] for case in CASES]
    hold(counts(answer.on_ranks(count_buckets, cases, nproc=2)[0]), "0 of 2")
