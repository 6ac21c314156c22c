"""Question 3: the seconds of a step on several machines, and the bandwidth from which on
they pay.
"""

import math
import os
import time
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_course.checks.claims import Between, Claim, agree, hold
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.variables import NETWORK

STEPS = 3  # that are measured; the shortest counts
DIGITS = 6


# ---- cases ----


class Case(NamedTuple):
    """The arguments of step_seconds, and what follows from them; those of
    bandwidth_that_pays are all but the last.
    """

    machines: int
    sample: float
    batch: int
    gradient: int
    delay: float
    bandwidth: float | None = None

    def __str__(self):
        given = {name: value for name, value in self._asdict().items() if value is not None}
        words = (f"{value:.4g}" if isinstance(value, float) else f"{value}" for value in given.values())
        return ", ".join(map("=".join, zip(given, words)))

    @property
    def alone(self):
        return self.sample * self.batch

    @property
    def computing(self):
        """The seconds of the machine with the most samples."""
        return self.sample * math.ceil(self.batch / self.machines)

    @property
    def messages(self):
        """Those of a ring all-reduce that wait for each other."""
        return 2 * (self.machines - 1)

    @property
    def sent(self):
        """The bytes of a ring all-reduce from each machine."""
        return self.messages * self.gradient / self.machines

    @property
    def network(self):
        return self.messages * self.delay + self.sent / self.bandwidth

    @property
    def step(self):
        return self.computing + self.network

    @property
    def left(self):
        """The seconds that are left for the bytes; not above 0 if there are none."""
        return self.alone - self.computing - self.messages * self.delay

    @property
    def threshold(self):
        return self.sent / self.left if self.left > 0 else math.inf


def a_case(draw, machines, shortest=0.02):
    """Computing and each part of the communication take about as long as `shortest`
    seconds, or some times that.
    """
    batch = machines * draw.randrange(5, 9) + draw.randrange(1, machines)
    messages = 2 * (machines - 1)
    gradient = 4 * machines * draw.randrange(20_000, 60_000)
    return Case(
        machines=machines,
        sample=draw.uniform(2, 4) * shortest / batch * machines,
        batch=batch,
        gradient=gradient,
        delay=draw.uniform(0.6, 1) * shortest / messages,
        bandwidth=gradient * messages / machines / shortest / draw.uniform(1, 2),
    )


def cases_of(draw):
    """The first three are measured, too; the others are too large, or need one machine."""
    measured = [a_case(draw, machines) for machines in (2, 3, 4)]
    large = [a_case(draw, draw.randrange(9, 60), shortest=1.0) for _ in range(4)]
    large[0] = large[0]._replace(batch=large[0].machines * draw.randrange(5, 9) + 1)
    alone = a_case(draw, 3)._replace(machines=1)
    whole = a_case(draw, 4)._replace(batch=32)
    few = a_case(draw, 8)._replace(batch=5)  # some machines get no sample
    fast = a_case(draw, 20, shortest=1e-5)  # and a gradient of a few bytes, less than one per machine
    fast = fast._replace(gradient=12, bandwidth=fast.bandwidth * 12 / fast.gradient)
    return [*measured, *large, alone, whole, few, fast]


def paying_cases(draw, cases):
    """Arguments for bandwidth_that_pays: some with a delay that no bandwidth makes up for."""
    found = []
    for case in cases:
        if case.machines > 1:
            for part in (draw.uniform(0.1, 0.4), draw.uniform(0.5, 0.8), draw.uniform(1.1, 3)):
                delay = part * (case.alone - case.computing) / case.messages
                found.append(case._replace(delay=delay, bandwidth=None))
    return found


# ---- observers ----


def observe_predictions(step_seconds, bandwidth_that_pays, name, cases):
    """What an answer's function returns. cases: tuples of its arguments, and words."""
    function = {"step_seconds": step_seconds, "bandwidth_that_pays": bandwidth_that_pays}[name]
    seen = []
    for case, words in cases:
        with trying(words):
            seen.append(as_float(function(*case)))
    return seen


def as_float(value):
    """A number of any kind, also a tensor's, as a float; anything else unchanged."""
    with suppress(TypeError, ValueError):
        if hasattr(value, "__float__") and not isinstance(value, bool):
            return float(value)
    return value


def observe_steps(batch, gradient, sample, delay, bandwidth):
    """The seconds of the shortest of some steps on these ranks, one per machine.

    Computing is sleep, as if another device did it; the gradient travels over the
    pretend network.
    """
    os.environ[NETWORK] = f"{delay} {bandwidth}"
    buffer, times = torch.zeros(gradient // 4), []
    with process_group(timeout=20) as (rank, n):
        mine = len(range(rank, batch, n))
        for _ in range(STEPS):
            dist.barrier()
            begin = time.perf_counter()
            time.sleep(sample * mine)
            dist.all_reduce(buffer)
            times.append(time.perf_counter() - begin)
    return min(times)


# ---- what is claimed ----


def step_with(computing=lambda s: s.computing, messages=lambda n: 2 * (n - 1), share=lambda n: n, delays=None):
    """A formula like that of a step, with a mistake in one part."""

    def formula(s):
        waits = (delays or messages)(s.machines) * s.delay
        return computing(s) + waits + messages(s.machines) * s.gradient / share(s.machines) / s.bandwidth

    return formula


# of step_seconds: pairs of a formula and a cause
STEP_MISTAKES = [
    (step_with(computing=lambda s: s.alone / s.machines), "samples cannot be divided: where the batch is no multiple "
     "of the machines, some get one more, and all wait for these"),
    (step_with(computing=lambda s: s.sample * (s.batch // s.machines)), "the rest of the batch is left out: where the "
     "batch is no multiple of the machines, some get one sample more, and all wait for these"),
    (step_with(computing=lambda s: s.sample * round(s.batch / s.machines)), "round up, not to the nearest: some "
     "machines get one sample more, and all wait for these"),
    (step_with(computing=lambda s: s.sample * (s.batch // s.machines + 1)), "// and + 1 gives one sample too many where "
     "the batch is a multiple of the machines: math.ceil rounds up only if something is left over"),
    (step_with(computing=lambda s: s.alone), "each machine computes only its part of the batch"),
    (step_with(computing=lambda s: 0.0), "the computing is missing: a step computes, and then communicates"),
    (step_with(messages=lambda n: n - 1), "this is only one round of the ring, the reduce-scatter: an all-reduce has a "
     "second one, the all-gather"),
    (step_with(messages=lambda n: 2 * n), "a ring on n machines has n - 1 steps in each of its two rounds, not n: on "
     "one machine, nothing is sent"),
    (step_with(share=lambda n: 1), "each message of the ring has a part of the "
     "gradient, 1 / n of it"),
    *[(step_with(delays=delays), "each message of the ring waits for the delay, and there are 2 (n - 1) of them in a row")
      for delays in (lambda n: 2, lambda n: 1, lambda n: 2 * (n > 1), lambda n: 1 * (n > 1))],
    (step_with(delays=lambda n: n - 1), "the delay comes with each message, in both rounds of the ring: 2 (n - 1) "
     "times"),
    (step_with(delays=lambda n: 0), "the delay is missing: each message takes delay + bytes / bandwidth"),
    (step_with(delays=lambda n: 2 * (n - 1) / n), "the bytes are divided by n, the delay is not: each of the 2 (n - 1) "
     "messages has it"),
    (step_with(messages=lambda n: 2 * (n - 1) / n, share=lambda n: 1 / n, delays=lambda n: 2 * (n - 1)), "each message "
     "of the ring has a part of the gradient, 1 / n of it"),
    (step_with(messages=lambda n: n * (n > 1), delays=lambda n: 2 * (n - 1)), "the bytes are "
     "those of two rounds, 2 (n - 1) / n times the gradient"),
    (lambda s: max(s.computing, s.network), "nothing overlaps here: the gradients are there when the computing has "
     "ended. Add the two"),
    (lambda s: s.computing + s._replace(bandwidth=s.bandwidth / 8).network, "the bandwidth is in bytes per second "
     "here, not in bits: do not multiply by 8"),
    (lambda s: s.computing + s._replace(bandwidth=s.bandwidth * 8).network, "the bandwidth is in bytes per second "
     "here, and the gradient in bytes: do not multiply by 8"),
    (lambda s: s.computing + s._replace(gradient=4 * s.gradient).network, "gradient is in bytes already: do not "
     "multiply by 4"),
    (lambda s: s.computing, "the communication is missing: a step computes, and then communicates"),
    (lambda s: s.computing + s.delay + s.gradient / s.bandwidth, "this is one message with the whole gradient: a ring "
     "has 2 (n - 1) messages in a row, each with 1 / n of it"),
    (lambda s: s.computing + s.gradient / s.bandwidth, "this is the whole gradient once, as for two machines without a "
     "delay: a ring has 2 (n - 1) messages in a row, each with 1 / n of it"),
    (lambda s: s.computing + (s.machines - 1) * (s.delay + s.gradient / s.bandwidth), "this is what one machine needs "
     "to send all of its gradient to each other one: a ring has 2 (n - 1) messages in a row, each with 1 / n of it"),
    (lambda s: 1e3 * s.step, "these are milliseconds: return seconds"),
]  # fmt: skip
STEP_OTHERWISE = (
    "the largest part of the batch, times sample; and 2 (n - 1) messages in a row, each of which takes delay + gradient / n "
    "/ bandwidth"
)


def pays(sent=lambda s: s.sent, left=lambda s: s.left):
    """A formula like that of the bandwidth, with a mistake in one part."""
    return lambda s: sent(s) / left(s) if left(s) > 0 else math.inf


PAYING_MISTAKES = [
    (pays(left=lambda s: s.alone - s.alone / s.machines - s.messages * s.delay), "samples cannot be divided: some "
     "machines get one more, and all wait for these"),
    (pays(left=lambda s: s.alone - s.sample * (s.batch // s.machines) - s.messages * s.delay), "the rest of the batch "
     "is left out: some machines get one sample more, and all wait for these"),
    (pays(left=lambda s: s.alone - s.computing), "the delays take a part of what is saved, whatever the bandwidth is: "
     "2 (n - 1) of them"),
    (pays(left=lambda s: s.alone - s.computing - s.delay), "there are 2 (n - 1) messages in a row, and each waits for "
     "the delay"),
    (pays(left=lambda s: s.alone - s.computing - 2 * s.delay), "there are 2 (n - 1) messages in a row, and each waits "
     "for the delay"),
    (pays(lambda s: s.gradient), "a ring sends 2 (n - 1) / n times the gradient from each machine; that is the "
     "gradient once for two machines only"),
    (pays(lambda s: 2 * s.gradient), "a ring sends 2 (n - 1) / n times the gradient from each machine, which is less "
     "than twice"),
    (pays(lambda s: s.sent / 2), "this is only one round of the ring: an all-reduce has two"),
    (pays(lambda s: s.sent * s.machines), "each message of the ring has a part of the gradient, 1 / n of it"),
    (pays(lambda s: 8 * s.sent), "these are bits per second: return bytes per second"),
    (pays(left=lambda s: s.alone - s.messages * s.delay), "the machines compute, too: what they save is the difference "
     "between one machine's computing and theirs"),
    (pays(left=lambda s: s.computing - s.messages * s.delay), "the bytes have to travel in the time that is saved, "
     "which is one machine's computing less that of several"),
    (pays(left=lambda s: s.computing), "the bytes have to travel in the time that is saved, less the delays; this is "
     "the time that several machines compute"),
]  # fmt: skip
NEVER = "where the delays take longer than what is saved, no bandwidth is enough: return math.inf"
PAYING_OTHERWISE = (
    "set the step of one machine equal to that of several: what is saved in computing, less 2 (n - 1) delays, is the "
    "time for 2 (n - 1) / n times the gradient"
)


def explaining(mistakes, cases, seen, here):
    """Of the mistakes, those that give what was seen in all cases; for a Claim about
    cases[here].
    """
    explains = lambda formula: all(agree(got, formula(case), DIGITS) for case, got in zip(cases, seen))
    return [(seen[here], cause) for formula, cause in mistakes if explains(formula)]


def is_float(checked, got, told, cause):
    nothing = [("NoneType", "the function ends without a return statement")]
    return Claim(checked, type(got).__name__, "float", cause, nothing, told=told, shown=got or "nothing")


def of_step(cases, seen, here, measured):
    """measured: what real ranks took, or None."""
    case, got = cases[here], seen[here]
    checked, told = f"step_seconds({case})", f"{case.step:.4g} s"
    if measured:
        told += f"; real ranks took {measured:.4g} s"
    yield is_float(checked, got, told, "return one number, the seconds")
    mistakes = partial(explaining, STEP_MISTAKES, cases, seen, here)
    yield Claim(checked, got, case.step, STEP_OTHERWISE, mistakes, DIGITS, told=told, shown=f"{got:.4g} s")


def of_bandwidth(cases, seen, here):
    case, got = cases[here], seen[here]
    checked, n, right = f"bandwidth_that_pays({case})", case.machines, case.threshold
    told = (
        f"math.inf: they save {case.alone - case.computing:.4g} s of computing, and the delays alone take "
        f"{case.messages * case.delay:.4g} s"
    )
    if right < math.inf:
        told = f"{right:.5g} bytes per second, with which {n} machines and one take {case.alone:.4g} s"
    yield is_float(checked, got, told, "return one number, the bytes per second, or math.inf")
    says = f"{got:.5g} bytes per second"
    if 0 < got < math.inf:
        step = case._replace(bandwidth=got).step
        says += f", with which {n} machines take {step:.4g} s, and one {case.alone:.4g} s"
    otherwise = NEVER if math.isinf(right) else PAYING_OTHERWISE
    if math.isnan(got):
        otherwise = "it is not a number: is 0 divided by 0?"

    def mistakes():
        enough = "there is a bandwidth that is enough: the delays take less than what is saved"
        return [(Between(-math.inf, 0.0), NEVER), *explaining(PAYING_MISTAKES, cases, seen, here), (math.inf, enough)]

    yield Claim(checked, got, right, otherwise, mistakes, DIGITS, told=told, shown=says)


# ---- the question ----


@question(
    "Write down what one machine does in a step, and what it waits for. All machines wait for the one with the most "
    "samples. How many messages in a row does a ring all-reduce have on n machines, and how large is each? (Lesson 2.)",
    "step_seconds is math.ceil(batch / machines) * sample + 2 (n - 1) messages, and each takes delay + gradient / n / "
    "bandwidth. For the other function: the machines save alone - computing seconds of each step. The delays take some of "
    "that, whatever the bandwidth. In what is left, the bytes have to travel.",
    "saved = sample * (batch - math.ceil(batch / machines)) - 2 * (machines - 1) * delay. If saved <= 0, return math.inf; "
    "else return 2 * (machines - 1) / machines * gradient / saved.",
)
def check_second_machine(answer, draw):
    """The predicted seconds must be those of the formula, which real ranks on a pretend
    network need, too; and the bandwidth, where several machines are as fast as one.
    """
    cases = cases_of(draw)
    told = [(tuple(case), f"step_seconds({case})") for case in cases]
    [steps] = answer.on_ranks(observe_predictions, "step_seconds", told)
    measured = []
    for case in cases[:3]:
        network = case.batch, case.gradient, case.sample, case.delay, case.bandwidth
        measured.append(max(answer.without(observe_steps, *network, nproc=case.machines, timeout=25)))
    for here in range(len(cases)):
        hold(of_step(cases, steps, here, measured[here] if here < 3 else None))
    nothing_saved = a_case(draw, 2)._replace(batch=1, delay=0.0, bandwidth=None)  # and nothing lost
    for paying in (paying_cases(draw, cases), [nothing_saved]):
        told = [(tuple(case)[:-1], f"bandwidth_that_pays({case})") for case in paying]
        [found] = answer.on_ranks(observe_predictions, "bandwidth_that_pays", told)
        for here in range(len(paying)):
            hold(of_bandwidth(paying, found, here))
    values = {}
    for case, predicted, seconds in zip(cases, steps, measured):
        words = f"{case.machines} machines"
        values |= {f"{words}, predicted": 1e3 * predicted, f"{words}, measured": 1e3 * seconds}
    title = "Your prediction, and real ranks on a pretend network"
    return "bars", {"values": values, "xlabel": "milliseconds per step", "title": title}
