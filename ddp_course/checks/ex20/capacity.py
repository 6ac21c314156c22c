"""Question 3: which choices an expert keeps, by a capacity of the whole batch."""

from functools import partial

import torch
import torch.distributed as dist

from ddp_course.checks.claims import on_every_rank
from ddp_course.checks.ex20.capacity_cases import batch, described, number_of, part_of
from ddp_course.checks.ex20.capacity_claims import causes_of, claims
from ddp_course.checks.ex20.explained import explaining_ranks, observed
from ddp_course.checks.ex20.travel_cases import group_and_place
from ddp_course.checks.ex20.watch import BroughtWatch, noticing_ranks, sent
from ddp_course.checks.groups import group_of, outside
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group


def observe_kept(keep, cases):
    """Of each case, what the answer keeps on this rank, and what it sends."""
    seen = []
    with process_group(timeout=5) as (rank, _):
        for case in cases:
            group, place, _ = group_of(case["groups"])
            given = [part_of(case, rank, values).clone() for values in batch(case, number_of(case, rank))]
            before = [values.clone() for values in given]
            dist.barrier()
            with trying(described(case)), noticing_ranks(place) as asked, BroughtWatch() as watch, torch.no_grad():
                got = keep(*given, case["experts"], case["capacity"], group)
            pairs = zip(("chosen", "weights"), given, before)
            seen.append({
                "got": got.long() if isinstance(got, torch.Tensor) else got,
                "dtype": str(getattr(got, "dtype", type(got).__name__)), "sent": sent(watch.log),
                "outside": outside(watch.log, group_and_place(case, rank)[0]), "asked": asked,
                "changed": [name for name, new, old in pairs if not torch.equal(new, old)],
            })  # fmt: skip
            dist.barrier()
    return seen


@question(
    "In one process: sort all choices by weight, the largest first, and go through them; each expert takes choices until it "
    "is full. What does a rank need to know of the other ranks' choices for that? And what if ranks have different "
    "numbers of tokens, or none?",
    "Gather how many choices each rank has, then the experts and weights, padded to the largest number; cut off the padding "
    "of each rank. Joined in the order of the ranks, these are the choices of the whole batch. A sort with stable=True and "
    "descending=True keeps equal weights in this order. The place of a choice among those of its expert is a cumulative sum "
    "(see within_capacity in the lesson). Then undo the sorting, and take this rank's part.",
    "number = torch.tensor([chosen.numel()]); all_gather into numbers; most = max(numbers). own = torch.zeros(2, most, "
    "dtype=torch.float64); own[:, :len] = the flattened experts and weights; all_gather; whole = torch.cat([part[:, :count] "
    "...], dim=1). order = whole[1].argsort(descending=True, stable=True); sorted experts = whole[0][order].long(); place = "
    "F.one_hot(sorted, experts).cumsum(0).gather(1, sorted[:, None])[:, 0]; kept[order] = place <= capacity; return "
    "kept.split(numbers)[rank].view_as(chosen).",
)
def check_keep(answer, draw):
    """The same choices are kept on any number of ranks: those of one process."""
    base = {"experts": 4, "k": 1, "capacity": 3, "weights": "different", "popular": None}
    wide = base | {"k": 2, "capacity": 4}
    kinds = [
        (base, 12), (wide, 12), (wide | {"weights": "few values"}, 14), (wide | {"weights": "equal"}, 12),
        (wide | {"weights": "zeros", "popular": 0, "capacity": 6}, 13), (wide | {"weights": "near 0.5"}, 12),
        *((base | {"weights": f"near {about}", "popular": 3, "capacity": 5}, 12) for about in (0.5, 0.3, 0.0001)),
        (wide | {"weights": "large"}, 12),
        (wide | {"weights": "rising", "popular": draw.randrange(4)}, 11), (wide | {"weights": "falling"}, 12),
        (wide | {"popular": 1}, 11), (wide | {"capacity": 0}, 9), (wide | {"capacity": 100}, 10),
        (wide | {"k": 3, "capacity": 1, "experts": 5}, 8),
        (wide | {"weights": draw.choice(["few values", "zeros"]), "k": 3, "experts": 6}, draw.randrange(8, 14)),
    ]  # fmt: skip
    drawn = [(kind | {"seed": draw.randrange(10**6)}, tokens) for kind, tokens in kinds]
    pairs = draw.choice([[[0, 1], [2, 3]], [[0, 2], [1, 3]]])
    for groups in ([[0]], [[0, 1, 2]], pairs):
        cases = [kind | {"groups": groups, "tokens": shared(draw, tokens, groups)} for kind, tokens in drawn]
        if len(groups[0]) > 1:
            # padding would take room, or there is none, or nothing to pad
            zeros = wide | {"weights": "zeros", "popular": 0, "capacity": 9, "seed": draw.randrange(10**6)}
            for kind, tokens in ((zeros, [2, 9, 3]), (wide | {"seed": 2}, [0, 9, 0]), (wide | {"seed": 1}, [0, 0, 0])):
                cases.append(kind | {"groups": groups, "tokens": [tokens[: len(ranks)] for ranks in groups]})
        of_ranks = observed(answer, observe_kept, cases, groups, timeout=10)
        causes = causes_of(cases, [[seen[number]["got"] for seen in of_ranks] for number in range(len(cases))])
        with explaining_ranks(groups, of_ranks):
            for number, case in enumerate(cases):
                on_every_rank(partial(claims, case, causes), [seen[number] for seen in of_ranks])


def shared(draw, tokens, groups):
    """The tokens of each group, unevenly on its ranks."""
    found = []
    for ranks in groups:
        cuts = sorted(draw.randrange(1, tokens) for _ in ranks[1:])
        found.append([end - begin for begin, end in zip([0, *cuts], [*cuts, tokens])])
    return found
