"""Question 5: find the bugs in data-parallel training by hand."""

from functools import partial

import torch.distributed as dist

from ddp_course.checks.claims import on_every_rank
from ddp_course.checks.ex03.by_hand_cases import Counting, batches_of, draw_case
from ddp_course.checks.ex03.by_hand_claims import claims
from ddp_course.checks.recording import recording
from ddp_course.checks.training import state
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group


def observe(train_by_hand, case):
    """What a rank has after training: its network, the averages, what it has sent."""
    with process_group() as (rank, _):
        network = Counting(case["width"], case["seed"] + rank)
        batches, options = batches_of(case), [case[name] for name in ("learning_rate", "max_norm", "decay")]
        with recording(network) as record:
            moving = train_by_hand(network, batches, *options)
        dist.barrier()
        kept = {name: record[name] for name in ("bytes", "forgotten")}
        moving = list(moving) if isinstance(moving, tuple) else moving
        return kept | {"state": state(network), "moving": moving, "samples": network.samples}


@question(
    "Go through the program with two ranks that have 3 samples and 1 sample of a batch, and next to it through one process "
    "with all 4. After each line: what would be equal on both ranks, and is it what the one process has?",
    "What is the mean of a mean over 3 samples and a mean over 1? Which gradient's norm does clipping look at? And of which "
    "parameters is a moving average a copy, when it is made?",
    "Copy the parameters after the broadcast. Multiply the loss by len(x) / len(inputs), and sum the gradients over the "
    "ranks without dividing. Clip after the all-reduces, before the step.",
)
def check_train_by_hand(answer, draw):
    """Parameters, buffers and moving averages are those of one process that trains on
    whole batches, and a step sends the gradients once.
    """
    for n in (2, 3):
        case = draw_case(draw, n)
        on_every_rank(partial(claims, case), answer.on_ranks(observe, case, nproc=n))
