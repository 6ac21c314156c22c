"""Question 3: a callback that stops all ranks together and communicates rarely."""

import math
import os
import time
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from torch import nn

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import Claim, hold
from ddp_course.checks.ex08.on_ranks import PRELOADED, TIMEOUT, Meeting, a_trainer, in_row, ranks, settings
from ddp_course.checks.training import fill
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.launch import RankError, start_server
from ddp_course.ranks.watch import Watch

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


class Case(NamedTuple):
    """wishes: {rank: the step at which it wants to stop}; other: the step at which another
    callback asks for the end, or None.
    """

    wishes: dict
    other: int | None = None


def trainings(stop_together, cases, every, seed):
    """A training for each Case; what was seen of each.

    calls: what this rank's should_stop was asked; asked: when; steps: how many were taken;
    ends: the notes of all ranks at the end of each step, and of each epoch; elsewhere:
    what this rank has sent at other times; wanted: the ranks that wanted to stop, as the
    callback knows them.
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
            calls, notes = [], Notes(meeting, number, case.other)

            def should_stop(step, calls=calls, wish=case.wishes.get(rank), notes=notes):
                calls.append(step)
                notes.asked.append(notes.event)
                if step == wish:
                    time.sleep(0.1)  # a rank that does not wait for this one will not know its wish
                return step == wish

            with trying(f"StopTogether(should_stop, {every})"), notes.listening("__init__", 0):
                callback = stop_together(should_stop, every)
            notes.wanted = lambda callback=callback: as_numbers(getattr(callback, "wanted", None))
            trainer = a_trainer(Square(seed), made, examples, callbacks=[callback])
            notes.take(trainer.callback_handler)
            with suppress(Parted), trying(f"a training where {in_words(case, n)}"):
                trainer.train()
            steps = trainer.state.global_step
            more = {"calls": calls, "steps": steps, "wanted": notes.wanted()}
            seen.append(more | {"asked": notes.asked, "ends": notes.ends, "elsewhere": notes.elsewhere})
            if disagree(notes.ends):
                break  # in another training run, they would only wait for each other
        return seen


def as_numbers(ranks):
    """A list of ranks as whole numbers, or in words if it is something else."""
    try:
        return [int(rank) for rank in ranks]
    except (TypeError, ValueError):
        return "nothing" if ranks is None else str(ranks)[:80]


class Notes:
    """What is noted of a training while it goes on. event: in which the callbacks are now."""

    def __init__(self, meeting, number, other):
        self.meeting, self.number, self.other = meeting, number, other
        self.asked, self.ends, self.elsewhere, self.event = [], [], [], None

    def take(self, handler):
        """Watch the callbacks in each event. Let the ranks meet at the end of each step and
        epoch, before one can wait for another forever.
        """
        call_event = handler.call_event

        def call(event, args, state, control, **more):
            if event in ("on_step_end", "on_epoch_end"):
                return call_event(event, args, state, control, **more)
            with self.listening(event, state.global_step):
                return call_event(event, args, state, control, **more)

        handler.call_event = call
        for event in ("on_step_end", "on_epoch_end"):
            setattr(handler, event, self.then_meet(event, getattr(handler, event)))

    @contextmanager
    def listening(self, event, step):
        with Watch() as watch:  # a CheckedWatch takes too long for all these events
            yield
        if watch.log:
            self.elsewhere.append({"event": event, "step": step, "sent": len(watch.log)})

    def then_meet(self, event, call_all):
        def call_and_meet(args, state, control):
            place = f"training {self.number}, {event}, step {state.global_step}"
            self.meeting.leave(f"to {place}", True)
            asked = requests(control, event, state.global_step, self.other)
            self.event = event
            with CheckedWatch() as watch:
                given, control = control, call_all(args, state, control)
            self.event = None
            flags = {name: getattr(control, name, None) for name in FLAGS}
            note = {name: None if flag is None else bool(flag) for name, flag in flags.items()}
            note |= {
                "event": event,
                "step": state.global_step,
                "kind": type(control).__name__,
                "given": control is given,
                "undone": [name for name in asked if not getattr(control, name, None)],
                "sent": len(watch.log),
                "wanted": self.wanted(),
            }
            if hasattr(control, "should_save"):
                control.should_save = control.should_evaluate = False  # Trainer need not do it
            notes = self.meeting.notes(place, note)
            if None in notes:
                other = notes.index(None)
                stands = STUCK if self.meeting.left_by(other, f"to {place}") else GOES_ON
                where = f"the end of the {event.split('_')[1]}, after step {state.global_step}"
                raise RuntimeError(f"{APART}rank {self.meeting.rank} has come to {where}, rank {other} {stands}")
            self.ends.append(notes)
            if disagree(self.ends):
                raise Parted
            return control

        return call_and_meet


def requests(control, event, step, other):
    """Ask for what another callback might ask for; return its names."""
    asked = ["should_save", "should_evaluate"][step % 2 :] if "step" in event else []
    if "step" in event and step == other:
        asked.append("should_training_stop")
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
    wishes, other = case
    if other:
        return f"another callback sets should_training_stop in step {other}"
    if not wishes:
        return "should_stop is never true"
    if len(wishes) == n and len(set(wishes.values())) == 1:
        return f"should_stop({wishes[0]}) is true" + " on all ranks" * (n > 1)
    if len(wishes) == 1:
        [(rank, step)] = wishes.items()
        return f"should_stop({step}) is true on rank {rank} alone"
    listed = [f"should_stop({step}) on rank {rank}" for rank, step in wishes.items()]
    return f"{in_row(listed)} are true"


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
    wants to, or when Trainer, or another callback, ends the training.
    """
    start_server(*PRELOADED)  # where none runs yet
    often, seldom = draw.sample([2, 3], 2)
    for n, every in ((2, often), (3, seldom), (1, often)):
        cases = some_cases(draw, n, every)
        seen = stopped(answer, cases, every, draw.randrange(10**6), n)
        run = [Training(case, every, of_ranks, cases) for case, *of_ranks in zip(cases, *seen)]
        for claims in (decided_together, asked_in_each_step, silent, ended, known, untouched):
            for training in run:
                for rank in range(n):
                    hold(claims(training, rank, run), f"{rank} of {n}")


def some_cases(draw, n, every):
    """Wishes of one rank, of several and of all; and the end that another callback wants."""
    common = Case(dict.fromkeys(range(n), draw.choice(LATER[every])))
    if n == 1:
        return [common]
    alone = Case({draw.randrange(1, n): draw.choice(LATER[every])})
    if n == 2:
        overruled = Case({}, other=draw.choice(AT_ONCE[every]))
        return [Case({}), overruled, Case({0: draw.choice(AT_ONCE[every])}), alone, common]
    some = sorted(draw.sample(range(n), 2))
    together = draw.choice([end for end in AT_ONCE[every] if end > every])
    steps = draw.sample([together - 1, together], 2)
    return [alone, Case(dict(zip(some, steps))), common]


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


# ---- what is claimed ----


class Training(NamedTuple):
    """One of the trainings, as all ranks have seen it; cases: those of all trainings."""

    case: Case
    every: int
    of_ranks: list
    cases: list

    @property
    def end(self):
        return end_of(self.case, self.every)

    def says(self, what):
        n = len(self.of_ranks)
        return f"{what}, with every={self.every} on {ranks(n)}, where {in_words(self.case, n)}"

    def after_another(self):
        """Whether a rank wanted to stop in a training before this one."""
        return any(case.wishes for case in self.cases[: self.cases.index(self.case)])


def decided_together(training, rank, run):
    """That all ranks stop, or none, at each end; and that Trainer has its control."""
    ends = training.of_ranks[rank]["ends"]
    if not disagree(ends):
        return
    notes, what = ends[-1], training.says(f"step {training.of_ranks[rank]['steps']}")
    stops = [note["should_training_stop"] for note in notes]
    if None in stops:
        yield Claim(what, f"a {notes[stops.index(None)]['kind']}", "control or None", NO_CONTROL)
    got = f"rank {stops.index(True)} stops, rank {stops.index(False)} goes on"
    yield Claim(what, got, "the same decision on all ranks", FOR_ONE if notes[0]["sent"] else ALONE)


def asked_in_each_step(training, rank, run):
    seen = training.of_ranks[rank]
    calls, steps = seen["calls"], seen["steps"]
    yield Claim(
        training.says("the steps for which should_stop was called"), calls, list(range(1, steps + 1)),
        cause_of_calls(calls, training.every),
        told=f"each step from 1 to {steps}, once", shown=in_row(calls) if calls else "nothing",
    )  # fmt: skip
    yield Claim(
        training.says("when should_stop was called"), seen["asked"], ["on_step_end"] * steps,
        "should_stop is asked at the end of each step: call it in on_step_end", told="in on_step_end", shown="elsewhere",
    )  # fmt: skip


def silent(training, rank, run):
    """That the callback communicates only in the steps that are multiples of `every`."""
    every = training.every
    rarely = (
        f"the ranks communicate after every {every} steps only, in the steps that are multiples of it: a rank keeps its "
        "wish until then"
    )
    late = "the end of an epoch may be far away: decide in on_step_end, in the steps that are multiples of `every`"
    for note in (notes[rank] for notes in training.of_ranks[rank]["ends"]):
        if note["event"] == "on_epoch_end":
            at = f"the end of the epoch, after step {note['step']}"
            yield Claim(training.says(f"collectives at {at}"), note["sent"], 0, late, told="none")
        elif note["step"] % every:
            at = f"step {note['step']}"
            yield Claim(training.says(f"collectives at {at}"), note["sent"], 0, rarely, told="none")
    for note in training.of_ranks[rank]["elsewhere"]:
        what = training.says(f"collectives in {note['event']}, after {note['step']} steps")
        yield Claim(what, note["sent"], 0, f"communicate in on_step_end only: {rarely}", told="none")


def ended(training, rank, run):
    steps = training.of_ranks[rank]["steps"]
    cause = "" if steps == training.end else cause_of_end(training, run)
    yield Claim(
        training.says(f"StopTogether, with max_steps={MAX_STEPS}"), steps, training.end, cause,
        told=f"the end after step {training.end}, on all ranks", shown=f"the end after step {steps}",
    )  # fmt: skip


def known(training, rank, run):
    """That each rank knows which of them wanted to stop, once all stop, and not before."""
    got, truth = training.of_ranks[rank]["wanted"], sorted(training.case.wishes)
    cause = "" if got == truth else cause_of_wanted(training, rank)
    yield Claim(training.says("self.wanted after the training"), got, truth, cause)
    for note in (notes[rank] for notes in training.of_ranks[rank]["ends"]):
        if note["step"] < training.end:
            what = training.says(f"self.wanted at the end of step {note['step']}")
            yield Claim(what, note["wanted"], [], TOO_SOON)


def untouched(training, rank, run):
    """That the callback has not undone what others have asked for."""
    for note in (notes[rank] for notes in training.of_ranks[rank]["ends"]):
        if note["event"] == "on_step_end":
            undone = ["should_log"] * (not note["should_log"]) + note["undone"]
            what = training.says(f"control.{', '.join(undone[:1])} at the end of step {note['step']}")
            cause = SET_TO_FALSE if note["given"] else NEW_CONTROL
            yield Claim(what, undone, [], cause, told="True, as another callback has asked for", shown="False")


NO_CONTROL = (
    "Trainer uses the return value of a callback as the new control: change the given one, and return it or None"
)
FOR_ONE = (
    "the ranks have communicated, but not all of them have the result: reduce and gather give the result to one rank, "
    "all_reduce and all_gather to all"
)
TOO_SOON = "until all ranks stop, self.wanted is [], on every rank: keep a rank's own wish under another name"
SET_TO_FALSE = "the callback has set it to False, but another callback has asked for it: set only should_training_stop"
NEW_CONTROL = "a new TrainerControl loses the requests of other callbacks: change the given one"


def end_of(case, every):
    """The step after which a training run must end."""
    first = min(case.wishes.values(), default=MAX_STEPS)
    return min(math.ceil(first / every) * every, case.other or MAX_STEPS, MAX_STEPS)


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


def cause_of_end(training, run):
    """Why a training run did not end at the right step. run: all trainings on these ranks."""
    case, every, (seen, *_), _ = training
    end, truth = seen["steps"], training.end
    if end > (case.other or MAX_STEPS):
        return OVERRULED
    if end < truth:
        return cause_of_early_end(training, end)
    if any(note["should_epoch_stop"] for notes in seen["ends"] for note in notes):
        return "should_epoch_stop ends only the current epoch, and the next one begins: use should_training_stop"
    if end == truth + 1:
        return "it comes one step late: every rank must know the decision before it starts the next step"
    if end == truth + every:
        return f"it comes {every} steps late: decide in the same step in which the ranks communicate"
    heard = [one.case.wishes for one in run if one.case.wishes and one.of_ranks[0]["steps"] == one.end]
    if not heard:
        return "no rank has stopped: Trainer checks control.should_training_stop"
    if at_once(heard, every) and not at_once([case.wishes], every):
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


def cause_of_early_end(training, end):
    if end == training.every and training.after_another():
        # as it was when each training before this one had ended at the right step
        return REMEMBERS
    if end == min(training.case.wishes.values(), default=None):
        return "that is the step of the wish: training goes on until the next multiple of `every`, on a single process, too"
    return "no rank wanted to stop so soon: is the test of should_stop inverted?"


def cause_of_wanted(training, rank):
    wanted, wishes = [of_rank["wanted"] for of_rank in training.of_ranks], training.case.wishes
    got, truth = wanted[rank], sorted(wishes)
    if isinstance(got, str):
        return "self.wanted is a list of ranks: [] until some rank has wanted to stop"
    if sorted(got) == truth:
        return "list the ranks in order"
    if truth in wanted:
        return (
            "this rank does not know it: does it list only its own wish, or has only one rank the result? all_reduce and "
            "all_gather give all ranks the wishes of all"
        )
    if all(of_rank == [at] * (at in wishes) for at, of_rank in enumerate(wanted)):
        return "each rank lists only itself: it needs the wishes of the others, not only whether there is one"
    if set(truth) < set(got) and training.after_another():
        return REMEMBERS
    if got == [int(at in wishes) for at in range(len(wanted))]:
        return "these are the wishes of all ranks: list the ranks whose wish is true"
    if set(got) < set(truth):
        return "a rank that wanted to stop is missing: several may want it, and each wish counts until the ranks communicate"
    return "list the ranks that wanted to stop, by their numbers, and no others"


def at_once(cases, every):
    """Whether all wishes came in steps in which the ranks communicate."""
    return all(step % every == 0 for wishes in cases for step in wishes.values())


REMEMBERS = (
    "no rank wanted to stop so soon, but in the training before one did: does the class, or a global variable, "
    "still know of it? What belongs to one training belongs into self"
)
OVERRULED = (
    "Trainer, at max_steps, or another callback wanted to stop, but was overruled: set should_training_stop to True if a "
    "rank wants to stop, and otherwise leave it unchanged"
)
