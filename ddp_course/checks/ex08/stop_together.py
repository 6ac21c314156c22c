"""Question 3: a callback that stops all ranks together and communicates rarely."""

import math
import os
import time
from contextlib import suppress

import torch
from torch import nn

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.ex08.on_ranks import PRELOADED, TIMEOUT, Meeting, a_trainer, in_row, ranks, settings
from ddp_course.checks.training import fill
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.launch import RankError, start_server

EPOCH, MAX_STEPS = 5, 11  # steps
# For each `every`: wishes in a step in which the ranks communicate, and in another one.
# Neither the step after the end that they lead to nor that end closes an epoch.
AT_ONCE = {2: [2, 6, 8], 3: [3, 6]}
LATER = {2: [5, 7], 3: [4, 5]}


class Square(nn.Module):
    """A small network that returns its own loss."""

    def __init__(self, seed):
        super().__init__()
        self.linear = fill(nn.Linear(3, 2), seed)

    def forward(self, inputs):
        return {"loss": self.linear(inputs).pow(2).mean()}


def trainings(stop_together, cases, every, seed):
    """A training for each case, {rank: the step at which it wants to stop}; what was
    seen of each.

    calls: what this rank's should_stop was asked; steps: how many were taken; ends: the
    notes of all ranks at the end of each step, and of each epoch; wanted: the ranks that
    wanted to stop, as the callback knows them.
    """
    meeting, seen = Meeting(), []
    rank, n = meeting.rank, meeting.n
    if n == 1:  # like a program started without a launcher, which has no process group
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    torch.manual_seed(seed)
    examples = [{"inputs": torch.randn(3, dtype=torch.float64)} for _ in range(2 * EPOCH * n)]
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "logging_steps": 1}
    with settings(meeting, max_steps=MAX_STEPS, **options) as made:
        for number, case in enumerate(cases):
            calls, ends = [], []

            def should_stop(step, calls=calls, wish=case.get(rank)):
                calls.append(step)
                if step == wish:
                    time.sleep(0.1)  # a rank that does not wait for this one will not know its wish
                return step == wish

            with trying(f"StopTogether(should_stop, {every})"):
                callback = stop_together(should_stop, every)
            trainer = a_trainer(Square(seed), made, examples, callbacks=[callback])
            meet_at_the_ends(trainer, meeting, number, ends)
            with suppress(Parted), trying(f"a training where {in_words(case, n)}"):
                trainer.train()
            seen.append(
                {
                    "calls": calls,
                    "steps": trainer.state.global_step,
                    "ends": ends,
                    "wanted": as_numbers(getattr(callback, "wanted", None)),
                }
            )
            if disagree(ends):
                break  # in another training run, they would only wait for each other
        return seen


def as_numbers(ranks):
    """A list of ranks as whole numbers, or in words if it is something else."""
    try:
        return [int(rank) for rank in ranks]
    except (TypeError, ValueError):
        return "nothing" if ranks is None else str(ranks)[:80]


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
            with CheckedWatch() as watch:
                given, control = control, call_all(args, state, control)
            flags = {name: getattr(control, name, None) for name in FLAGS}
            note = {name: None if flag is None else bool(flag) for name, flag in flags.items()}
            note |= {
                "event": event,
                "step": state.global_step,
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
                raise RuntimeError(f"{APART}rank {meeting.rank} has come to {where}, rank {other} {stands}")
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
    if len(case) == n and len(set(case.values())) == 1:
        return f"should_stop({case[0]}) is true" + " on all ranks" * (n > 1)
    if len(case) == 1:
        [(rank, step)] = case.items()
        return f"should_stop({step}) is true on rank {rank} alone"
    wishes = [f"should_stop({step}) on rank {rank}" for rank, step in case.items()]
    return f"{in_row(wishes)} are true"


@question(
    "The other ranks need information that only one rank has, so use a collective, which all ranks must call in the "
    "same steps. A rank may want to stop in a step in which nobody communicates: what must it remember until then?",
    "In __init__: self.wish = False. In each step: self.wish = self.should_stop(state.global_step) or self.wish. Where "
    "state.global_step is a multiple of self.every, every rank needs the wishes of all: a tensor of args.world_size "
    "zeros with the own wish in its place, summed by dist.all_reduce. Without a process group, "
    "dist.is_initialized() is False: then there are no other ranks.",
    "if state.global_step % self.every == 0: wishes = torch.zeros(args.world_size, dtype=torch.long, "
    "device=args.device); wishes[args.process_index] = int(self.wish); if dist.is_initialized(): "
    "dist.all_reduce(wishes); self.wanted = wishes.nonzero().flatten().tolist(); if self.wanted: "
    "control.should_training_stop = True",
)
def check_stop_together(answer, draw):
    """All ranks must stop after the first step in which they communicate and one of them
    wants to, or when Trainer ends by itself.
    """
    start_server(*PRELOADED)  # where none runs yet
    often, seldom = draw.sample([2, 3], 2)
    for n, every in ((2, often), (3, seldom), (1, often)):
        cases = some_cases(draw, n, every)
        seen = stopped(answer, cases, every, draw.randrange(10**6), n)
        judge_stops(cases, every, seen)


def some_cases(draw, n, every):
    """Wishes of one rank, of several and of all."""
    common = dict.fromkeys(range(n), draw.choice(LATER[every]))
    if n == 1:
        return [common]
    alone = {draw.randrange(1, n): draw.choice(LATER[every])}
    if n == 2:
        return [{}, {0: draw.choice(AT_ONCE[every])}, alone, common]
    some = sorted(draw.sample(range(n), 2))
    together = draw.choice([end for end in AT_ONCE[every] if end > every])
    steps = draw.sample([together - 1, together], 2)
    return [alone, dict(zip(some, steps)), common]


def stopped(answer, cases, every, seed, n):
    """`trainings` on n ranks. If they fail for a known reason, raise Wrong with that
    cause.
    """
    try:
        return answer.on_ranks(trainings, cases, every, seed, nproc=n, timeout=TIMEOUT)
    except RankError as error:
        said = error.message.splitlines()[0] if error.message else ""
        if APART in said:
            cause = ONE_SIDED if STUCK in said else ALONE
            raise Wrong(checked_in(error.message, n, every), expected="all ranks at the end of the same step",
                        got=said.split(APART)[1], cause=cause) from None  # fmt: skip
        if n == 1 and "process group has not been initialized" in said:
            raise Wrong(checked_in(error.message, n, every), expected="a stop without a process group", got=said,
                        cause=NO_GROUP) from None  # fmt: skip
        raise


NO_GROUP = "a process started without a launcher has no process group: check dist.is_initialized() first"
ALONE = (
    "no rank has waited for the decision of the others. If a rank stops alone, the others wait for it in their next "
    "backward: the decision needs a collective, on all ranks"
)
ONE_SIDED = (
    "a collective ends when all ranks have called it: call it in every step that is a multiple of `every`, even if this "
    "rank wants to continue"
)


def checked_in(message, n, every):
    """The case that failed, from the note that `trying` adds to an error."""
    case = message.splitlines()[-1].removeprefix("(in a training where ").removesuffix(")")
    return f"StopTogether(should_stop, {every}) on {ranks(n)}, where {case}"


def judge_stops(cases, every, seen):
    """Raise Wrong unless all ranks have asked in each step, and have communicated and
    stopped at the same, right steps.
    """
    n = len(seen)
    done = [[of_rank[number] for of_rank in seen] for number in range(len(seen[0]))]

    def checked(what, case):
        return f"{what}, with every={every} on {ranks(n)}, where {in_words(case, n)}"

    for case, (first, *_) in zip(cases, done):
        if disagree(first["ends"]):
            tell_of_the_parting(checked(f"step {first['steps']}", case), first["ends"][-1])
    for case, of_ranks in zip(cases, done):
        for rank, of_rank in enumerate(of_ranks):
            calls, steps = of_rank["calls"], of_rank["steps"]
            if calls != list(range(1, steps + 1)):
                raise Wrong(checked("the steps for which should_stop was called", case), rank=f"{rank} of {n}",
                            expected=f"each step from 1 to {steps}, once",
                            got=in_row(calls) if calls else "nothing",
                            cause=cause_of_calls(calls, every))  # fmt: skip
    for case, (first, *_) in zip(cases, done):
        judge_silence(checked, case, every, first["ends"])
    for case, (first, *_) in zip(cases, done):
        if first["steps"] != (truth := end_of(case, every)):
            raise Wrong(checked(f"StopTogether, with max_steps={MAX_STEPS}", case),
                        expected=f"the end after step {truth}, on all ranks",
                        got=f"the end after step {first['steps']}",
                        cause=cause_of_end(case, every, first, cases, done))  # fmt: skip
    for case, of_ranks in zip(cases, done):
        judge_wanted(checked, case, [of_rank["wanted"] for of_rank in of_ranks], cases)
    for case, (first, *_) in zip(cases, done):
        judge_requests(checked, case, first["ends"])


def judge_silence(checked, case, every, ends):
    """Raise Wrong if the callback has communicated in other steps than agreed."""
    for notes in ends:
        for rank, note in enumerate(notes):
            agreed = note["event"] == "on_step_end" and note["step"] % every == 0
            if note["sent"] and not agreed:
                at = f"step {note['step']}"
                cause = f"the ranks communicate after every {every} steps only, in the steps that are multiples of it: "
                cause += "a rank keeps its wish until then"
                if note["event"] == "on_epoch_end":
                    at = f"the end of the epoch, after step {note['step']}"
                    cause = (
                        "the end of an epoch may be far away: decide in on_step_end, in the steps that are multiples "
                    )
                    cause += "of `every`"
                raise Wrong(checked(f"collectives at {at}", case), rank=f"{rank} of {len(notes)}",
                            expected="none", got=note["sent"], cause=cause)  # fmt: skip


def judge_wanted(checked, case, wanted, cases):
    """Raise Wrong unless all ranks know which of them wanted to stop."""
    n, truth = len(wanted), sorted(case)
    for rank, got in enumerate(wanted):
        if got != truth:
            raise Wrong(checked("self.wanted after the training", case), rank=f"{rank} of {n}",
                        expected=truth, got=got,
                        cause=cause_of_wanted(case, wanted, rank, cases))  # fmt: skip


def cause_of_wanted(case, wanted, rank, cases):
    n, got, truth = len(wanted), wanted[rank], sorted(case)
    if isinstance(got, str):
        return "self.wanted is a list of ranks: [] until some rank has wanted to stop"
    if sorted(got) == truth:
        return "list the ranks in order"
    if truth in wanted:
        return (
            "this rank does not know it: does it list only its own wish, or has only one rank the result? all_reduce and "
            "all_gather give all ranks the wishes of all"
        )
    if all(of_rank == [at] * (at in case) for at, of_rank in enumerate(wanted)):
        return "each rank lists only itself: it needs the wishes of the others, not only whether there is one"
    if set(truth) < set(got) and any(cases[: cases.index(case)]):
        return REMEMBERS
    if got == [int(at in case) for at in range(n)]:
        return "these are the wishes of all ranks: list the ranks whose wish is true"
    if set(got) < set(truth):
        return "a rank that wanted to stop is missing: several may want it, and each wish counts until the ranks communicate"
    return "list the ranks that wanted to stop, by their numbers, and no others"


def judge_requests(checked, case, ends):
    """Raise Wrong if the callback has undone what others have asked for."""
    for notes in ends:
        if notes[0]["event"] != "on_step_end":
            continue
        for rank, note in enumerate(notes):
            undone = ["should_log"] * (not note["should_log"]) + note["undone"]
            if undone:
                cause = "the callback has set it to False, but another callback has asked for it: set only "
                cause += "should_training_stop"
                if not note["given"]:
                    cause = "a new TrainerControl loses the requests of other callbacks: change the given one"
                raise Wrong(checked(f"control.{undone[0]} at the end of step {note['step']}", case),
                            rank=f"{rank} of {len(notes)}", expected="True, as another callback has asked for",
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
    raise Wrong(checked, expected="the same decision on all ranks", got=got, cause=cause)


def end_of(case, every):
    """The step after which a training run must end."""
    first = min(case.values(), default=MAX_STEPS)
    return min(math.ceil(first / every) * every, MAX_STEPS)


def cause_of_calls(calls, every):
    if not calls:
        return "only this rank knows what it wants: every rank must call its own should_stop"
    if not all(type(call) is int for call in calls):
        return "should_stop takes the number of the step, state.global_step"
    if len(set(calls)) < len(calls):
        return "it is called more than once per step, which may have several micro-batches: store its answer"
    if calls[0] == 0:
        return "the first step is 1: call it in on_step_end, when state.global_step is 1, not earlier"
    if all(call % every == 0 for call in calls):
        return "call it in every step, also where the ranks do not communicate: it may be true in one step only"
    if all(call % EPOCH == 0 or call == MAX_STEPS for call in calls):
        return f"it is called at the end of each epoch, so only once in {EPOCH} steps"
    return "call it at the end of every step, until training stops"


def cause_of_end(case, every, seen, cases, done):
    """Why a training run did not end at the right step. done: the runs of each case, on
    each rank.
    """
    end, truth = seen["steps"], end_of(case, every)
    if end > MAX_STEPS:
        return OVERRULED
    if end < truth:
        return cause_of_early_end(case, every, end, cases)
    if any(note["should_epoch_stop"] for notes in seen["ends"] for note in notes):
        return "should_epoch_stop ends only the current epoch, and the next one begins: use should_training_stop"
    if end == truth + 1:
        return "it comes one step late: every rank must know the decision before it starts the next step"
    if end == truth + every:
        return f"it comes {every} steps late: decide in the same step in which the ranks communicate"
    heard = [case for case, (first, *_) in zip(cases, done) if case and first["steps"] == end_of(case, every)]
    if not heard:
        return "no rank has stopped: Trainer checks control.should_training_stop"
    if at_once(heard, every) and not at_once([case], every):
        return (
            "a wish is lost if it comes in a step in which the ranks do not communicate: each rank must remember its wish "
            "until they do"
        )
    decisive = set.intersection(*map(set, heard))
    if len(decisive) > 1:
        return "they stop only if all ranks, or most of them, want to: one rank must be enough, as with a maximum"
    if decisive:
        return f"only rank {min(decisive)} decides: it sends its wish to the others, but gets nothing from them"
    return "one rank can stop all ranks, but several at the same time cannot: the sum of their wishes is more than 1"


def cause_of_early_end(case, every, end, cases):
    if end == every and any(cases[: cases.index(case)]):
        # as it was when each training before this one had ended at the right step
        return REMEMBERS
    if end == min(case.values(), default=None):
        return "that is the step of the wish: training goes on until the next multiple of `every`, on a single process, too"
    return "no rank wanted to stop so soon: is the test of should_stop inverted?"


def at_once(cases, every):
    """Whether all wishes came in steps in which the ranks communicate."""
    return all(step % every == 0 for case in cases for step in case.values())


REMEMBERS = (
    "no rank wanted to stop so soon, but in the training before one did: does the class, or a global variable, "
    "still know of it? What belongs to one training belongs into self"
)
OVERRULED = (
    "Trainer wanted to stop at max_steps, but was overruled: set should_training_stop to True if a rank wants to "
    "stop, and otherwise leave it unchanged"
)
