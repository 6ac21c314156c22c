"""Question 2: which gradients need a sum under sequence parallelism."""

from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional as F

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import on_every_rank
from ddp_course.checks.ex17.gradient_cases import (
    a_batch,
    classifier,
    cut,
    described,
    drawn,
    freeze,
    gradients_in_one_process,
)
from ddp_course.checks.ex17.gradient_causes import in_part
from ddp_course.checks.ex17.gradient_claims import claims
from ddp_course.checks.ex17.meshes import given, names_in, whole_world
from ddp_course.checks.groups import group_of
from ddp_course.checks.training import gradients_of, state
from ddp_course.checks.works import noting_works
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group

SOME = ["positions.weight", "query_norm.bias", "contract.bias", "norm.weight"]


def observe_sums(sum_gradients, cases):
    """Of each case, the gradients before and after the answer, and what it sends."""
    seen = []
    with process_group(timeout=5):
        for case in cases:
            group, place, number = group_of(case["groups"])
            n = dist.get_world_size(group)
            whole, model = drawn(case).state_dict(), classifier(case, n)
            model.load_state_dict({name: cut(name, value, place, n) for name, value in whole.items()})
            freeze(model, case["frozen"])
            texts, labels = a_batch(case, number)
            for step in range(case["step"]):
                model.zero_grad()
                F.cross_entropy(model(texts.chunk(n, dim=1)[place], group), labels).backward()
                if step < case["step"] - 1:
                    with trying(described(case)):
                        sum_gradients(model, group)
            before, parameters = gradients_of(model), state(model)
            dist.barrier()
            with trying(described(case)), CheckedWatch() as watch, noting_works() as works:
                sum_gradients(model, group)
            after = state(model)
            seen.append({
                "before": before, "after": gradients_of(model), "names": names_in(watch.log),
                "bytes": given(watch.log, n), "forgotten": sum(not work.waited for work in works),
                "moved": [name for name, value in parameters.items() if not torch.equal(value, after[name])],
            })  # fmt: skip
            dist.barrier()
    return seen


@question(
    "Go through the model from above and ask of each parameter: does this rank's forward use the whole of it? On all "
    "tokens, or on its own? In all heads, or in its own? A gradient needs a sum where each rank has the whole parameter "
    "but has used it for a part of the tokens or heads only.",
    "A sum is needed for norm1, norm2, norm and positions (own tokens), the biases of output and contract (added to own "
    "tokens), and query_norm and key_norm (all tokens, but own heads). The head needs none: each rank has computed it from "
    "all tokens. model.named_parameters() gives a shared parameter once; p.grad is None where it is frozen.",
    'parts = ("norm", "positions", "output.bias", "contract.bias"); gradients = [p.grad for name, p in '
    "model.named_parameters() if p.grad is not None and any(part in name for part in parts)]; flat = torch.cat of the "
    "flattened; one dist.all_reduce(flat, group=group); copy flat.split(sizes) back. If the list is empty, return first.",
)
def check_sum_gradients(answer, draw):
    """After the sums, each gradient is that of one process; one all-reduce has carried
    what was needed, and no more.
    """
    few = draw.choice([2, 3])
    pairs = draw.choice([[[0, 1], [2, 3]], [[0, 2], [1, 3]]])
    first_frozen = [SOME[0], draw.choice(SOME[1:])], False
    shared, all_frozen = ("", True), (in_part(), draw.random() < 0.5)
    several = [("", False), first_frozen, shared, all_frozen, ("", False)]
    for n, groups, chosen in [(few, whole_world(few), several), (4, pairs, [(draw.sample(SOME, 2), False), shared])]:
        cases = []
        for number, (frozen, shares) in enumerate(chosen):
            case = {"groups": groups, "frozen": list(frozen), "shared": shares, "seed": draw.randrange(10**6)}
            # the first case is the easiest; with eleven blocks, a number has two digits
            blocks = 11 if n == 4 and shares else 3 if frozen or shares else 1
            case |= {"heads": 6, "tokens": 6 * draw.choice([1, 2]), "blocks": blocks}
            # a small new model after large ones
            case |= {"tokens": 6, "new": True} if number == 4 else {"new": False}
            cases.append(case | {"step": 1 + (shares and n < 4)})
        of_ranks = answer.on_ranks(observe_sums, cases, nproc=n, timeout=10)
        for number, case in enumerate(cases):
            wanted = [gradients_in_one_process(case, of_group) for of_group in range(len(groups))]
            on_every_rank(partial(claims, case, wanted), [seen[number] for seen in of_ranks])
