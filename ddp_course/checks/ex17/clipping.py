"""Question 5: clipping gradients of which some are shards and some are replicas."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import on_every_rank
from ddp_course.checks.ex17.clipping_cases import described, norm_of, pieces
from ddp_course.checks.ex17.clipping_claims import claims
from ddp_course.checks.ex17.meshes import is_message, names_in
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group


def observe_clipping(clip, cases):
    seen = []
    with process_group(timeout=5) as (rank, n):
        for case in cases:
            given = []
            for gradient, replicas in pieces(case, rank):
                parameter = nn.Parameter(torch.ones(3 if gradient is None else len(gradient), dtype=torch.float64))
                parameter.grad = gradient
                given.append((parameter, replicas))
            if rank in case["without"]:
                given = [pair for pair in given if pair[0].grad is not None]
            dist.barrier()
            with trying(described(case)), CheckedWatch() as watch:
                norm = clip(given, case["max_norm"])
            seen.append({
                "norm": norm.double().reshape(()) if isinstance(norm, torch.Tensor) and norm.numel() == 1 else
                torch.tensor(norm, dtype=torch.float64) if isinstance(norm, float) else repr(norm),
                "gradients": [parameter.grad for parameter, _ in given],
                "moved": any((parameter != 1).any().item() for parameter, _ in given),
                "names": names_in(watch.log), "bytes": sum(entry["bytes"] for entry in watch.log if is_message(entry)),
            })  # fmt: skip
            dist.barrier()
    return seen


@question(
    "The square of the whole norm is a sum over all parameters. If each rank adds up the squares of all that it has and "
    "the ranks then add up their sums, how often is a gradient counted that several ranks have?",
    "Count each square once: a rank adds square / replicas, so that the replicas together give it once. One all-reduce of "
    "this number over all ranks, then the root. Take part in the all-reduce also with no gradients at all, with 0.",
    "square = torch.zeros((), dtype=torch.float64); for each p with a gradient: square += p.grad.pow(2).sum() / replicas; "
    "dist.all_reduce(square); norm = square.sqrt(); scale = (max_norm / (norm + 1e-6)).clamp(max=1); each p.grad *= scale; "
    "return norm.",
)
def check_clip_gradients(answer, draw):
    """Norm and gradients are those of clip_grad_norm_ in one process that has each
    gradient once; one number travels.
    """
    few = draw.choice([2, 3])
    for n, shapes in [(few, [(1, few), (few, 1)]), (4, [(2, 2), (1, 4)]), (few, [None, None, (1, few)])]:
        cases = []
        for place, shape in enumerate(shapes):
            if shape is None:
                continue
            kinds = (
                ["this", "all"]
                if not place and n < 4
                else draw.sample(["this", "all", "tensor", "data"] * 2, 6) + ["this"]
            )
            case = {"shape": shape, "kinds": kinds, "seed": draw.randrange(10**6), "length": draw.choice([0.5, 2.0])}
            case["frozen"] = [draw.randrange(len(kinds))] if place == 1 else []
            case["without"] = [draw.randrange(n)] if place == 2 else []
            if case["without"]:
                case["kinds"] = ["this"] * 3
            # the second is not long enough to be clipped
            case["max_norm"] = norm_of(case, n) * (draw.uniform(1.5, 3) if place == 1 else draw.uniform(0.2, 0.7))
            cases.append(case)
        of_ranks = answer.on_ranks(observe_clipping, cases, nproc=n, timeout=10)
        for number, case in enumerate(cases):
            on_every_rank(partial(claims, case), [seen[number] for seen in of_ranks])
