"""Question 2: average during the last of several backwards."""

import time

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.checks.ex03.networks import Tied, equal_in_64_bits, judge_digits
from ddp_course.checks.ex03.readiness import noting_what_is_sent
from ddp_course.checks.training import (
    a_batch,
    close,
    descend,
    gradients_of,
    state,
)
from ddp_course.checks.works import noting_works
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.watch import Watch

STEPS = 4
TIED = {"first.weight", "last.weight"}

# ---- what the ranks observe ----


def train_wrapped(wrapper, options, width, seed, batches, lateness):
    """Wrap a network that differs on each rank, watch one step in which the last rank
    is late, then train.

    batches: those of all ranks, for each step a list of one per backward.
    """
    with process_group() as (rank, world_size):
        model = wrapper(Tied(width, seed + rank), **options)
        if not isinstance(getattr(model, "module", None), nn.Module):
            return {"module": False}
        start = state(model.module)
        mine = [[batch.chunk(world_size)[rank] for batch in step] for step in batches]
        with noting_works() as works:
            seen = watch_a_step(model, mine[0], lateness * (rank == world_size - 1))
        seen["moved"] = [
            name
            for name, value in model.module.state_dict().items()
            if not torch.equal(value, start[name])
        ]
        seen["gradients"] = gradients_of(model.module)
        model.module.zero_grad()
        in_first_step = [work.waited for work in works]
        history = take_long_steps(model, mine, model.finish_gradient_synchronization)
        again = [work.waited > before for work, before in zip(works, in_first_step)]
        return seen | {
            "module": True, "start": start, "history": history,
            "forgotten": in_first_step.count(0), "again": sum(again),
        }  # fmt: skip


def watch_a_step(model, parts, lateness):
    """The backwards of one step, the last one `lateness` seconds late: what was sent,
    and when.
    """
    *earlier, last = parts
    with Watch() as watch:
        for number, part in enumerate(earlier, 1):
            with trying(f"backward {number} of {len(parts)} of a step"):
                model(part).pow(2).mean().backward()
    too_early = [entry["name"] for entry in watch.log]

    ends = []
    last = last.clone().requires_grad_(True)
    # the last gradient of backward
    last.register_hook(lambda gradient: ends.append(time.perf_counter()))
    loss = model(last).pow(2).mean()
    dist.barrier()
    time.sleep(lateness)
    begin = time.perf_counter()
    with Watch() as watch, trying(f"backward {len(parts)} of {len(parts)} of a step"):
        with noting_what_is_sent(model.module.parameters(), watch) as noted:
            loss.backward()
        blocked = time.perf_counter() - begin
        model.finish_gradient_synchronization()
    collectives = [entry for entry in watch.log if entry["name"] == "allreduce"]
    waiting = [ready - len(sent) for ready, sent in enumerate(noted, 1)]
    return {
        "too_early": too_early, "blocked": blocked, "all": [entry["name"] for entry in watch.log],
        "count": len(collectives), "in_time": sum(entry["at"] < ends[0] for entry in collectives),
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


# ---- how it is judged ----


def judge_wrapper(answer, width, seed, n, every, options):
    batches = [
        [a_batch(4 * n, width, seed + 100 + 10 * step + part) for part in range(every)]
        for step in range(STEPS)
    ]
    lateness = 0.5
    seen = answer.on_ranks(
        train_wrapped, options, width, seed, batches, lateness, nproc=n
    )
    call = f"Overlapped(model{f', every={every}' if options else ''})"
    joined = [[torch.cat(step)] for step in batches]
    alone = Tied(width, seed)
    start = state(alone)
    alone(joined[0][0]).pow(2).mean().backward()
    gradients = gradients_of(alone)
    alone.zero_grad()
    history = take_long_steps(alone, joined)
    of_each = [(f"{rank} of {n}", of_rank) for rank, of_rank in enumerate(seen)]
    judge_start(call, of_each, start)
    judge_one_step(call, of_each, gradients, n, every)
    judge_history(call, of_each, history)
    judge_times(call, *of_each[0], lateness, n)


def judge_start(call, of_each, start):
    for where, of_rank in of_each:
        if not of_rank["module"]:
            raise Wrong(call, rank=where, expected="the wrapped network as .module", got="no such attribute",
                        cause="keep the network: self.module = module, in __init__")  # fmt: skip
    for kind in ("parameter", "buffer"):
        for where, of_rank in of_each:
            for key, expected in start.items():
                if (key == "scale") == (kind == "buffer") and not torch.equal(
                    got := of_rank["start"][key], expected
                ):
                    raise Wrong(f"{kind} {key} after {call}, with a different one on each rank before", rank=where,
                                expected=expected, got=got, cause="the ranks must start from the same parameters and "
                                f"buffers: broadcast every {kind} from rank 0")  # fmt: skip


def judge_one_step(call, of_each, gradients, n, every):
    after = f"after {every} backward{'s' * (every > 1)} and finish_gradient_synchronization() of {call}"
    trained = sum(value is not None for value in gradients.values())
    for where, of_rank in of_each:
        if of_rank["moved"]:
            raise Wrong(f"{of_rank['moved'][0]} {after}, with no step", rank=where, expected="unchanged", got="changed",
                        cause="the parameter was all-reduced instead of its gradient: use parameter.grad")  # fmt: skip
        if of_rank["too_early"]:
            raise Wrong(f"messages in the first {every - 1} of {every} backwards of a step, {call}", rank=where,
                        expected="none", got=f"{len(of_rank['too_early'])}: {of_rank['too_early'][0]}, ...",
                        cause="gradients are sent before the last backward of the step: let them add up on the rank, and "
                        "send the sum once")  # fmt: skip
        if of_rank["count"] > trained:
            raise Wrong(f"all-reduces in a step of {call}", rank=where, expected=f"at most {trained}, one per gradient",
                        got=of_rank["count"], cause="a gradient is sent twice: a tied weight has two names, but it is "
                        "one parameter; module.parameters() gives it once")  # fmt: skip
        compare_with_joined(after, where, gradients, of_rank["gradients"], n, every)
    for where, of_rank in of_each:
        if of_rank["forgotten"]:
            raise Wrong(f"finish_gradient_synchronization() of {call}", rank=where, expected="a wait() for each all-reduce",
                        got=f"{of_rank['forgotten']} of {of_rank['count']} not waited for",
                        cause="each all_reduce(..., async_op=True) returns its own work: keep all of them, and wait for "
                        "each")  # fmt: skip


def compare_with_joined(after, where, expected, got, n, every):
    """Raise Wrong unless gradients equal those of one process on the joined batch."""
    wrong = [
        name
        for name, gradient in expected.items()
        if (gradient is None) != (got[name] is None)
        or (gradient is not None and not equal_in_64_bits(got[name], gradient))
    ]
    if not wrong:
        return
    name, checked = wrong[0], f"the gradient of {wrong[0]} {after}"
    if expected[name] is None or got[name] is None:
        cause = "a frozen parameter has no gradient, and every other one has"
        raise Wrong(checked, rank=where, expected=expected[name] if got[name] is None else "None",
                    got="None" if got[name] is None else got[name], cause=cause)  # fmt: skip
    looks = [
        (n, "it is the sum over the ranks, not the mean: divide by the number of ranks"),
        (every, f"it is {every} times too large: the {every} backwards of a step have added up, so divide by their number"),
        (n * every, "it is the sum over all ranks and backwards: divide by the number of both"),
        (1 / n, "it was divided by the number of ranks twice"),
        (1 / every, "it was divided by the number of backwards twice"),
    ]  # fmt: skip
    cause = "did you send every gradient once it was complete, and wait for it?"
    if set(wrong) <= TIED:
        cause = TOO_SOON
    for factor, text in looks:
        if factor != 1 and close(got[name], expected[name] * factor):
            cause = text
            break
    judge_digits(checked, where, expected[name], got[name])
    raise Wrong(
        checked, rank=where, expected=expected[name], got=got[name], cause=cause
    )


TOO_SOON = (
    "only the weight that two layers share is wrong: backward adds to its gradient in both layers, and here it was sent, or "
    "divided, after the first of them. A hook on the parameter runs when its gradient is complete, one on a module does not"
)  # fmt: skip


def judge_history(call, of_each, history):
    for where, of_rank in of_each:
        for step, (expected, got) in enumerate(zip(history, of_rank["history"]), 1):
            wrong = [key for key in expected if not close(got[key], expected[key])]
            if not wrong:
                continue
            cause = "the first step was right, but a later one is not: what is left over from the step before?"
            if step == 1:
                cause = "the gradients were right when this step was watched alone: what is left over from then?"
            if set(wrong) <= TIED:
                cause = TOO_SOON
            raise Wrong(f"{wrong[0]} after step {step} of training with {call}", rank=where, expected=expected[wrong[0]],
                        got=got[wrong[0]], cause=cause)  # fmt: skip
        if of_rank["again"]:
            raise Wrong(f"the works that later steps of {call} wait for", rank=where, expected="only those of the same step",
                        got=f"also {of_rank['again']} of the first step", cause="the list of works keeps growing: clear "
                        "it at the end of finish_gradient_synchronization()")  # fmt: skip


def judge_times(call, where, of_rank, lateness, n):
    late = of_rank["count"] - of_rank["in_time"]
    if late or not of_rank["count"]:
        got = f"{late} of {of_rank['count']} after backward had ended"
        cause = "start the all-reduce in a hook: parameter.register_post_accumulate_grad_hook(...)"
        raise Wrong(f"when {call} started its all-reduces", rank=where,
                    expected="all of them during the last backward of the step",
                    got=got if of_rank["count"] else f"no all-reduce at all: {of_rank['all']}", cause=cause)  # fmt: skip
    if of_rank["waiting"] > 1:
        raise Wrong(f"gradients that are ready and not yet sent, in the last backward of a step of {call}", rank=where,
                    expected="at most one at any time", got=f"up to {of_rank['waiting']} at a time", cause="gradients "
                    "wait until others are ready: start the all-reduce of each one as soon as its hook is called in "
                    "the last backward, so that it travels while backward continues")  # fmt: skip
    if of_rank["blocked"] > lateness / 2:
        raise Wrong(f"how long backward took, while rank {n - 1} came {lateness} s late", rank=where,
                    expected="almost no time: backward continues, and only finish_gradient_synchronization() waits",
                    got=f"{of_rank['blocked']:.1f} s", cause="the hook waits for its all-reduce: pass async_op=True, "
                    "and keep the returned work to wait for it later")  # fmt: skip


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
        options = {"every": every} if every > 1 else {}
        judge_wrapper(answer, width, draw.randrange(10**6), n, every, options)
