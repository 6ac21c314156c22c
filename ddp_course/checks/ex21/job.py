"""A small job of question 3: it runs on real ranks, with planted faults, and each rank
writes a page.
"""

import time

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.ranks.environment import process_group

RANKS = 3
PACE = 0.001


def run_jobs(jobs, stretch):
    """This rank's pages of all jobs. stretch: how many times their pace a rank computes."""
    with process_group(timeout=10) as (rank, _):
        for _ in range(3):
            dist.all_reduce(torch.zeros(1))
        return [run_job(job | {"pace": stretch * job["pace"]}, rank) for job in jobs]


def run_job(job, rank):
    """A page: rows in the order in which this rank has written them."""
    page, begin = [], 1
    for attempt, lost in enumerate([*job["lost"], None]):
        torch.manual_seed(begin)
        model, end = nn.Linear(8, 1), lost[0] if lost else job["steps"]
        dist.barrier()
        for step in range(begin, end + 1):
            gone = bool(lost) and step == end
            row = a_step(job, model, rank, attempt, step, gone)
            if not gone or rank not in lost[1]:
                page.append(row)
        begin = (end - 1) // job["every"] * job["every"] + 1
    return page


def a_step(job, model, rank, attempt, step, gone):
    """A row. gone: whether a machine is lost in this step, so that no mean comes."""
    start = time.perf_counter()
    loss, gradient = own_gradient(model, step, rank)
    for *place, value in job["nan"]:
        if place == [attempt, rank, step]:
            gradient[3] = value
    until = start + job["pace"] * times_of(job, rank, attempt, step)
    time.sleep(max(0.0, until - time.perf_counter()))
    norm, computed = gradient.norm().item(), time.perf_counter()
    if gone:
        time.sleep(0.003)  # until the others give up
        mean = None
    else:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
        mean = gradient.norm().item()
        descend(model, gradient)
    done = time.perf_counter()
    row = {"attempt": attempt, "step": step, "compute": computed - start, "wait": done - computed}
    return row | {"loss": loss, "norm": norm, "mean_norm": mean}


def own_gradient(model, step, rank):
    """The loss of this rank's samples of a step, and its gradient as one vector."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    model.zero_grad()
    loss.backward()
    return loss.item(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@torch.no_grad()
def descend(model, gradient):
    for parameter, part in zip(model.parameters(), gradient.split([8, 1])):
        parameter -= 0.01 * part.view_as(parameter)


def times_of(job, rank, attempt, step):
    """How many times as long as its job's pace a rank computes."""
    for who, first, last, when, *times in job["slow"]:
        if who == rank and first <= step <= last and attempt == when:
            return times[0] if times else 8
    return job["usual"]


def with_planned_times(job, pages):
    """The pages with the seconds that the ranks should have taken: for a machine that is so
    busy that what they took says nothing.
    """
    planned = [
        [row | {"compute": job["pace"] * (times_of(job, rank, row["attempt"], row["step"]) or 0.3 + 0.01 * rank)}
         for row in page]
        for rank, page in enumerate(pages)
    ]  # fmt: skip
    slowest = {}
    for row in (row for page in planned for row in page):
        place = row["attempt"], row["step"]
        slowest[place] = max(slowest.get(place, 0.0), row["compute"])
    for rank, page in enumerate(planned):
        for row in page:
            sends = job["pace"] * (0.1 + 0.02 * rank)
            row["wait"] = slowest[row["attempt"], row["step"]] - row["compute"] + sends
    return planned


# ---- which jobs ----


def a_job(steps=12, every=4, lost=(), nan=(), slow=(), pace=PACE):
    """lost: of each attempt but the last, [step, ranks that write no row of it]; nan: lists of [attempt,
    rank, step, what its gradient has]; slow: [rank, first step, last step, attempt, how many times]. pace:
    seconds that a rank computes at least; with PACE only one that is slow.
    """
    faults = {"lost": list(lost), "nan": list(nan), "slow": list(slow)}
    return faults | {"steps": steps, "every": every, "pace": pace, "usual": int(pace != PACE)}


def jobs_of(draw):
    nan, inf = float("nan"), float("inf")
    rank = draw.randrange(RANKS)
    other = (rank + 1) % RANKS
    jobs = [
        a_job(),
        a_job(nan=[[0, rank, 12, nan]]),
        a_job(slow=[[rank, 1, 12, 0]]),
        a_job(lost=[[1, [rank]]]),  # nothing was done
        a_job(lost=[[9, [rank]]]),  # just after a checkpoint
        a_job(lost=[[8, [rank, other]], [7, [0]]], slow=[[other, 5, 7, 0]]),
        a_job(lost=[[11, [rank]]], nan=[[1, other, 9, nan]], slow=[[rank, 2, 4, 0, 20], [other, 5, 9, 0, 20]]),
        a_job(lost=[[7, [other]], [12, [rank]]], nan=[[0, 2, 6, inf]]),
        a_job(every=5, lost=[[8, [2]]], nan=[[0, 0, 6, nan]], slow=[[2, 6, 12, 1]]),
        a_job(slow=[[rank, 3, 4, 0], [other, 8, 8, 0]]),  # too short
        a_job(slow=[[rank, 2, 5, 0], [other, 8, 11, 0]]),  # equally long
        # several, for a busy machine can make a run shorter
        a_job(slow=[[rank, 2, 4, 0], [other, 6, 8, 0]]),
        a_job(slow=[[other, 1, 3, 0], [rank, 10, 12, 0]]),
        a_job(slow=[[rank, 1, 3, 0], [rank, 7, 9, 0]]),
        a_job(slow=[[rank, 1, 12, 0, 2.7]], pace=0.004),  # less than 3 times
        a_job(slow=[[rank, 1, 12, 0, 3.3]], pace=0.004),  # and a bit more
        a_job(slow=[[rank, 1, 12, 0, 7], [other, 1, 12, 0, 2.6]], pace=0.002),  # slow for one of the others only
        # two slow steps just before a loss, and two after it; then all ranks are lost
        a_job(lost=[[5, [other]]], slow=[[rank, 3, 4, 0, 20], [rank, 5, 6, 1, 20]]),
        a_job(lost=[[9, list(range(RANKS))]], slow=[[rank, 7, 8, 0, 20], [rank, 9, 10, 1, 20]]),
        a_job(lost=[[7, [rank]]], nan=[[0, other, 7, nan]], slow=[[other, 5, 7, 0]]),  # in an incomplete execution
        a_job(every=20, lost=[[10, [1]], [10, [2]]]),
        a_job(every=20, lost=[[10, [other]]], nan=[[0, other, 9, nan], [1, rank, 3, nan]]),  # the smaller step is later
    ]  # fmt: skip
    for _ in range(5):
        every, end = draw.choice([2, 3, 4]), draw.randrange(5, 12)
        first = draw.randrange(1, 8)
        jobs.append(a_job(
            draw.randrange(12, 15), every, [[end, draw.choice([[0], [1], [2], [0, 2]])]],
            [[draw.randrange(2), draw.randrange(RANKS), end - 1 - draw.randrange(2) * (end > every), nan]],
            [[draw.randrange(RANKS), first, first + draw.randrange(2, 5), draw.randrange(2)]],
        ))  # fmt: skip
    return jobs
