"""Question 4: find the bugs in a step of a pipeline."""

from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import on_every_rank
from ddp_course.checks.ex18.step_cases import described, micro_batches, stage_of
from ddp_course.checks.ex18.step_claims import claims, works
from ddp_course.checks.ex18.step_works import noting_messages
from ddp_course.checks.training import gradients_of, state
from ddp_course.judge.answer import trying
from ddp_course.judge.known_errors import NO_GRADIENT
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group


def observe_steps(answer, cases):
    """Of each case, two steps, whose gradients add up."""
    seen = []
    with process_group(timeout=10) as (rank, _):
        for case in cases:
            stage, steps = stage_of(case, rank), []
            for step in range(2):
                inputs, targets = micro_batches(case, step)
                given, before = [*inputs, *targets], state(stage)
                copies = [tensor.clone() for tensor in given]
                dist.barrier()
                with noting_none(rank), trying(described(case)), CheckedWatch() as watch, noting_messages() as messages:
                    loss = answer(stage, inputs, targets)
                after = state(stage)
                steps.append({
                    "loss": as_number(loss), "gradients": gradients_of(stage),
                    "changed": sum(message.changed for message in messages),
                    "forgotten": sum(message.waited == 0 for message in messages),
                    "given": any(not torch.equal(*pair) for pair in zip(given, copies)),
                    "listed": [*map(id, [*inputs, *targets])] == [*map(id, given)],
                    "moved": any(not torch.equal(value, after[name]) for name, value in before.items()),
                    "sent": sorted([e["name"], e["peer"], e["bytes"]] for e in sendings(watch.log)),
                })  # fmt: skip
                dist.barrier()
            seen.append(steps)
    return seen


@contextmanager
def noting_none(rank):
    """An error in which a rank that has received inputs uses None gets a note."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        if rank > 0 and "NoneType" in str(error):
            error.add_note(NO_GRADIENT)
        raise


def as_number(loss):
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss.item()
    return loss if loss is None or isinstance(loss, float) else repr(loss)[:60]


def sendings(log):
    """All but what is received; a collective, as a barrier, is to nobody, -1."""
    for entry in log:
        if not entry["name"].startswith("recv"):
            yield entry if entry["peer"] is not None else entry | {"peer": -1}


@question(
    "Follow two micro-batches through two ranks on paper. Which memory does each message use, and who still needs what was "
    "in it? By which factors is a gradient multiplied on its way from the loss to the first rank? Then let the last "
    "micro-batch be smaller.",
    "Four places. A tensor that isend sends must not change before wait() has returned. What a rank has received in forward "
    "is needed in backward. The loss of the batch is a mean over its samples, not over its micro-batches. And what the last "
    "rank has multiplied into its loss is in every gradient that travels back.",
    "send: works.append(dist.isend(tensor, to)), with no buffer. In forward: x = torch.empty_like(inputs[i]); dist.recv(x, "
    "rank - 1); x.requires_grad_(). In the loss, len(y) / sum(map(len, inputs)) in the place of 1 / m. In backward, "
    "gradient without / m.",
)
def check_pipeline_step(answer, draw):
    """Loss and gradients of two steps are those of one process; one message per
    micro-batch and direction travels between neighbours, and none is left.
    """
    for n in (2, 3, 4):
        numbers = [(n + draw.randrange(1, 3), False), (n + draw.randrange(1, 4), True), (draw.randrange(1, n), False)]
        if n > 2:
            numbers[2] = (draw.randrange(2, n), True)
        cases = []
        for number, uneven in numbers:
            size = draw.randrange(3, 6)
            case = {"number": number, "size": size, "last": draw.randrange(1, size) if uneven else size}
            case |= {"width": draw.randrange(3, 6), "depths": [draw.randrange(1, 3) for _ in range(n)]}
            cases.append(case | {"seed": draw.randrange(10**6)})
        of_ranks = answer.on_ranks(observe_steps, cases, nproc=n, timeout=12)
        for place, case in enumerate(cases):
            for claimed in (works, claims):
                on_every_rank(partial(claimed, case), [seen[place] for seen in of_ranks])
