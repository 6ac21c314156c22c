"""What is planted in the small run of question 4. It is drawn from a name.

This file says how each fault is drawn, but not what a person's run has.
"""

import random
import unicodedata
from typing import NamedTuple

MACHINES, PER_MACHINE = 2, 2
BUDGET = 36  # executions of a step, complete or not, in all attempts together
PACE, SLOW = 0.03, 0.3  # seconds that a rank computes in a step at least


class Planted(NamedTuple):
    """Steps are counted from 1, attempts from 0."""

    every: int  # after so many steps comes a checkpoint
    lost: tuple  # (machine, step): it loses its power in this step of attempt 0
    nan: tuple  # (attempt, rank, step)
    slow: tuple  # (attempt, rank, first step, last step)


def planted(name):
    """The faults in a person's small run."""
    name = unicodedata.normalize("NFC", name)  # one name, however it was typed
    draw = random.Random(f"exercise 21 {' '.join(name.lower().split())}")
    every = draw.choice([4, 5, 6, 7])
    # steps are redone in each run, also with a checkpoint every 3 steps, but fewer of them
    done = [step for step in range(2 * every + 2, 3 * every) if step % 3 and step // 3 * 3 > 2 * every]
    lost = draw.choice(done) + 1
    faults = [draw.randrange(2), draw.randrange(2)]
    nan = (faults[0], draw.randrange(MACHINES * PER_MACHINE), draw.randrange(2 * every + 1, lost))
    length = draw.randint(4, 6)
    first = draw.randint(2, lost - 1 - length) if faults[1] == 0 else draw.randint(2 * every + 1, 2 * every + 6)
    slow = (faults[1], draw.randrange(MACHINES * PER_MACHINE), first, first + length - 1)
    return Planted(every, (draw.randrange(MACHINES), lost), nan, slow)


def truth(name):
    """The findings of a person's small run, as the question asks for them."""
    run = planted(name)
    lost = run.lost[1]
    saved = lambda every: (lost - 1) // every * every  # the latest checkpoint before the loss
    return {
        "lost": list(run.lost),
        "nan": list(run.nan[1:]),
        "slow": list(run.slow[1:]),
        "redone": lost - 1 - saved(run.every),
        "reached": saved(run.every) + BUDGET - lost,
        "every_3": saved(3) + BUDGET - lost,
    }
