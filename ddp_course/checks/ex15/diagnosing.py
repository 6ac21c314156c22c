"""Question 1: rank, step and cause of five patients."""

from ddp_course.checks.claims import Claim, hold
from ddp_course.checks.ex15.patients import CAUSES, PATIENTS, RANKS, STEPS, truths
from ddp_course.judge.question import question


def number(value):
    """An int if it is whole, so that 2.0 counts as 2, and 2.5 stays what it is."""
    value = float(value)
    return int(value) if value.is_integer() else value


def written(diagnoses):
    """What the answer is: a name, and {letter: (rank, step, cause)}; or None."""
    answer = diagnoses()
    try:
        name, found = answer
        rows = {
            str(letter): [number(rank), number(step), str(cause).strip().lower()]
            for letter, (rank, step, cause) in dict(found).items()
        }
        return {"name": str(name), "found": rows}
    except (TypeError, ValueError):
        return {"name": repr(answer)[:200], "found": None}


@question(
    "First ask: dead, stuck, slow or wrong? examine('A') shows how the ranks end. A rank that says `Timed out` or "
    "`Connection closed` is usually healthy: which rank says something else, or nothing?",
    "If nothing fails, attach the lesson's tools with watch=: a NanGuard, a DesyncDetector with every=1, a "
    "StragglerDetector with every=1 and factor=4. The desync detector compares with rank 0: if it accuses rank 1, ask "
    "whether rank 2 agrees with rank 1 or with rank 0.",
    "If ranks are stuck, compare the latest collectives in their flight records. There is one all_reduce per step, so "
    "its number is the step. A rank whose record ends with a barrier out of after_the_training has no more data; one "
    "whose barrier comes out of before_the_step calls another collective; one whose record simply ends one step earlier "
    "than the others' is stuck or was killed in the step for which they wait.",
)
def check_diagnoses(answer, draw):
    """Rank, step and cause of each patient must be those that are drawn from the name."""
    [said] = answer.on_ranks(written)
    hold(form(said["name"], said["found"]))
    for letter, truth in truths(said["name"]).items():
        hold(diagnosis(letter, truth, *said["found"][letter]))


# ---- what is claimed ----


def form(name, found):
    """Claims that there is a name, and a possible diagnosis for each patient."""
    yield Claim("what diagnoses() returns", isinstance(found, dict), True, "return a pair: a text, and a dict with five "
                "tuples of three", told="your name, and {letter: (rank, step, cause)}", shown=name)  # fmt: skip
    yield Claim("the name in diagnoses()", name.strip().lower() not in ("", "your name"), True, "write your own name: the "
                "patients are drawn from it, so yours are yours", told="your name", shown=repr(name))  # fmt: skip
    missing = [letter for letter in PATIENTS if letter not in found]
    yield Claim("the patients", missing, [], f"there is no diagnosis for {', '.join(missing)}",
                told=", ".join(PATIENTS), shown=", ".join(found))  # fmt: skip
    for letter, (rank, step, cause) in found.items():
        yield Claim(f"patient {letter}", cause in CAUSES, True, "use the words of checks.ex15.CAUSES for the causes",
                    told=f"one of {', '.join(CAUSES)}", shown=cause)  # fmt: skip
        possible = rank in range(RANKS) and step in range(1, STEPS + 1)
        whole = isinstance(rank, int) and isinstance(step, int)
        yield Claim(f"patient {letter}", possible, True,
                    "the order is (rank, step, cause)" if whole else "ranks and steps are whole numbers",
                    told=f"a rank from 0 to {RANKS - 1}, a step from 1 to {STEPS}",
                    shown=f"rank {rank}, step {step}")  # fmt: skip


def diagnosis(letter, truth, rank, step, cause):
    """The claim that a diagnosis is the truth; the words do not give it away."""
    said = {"the rank": rank == truth.rank, "the step": step == truth.step, "the cause": cause == truth.cause}
    right = [word for word, same in said.items() if same]
    verb = "are" if len(right) > 1 else "is"
    yield Claim(f"patient {letter}", len(right), 3, likely_mistake(truth, rank, step, cause),
                told="what its records and the tools show",
                shown=f"rank {rank}, step {step}, {cause}: {' and '.join(right) or 'nothing'} {verb} right")  # fmt: skip


HANGS = ("out of data", "another collective", "stuck")


def likely_mistake(truth, rank, step, cause):
    """The likely mistake in a diagnosis."""
    if cause != truth.cause and cause in HANGS and truth.cause in HANGS:
        return (
            "it hangs, but otherwise: look at where the rank that does not come is. In a barrier after its loop, in a "
            "collective of another kind within the loop, or in none at all?"
        )
    if cause != truth.cause and {cause, truth.cause} <= {"stuck", "killed"}:
        return "a process that hangs is still there, one that was killed is not: look at how each rank ended"
    if cause != truth.cause:
        return "the tools say something else: is it dead, stuck, slow or wrong? Look at how each rank ends first"
    if rank != truth.rank and cause == "drift":
        return (
            "the detector compares with rank 0, and names the first rank that differs from it; of three ranks, the odd "
            "one out is the one whom nobody else agrees with"
        )
    if rank != truth.rank:
        return "the rank that complains is usually healthy: look for the one that is not where the others are"
    if abs(step - truth.step) == 1:
        return (
            "the step is off by one: steps are counted from 1, and there is one all_reduce per step, which ends it. A "
            "rank that fails before its all_reduce has taken one less than the others have begun"
        )
    return (
        "rank and cause are right, the step is not: let the detectors compare after each step (every=1), or count the "
        "all_reduces in the flight record"
    )
