"""Question 5: find the bugs in a program that fine-tunes a network."""

from functools import partial

import torch
from torch import nn

from ddp_course.checks.claims import on_every_rank
from ddp_course.checks.ex05.tuning_cases import batches_of, described, network_of, test_set
from ddp_course.checks.ex05.tuning_claims import claims
from ddp_course.checks.predictions import numbers
from ddp_course.checks.training import gradients_of, state, unwrapped
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group


def tuned_by(fine_tune, case):
    """The state of the network that an answer returned, and its test losses."""
    with process_group(timeout=5) as (rank, _):
        backbone, head = network_of(case)
        computed = noting_gradients(backbone)
        epochs = [[parts[rank] for parts in epoch] for epoch in batches_of(case)]
        with trying(described(case)):
            returned = fine_tune(backbone, head, epochs, test_set(case), case["lr"])
        match returned:
            case [nn.Module() as network, (torch.Tensor() | list() | tuple()) as losses]:
                left = [name for name, gradient in gradients_of(backbone).items() if gradient is not None]
                return {
                    "state": state(unwrapped(network)),
                    "with gradients": sorted(computed.union(left)),
                    "losses": numbers(losses, len(epochs)),
                }
            case other:
                return {"returned": f"{other!r}"[:100]}


def noting_gradients(module):
    """A set that gets the names of parameters whose gradients are computed."""
    names = set()
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda gradient, name=name: names.add(name))
    return names


@question(
    "Print three things: backbone[1].running_mean before and after; head[1].weight on each rank, at the end; and, in each "
    "epoch, head[1].training at the first batch.",
    "Three places. A frozen BatchNorm is not frozen by requires_grad alone. DDP averages the gradients of the parameters "
    "that the network has when it is wrapped. And model.eval() is in force until somebody calls model.train().",
    "Before the network is wrapped: network = convert_sync_batchnorm(network), in the place of the loop that makes new "
    "layers. At the start of each epoch: model.train(), and then backbone.eval().",
)
def check_fine_tune(answer, draw):
    """The backbone is unchanged, and all ranks have the head and the test losses of one
    process that trains on the joined batches.
    """
    for n in (2, 3):
        case = {"ranks": n, "size": draw.choice([4, 5]), "epochs": 3, "steps": draw.randint(2, 3)}
        case |= {"lr": draw.uniform(0.1, 0.3), "momentum": draw.uniform(0.15, 0.4), "seed": draw.randrange(10**6)}
        on_every_rank(partial(claims, case), answer.on_ranks(tuned_by, case, nproc=n))
