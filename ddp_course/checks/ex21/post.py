"""Question 3: the post-mortem of a job that ran with faults."""

from ddp_course.checks.claims import hold
from ddp_course.checks.ex21.job import RANKS, jobs_of, run_jobs, with_planned_times
from ddp_course.checks.ex21.post_claims import FINDINGS, all_claims, all_differ
from ddp_course.checks.functions import as_plain
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question


def observe_findings(post_mortem, cases, told):
    seen = []
    for pages, words in zip(cases, told):
        with trying(words):
            found = post_mortem(pages)
        if isinstance(found, dict):  # other names do no harm
            found = {name: as_plain(value) for name, value in found.items() if name in FINDINGS}
        seen.append(found)
    return seen


def in_words(job):
    words = [f"a job of {job['steps']} steps with a checkpoint every {job['every']}"]
    words += [f"a rank lost in step {step}" for step, _ in job["lost"]]
    return ", ".join(words)


@question(
    "Put the rows of all ranks together by (attempt, step): {(attempt, step): {rank: row}}. Sorted, that is the order of "
    "time. All four findings are short with it.",
    "slow: in each complete step, at most one rank has more than 3 times the compute of each other one; then look for runs "
    "of steps. nan: the first (attempt, step) in which some rank's own norm is not finite. redone: complete executions, "
    "less different steps. goodput: {step: seconds} that later attempts overwrite has the useful seconds.",
    "done = {key: rows for key, rows in sorted(steps.items()) if len(rows) == len(pages)}; seconds = {key: "
    "max(row['compute'] + row['wait'] for row in rows.values())}; redone = len(done) - len({step for _, step in done}); "
    "useful = {step: seconds[attempt, step] for attempt, step in done}; goodput = sum(useful.values()) / "
    "sum(seconds.values()). For slow, keep the current run (rank, attempt, first, last), and begin a new one when rank or "
    "attempt changes, or a step is missing.",
)
def check_post_mortem(answer, draw):
    """Jobs run on three real ranks with planted faults; what their pages say must be found."""
    jobs = jobs_of(draw)
    for stretch in (1, 3):  # on a busy machine, all ranks are slow now and then
        of_ranks = answer.without(run_jobs, jobs, stretch, nproc=RANKS, timeout=20)
        cases = [list(pages) for pages in zip(*of_ranks)]
        if all_differ(cases):
            break
    else:
        cases = [with_planned_times(job, pages) for job, pages in zip(jobs, cases)]
    told = [in_words(job) for job in jobs]
    [seen] = answer.on_ranks(observe_findings, cases, told)
    hold(all_claims(cases, told, seen))
