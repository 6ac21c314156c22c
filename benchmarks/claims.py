"""What every benchmark prints: one JSON object, with each claim, what was measured, and
whether the claim holds.
"""

import json
import statistics
import sys
import time


def claim(figure, measured, *, at_least=None, at_most=None):
    """One figure that the course claims, as a dict; ratios have no unit, all else has
    its unit in its name.
    """
    holds = (at_least is None or measured >= at_least) and (
        at_most is None or measured <= at_most
    )
    bound = {"at_least": at_least} if at_most is None else {"at_most": at_most}
    return {
        "figure": figure,
        "measured": float(f"{measured:.3g}"),
        **bound,
        "holds": holds,
    }


def report(claims, **details):
    """Print the JSON object; leave with exit code 1 where a claim does not hold."""
    print(json.dumps({"claims": claims, "details": details}, indent=2))
    sys.exit(0 if all(claim["holds"] for claim in claims) else 1)


def seconds(work, *args):
    """How long a call takes."""
    begin = time.perf_counter()
    work(*args)
    return time.perf_counter() - begin


def rounds_in_turn(rounds, **works):
    """Time functions in turn, so that other load on the machine affects all of them;
    for each round {name: seconds}.
    """
    return [
        {name: seconds(work) for name, work in works.items()} for _ in range(rounds)
    ]


def in_turn(rounds, **works):
    """The median seconds of each of these functions, timed in turn."""
    times = rounds_in_turn(rounds, **works)
    return {name: statistics.median(of_one[name] for of_one in times) for name in works}
