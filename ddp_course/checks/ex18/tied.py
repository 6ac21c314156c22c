"""Question 3: the gradient of a matrix that the first and the last stage have."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.checks.claims import on_every_rank
from ddp_course.checks.ex18.tied_cases import described, gradient, shape_of
from ddp_course.checks.ex18.tied_claims import claims
from ddp_course.checks.ex18.tied_seen import alike, gradients_of, number_in, share_memory
from ddp_course.checks.ex18.tied_watch import TiedWatch, noting_groups
from ddp_course.checks.works import noting_works
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group


def observe_tied(kind, cases):
    seen = []
    for case in cases:  # names of groups depend on the groups that a process has made before
        with process_group(timeout=10) as (rank, _):
            embedding, head = copies(case, rank)
            with trying(described(case)), noting_groups() as calls:
                tied = kind(embedding, head, [tuple(pair) for pair in case["ends"]])
            dist.barrier()
            steps = [a_step(tied, case, step, embedding, head) for step in range(2)]
            seen.append([found | {"calls": len(calls)} for found in steps])
    return seen


def copies(case, rank):
    """The matrices that this rank has, or None: of the first stage, and of the last one."""
    firsts, lasts = zip(*case["ends"])
    make = lambda: nn.Parameter(torch.ones(shape_of(case), dtype=torch.float64))  # noqa: E731
    embedding = make() if rank in firsts else None
    head = make() if rank in lasts else None
    return embedding, embedding if case["one"] and embedding is not None and head is not None else head


def a_step(tied, case, step, embedding, head):
    """Gradients as a backward leaves them, then the answer, and what it did."""
    rank, given = dist.get_rank(), {}
    for name, matrix in (("embedding", embedding), ("head", head)):
        if matrix is not None:
            given[name] = matrix
            matrix.grad = None
    for name, matrix in given.items():
        own = gradient(case, step, rank, name)
        matrix.grad = own if matrix.grad is None else matrix.grad + own
    groups = len(dist.distributed_c10d._world.pg_map)
    with trying(described(case)), TiedWatch(len(members(case))) as watch, noting_works() as works:
        tied.sum_gradients()
        log, gradients = watch.brought(), gradients_of(given)
        square = tied.square()
    found = {
        "gradients": gradients, "shared": share_memory([p.grad for p in set(given.values())]),
        "square": number_in(square), "squared": not alike(gradients, gradients_of(given)),
        "moved": any((matrix != 1).any().item() for matrix in given.values()), "names": [name for name, _ in log],
        "bytes": sum(size for _, size in log), "later": len(watch.brought()) - len(log),
        "forgotten": sum(not work.waited for work in works),
        "groups": len(dist.distributed_c10d._world.pg_map) - groups,
    }  # fmt: skip
    dist.barrier()
    return found


def members(case):
    return {rank for pair in case["ends"] for rank in pair}


@question(
    "One process has one matrix, used twice: what is its gradient, given those of the two uses? With replicas, each has "
    "seen other samples: what is its gradient then? Which ranks have to know of it, and how often does it have to travel?",
    "The sum over the stages and the mean over the replicas are one sum of all these gradients, divided by the number of "
    "replicas. So one all-reduce over all ranks with a first or last stage is enough. A rank with two copies adds them up "
    "first, and writes the result into both; if both are one parameter, autograd has added them up already. All ranks call "
    "new_group, once, in __init__.",
    "ranks = sorted({rank for pair in ends for rank in pair}); self.group = dist.new_group(ranks); copies = [embedding, "
    "head] without None, and each parameter once. Then total = sum(p.grad for p in copies), all_reduce(total, "
    "group=self.group) if there are copies and len(ranks) > 1, total /= len(ends), and p.grad.copy_(total) for each. "
    "square: total.pow(2).sum() / len(ranks) on these ranks, 0 on the others.",
)
def check_tied_gradients(answer, draw):
    """The copies' gradients are that of one process, after one all-reduce of the ranks
    that have copies; the squares of all ranks count it once.
    """
    three, four = draw.sample(range(3), 3), draw.sample(range(4), 4)
    a, b, c = three
    few = [{"ends": [[a, b]], "one": False}, {"ends": [[a, a]], "one": True},
           {"ends": [[a, a], [b, b]], "one": True}, {"ends": [[a, a], [b, b]], "one": False},
           {"ends": [[b, c], [a, a]], "one": draw.random() < 0.5},
           {"ends": [[a, a], [b, b], [c, c]], "one": draw.random() < 0.5}]  # fmt: skip
    apart = draw.choice([[0, 2], [2, 0], [1, 3], [3, 1]])  # between them, a rank without a copy
    more = [{"ends": [four[:2], four[2:]], "one": False}, {"ends": [apart], "one": False}]
    for n, cases in [(3, few), (4, more)]:
        cases = [case | {"seed": draw.randrange(10**6), "rows": draw.randrange(4, 9)} for case in cases]
        of_ranks = answer.on_ranks(observe_tied, cases, nproc=n, timeout=12)
        for number, case in enumerate(cases):
            on_every_rank(partial(claims, case), [seen[number] for seen in of_ranks])
