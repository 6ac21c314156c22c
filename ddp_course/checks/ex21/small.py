"""Question 4: what went wrong in a small run of your own."""

from ddp_course.checks.claims import Claim, hold
from ddp_course.checks.ex21.planted import BUDGET, MACHINES, PER_MACHINE, planted, truth
from ddp_course.checks.functions import as_plain
from ddp_course.judge.question import question

RANKS = MACHINES * PER_MACHINE


def written(findings):
    """What the answer is: a name and a dict, as plain values; in words."""
    answer = findings()
    try:
        name, found = answer
        found = {str(key): as_plain(value) for key, value in dict(found).items()}
    except (TypeError, ValueError):
        return {"name": None, "found": None, "text": repr(answer)[:200]}
    return {"name": name if isinstance(name, str) else None, "found": found, "text": repr(answer)[:200]}


@question(
    "Run your post_mortem on the pages first: it gives slow, nan and redone. For the others, look at the last rows of "
    "attempt 0: which ranks have one row less?",
    "lost: ranks 0 and 1 are on machine 0, ranks 2 and 3 on machine 1. The lost machine has no row of its last step, and "
    "the other one has a row without a mean norm. reached: the largest step of attempt 1.",
    "every_3: the loss takes the job back to the latest multiple of 3 below the lost step. What is left of the budget after "
    "attempt 0 goes on from there: that step, plus the rest of the budget.",
)
def check_small_run(answer, draw):
    """The findings must be those of the run that is drawn from the name."""
    [said] = answer.on_ranks(written)
    hold(form(said["name"], said["found"], said["text"]))
    hold(findings(said["name"], said["found"]))


def form(name, found, text):
    """Claims that there is a name, and a dict with all findings."""
    yield Claim(
        "what small_run_findings() returns", name is not None and found is not None, True,
        "return a pair: a text, and a dict", told="your name, and {finding: value}", shown=text,
    )  # fmt: skip
    yield Claim(
        "the name in small_run_findings()", name.strip().lower() not in ("", "your name"), True,
        "write your own name: the run is drawn from it, so yours is yours", told="your name", shown=repr(name),
    )  # fmt: skip
    missing = [key for key in truth(name) if key not in found]
    yield Claim(
        "the findings", missing, [], f"there is no {', '.join(missing)}",
        told=", ".join(truth(name)), shown=", ".join(found),
    )  # fmt: skip


def findings(name, found):
    """Claims that each finding is the true one; the words do not give it away."""
    faults = ("lost", "nan", "slow")
    yield Claim(
        f"{', '.join(faults)} in the small run of {name}", any(found[key] == truth(name)[key] for key in faults), True,
        "none of the three is that of this run: is this the name that you gave small_run?",
        told="what the pages of this run say", shown=repr([found[key] for key in faults])[:200],
    )  # fmt: skip
    for key, value in truth(name).items():
        yield Claim(
            f"{key} in the small run of {name}", found[key], value, RULES[key], mistakes(name)[key],
            told="what the pages of this run say", shown=repr(found[key])[:100],
        )  # fmt: skip


RULES = {
    "lost": "(machine, step): the machine whose ranks have no row of the last step of attempt 0, and that step",
    "nan": '(rank, step): the first row with a "norm" that is not finite',
    "slow": '(rank, first step, last step): "compute" is more than 3 times that of each other rank, in complete executions',
    "redone": "a whole number: the complete executions, less the different steps among them",
    "reached": "a whole number: the last step that was done when the budget was used up",
    "every_3": "a whole number: after the loss, the job goes on from the latest multiple of 3 that was done",
}


def mistakes(name):
    """For each finding, pairs of what a likely mistake gives, and its cause."""
    true, run = truth(name), planted(name)
    (machine, step), (rank, bad) = true["lost"], true["nan"]
    slow, first, last = true["slow"]
    from_zero = "steps are counted as the rows say it: from 1"
    other = "ranks that wait in vain write a row without a mean norm: the lost machine has no row of that step"
    return {
        "lost": [
            ([1 - machine, step], other),
            ([1 - machine, step - 1], other),
            ([machine, step - 1], "that is the last step that the machine has done: it was lost in the next one"),
            *(([rank, at], "name the machine, 0 or 1, not a rank") for rank in range(2, RANKS) for at in (step, step - 1)),
            ([step, machine], "the order is (machine, step)"),
        ],
        "nan": [
            ([rank, bad - 1], from_zero),
            ([bad, rank], "the order is (rank, step)"),
            *(([each, bad], "the step is right, but not the rank: ranks are counted from 0, and the mean norm is NaN on all "
               "of them. Whose own \"norm\" is it?") for each in range(RANKS + 1) if each != rank),
        ],
        "slow": [
            ([slow, first - 1, last - 1], from_zero),
            ([slow, first, last + 1], "the last step is the last slow one, not the one after it"),
            ([slow, first, last - first + 1], "these are a first step and a number of steps: name the last step"),
            ([first, last, slow], "the order is (rank, first step, last step)"),
            *(([each, first, last], "the steps are right, but not the rank: ranks are counted from 0, and those that wait "
               "for the slow one have a long \"wait\". Look at \"compute\"") for each in range(RANKS + 1) if each != slow),
        ],
        "redone": [
            (true["redone"] + 1, "an execution is complete if each rank has a row of it: the lost step was not done twice"),
            (RANKS * true["redone"], "these are rows: an update has one row per rank"),
            (BUDGET, "these are all executions: count those that were redone"),
        ],
        "reached": [
            (BUDGET, "these are executions: some steps were done twice, and one was not finished"),
            (true["reached"] + 1, "the budget counts the incomplete execution, too"),
            (BUDGET - step, "this is the number of executions in attempt 1, which does not begin with step 1"),
        ],
        "every_3": [
            (true["reached"], f"this is with a checkpoint every {run.every} steps: what would it be with one every 3?"),
            (BUDGET, "a loss costs at least the execution that it interrupts"),
            (BUDGET - 1, "the incomplete execution is one that is lost: some steps after the latest checkpoint are, too"),
            (true["every_3"] + 1, "the budget counts the incomplete execution, too"),
        ],
    }  # fmt: skip
