"""Question 3: the seconds of a step on several machines, and the bandwidth from which on
they pay.
"""

import math
import os
import time
from contextlib import suppress

import torch
import torch.distributed as dist

from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.variables import NETWORK

STEPS = 3  # that are measured; the shortest counts


# ---- cases ----


def a_case(draw, machines, shortest=0.02):
    """Arguments for step_seconds, so that computing and each part of the communication
    takes about as long as `shortest` seconds, or some times that.
    """
    batch = machines * draw.randrange(5, 9) + draw.randrange(1, machines)
    messages = 2 * (machines - 1)
    gradient = 4 * machines * draw.randrange(20_000, 60_000)
    return {
        "machines": machines,
        "sample": draw.uniform(2, 4) * shortest / batch * machines,
        "batch": batch,
        "gradient": gradient,
        "delay": draw.uniform(0.6, 1) * shortest / messages,
        "bandwidth": gradient * messages / machines / shortest / draw.uniform(1, 2),
    }


def cases_of(draw):
    """The first three are measured, too; the others are too large, or need one machine."""
    measured = [a_case(draw, machines) for machines in (2, 3, 4)]
    large = [a_case(draw, draw.randrange(9, 60), shortest=1.0) for _ in range(4)]
    large[0]["batch"] = large[0]["machines"] * draw.randrange(5, 9) + 1
    alone = a_case(draw, 3) | {"machines": 1}
    whole = a_case(draw, 4)
    few = a_case(draw, 8) | {"batch": 5}  # some machines get no sample
    return [*measured, *large, alone, whole | {"batch": 32}, few]


def paying_cases(draw, cases):
    """Arguments for bandwidth_that_pays: some with a delay that no bandwidth makes up for."""
    found = []
    for case in cases:
        if case["machines"] > 1:
            saved = alone(case) - computing(case)
            for part in (draw.uniform(0.1, 0.4), draw.uniform(0.5, 0.8), draw.uniform(1.1, 3)):
                delay = part * saved / messages(case["machines"])
                found.append({**case, "delay": delay})
    for case in found:
        del case["bandwidth"]
    return found


# ---- formulas ----


def messages(machines):
    """Those of a ring all-reduce that wait for each other."""
    return 2 * (machines - 1)


def alone(case):
    return case["sample"] * case["batch"]


def computing(case):
    """The seconds of the machine with the most samples."""
    return case["sample"] * math.ceil(case["batch"] / case["machines"])


def true_step(case):
    n = case["machines"]
    message = case["delay"] + case["gradient"] / n / case["bandwidth"]
    return computing(case) + messages(n) * message


def true_bandwidth(case):
    n = case["machines"]
    left = alone(case) - computing(case) - messages(n) * case["delay"]
    return messages(n) * case["gradient"] / n / left if left > 0 else math.inf


# ---- observers ----


def observe_predictions(step_seconds, bandwidth_that_pays, name, cases):
    function = {"step_seconds": step_seconds, "bandwidth_that_pays": bandwidth_that_pays}[name]
    seen = []
    for case in cases:
        with trying(f"{name}({in_words(case)})"):
            seen.append(as_float(function(*case.values())))
    return seen


def as_float(value):
    """A number of any kind, also a tensor's, as a float; anything else unchanged."""
    with suppress(TypeError, ValueError):
        if hasattr(value, "__float__") and not isinstance(value, bool):
            return float(value)
    return value


def in_words(case):
    return ", ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in case.items()
    )


def observe_steps(case):
    """The seconds of the shortest of some steps on these ranks, one per machine.

    Computing is sleep, as if another device did it; the gradient travels over the
    pretend network.
    """
    os.environ[NETWORK] = f"{case['delay']} {case['bandwidth']}"
    gradient, times = torch.zeros(case["gradient"] // 4), []
    with process_group(timeout=20) as (rank, n):
        mine = len(range(rank, case["batch"], n))
        for _ in range(STEPS):
            dist.barrier()
            begin = time.perf_counter()
            time.sleep(case["sample"] * mine)
            dist.all_reduce(gradient)
            times.append(time.perf_counter() - begin)
    return min(times)


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
    [steps] = answer.on_ranks(observe_predictions, "step_seconds", cases)
    measured = {}
    for place, case in enumerate(cases[:3]):
        seconds = answer.without(observe_steps, case, nproc=case["machines"], timeout=25)
        measured[place] = max(seconds)
    for place, case in enumerate(cases):
        judge_step(case, steps[place], measured.get(place), cases, steps)
    paying = paying_cases(draw, cases)
    [found] = answer.on_ranks(observe_predictions, "bandwidth_that_pays", paying)
    for case, got in zip(paying, found):
        judge_bandwidth(case, got, paying, found)
    values = {}
    for place, seconds in measured.items():
        words = f"{cases[place]['machines']} machines"
        values |= {f"{words}, predicted": 1e3 * steps[place]}
        values |= {f"{words}, measured": 1e3 * seconds}
    title = "Your prediction, and real ranks on a pretend network"
    return "bars", {"values": values, "xlabel": "milliseconds per step", "title": title}


def judge_step(case, got, measured, cases, steps):
    checked, expected = f"step_seconds({in_words(case)})", true_step(case)
    told = f"{expected:.4g} s"
    if measured:
        told += f"; real ranks took {measured:.4g} s"
    if not isinstance(got, float):
        cause = "return one number, the seconds"
        if got is None:
            cause, got = "the function ends without a return statement", "nothing"
        raise Wrong(checked, expected=told, got=got, cause=cause)
    if not near(got, expected):
        cause = cause_of_step(cases, steps)
        raise Wrong(checked, expected=told, got=f"{got:.4g} s", cause=cause)


def near(got, expected):
    if math.isinf(expected) or math.isinf(got):
        return got == expected
    return abs(got - expected) <= 1e-6 * abs(expected) + 1e-12


def step_with(computing=computing, messages=messages, share=lambda n: n, delays=None):
    """A formula like that of a step, with a mistake in one part."""

    def formula(case):
        n = case["machines"]
        waits = (delays or messages)(n) * case["delay"]
        travels = messages(n) * case["gradient"] / share(n) / case["bandwidth"]
        return computing(case) + waits + travels

    return formula


even = lambda case: alone(case) / case["machines"]
floor = lambda case: case["sample"] * (case["batch"] // case["machines"])
rounded = lambda case: case["sample"] * round(case["batch"] / case["machines"])
network = lambda case: true_step(case) - computing(case)
PARTS = [  # a mistake in one part, and its cause
    ({"computing": even}, "samples cannot be divided: where the batch is no multiple of the machines, some get one more, "
     "and all wait for these"),
    ({"computing": floor}, "the rest of the batch is left out: where the batch is no multiple of the machines, some get one "
     "sample more, and all wait for these"),
    ({"computing": rounded}, "round up, not to the nearest: some machines get one sample more, and all wait for these"),
    ({"computing": alone}, "each machine computes only its part of the batch"),
    ({"computing": lambda case: 0.0}, "the computing is missing: a step computes, and then communicates"),
    ({"messages": lambda n: n - 1}, "this is only one round of the ring, the reduce-scatter: an all-reduce has a second "
     "one, the all-gather"),
    ({"messages": lambda n: 2 * n}, "a ring on n machines has n - 1 steps in each of its two rounds, not n: on one machine, "
     "nothing is sent"),
    ({"messages": lambda n: 2 * (n - 1), "share": lambda n: 1}, "each message of the ring has a part of the gradient, 1 / n "
     "of it"),
    ({"delays": lambda n: 2}, "each message of the ring waits for the delay, and there are 2 (n - 1) of them in a row"),
    ({"delays": lambda n: 1}, "each message of the ring waits for the delay, and there are 2 (n - 1) of them in a row"),
    ({"delays": lambda n: 2 if n > 1 else 0}, "each message of the ring waits for the delay, and there are 2 (n - 1) of "
     "them in a row"),
    ({"delays": lambda n: 1 if n > 1 else 0}, "each message of the ring waits for the delay, and there are 2 (n - 1) of "
     "them in a row"),
    ({"delays": lambda n: n - 1}, "the delay comes with each message, in both rounds of the ring: 2 (n - 1) times"),
    ({"delays": lambda n: 0}, "the delay is missing: each message takes delay + bytes / bandwidth"),
    ({"delays": lambda n: 2 * (n - 1) / n}, "the bytes are divided by n, the delay is not: each of the 2 (n - 1) messages "
     "has it"),
    ({"messages": lambda n: 2 * (n - 1) / n, "share": lambda n: 1 / n, "delays": lambda n: 2 * (n - 1)}, "each message of "
     "the ring has a part of the gradient, 1 / n of it"),
    ({"messages": lambda n: n if n > 1 else 0, "share": lambda n: n, "delays": lambda n: 2 * (n - 1)}, "the bytes are those "
     "of two rounds, 2 (n - 1) / n times the gradient"),
]  # fmt: skip
STEPS_LOOK = [(step_with(**parts), cause) for parts, cause in PARTS] + [
    (lambda case: max(computing(case), network(case)), "nothing overlaps here: the gradients are there when the computing "
     "has ended. Add the two"),
    (lambda case: computing(case) + network({**case, "bandwidth": case["bandwidth"] / 8}), "the bandwidth is in bytes per "
     "second here, not in bits: do not multiply by 8"),
    (lambda case: computing(case) + network({**case, "bandwidth": case["bandwidth"] * 8}), "the bandwidth is in bytes per "
     "second here, and the gradient in bytes: do not multiply by 8"),
    (lambda case: computing(case) + network({**case, "gradient": 4 * case["gradient"]}), "gradient is in bytes already: do "
     "not multiply by 4"),
    (lambda case: computing(case), "the communication is missing: a step computes, and then communicates"),
    (lambda case: computing(case) + case["delay"] + case["gradient"] / case["bandwidth"], "this is one message with the "
     "whole gradient: a ring has 2 (n - 1) messages in a row, each with 1 / n of it"),
    (lambda case: computing(case) + case["gradient"] / case["bandwidth"], "this is the whole gradient once, as for two "
     "machines without a delay: a ring has 2 (n - 1) messages in a row, each with 1 / n of it"),
    (lambda case: computing(case) + (case["machines"] - 1) * (case["delay"] + case["gradient"] / case["bandwidth"]), "this "
     "is what one machine needs to send all of its gradient to each other one: a ring has 2 (n - 1) messages in a row, each "
     "with 1 / n of it"),
    (lambda case: 1e3 * true_step(case), "these are milliseconds: return seconds"),
]  # fmt: skip
OTHERWISE = (
    "the largest part of the batch, times sample; and 2 (n - 1) messages in a row, each of which takes delay + gradient / n "
    "/ bandwidth"
)


def cause_of_step(cases, steps):
    """The likely mistake: the formula that explains the numbers of all cases."""
    for formula, cause in STEPS_LOOK:
        if explains(formula, cases, steps):
            return cause
    return OTHERWISE


def explains(formula, cases, numbers):
    return all(isinstance(got, float) and near(got, formula(case)) for case, got in zip(cases, numbers))


def judge_bandwidth(case, got, cases, found):
    checked, expected = f"bandwidth_that_pays({in_words(case)})", true_bandwidth(case)
    n, saved = case["machines"], alone(case) - computing(case)
    if math.isinf(expected):
        waits = messages(n) * case["delay"]
        told = f"math.inf: they save {saved:.4g} s of computing, and the delays alone take {waits:.4g} s"
    else:
        step = true_step({**case, "bandwidth": expected})
        told = f"{expected:.5g} bytes per second, with which {n} machines and one take {step:.4g} s"
    if not isinstance(got, float):
        cause = "return one number, the bytes per second, or math.inf"
        if got is None:
            cause, got = "the function ends without a return statement", "nothing"
        raise Wrong(checked, expected=told, got=got, cause=cause)
    if near(got, expected):
        return
    says = f"{got:.5g} bytes per second"
    if 0 < got < math.inf:
        step = true_step({**case, "bandwidth": got})
        says += f", with which {n} machines take {step:.4g} s, and one {alone(case):.4g} s"
    raise Wrong(checked, expected=told, got=says, cause=cause_of_bandwidth(case, got, cases, found))


def left(case):
    """The seconds that are left for the bytes; not above 0 if there are none."""
    return alone(case) - computing(case) - messages(case["machines"]) * case["delay"]


def pays(bytes_of, left=left):
    """A formula like that of the bandwidth, with a mistake in one part."""
    return lambda case: bytes_of(case) / left(case) if left(case) > 0 else math.inf


ring = lambda case: messages(case["machines"]) * case["gradient"] / case["machines"]
without = lambda computing: lambda case: alone(case) - computing(case) - messages(case["machines"]) * case["delay"]
PAYING_LOOK = [
    (pays(ring, without(even)), "samples cannot be divided: some machines get one more, and all wait for these"),
    (pays(ring, without(floor)), "the rest of the batch is left out: some machines get one sample more, and all wait for "
     "these"),
    (pays(ring, lambda case: alone(case) - computing(case)), "the delays take a part of what is saved, whatever the "
     "bandwidth is: 2 (n - 1) of them"),
    (pays(ring, lambda case: alone(case) - computing(case) - case["delay"]), "there are 2 (n - 1) messages in a row, and "
     "each waits for the delay"),
    (pays(ring, lambda case: alone(case) - computing(case) - 2 * case["delay"]), "there are 2 (n - 1) messages in a row, "
     "and each waits for the delay"),
    (pays(lambda case: case["gradient"]), "a ring sends 2 (n - 1) / n times the gradient from each machine; that is the "
     "gradient once for two machines only"),
    (pays(lambda case: 2 * case["gradient"]), "a ring sends 2 (n - 1) / n times the gradient from each machine, which is "
     "less than twice"),
    (pays(lambda case: ring(case) / 2), "this is only one round of the ring: an all-reduce has two"),
    (pays(lambda case: ring(case) * case["machines"]), "each message of the ring has a part of the gradient, 1 / n of it"),
    (pays(lambda case: 8 * ring(case)), "these are bits per second: return bytes per second"),
    (pays(ring, lambda case: alone(case) - messages(case["machines"]) * case["delay"]), "the machines compute, too: what "
     "they save is the difference between one machine's computing and theirs"),
    (pays(ring, lambda case: computing(case) - messages(case["machines"]) * case["delay"]), "the bytes have to travel in "
     "the time that is saved, which is one machine's computing less that of several"),
    (pays(ring, lambda case: computing(case)), "the bytes have to travel in the time that is saved, less the delays; this "
     "is the time that several machines compute"),
]  # fmt: skip


def cause_of_bandwidth(case, got, cases, found):
    if math.isnan(got):
        return "it is not a number: is 0 divided by 0?"
    if got <= 0:
        return "where the delays take longer than what is saved, no bandwidth is enough: return math.inf"
    for formula, cause in PAYING_LOOK:
        if explains(formula, cases, found):
            return cause
    if math.isinf(true_bandwidth(case)):
        return "where the delays take longer than what is saved, no bandwidth is enough: return math.inf"
    if math.isinf(got):
        return "there is a bandwidth that is enough: the delays take less than what is saved"
    return (
        "set the step of one machine equal to that of several: what is saved in computing, less 2 (n - 1) delays, is the "
        "time for 2 (n - 1) / n times the gradient"
    )
