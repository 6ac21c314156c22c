"""Question 1: rank, step and cause of five patients."""

from ddp_course.checks.ex15.patients import CAUSES, PATIENTS, RANKS, STEPS, truths
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong


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
    if said["found"] is None:
        raise Wrong(
            "what diagnoses() returns",
            expected="your name, and {letter: (rank, step, cause)}",
            got=said["name"],
            cause="return a pair: a text, and a dict with five tuples of three",
        )
    judge_form(said["name"], said["found"])
    for letter, truth in truths(said["name"]).items():
        judge_diagnosis(letter, truth, said["found"][letter])


def judge_form(name, found):
    """Raise Wrong unless there is a name, and a possible diagnosis for each patient."""
    if not name.strip() or name.strip().lower() == "your name":
        cause = "write your own name: the patients are drawn from it, so yours are yours"
        raise Wrong("the name in diagnoses()", got=repr(name), cause=cause)
    missing = [letter for letter in PATIENTS if letter not in found]
    if missing:
        cause = f"there is no diagnosis for {', '.join(missing)}"
        raise Wrong("the patients", expected=", ".join(PATIENTS), got=", ".join(found), cause=cause)  # fmt: skip
    for letter, (rank, step, cause) in found.items():
        checked = f"patient {letter}"
        if cause not in CAUSES:
            raise Wrong(
                checked,
                expected=f"one of {', '.join(CAUSES)}",
                got=cause,
                cause="use the words of checks.ex15.CAUSES for the causes",
            )
        if rank not in range(RANKS) or step not in range(1, STEPS + 1):
            whole = isinstance(rank, int) and isinstance(step, int)
            raise Wrong(
                checked,
                expected=f"a rank from 0 to {RANKS - 1}, a step from 1 to {STEPS}",
                got=f"rank {rank}, step {step}",
                cause="the order is (rank, step, cause)" if whole else "ranks and steps are whole numbers",
            )


def judge_diagnosis(letter, truth, said):
    """Raise Wrong unless a diagnosis is the truth; the words do not give it away."""
    rank, step, cause = said
    if (rank, step, cause) == truth:
        return
    right = [
        word
        for word, same in [
            ("the rank", rank == truth.rank),
            ("the step", step == truth.step),
            ("the cause", cause == truth.cause),
        ]
        if same
    ]
    verb = "are" if len(right) > 1 else "is"
    raise Wrong(
        f"patient {letter}",
        expected="what its records and the tools show",
        got=f"rank {rank}, step {step}, {cause}: {' and '.join(right) or 'nothing'} {verb} right",
        cause=likely_mistake(truth, rank, step, cause),
    )


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
