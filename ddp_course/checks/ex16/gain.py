"""Measures what a fix gains: the answer and the slow program take turns."""

import statistics

from ddp_course.checks.claims import Between, Claim, hold
from ddp_course.lesson16 import take_turns

SLOW, YOURS = "the slow program", "yours"


def in_turn(slow, yours):
    """The seconds of each round: {SLOW: [...], YOURS: [...]}. All ranks call it, in a
    process group.
    """
    return take_turns({SLOW: slow, YOURS: yours}, rounds=6, warm_up=1)


def judge_gain(times, least, checked, cause):
    """Raise Wrong unless the answer is at least so many times as fast; return a picture
    of the two. least: far below what a right answer gains, as a machine may be busy.
    """
    ratios = [slow / yours for slow, yours in zip(times[SLOW], times[YOURS])]
    _, gain, undisturbed = statistics.quantiles(ratios, n=4)
    shown = {name: 1e3 * statistics.median(times[name]) for name in (SLOW, YOURS)}
    told = ", ".join(f"{name} {took:.2f} ms" for name, took in shown.items())
    hold([Claim(f"{checked}, timed in turn with the slow program", undisturbed, Between(least), cause,
                told=f"at least {least} times as fast", shown=f"{gain:.1f} times as fast: {told}")])  # fmt: skip
    title = f"{checked[0].upper()}{checked[1:]}: yours is {gain:.1f} times as fast"
    return "bars", {"values": shown, "xlabel": "ms", "title": title, "unit": " ms"}
