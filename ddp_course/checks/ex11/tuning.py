"""Question 6: find the bugs in fine-tuning on ranks, without DDP."""

from functools import partial

import torch
import torch.distributed as dist

from ddp_course.checks.claims import on_every_rank
from ddp_course.checks.ex11.tuning_cases import EPOCHS, adapters_of, batches_of, draw_case, network_of
from ddp_course.checks.ex11.tuning_claims import claims
from ddp_course.checks.recording import recording
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group


def observe(fine_tune, case, batches, held_out):
    """What a rank has after fine-tuning, what it returned, and what it has sent."""
    with process_group() as (rank, _):
        network = network_of(case, adapters_of(case, rank))
        bases = [base_in_training(layer) for layer in network.layers]
        with recording(network) as record:
            returned = fine_tune(network, batches[rank], held_out[rank], EPOCHS, case["learning_rate"])
        dist.barrier()
        best, losses = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        layers = list(network.layers)
        return {
            "weights": [layer.weight.detach() for layer in layers],
            "in training": bases,
            "merged": [layer.merged for layer in layers],
            "adapters": [value.detach() for layer in layers for value in (layer.A, layer.B)],
            "best": in_a_list(best, torch.Tensor.detach),
            "losses": in_a_list(losses, float),
            "bytes": record["bytes"],
            "forgotten": record["forgotten"],
        }


def base_in_training(layer):
    """{"types", "others"}, which fill when a layer computes something to learn from: the types
    of its weight, and how many of its numbers were not those of now.
    """
    base, seen = layer.weight.detach().clone(), {"types": [], "others": 0}

    def look(layer, _):
        if torch.is_grad_enabled() and not layer.merged:
            weight = layer.weight.detach()
            seen["types"].append(str(weight.dtype))
            others = (weight != base).sum().item() if weight.shape == base.shape else base.numel()
            seen["others"] = max(seen["others"], others)

    layer.register_forward_pre_hook(look)
    return seen


def in_a_list(values, kind):
    """A list of these; what is none stays as it is."""
    try:
        return list(map(kind, values))
    except (TypeError, ValueError, RuntimeError):
        return values


@question(
    "Follow three things with a print on 2 ranks: layer.A of both ranks, layer.weight before and after an epoch, and "
    "the epoch that each rank takes for the best one.",
    "The base comes from one file, but A is random. A rank's own held-out samples are only a part of all. And in bf16, a "
    "sum is rounded: subtracting what was added does not give back the old weight.",
    "Broadcast each tensor of `trained` from rank 0 at the start. Keep a clone of each weight before it is merged, and "
    "copy it back. all_reduce the sum of the squared errors and their number, and divide the one by the other.",
)
def check_fine_tune(answer, draw):
    """Adapters, base and held-out losses are those of one process with all samples, and a
    step sends the gradients of the adapters once.
    """
    for n in (2, 3):
        case, right = draw_case(draw, n)
        batches = [batches_of(case, rank) for rank in range(n)]
        given = {name: case[name] for name in ("seed", "sizes", "r", "scale", "learning_rate")}
        of_ranks = answer.on_ranks(observe, given, batches, right.held_out, nproc=n)
        on_every_rank(partial(claims, case, right), of_ranks)
