"""Question 3: what a rank needs of a packed text."""

from functools import partial

import torch
import torch.distributed as dist

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import on_every_rank
from ddp_course.checks.ex19.batch_cases import described, drawn, places_of
from ddp_course.checks.ex19.batch_claims import claims
from ddp_course.checks.ex19.batch_weights import claims_of_weights
from ddp_course.checks.works import noting_works
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group


def observe_batches(own_batch, cases):
    """Of each case, the five tensors that the answer returns, and what it sends."""
    seen = []
    with process_group(timeout=5) as (rank, _):
        for case in cases:
            document = case["texts"][rank // case["context"]]
            text, places = torch.tensor(document["tokens"]), torch.tensor(places_of(case, rank))
            given = [text, list(document["lengths"]), list(document["prompts"]), places]
            before = text.clone(), list(document["lengths"]), list(document["prompts"]), places.clone()
            dist.barrier()
            with trying(described(case)), CheckedWatch() as watch, noting_works() as works:
                got = own_batch(*given)
            names = ("text", "lengths", "prompts", "places")
            log = [entry for entry in watch.log if not entry["name"].startswith("recv")]
            seen.append({
                "got": [copied(part) for part in got] if isinstance(got, tuple | list) else copied(got),
                "changed": [name for name, old, new in zip(names, before, given) if not same(old, new)],
                "names": [entry["name"] for entry in log], "bytes": sum(entry["whole"] for entry in log),
                "forgotten": sum(not work.waited for work in works),
            })  # fmt: skip
            dist.barrier()
    return seen


def copied(part):
    return part.detach().clone() if isinstance(part, torch.Tensor) else part


def same(old, new):
    return torch.equal(old, new) if isinstance(old, torch.Tensor) else old == new


@question(
    "Everything that depends on a token's neighbours in the text has to be computed for the whole text, before it is cut: "
    "its target, its position, its document. For the weights: DDP adds up the gradients of all ranks and divides by the "
    "number of ranks. By what does the sum over all counted tokens have to be divided instead?",
    "For token p of a document (from 0), the target is token p + 1, if there is one and it is not in the prompt: p + 1 >= "
    "prompt. Make lists of targets, positions and documents for the whole text, and index each with places. Each rank then "
    "counts its own targets, and all ranks of the world add up these numbers, also those that count none. The weight of a "
    "counted token is ranks / sum.",
    "lengths = torch.tensor(lengths); documents = torch.arange(len(lengths)).repeat_interleave(lengths); positions = "
    "torch.arange(len(text)) - (lengths.cumsum(0) - lengths)[documents]; counts = (positions + 1 < lengths[documents]) & "
    "(positions + 1 >= torch.tensor(prompts)[documents]); targets = text.roll(-1).masked_fill(~counts, -100). own = "
    "counts[places]; number = own.sum(); dist.all_reduce(number); weights = own.double() * dist.get_world_size() / "
    "number.clamp(min=1).",
)
def check_own_batch(answer, draw):
    """On 2 or 3 ranks that share a text, and on 4 ranks with two texts: the five tensors
    are the rank's part of those of the whole text, and one number is all that travels.
    """
    few = draw.choice([2, 3])
    kinds = ["plain", "prompts", "short", "one rank only", "nothing", "long"]
    for n, context, chosen in [(few, few, kinds), (4, 2, ["prompts", "one text only", "short"])]:
        cases = [drawn(draw, kind, n, context) for kind in chosen]
        of_ranks = answer.on_ranks(observe_batches, cases, nproc=n, timeout=10)
        for number, case in enumerate(cases):
            seen = [of_rank[number] for of_rank in of_ranks]
            on_every_rank(partial(claims, case), seen)
            on_every_rank(partial(claims_of_weights, case), seen)
