"""Question 1: cross-entropy from each rank's columns of the logits."""

from functools import partial

import torch
import torch.distributed as dist

from ddp_course.checks.claims import on_every_rank
from ddp_course.checks.ex17.loss_cases import columns, described, made
from ddp_course.checks.ex17.loss_claims import claims
from ddp_course.checks.ex17.meshes import given, names_in, whole_world
from ddp_course.checks.groups import GroupWatch, group_of, outside
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group


def observe_losses(answer, cases):
    """The loss of each case on this rank, its gradient, and what is sent. Another loss is
    computed between forward and backward: of others, or with the same logits or targets.
    """
    seen = []
    with process_group(timeout=5) as (rank, n):
        for case in cases:
            group, place, number = group_of(case["groups"])
            ranks = case["groups"][number]
            dist.barrier()
            tries = []
            for further in (0, 10):
                logits, others = made(case, number + further)
                if further == 0 or case["same"] != "logits":
                    own = logits[:, columns(case, place)].clone().requires_grad_()
                if further == 0 or case["same"] != "targets":
                    targets = others
                before = own.detach().clone(), targets.clone()
                with trying(described(case)), GroupWatch() as forward:
                    loss = answer(own, targets, columns(case, place).start, group)
                tensors = [*zip(("logits", "targets"), before, (own, targets))]
                tries.append({"value": loss, "own": own, "tensors": tensors, "changed": changed(tensors)})
                log = forward.log
                tries[-1] |= {"forward": given(log, len(ranks)), "names": names_in(log), "outside": outside(log, ranks)}
            for one in tries:
                own, loss = one.pop("own"), one["value"]
                own.grad = None
                with trying(f"backward of {described(case)}"), GroupWatch() as backward:
                    if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1:
                        (case["factor"] * loss).backward()
                one |= {"gradient": own.grad, "backward": names_in(backward.log)}
                one["outside"] += outside(backward.log, ranks)
                one["changed_in_backward"] = changed(one.pop("tensors"))
                if one["changed_in_backward"]:
                    break  # what comes next may raise an error that says less
            seen.append(tries[0] | {"second": tries[1].get("gradient")})
            dist.barrier()
    return seen


def changed(tensors):
    return [name for name, old, new in tensors if not torch.equal(old, new.detach())]


@question(
    "The loss of a token is log(sum of exp(logit)) - chosen logit. Which parts of it can each rank compute from its own "
    "columns, and which numbers have to be combined over the group? For large logits, subtract the largest one of *all* "
    "ranks first.",
    "Forward: all-reduce the largest logit of each token (MAX), then the sum of exp(logit - largest), and the logit of the "
    "target, which is 0 on the ranks that do not have it. Backward: (softmax - 1 at the target) / counted, of the own "
    "columns, times the gradient that arrives: each rank has all it needs for that. Write both in a "
    "torch.autograd.Function.",
    "here = (targets >= first) & (targets < first + width); place = (targets - first).where(here, 0); chosen = "
    "logits.gather(1, place[:, None])[:, 0] * here. In backward: gradient = softmax of the own columns; "
    "gradient[here.nonzero()[:, 0], place[here]] -= 1; multiply the rows by counted.double()[:, None] / "
    "counted.sum().clamp(min=1) and by the incoming gradient.",
)
def check_vocabulary_parallel_loss(answer, draw):
    """Loss and gradient are those of F.cross_entropy on the whole logits; three numbers
    per token travel in forward, and none in backward.
    """
    pairs = draw.choice([[[0, 1], [2, 3]], [[0, 2], [1, 3]]])
    few = draw.choice([2, 3])
    for n, groups in [(few, [whole_world(few)] * 7), (4, [whole_world(4), pairs])]:
        cases = []
        for place, group in enumerate(groups):
            # the first is the easiest, where it is easiest to say what is wrong
            case = {"groups": group, "seed": draw.randrange(10**6), "tokens": draw.randrange(13, 20)}
            widths = draw.sample(range(3, 12), len(group[0]))
            case["widths"] = widths if place or n == 4 else [draw.randrange(6, 9)] * n
            if place == 1:
                case["widths"][draw.randrange(len(widths))] = 1
            case["around"] = [0, 0, 1e4, -1e4, 0, "tokens", "ranks"][place] if n < 4 else [0, "groups"][place]
            ignored = ["none", "some", "some", "all but one", "all", "some", "some"]
            case["ignored"] = ignored[place] if n < 4 else "some"
            case["same"] = {2: "logits", 5: "targets"}.get(place)  # in the second loss
            case["factor"] = draw.choice([0.25, 3.0, -2.0]) if place or n == 4 else 1.0
            cases.append(case)
        of_ranks = answer.on_ranks(observe_losses, cases, nproc=n, timeout=10)
        for number, case in enumerate(cases):
            on_every_rank(partial(claims, case), [seen[number] for seen in of_ranks])
