"""What is right in question 3, and what likely mistakes give: a function of pages for each
of the four findings.
"""

import math

from ddp_course.checks.claims import Claim, agree

DIGITS = 6


def executions(pages):
    """{(attempt, step): {rank: row}}, in the order of time."""
    found = {}
    for rank, page in enumerate(pages):
        for row in page:
            found.setdefault((row["attempt"], row["step"]), {})[rank] = row
    return dict(sorted(found.items()))


def complete(pages):
    return {key: rows for key, rows in executions(pages).items() if len(rows) == len(pages)}


# ---- slow ----


def slow(
    pages, seconds=lambda row: row["compute"], least=3, times=3, first_is_best=True, across=False, longest=True,
    of=max, among=complete, with_itself=False,
):  # fmt: skip
    """[rank, first step, last step] of the longest run of steps in which a rank is slow."""
    runs = []
    for (attempt, step), rows in among(pages).items():
        for rank, row in rows.items():
            others = [seconds(each) for other, each in rows.items() if with_itself or other != rank]
            if not others or seconds(row) <= times * of(others):
                continue
            for run in runs:
                if run[0] == rank and run[2] == step - 1 and (across or run[3] == attempt):
                    run[2:] = step, attempt
                    break
            else:
                runs.append([rank, step, step, attempt])
    runs = [run[:3] for run in runs if run[2] - run[1] + 1 >= least]
    runs = runs if first_is_best else runs[::-1]
    return max(runs, key=lambda run: longest * (run[2] - run[1]), default=None)


def first_slow(pages):
    """Of all runs that are long enough, the first one."""
    return slow(pages, longest=False)


# ---- nan ----


def nan(
    pages, norm="norm", order=lambda key: key, bad=lambda value: value is None or not math.isfinite(value), last=False,
    among=executions,
):  # fmt: skip
    rows = among(pages)
    found = [
        [rank, key[1]]
        for key in sorted(rows, key=order)
        for rank in sorted(rows[key], reverse=last)
        if rows[key][rank][norm] is not None and bad(rows[key][rank][norm])
    ]
    return found[0] if found else None


def step_from_zero(found):
    return found and [found[0], found[1] - 1]


# ---- redone and goodput ----


def redone(pages):
    done = complete(pages)
    return len(done) - len({step for _, step in done})


def redone_steps(pages):
    done = [step for _, step in complete(pages)]
    return sum(done.count(step) > 1 for step in set(done))


def seconds_of(rows, join=max, parts=("compute", "wait")):
    return join(sum(row[part] for part in parts) for row in rows.values())


def goodput(pages, total=executions, last=True, **how):
    seconds = {key: seconds_of(rows, **how) for key, rows in executions(pages).items()}
    kept = {}
    for key in complete(pages):
        if last or key[1] not in kept:
            kept[key[1]] = seconds[key]
    return sum(kept.values()) / sum(seconds[key] for key in total(pages))


def steps_share(pages):
    done = complete(pages)
    return len({step for _, step in done}) / len(executions(pages))


def mean(values):
    values = list(values)
    return sum(values) / len(values)


LIMITS = {
    f"your limit is {'larger' if times > 3 else 'smaller'}, such as {times:g} times": times
    for times in (1.5, 2, 2.5, 3.5, 4, 5)
}

FINDINGS = {
    "slow": (slow, {
        "no straggler is found in any job: look at \"compute\" alone, since the others wait for the slowest rank":
            lambda pages: None,
        "the rank that waits is not the slow one: it waits for it. Look at \"compute\"":
            lambda pages: slow(pages, seconds=lambda row: row["wait"]),
        "compute and wait together are about the same on all ranks, for all wait for the slowest one: look at \"compute\"":
            lambda pages: slow(pages, seconds=lambda row: row["compute"] + row["wait"]),
        "one or two slow steps are no straggler: three in a row, or more": lambda pages: slow(pages, least=1),
        "a single slow step is no straggler, nor are two: three in a row, or more": lambda pages: slow(pages, least=2),
        "three slow steps in a row are enough": lambda pages: slow(pages, least=4),
        "the longest run of slow steps counts, and not the first one": first_slow,
        "of runs that are equally long, the first one counts": lambda pages: slow(pages, first_is_best=False),
        "a run of steps ends with its attempt": lambda pages: slow(pages, across=True),
        "an incomplete execution does not count: a rank is slow in complete ones only":
            lambda pages: slow(pages, among=executions),
        "the rank takes more than 3 times as long as each other rank: compare it with the slowest other, not their mean":
            lambda pages: slow(pages, of=mean),
        "the rank takes more than 3 times as long as each other rank: compare it with the slowest other, not the fastest":
            lambda pages: slow(pages, of=min),
        "compare a rank with the others: its own seconds are not in their mean":
            lambda pages: slow(pages, of=mean, with_itself=True),
        **{f"slow is more than 3 times as long: {words}": lambda pages, times=times: slow(pages, times=times)
           for words, times in LIMITS.items()},
        "steps are counted as the rows say it: from 1": lambda pages: (
            lambda found: found and [found[0], found[1] - 1, found[2] - 1])(slow(pages)),
        "the last slow step belongs to the run, too": lambda pages: (
            lambda found: found and [found[0], found[1], found[2] + 1])(slow(pages)),
    }, "3 times as long as each other rank's compute, in 3 steps of one attempt in a row or more; else None"),
    "nan": (nan, {
        "after the all-reduce, all ranks have the NaN: \"norm\" is of the rank's own gradient, before it":
            lambda pages: nan(pages, norm="mean_norm"),
        "the loss is computed before the gradient: it becomes NaN one step later, on all ranks":
            lambda pages: nan(pages, norm="loss"),
        "a rank writes its norm in an incomplete execution, too: look at all rows":
            lambda pages: nan(pages, among=complete),
        "inf is not finite either: use math.isfinite": lambda pages: nan(pages, bad=math.isnan),
        "an attempt comes after the one before it, even if its steps have smaller numbers":
            lambda pages: nan(pages, order=lambda key: (key[1], key[0])),
        "this is the last attempt only: the NaN may have come before": lambda pages: nan(
            [[row for row in page if row["attempt"] == max(page[-1]["attempt"] for page in pages)] for page in pages]),
        "this is the first attempt only: a NaN may come later": lambda pages: nan(
            [[row for row in page if row["attempt"] == 0] for page in pages]),
        "steps are counted as the rows say it: from 1": lambda pages: step_from_zero(nan(pages)),
        "no NaN is found in any job": lambda pages: None,
        "the order is (rank, step)": lambda pages: (lambda found: found and found[::-1])(nan(pages)),
    }, "the first attempt and step, in the order of time, in which a rank's own \"norm\" is not finite; or None"),
    "redone": (redone, {
        "an update was done only if all ranks have a row of it in this attempt": lambda pages:
            len(executions(pages)) - len({step for _, step in executions(pages)}),
        "these are updates that were done more than once: one that was done three times was redone twice": redone_steps,
        "these are rows: an update has one row per rank": lambda pages: 3 * redone(pages),
        "these are all updates that were done: return those that were done again": lambda pages: len(complete(pages)),
        "these are restarts, and not updates": lambda pages: max(row["attempt"] for page in pages for row in page),
        "what one rank has written is not enough: a lost rank has fewer rows": lambda pages:
            len(pages[0]) - len({row["step"] for row in pages[0]}),
    }, "for each complete execution of a step after the first one, 1"),
    "goodput": (goodput, {
        "the seconds of a step that was not finished are lost, but they are part of all seconds":
            lambda pages: goodput(pages, total=complete),
        "of a step that was done twice, the last execution counts, since the first one was lost":
            lambda pages: goodput(pages, last=False),
        "a step takes compute and wait": lambda pages: goodput(pages, parts=("compute",)),
        "a step takes as long as its slowest rank: the maximum, and not the mean": lambda pages: goodput(pages, join=mean),
        "a step takes as long as its slowest rank: the maximum, and not the sum": lambda pages: goodput(pages, join=sum),
        "a step takes as long as its slowest rank: the maximum, and not the minimum": lambda pages: goodput(pages, join=min),
        "a step takes as long as its slowest rank, and not as long as the first that has a row":
            lambda pages: goodput(pages, join=lambda values: next(iter(values))),
        "this counts steps: goodput is a share of seconds": steps_share,
        "this is the share that was lost: goodput is what was useful": lambda pages: 1 - goodput(pages),
        "this is in percent: return a share from 0 to 1": lambda pages: 100 * goodput(pages),
        "redone steps count once": lambda pages: (
            sum(seconds_of(rows) for rows in complete(pages).values())
            / sum(seconds_of(rows) for rows in executions(pages).values())),
    }, "the seconds of the last complete execution of each step, by the seconds of all executions"),
}  # fmt: skip


def all_claims(cases, told, seen):
    """told: what the jobs are, in words."""
    for words, got in zip(told, seen):
        yield Claim(
            words, sorted(got) if isinstance(got, dict) else got, sorted(FINDINGS), "return a dict with these four names",
        )  # fmt: skip
    for name, (right, mistakes, rule) in FINDINGS.items():
        of_all = [got[name] for got in seen]
        for pages, words, got in zip(cases, told, of_all):
            yield Claim(
                f"{name}: {words}", got, right(pages), f"{name}: {rule}",
                lambda of_all=of_all, got=got, mistakes=mistakes: explaining(mistakes, cases, of_all, got), DIGITS,
            )  # fmt: skip


def all_differ(cases):
    """Whether each mistake gives something else than the right function, in some case."""
    return all(
        any(not agree(mistake(pages), right(pages), DIGITS) for pages in cases)
        for right, mistakes, _ in FINDINGS.values()
        for mistake in mistakes.values()
    )


def explaining(mistakes, cases, seen, got):
    """The mistakes that give what was seen in all cases."""
    for cause, mistake in mistakes.items():
        if all(agree(one, mistake(pages), DIGITS) for pages, one in zip(cases, seen)):
            yield got, cause
