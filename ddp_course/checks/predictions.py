"""Numbers that an answer predicts, and that are then measured."""

from ddp_course.checks.claims import agree


def numbers(returned, many):
    """What an answer returned, as `many` floats; in words, if it is something else."""
    try:
        found = [float(number) for number in returned]
        if len(found) == many:
            return found
    except (TypeError, ValueError, RuntimeError):
        pass
    return "nothing (None)" if returned is None else str(returned)[:80]


def likely(mistakes, cases, seen, here, digits=10):
    """The mistakes for a Claim about one of the cases, cases[here]: pairs of what it gives
    there and its cause. Those that give what was seen in all cases come first.

    mistakes: pairs of a function of a case and a cause. seen: a number for each case.
    """

    def unlikely(mistake):
        return not all(agree(got, float(mistake(case)), digits) for case, got in zip(cases, seen))

    ordered = sorted(mistakes, key=lambda pair: unlikely(pair[0]))
    return [(float(mistake(cases[here])), cause) for mistake, cause in ordered]
