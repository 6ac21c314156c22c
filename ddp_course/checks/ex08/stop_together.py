"""Question 3: a callback that stops all ranks together."""

import os
import time
from contextlib import suppress

import torch
from torch import nn

from ddp_course.checks.ex08.on_ranks import (
    PRELOADED,
    TIMEOUT,
    Meeting,
    a_trainer,
    in_row,
    ranks,
    settings,
)
from ddp_course.checks.training import fill
from ddp_course.ranks.launch import RankError, start_server
from ddp_course.ranks.watch import Watch
from ddp_course.school.judge import Wrong, question, trying

EPOCH, MAX_STEPS = 4, 9  # steps
STOPS = [
    1,
    2,
    5,
    6,
]  # steps after which the next one is not the end of an epoch, nor the last of all


class Square(nn.Module):
    """A small network that returns its own loss."""

    def __init__(self, seed):
        super().__init__()
        self.linear = fill(nn.Linear(3, 2), seed)

    def forward(self, inputs):
        return {"loss": self.linear(inputs).pow(2).mean()}


def trainings(stop_together, cases, seed):
    """A training for each case, {rank: the step at which it wants to stop}; what was
    seen of each.

    calls: what this rank's should_stop was asked; steps: how many were taken; ends: the
    notes of all ranks at the end of each step, and of each epoch.
    """
    meeting, seen = Meeting(), []
    rank, n = meeting.rank, meeting.n
    if n == 1:  # like a program started without a launcher, which has no process group
        for name in (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
        ):
            del os.environ[name]
    torch.manual_seed(seed)
    examples = [
        {"inputs": torch.randn(3, dtype=torch.float64)} for _ in range(2 * EPOCH * n)
    ]
    options = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
    }
    with settings(meeting, max_steps=MAX_STEPS, **options) as made:
        for number, case in enumerate(cases):
            calls, ends = [], []

            def should_stop(step, calls=calls, wish=case.get(rank)):
                calls.append(step)
                if step == wish:
                    time.sleep(
                        0.1
                    )  # a rank that does not wait for this one will not know its wish
                return step == wish

            trainer = a_trainer(
                Square(seed), made, examples, callbacks=[stop_together(should_stop)]
            )
            meet_at_the_ends(trainer, meeting, number, ends)
            with suppress(Parted), trying(f"a training where {in_words(case, n)}"):
                trainer.train()
            seen.append(
                {"calls": calls, "steps": trainer.state.global_step, "ends": ends}
            )
            if disagree(ends):
                break  # in another training run, they would only wait for each other
        return seen


def meet_at_the_ends(trainer, meeting, number, ends):
    """Let the ranks meet at the end of each step and epoch, before one can wait for
    another forever.
    """

    def then_meet(event):
        call_all = getattr(trainer.callback_handler, event)

        def call_and_meet(args, state, control):
            place = f"training {number}, {event}, step {state.global_step}"
            meeting.leave(f"to {place}", True)
            asked = requests(control, event, state.global_step)
            with Watch() as watch:
                given, control = control, call_all(args, state, control)
            flags = {name: getattr(control, name, None) for name in FLAGS}
            note = {
                name: None if flag is None else bool(flag)
                for name, flag in flags.items()
            }
            note |= {
                "event": event,
                "kind": type(control).__name__,
                "given": control is given,
                "undone": [name for name in asked if not getattr(control, name, None)],
                "sent": len(watch.log),
            }
            if hasattr(control, "should_save"):
                for name in asked:  # Trainer need not do it
                    setattr(control, name, False)
            notes = meeting.notes(place, note)
            if None in notes:
                other = notes.index(None)
                stands = STUCK if meeting.left_by(other, f"to {place}") else GOES_ON
                where = f"the end of the {event.split('_')[1]}, after step {state.global_step}"
                raise RuntimeError(
                    f"{APART}rank {meeting.rank} has come to {where}, rank {other} {stands}"
                )
            ends.append(notes)
            if disagree(ends):
                raise Parted
            return control

        return call_and_meet

    for event in ("on_step_end", "on_epoch_end"):
        setattr(trainer.callback_handler, event, then_meet(event))


def requests(control, event, step):
    """Ask for what another callback might ask for; return its names."""
    asked = ["should_save", "should_evaluate"][step % 2 :] if "step" in event else []
    for name in asked:
        setattr(control, name, True)
    return asked


FLAGS = ["should_training_stop", "should_epoch_stop", "should_log"]
APART = "the ranks are apart: "
STUCK, GOES_ON = "has not returned from its callback there", "goes on with the epoch"


class Parted(Exception):
    """The ranks would not continue together."""


def disagree(ends):
    """Whether, in the last of these steps, some ranks stop and others continue, or have
    lost the control.
    """
    flags = {note["should_training_stop"] for notes in ends[-1:] for note in notes}
    return len(flags) > 1 or None in flags


def in_words(case, n):
    if not case:
        return "should_stop is never true"
    [step] = set(case.values())
    who = f"rank {next(iter(case))} alone" if len(case) < n else "all ranks"
    return f"should_stop({step}) is true" + f" on {who}" * (n > 1)


@question(
    "The other ranks need information that only one rank has, so use a collective. A collective ends only when all "
    "ranks have called it, so every rank must call it in every step, whether or not it wants to stop.",
    "0 or 1 from each rank, as a tensor of integers, and one dist.all_reduce of it, with dist.ReduceOp.MAX or the "
    "sum. Without a process group, dist.is_initialized() is False: then there are no other ranks.",
    "wish = torch.tensor(int(self.should_stop(state.global_step)), device=args.device); if "
    "dist.is_initialized(): dist.all_reduce(wish, dist.ReduceOp.MAX); if wish: "
    "control.should_training_stop = True",
)
def check_stop_together(answer, draw):
    """All ranks must stop after the first step at which one of them wants to, or when
    Trainer ends by itself.
    """
    start_server(*PRELOADED)  # where none runs yet
    for n in (2, 3, 1):
        one, other, common = draw.sample(STOPS, 3)
        cases = [{}, {0: one}] if n == 2 else []
        cases += [{draw.randrange(1, n): other}] if n > 1 else []
        cases += [dict.fromkeys(range(n), common)]
        judge_stops(cases, stopped(answer, cases, draw.randrange(10**6), n))


def stopped(answer, cases, seed, n):
    """`trainings` on n ranks. If they fail for a known reason, raise Wrong with that
    cause.
    """
    try:
        return answer.on_ranks(trainings, cases, seed, nproc=n, timeout=TIMEOUT)
    except RankError as error:
        said = error.message.splitlines()[0] if error.message else ""
        if APART in said:
            cause = ONE_SIDED if STUCK in said else ALONE
            raise Wrong(checked_in(error.message, n), expected="all ranks at the end of the same step",
                        got=said.split(APART)[1], cause=cause) from None  # fmt: skip
        if n == 1 and "process group has not been initialized" in said:
            raise Wrong(checked_in(error.message, n), expected="a stop without a process group", got=said,
                        cause=NO_GROUP) from None  # fmt: skip
        raise


NO_GROUP = "a process started without a launcher has no process group: check dist.is_initialized() first"
ALONE = (
    "no rank has waited for the decision of the others. If a rank stops alone, the others wait for it in their next "
    "backward: the decision needs a collective in every step"
)
ONE_SIDED = "a collective ends when all ranks have called it: call it in every step, even if this rank wants to continue"


def checked_in(message, n):
    """The case that failed, from the note that `trying` adds to an error."""
    case = (
        message.splitlines()[-1].removeprefix("(in a training where ").removesuffix(")")
    )
    return f"StopTogether on {ranks(n)}, where {case}"


def judge_stops(cases, seen):
    """Raise Wrong unless all ranks have asked in each step and have stopped at the
    same, right step.
    """
    n = len(seen)
    done = [[of_rank[number] for of_rank in seen] for number in range(len(seen[0]))]
    for case, (first, *_) in zip(cases, done):
        if disagree(first["ends"]):
            checked = f"step {first['steps']} on {ranks(n)}, where {in_words(case, n)}"
            tell_of_the_parting(checked, first["ends"][-1])
    for case, of_ranks in zip(cases, done):
        for rank, of_rank in enumerate(of_ranks):
            calls, steps = of_rank["calls"], of_rank["steps"]
            if calls != list(range(1, steps + 1)):
                raise Wrong(f"the steps for which should_stop was called, where {in_words(case, n)}", rank=f"{rank} of {n}",
                            expected=f"each step from 1 to {steps}, once",
                            got=in_row(calls) if calls else "nothing",
                            cause=cause_of_calls(calls))  # fmt: skip
    for case, (first, *_) in zip(cases, done):
        if first["steps"] != (truth := end_of(case)):
            raise Wrong(f"StopTogether on {ranks(n)}, where {in_words(case, n)}, and max_steps={MAX_STEPS}",
                        expected=f"the end after step {truth}, on all ranks",
                        got=f"the end after step {first['steps']}",
                        cause=cause_of_end(case, first, cases, done))  # fmt: skip
    for case, (first, *_) in zip(cases, done):
        of_steps = [
            notes for notes in first["ends"] if notes[0]["event"] == "on_step_end"
        ]
        for step, notes in enumerate(of_steps, 1):
            for rank, note in enumerate(notes):
                undone = ["should_log"] * (not note["should_log"]) + note["undone"]
                if undone:
                    cause = "the callback has set it to False, but another callback has asked for it: set only "
                    cause += "should_training_stop"
                    if not note["given"]:
                        cause = "a new TrainerControl loses the requests of other callbacks: change the given one"
                    raise Wrong(f"control.{undone[0]} at the end of step {step}, where {in_words(case, n)}",
                                rank=f"{rank} of {n}", expected="True, as another callback has asked for",
                                got="False", cause=cause)  # fmt: skip


def tell_of_the_parting(checked, notes):
    stops = [note["should_training_stop"] for note in notes]
    if None in stops:
        kind = notes[stops.index(None)]["kind"]
        raise Wrong(checked, expected="control or None", got=f"a {kind}",
                    cause="Trainer uses the return value of a callback as the new control: change the given one, "
                    "and return it or None")  # fmt: skip
    cause = ALONE
    if notes[0]["sent"]:
        cause = "the ranks have communicated, but not all of them have the result: reduce and gather give the "
        cause += "result to one rank, all_reduce and all_gather to all"
    got = f"rank {stops.index(True)} stops, rank {stops.index(False)} goes on"
    raise Wrong(
        checked, expected="the same decision on all ranks", got=got, cause=cause
    )


def end_of(case):
    """The step after which a training run must end."""
    return min(case.values(), default=MAX_STEPS)


def cause_of_calls(calls):
    if not calls:
        return "only this rank knows what it wants: every rank must call its own should_stop"
    if not all(type(call) is int for call in calls):
        return "should_stop takes the number of the step, state.global_step"
    if len(set(calls)) < len(calls):
        return "it is called more than once per step, which may have several micro-batches: store its answer"
    if calls[0] == 0:
        return "the first step is 1: call it in on_step_end, when state.global_step is 1, not earlier"
    if all(call % EPOCH == 0 or call == MAX_STEPS for call in calls):
        return f"it is called at the end of each epoch, so only once in {EPOCH} steps"
    return "call it at the end of every step, until training stops"


def cause_of_end(case, seen, cases, done):
    """Why a training run did not end at the right step. done: the runs of each case, on
    each rank.
    """
    end, truth = seen["steps"], end_of(case)
    if end > MAX_STEPS:
        return OVERRULED
    if end < truth:
        place = cases.index(case)
        if end == 1 and any(cases[:place]):
            # as it was when each training before this one had ended at the right step
            return REMEMBERS
        return "no rank wanted to stop so soon: is the test of should_stop inverted?"
    if any(note["should_epoch_stop"] for notes in seen["ends"] for note in notes):
        return "should_epoch_stop ends only the current epoch, and the next one begins: use should_training_stop"
    if end == truth + 1:
        return "it comes one step late: every rank must know the decision before it starts the next step"
    if end % EPOCH == 0:
        return "it comes at the end of the epoch: decide in on_step_end"
    heard = [
        case
        for case, (first, *_) in zip(cases, done)
        if case and first["steps"] == end_of(case)
    ]
    if not heard:
        return "no rank has stopped: Trainer checks control.should_training_stop"
    decisive = set.intersection(*map(set, heard))
    if decisive == set(cases[-1]):
        return "they stop only if all ranks, or most of them, want to: one rank must be enough, as with a maximum"
    if decisive:
        return f"only rank {min(decisive)} decides: it sends its wish to the others, but gets nothing from them"
    return "one rank can stop all ranks, but several at the same time cannot: the sum of their wishes is more than 1"


REMEMBERS = (
    "no rank wanted to stop so soon, but in the training before one did: does the class, or a global variable, "
    "still know of it? What belongs to one training belongs into self"
)
OVERRULED = (
    "Trainer wanted to stop at max_steps, but was overruled: set should_training_stop to True if a rank wants to "
    "stop, and otherwise leave it unchanged"
)
