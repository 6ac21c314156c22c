"""Question 5: find the bugs in training on a text that ranks share."""

from functools import partial

import torch.distributed as dist

from ddp_course.checks.claims import on_every_rank
from ddp_course.checks.ex19.shared_cases import LAYERS, described, draw_case, network_of, text_of
from ddp_course.checks.ex19.shared_claims import claims
from ddp_course.checks.recording import recording
from ddp_course.checks.training import state
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group


def observe(train_shared, cases):
    """Of each case, what a rank has after training: its network, the losses, what it has
    computed and sent.
    """
    with process_group(timeout=5):
        return [observe_case(train_shared, case) for case in cases]


def observe_case(train_shared, case):
    network, calls = network_of(case), {name: [] for name in LAYERS}
    for name in LAYERS:
        note = lambda _, inputs, name=name: calls[name].append(inputs[0].detach().clone())  # noqa: E731
        getattr(network, name).register_forward_pre_hook(note)
    text, targets = text_of(case)
    dist.barrier()
    with trying(described(case)), recording(network) as record:
        losses = train_shared(network, text, targets, case["steps"], case["learning_rate"])
    dist.barrier()
    return {
        "losses": losses, "state": state(network), "bytes": record["bytes"],
        "sent": sorted({*record["sent"]}), "forgotten": record["forgotten"],
        "tokens": [tokens.flatten().tolist() for tokens in calls["embedding"]],
        "counted": {name: [inputs.numel() // inputs.shape[-1] for inputs in calls[name]] for name in LAYERS[1:]},
    }  # fmt: skip


@question(
    "Take a text of 8 tokens on 2 ranks and go through the program on paper. Which places does rank 1 have? In which "
    "order are the keys after they were gathered? Whose losses depend on a key of rank 1?",
    "What does torch.arange stand for, each time? With zigzag, rank 0 gathers the keys of the places 0, 1, 6, 7, 2, "
    "3, 4, 5. And a key has a gradient from each rank whose queries have seen it: who adds these up?",
    "Rotate by places. For the mask, make the places of all ranks, one rank after the other, and compare the rank's "
    "own places with those. The backward of a gather is a reduce-scatter: each rank gets the sum of the gradients of "
    "its own part.",
)
def check_train_shared(answer, draw):
    """Losses and parameters are those of one process, after one step and after several;
    each rank computes its own tokens.
    """
    for n in (2, 3):
        cases = [draw_case(draw, n, steps) for steps in (1, 3)]
        of_ranks = answer.on_ranks(observe, cases, nproc=n, timeout=10)
        for place, case in enumerate(cases):
            on_every_rank(partial(claims, case), [seen[place] for seen in of_ranks])
