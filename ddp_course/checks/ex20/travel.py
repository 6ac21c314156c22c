"""Question 2: tokens travel to the experts of other ranks, and back."""

from functools import partial

import torch
import torch.distributed as dist

from ddp_course.checks.claims import on_every_rank
from ddp_course.checks.ex20.explained import explaining_ranks, observed
from ddp_course.checks.ex20.travel_cases import described, expert, group_and_place, owned, tokens_of
from ddp_course.checks.ex20.travel_claims import causes_of, claims_of_results, claims_of_the_way
from ddp_course.checks.ex20.watch import BroughtWatch, noticing_ranks, sent
from ddp_course.checks.groups import group_of, outside
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group


def observe_travel(there_and_back, cases):
    """Of each case, what the answer returns, what the experts got, and what was sent."""
    seen = []
    with process_group(timeout=5) as (rank, _):
        for case in cases:
            group, place, _ = group_of(case["groups"])
            given, owner, calls = tokens_of(case, rank), list(case["owner"]), []
            compute = partial(compute_and_note, owned(case, place), calls)
            dist.barrier()
            with trying(described(case)), noticing_ranks(place) as asked, BroughtWatch() as watch, torch.no_grad():
                got = there_and_back(*given, owner, compute, group)
            before = tokens_of(case, rank)
            names = [
                name for name, new, old in zip(("x", "chosen", "weights"), given, before) if not torch.equal(new, old)
            ]
            seen.append({
                "got": got, "dtype": str(getattr(got, "dtype", type(got).__name__)), "calls": calls,
                "sent": sent(watch.log, barriers=True), "asked": asked,
                "outside": outside(watch.log, group_and_place(case, rank)[0]),
                "changed": names + ["owner"] * (owner != case["owner"]),
            })  # fmt: skip
            dist.barrier()
    return seen


def compute_and_note(numbers, calls, rows, counts):
    """The experts of a rank; of wrong counts, zeros."""
    kind = type(counts).__name__
    if isinstance(counts, list | tuple):
        kind += f" of {', '.join(sorted({type(count).__name__ for count in counts})) or 'int'}"
    counts = [int(count) for count in counts]
    fits = len(counts) == len(numbers) and sum(counts) == len(rows) and min(counts, default=0) >= 0
    calls.append({"rows": rows.clone(), "counts": counts, "kind": kind})
    if not fits or not numbers:
        return torch.zeros_like(rows)
    return torch.cat([expert(number, part) for number, part in zip(numbers, rows.split(counts))])


@question(
    "Number the choices: choice c of a rank belongs to token c // k. In which order must their rows be, so that "
    "all_to_all_single can cut them into parts for rank 0, rank 1, ...? What does a rank need to know before it can "
    "allocate memory for what arrives? And in which order do the results come home?",
    "Sort the choices by the rank of their expert, and among these by expert. Count the choices per expert, and all-gather "
    "the counts: (ranks, experts) on each rank. From these numbers follow `send`, `receive`, and the counts for compute. "
    "What arrives is sorted by source rank first; compute wants it sorted by expert, so sort it again, and undo that before "
    "the way back. Results come home in the order in which the rows left: add each to its token, index_add, with its own "
    "weight.",
    "owner = torch.tensor(owner); flat = chosen.flatten(); place = owner.argsort(stable=True).argsort(); order = "
    "place[flat].argsort(stable=True); counts = torch.bincount(flat, minlength=len(owner)), all-gathered to theirs; mine = "
    "theirs[:, owner == me]; send = [int(counts[owner == r].sum()) for r in range(ranks)]; receive = mine.sum(1).tolist(). "
    "numbers = torch.arange(mine.shape[1]).repeat(ranks).repeat_interleave(mine.flatten()); by_expert = "
    "numbers.argsort(stable=True); results = compute(arrived[by_expert], mine.sum(0).tolist()); back[by_expert] = results; "
    "torch.zeros_like(x).index_add(0, order // k, home * weights.flatten()[order, None]).",
)
def check_there_and_back(answer, draw):
    """The result is that of one process; each choice reaches its expert once, after an
    exchange of counts.
    """
    three, pairs = [[0, 1, 2]], draw.choice([[[0, 1], [2, 3]], [[0, 2], [1, 3]]])
    some = lambda n: [draw.randrange(3, 8) for _ in range(n)]  # noqa: E731
    shuffled = draw.choice([[2, 0, 1, 0, 2, 1], [1, 2, 0, 2, 1, 0], [2, 1, 0, 1, 0, 2]])
    twice = {"tokens": some(3), "k": 2, "owner": [0, 0, 1, 1, 2, 2], "never": []}  # with other choices
    few = [
        {"tokens": some(3), "k": 1, "owner": [0, 0, 1, 1, 2, 2], "never": []},
        twice,
        twice,
        {"tokens": some(3), "k": 2, "owner": shuffled, "never": []},
        {"tokens": [5, 0, 3], "k": 3, "owner": [1, 0, 0, 2, 1], "never": [1]},
        {"tokens": draw.sample([0, 4, 7], 3), "k": 2, "owner": draw.choice([[2, 0, 2, 0], [0, 1, 1, 0]]), "never": []},
        {"tokens": some(3), "k": 1, "owner": [2, 1, 0], "never": [0, 2]},
        {"tokens": [0, 0, 0], "k": 2, "owner": [2, 1, 0], "never": []},
        {"tokens": [700, 3, 600], "k": 1, "owner": [2, 0], "never": []},  # more than 255 for one expert
    ]
    more = [
        {"tokens": some(4), "k": 2, "owner": [1, 0, 0, 1, 1], "never": []},
        {"tokens": [4, 0, 6, 3], "k": 3, "owner": [1, 1, 0, 1, 0], "never": []},
        {"tokens": some(4), "k": 1, "owner": [1, 1, 1], "never": [1]},
    ]
    for groups, cases in ((three, few), (pairs, more)):
        cases = [case | {"groups": groups, "seed": draw.randrange(10**6)} for case in cases]
        of_ranks = observed(answer, observe_travel, cases, groups, timeout=12)
        causes = causes_of(cases, [[seen[number]["got"] for seen in of_ranks] for number in range(len(cases))])
        with explaining_ranks(groups, of_ranks):
            for number, case in enumerate(cases):
                seen = [of_rank[number] for of_rank in of_ranks]
                on_every_rank(partial(claims_of_the_way, case), seen)
                on_every_rank(partial(claims_of_results, case, causes), seen)
