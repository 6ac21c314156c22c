"""What question 2 claims of a detector in a run: it keeps the rules, and each of its checks
finds what is right, with few bytes.
"""

import math
from functools import partial

from ddp_course.checks.claims import Between, Claim, OneOf
from ddp_course.checks.ex15.desync_cases import FAULTS, LONG, in_words, negate, right_results, swap

QUIET, LOUD = 100, 2000  # bytes per rank in a check: if all agree, and if not
NOTHING = "nothing (None)"

RULES = {
    "changes": "changes parameters, buffers, gradients, the optimizer's state or the training mode: work on copies",
    "draws": "draws from torch's global random generator, so the training's dropout masks change: use a generator of "
    "your own",
    "sends": "communicates: only check may",
}


def rules(case, rank, of_ranks):
    broken = of_ranks[rank]["broken"]
    part, rule = broken[0] if broken else ("it", "sends")
    yield Claim(in_words(case), broken, [], f"{part} {RULES[rule]}", told=f"{part} only looks", shown=f"{part} {rule}")


def result(case, place, rank, of_ranks):
    """Claims that a check has found what is right. place: which check it is."""
    results = [seen["checks"][place][0] for seen in of_ranks]
    found, expected = results[rank], right_results(case)[place]
    claim = partial(Claim, where(case, place), told=expected or NOTHING, shown=found or NOTHING)
    whole = isinstance(found, list) and all(isinstance(number, int) for number in found[:2])
    yield claim(
        whole or found is None, True, "return None, or (step, rank, name of the tensor), two whole numbers and a text"
    )
    yield claim(len({str(one) for one in results}), 1, "the ranks return different results: all of them must decide from "
                "the same exchanged numbers", told="the same result on all ranks",
                shown="; ".join(f"rank {r}: {one or NOTHING}" for r, one in enumerate(results)))  # fmt: skip
    told_before = case["fault"] and ([0] + case["checks"])[place] >= case["steps"][0]
    if expected is None:
        old = [(FAULTS[case["fault"]][0][1], FORGET)] if told_before else []
        yield claim(found and found[2], None, ALARM, old)
        return
    yield claim(found is None, False, AGAIN if told_before else lambda: why_missed(case, found))
    yield claim(found, expected, OTHER_RANK[case["n"]], lambda: mistakes(case, place, found, *expected))


ALARM = (
    "all ranks are equal there, bit for bit: a false alarm. (Python's own hash() of texts and bytes differs between "
    "processes.)"
)
FORGET = "all ranks have agreed since the last check, which has told of the difference: forget its steps"
AGAIN = "a check looks at the steps since the last one, whatever has been found before"
OTHER_RANK = {  # by the number of ranks
    2: "of two ranks, nobody can tell which is right: name rank 1",
    3: "of three ranks, the odd one out is the one that the other two do not agree with, and that may be rank 0",
    4: "it finds the odd one of three ranks, but not of four: count how many ranks have each hash",
}
OTHER_TENSOR = {  # by the part of the first that differs
    "model": "another tensor is the first that differs: go through model.state_dict(), and then through the optimizer's "
    "state, with names such as first.weight and first.weight.exp_avg",
    "optimizer": "another tensor is the first that differs: go through model.named_parameters(), and look for the state of "
    "each in optimizer.state[parameter]; the optimizer's own order may be another",
}
SINCE_THE_CHECK = "steps are counted from the beginning of the job, not from the last check: keep a count of all steps"
FROM_1 = "steps are counted from 1: after the first call of after_step, the step is 1"
THE_CHECKS_STEP = "that is the step of the check, and the ranks have differed for longer: keep the hashes of each step"
NO_COPY = "Or does it keep the tensors themselves, which change? Keep hashes or copies of each step"
LATEST = 10**18  # any step is before it


def mistakes(case, place, found, step, odd, name):
    """What is often found in place of step, odd rank and name; *rest: whatever these are."""
    begin, check, rest = ([0] + case["checks"])[place], case["checks"][place], found[1:]
    if begin:
        yield [OneOf([step - begin, step - begin - 1]), odd, name], SINCE_THE_CHECK
    if begin >= case["steps"][0]:
        yield [case["steps"][0], odd, name], FORGET
    yield [step - 1, odd, name], FROM_1
    yield [range(-LATEST, step), *rest], f"{ALARM} {NO_COPY}"
    yield [check, *rest], THE_CHECKS_STEP
    yield [range(step + 1, LATEST), *rest], why_missed(case, found)
    yield [step, odd, found[2]], OTHER_TENSOR[FAULTS[case["fault"]][0][0]]


def why_missed(case, found):
    """The likely cause if a difference is found too late, or not at all (None)."""
    part, name, fault = FAULTS[case["fault"]][0]
    hashed = found and found[2] == name  # but noticed too late
    untold = not hashed and name.startswith("norm.") and "weight" not in name
    reasons = [
        (case["passing"], "the ranks differ after this step only, and agree again at the check: keep hashes or copies of "
         "each step, and compare them all"),
        (part == "optimizer" and not hashed,
         "the optimizer's state is missing: it changes the parameters, but only in later steps"),
        (untold, "buffers are missing: model.state_dict() has them, model.parameters() does not"),
        (fault in (swap, negate), "these changes leave sums or sizes as they were: hash the bits with their places"),
        (True, "the change of a single bit must be noticed: hash the bits, and do not sum or round the numbers"),
    ]  # fmt: skip
    return next(cause for likely, cause in reasons if likely)


def where(case, place):
    return f"{in_words(case)}: the check after step {case['checks'][place]}"


def sent(case, place, rank, of_ranks):
    """Claims that a check has sent something, and not too much."""
    limit = QUIET if right_results(case)[place] is None else LOUD
    number, (words, cause) = of_ranks[rank]["checks"][place][1], TOO_MUCH[limit]
    yield Claim(f"{where(case, place)}: its bytes, {words}", number, Between(0, limit), cause,
                told=f"at most {limit} per rank", shown=f"{number:.0f}")  # fmt: skip
    first = case["checks"][place] not in case["checks"][:place]
    yield Claim(f"{where(case, place)}: its bytes", number > 0 or not first, True, SILENT, told="some", shown=0)


SILENT = "a rank knows nothing of the others' parameters but what it is sent: exchange a hash in each check"
TOO_MUCH = {
    QUIET: ("while all agree", "one hash of everything is enough then, whatever the number of steps and tensors"),
    LOUD: ("as they differ", "find the step first, with one hash per step, and then exchange only this step's hashes"),
}


def memory(case, rank, of_ranks):
    """The claim that a detector does not keep something of each step for ever."""
    first, second, third = [held for _, _, held in of_ranks[rank]["checks"]]
    steps = LONG[-1] - LONG[-2]
    # a dict or list may grow once without being longer
    yield Claim(f"{in_words(case)}: the memory that the detector holds after a check", min(second - first, third - second),
                Between(-math.inf, steps), "it keeps something of each step for ever: after a check, forget the steps that "
                "it has compared", told="as much as after the check before it",
                shown=f"{third - second} bytes more, with {steps} steps between them")  # fmt: skip
