"""Question 2: average during the last of several backwards."""

import time

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.checks.claims import Between, Claim, agree, on_every_rank
from ddp_course.checks.ex03.after_backward import TWICE
from ddp_course.checks.ex03.networks import Tied
from ddp_course.checks.ex03.readiness import noting_what_is_sent
from ddp_course.checks.recording import recording, started_alike, unmoved, waited, wraps
from ddp_course.checks.training import a_batch, descend, gradients_of, state
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group

STEPS = 4
LATE = 1.5  # seconds that the last rank comes late to backward: half are for a busy machine

# ---- what the ranks observe ----


def observe(wrapper, options, width, seed, batches):
    """Wrap a network that differs on each rank, record one step to which the last rank
    comes late, then train.

    batches: those of all ranks, for each step a list of one per backward.
    """
    with process_group() as (rank, world_size):
        model = wrapper(Tied(width, seed + rank), **options)
        if not isinstance(getattr(model, "module", None), nn.Module):
            return {"module": False}
        start = state(model.module)
        mine = [[batch.chunk(world_size)[rank] for batch in step] for step in batches]
        with recording(model.module) as record:
            times = watch_a_step(model, mine[0], record["log"])
        works, log = record.pop("works"), record.pop("log")
        model.module.zero_grad()
        before = [work.waited for work in works]
        finish = model.finish_gradient_synchronization
        history = take_long_steps(model, mine, finish)
        again = sum(work.waited > count for work, count in zip(works, before))
        return record | {
            "module": True, "start": start, "history": history, "again": again,
            "blocked": times["blocked"], "waiting": times["waiting"],
            "too early": times["too early"], "all-reduces": record["sent"].count("allreduce"),
            "late": sum(entry["at"] >= times["ended"] for entry in log),
        }  # fmt: skip


def watch_a_step(model, parts, log):
    """The backwards of one step, to the last of which the last rank comes late: when it
    ended, and what was sent by then. log: that of a Watch which is active.
    """
    *earlier, last = parts
    for number, part in enumerate(earlier, 1):
        with trying(f"backward {number} of {len(parts)} of a step"):
            model(part).pow(2).mean().backward()
    too_early = len(log)

    ends = []
    last = last.clone().requires_grad_(True)
    # the last gradient of backward
    last.register_hook(lambda gradient: ends.append(time.perf_counter()))
    loss = model(last).pow(2).mean()
    dist.barrier()
    time.sleep(LATE * (dist.get_rank() == dist.get_world_size() - 1))
    begin = time.perf_counter()
    with trying(f"backward {len(parts)} of {len(parts)} of a step"):
        with noting_what_is_sent(model.module.parameters(), log) as noted:
            loss.backward()
        blocked = time.perf_counter() - begin
        model.finish_gradient_synchronization()
    waiting = [ready - len(sent) + too_early for ready, sent in enumerate(noted, 1)]
    return {
        "too early": too_early, "blocked": blocked, "ended": ends[0],
        "waiting": max(waiting, default=0),
    }  # fmt: skip


def take_long_steps(model, batches, finish=lambda: None):
    """SGD with several backwards per step; return the `state` after each step."""
    history = []
    for number, parts in enumerate(batches, 1):
        with trying(f"step {number} of training"):
            for part in parts:
                model(part).pow(2).mean().backward()
            finish()
        network = getattr(model, "module", model)
        descend(network)
        history.append(state(network))
    return history


# ---- what is claimed ----

TIED = {"first.weight", "last.weight"}
TOO_SOON = (
    "only the weight that two layers share is wrong: backward adds to its gradient in both layers, and here it was sent, or "
    "divided, after the first of them. A hook on the parameter runs when its gradient is complete, one on a module does not"
)  # fmt: skip


def claims_about(call, every, alone):
    """What each rank must have done. alone: `start`, `gradients` and `history` of one
    process that trained on the joined batches.
    """
    backwards = f"{every} backward{'s' * (every > 1)}"
    after = f"{backwards} and finish_gradient_synchronization() of {call}"

    def claims(rank, of_ranks):
        mine, n = of_ranks[rank], len(of_ranks)
        yield wraps(call, mine)
        yield from started_alike(call, mine, alone["start"])
        yield unmoved(f"{after}, without a step", mine)
        yield Claim(
            f"messages before the last of {every} backwards of a step, {call}", mine["too early"], 0,
            "gradients are sent before the last backward of the step: let them add up on the rank, and send the sum once",
        )  # fmt: skip
        trained = sum(value is not None for value in alone["gradients"].values())
        yield Claim(
            f"all-reduces in a step of {call}", mine["all-reduces"], range(trained + 1),
            TWICE, told=f"at most {trained}, one per gradient",
        )  # fmt: skip
        yield from as_if_joined(after, alone["gradients"], mine["gradients"], n, every)
        yield waited(f"finish_gradient_synchronization() of {call}", mine)
        yield from trained_alike(call, alone["history"], mine["history"])
        yield Claim(
            f"works of the first step that later steps of {call} wait for", mine["again"], 0,
            "the list of works keeps growing: clear it at the end of finish_gradient_synchronization()",
        )  # fmt: skip
        if rank == 0:
            yield from in_time(call, mine, n)

    return claims


def as_if_joined(after, expected, gradients, n, every):
    """Claims that the gradients are those of one process on the joined batch."""
    factors = {
        n: "it is the sum over the ranks, not the mean: divide by the number of ranks",
        every: f"it is {every} times too large: the {every} backwards of a step have added up, so divide by their number",
        n * every: "it is the sum over all ranks and backwards: divide by the number of both",
        1 / n: "it was divided by the number of ranks twice",
        1 / every: "it was divided by the number of backwards twice",
    }  # fmt: skip
    wrong = different(expected, gradients)
    for name, value in expected.items():
        got = gradients[name]
        if value is None or got is None:
            cause = "a frozen parameter has no gradient, and every other one has"
            yield Claim(f"the gradient of {name} after {after}", got, value, cause)
            continue
        otherwise = "did you send every gradient once it was complete, and wait for it?"
        if agree(got, value, 2):
            otherwise = "the numbers have lost digits on their way: keep the precision of the gradients"
        elif wrong <= TIED:
            otherwise = TOO_SOON
        mistakes = [(factor * value, cause) for factor, cause in factors.items() if factor != 1]  # fmt: skip
        yield Claim(f"the gradient of {name} after {after}", got, value, otherwise, mistakes)


def trained_alike(call, history, of_rank):
    """Claims that the parameters after each step are those of one process."""
    for step, (expected, got) in enumerate(zip(history, of_rank), 1):
        cause = "the first step was right, but a later one is not: what is left over from the step before?"
        if step == 1:
            cause = "the gradients were right when this step was recorded alone: what is left over from then?"
        if different(expected, got, 6) <= TIED:
            cause = TOO_SOON
        for name, value in expected.items():
            yield Claim(f"{name} after step {step} of training with {call}", got[name], value, cause, digits=6)


def different(expected, got, digits=10):
    """The names of the tensors that do not agree."""
    return {name for name, value in expected.items() if not agree(got[name], value, digits)}  # fmt: skip


def in_time(call, mine, n):
    """Claims about when all-reduces start, and that no hook waits for one."""
    yield Claim(
        f"all-reduces during the last backward of a step of {call}", mine["all-reduces"] - mine["late"], range(1, 100),
        "start the all-reduce in a hook: parameter.register_post_accumulate_grad_hook(...)",
        told="all of them", shown=f"none: {mine['sent']}",
    )  # fmt: skip
    yield Claim(
        f"all-reduces of {call} that start after backward has ended", mine["late"], 0,
        "start the all-reduce in a hook: parameter.register_post_accumulate_grad_hook(...)",
    )  # fmt: skip
    yield Claim(
        f"gradients that are ready and not yet sent, in the last backward of a step of {call}", mine["waiting"],
        Between(-99, 1), "gradients wait until others are ready: start the all-reduce of each one as soon as its hook is "
        "called in the last backward, so that it travels while backward continues", told="at most one at any time",
    )  # fmt: skip
    yield Claim(
        f"seconds that backward took, while rank {n - 1} came {LATE} s late", mine["blocked"], Between(0, LATE / 2),
        "the hook waits for its all-reduce: pass async_op=True, and keep the returned work to wait for it later",
        told="almost none: only finish_gradient_synchronization() waits", shown=f"{mine['blocked']:.1f}",
    )  # fmt: skip


@question(
    "parameter.register_post_accumulate_grad_hook(function) calls function(parameter) in each backward, once this "
    "backward has added to parameter.grad. How does the hook know whether this is the last backward of the step?",
    "Count for each parameter how often its hook was called. dist.all_reduce(tensor, async_op=True) returns a work "
    "immediately; work.wait() waits for the all-reduce. Collect the works.",
    "The hook: self.calls[parameter] += 1; if self.calls[parameter] % self.every == 0, divide parameter.grad by "
    "dist.get_world_size() * self.every, all_reduce with async_op=True, append the work. "
    "finish_gradient_synchronization: wait for all, and clear the list.",
)
def check_overlapped(answer, draw):
    """Every rank starts with rank 0's parameters; gradients are averaged in the last
    backward of a step; training equals one process.
    """
    width = draw.randint(2, 6)
    first, second = draw.choice([3, 4]), draw.choice([2, 4])  # not the number of ranks
    for n, every in ((2, first), (3, second), (2, 1)):
        options, seed = {"every": every} if every > 1 else {}, draw.randrange(10**6)
        batches = [
            [a_batch(4 * n, width, seed + 100 + 10 * step + part) for part in range(every)] for step in range(STEPS)
        ]
        seen = answer.on_ranks(observe, options, width, seed, batches, nproc=n)
        call = f"Overlapped(model{f', every={every}' if options else ''})"
        joined = [[torch.cat(step)] for step in batches]
        on_every_rank(claims_about(call, every, trained_alone(width, seed, joined)), seen)


def trained_alone(width, seed, batches):
    """One process: its parameters at the start, the first gradients, and its history."""
    network = Tied(width, seed)
    start = state(network)
    network(batches[0][0]).pow(2).mean().backward()
    gradients = gradients_of(network)
    network.zero_grad()
    history = take_long_steps(network, batches)
    return {"start": start, "gradients": gradients, "history": history}
