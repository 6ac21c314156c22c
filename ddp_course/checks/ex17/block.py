"""Question 4: find the bugs in a tensor-parallel block."""

from functools import partial

import torch
import torch.distributed as dist

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import on_every_rank
from ddp_course.checks.ex17.block_claims import HEADS, claims, described, inputs, whole_block
from ddp_course.checks.ex17.meshes import is_message, whole_world
from ddp_course.checks.groups import group_of
from ddp_course.checks.training import gradients_of
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group


def observe_blocks(kind, cases):
    seen = []
    with process_group(timeout=5):
        for case in cases:
            group, _, number = group_of(case["groups"])
            x, gradient = inputs(case, number)
            before = x.clone()
            x.requires_grad_()
            dist.barrier()
            with trying(described(case)):
                block = kind(whole_block(case), group)
                with CheckedWatch() as forward:
                    y = block(x)
                block.zero_grad()
                with CheckedWatch() as backward:
                    if isinstance(y, torch.Tensor) and y.shape == gradient.shape and y.requires_grad:
                        y.backward(gradient)
            of_x, x = x.grad, x.detach()
            seen.append({
                "y": y, "x": of_x, "gradients": gradients_of(block), "changed": not torch.equal(x, before),
                "forward": messages(forward.log), "backward": messages(backward.log),
            })  # fmt: skip
            dist.barrier()
    return seen


def messages(log):
    return [[entry["name"], entry["whole"]] for entry in log if is_message(entry)]


@question(
    "Compare the block with one process on paper, line by line, for two ranks. Which lines compute the same on every rank, "
    "and which a part? What is added up in the all-reduce, and what must not be? Which gradient is a part of a sum, and "
    "which is whole?",
    "Five places. Forward: which rows of query_key_value belong to this rank's heads; the scale of the attention; what is "
    "inside the all-reduce twice per block. Backward: before a column-parallel layer, each rank has the gradient through "
    "its own columns only; after a row-parallel layer, every rank has the whole gradient.",
    "Enter: backward all-reduces the gradient. Leave: backward passes it on. query_key_value: "
    "torch.cat([part.chunk(n)[rank] for part in value.chunk(3)]). The scale is head_width ** -0.5. "
    "Leave.apply(F.linear(mixed, self.output.weight), self.group) + self.output.bias, and the same with contract.",
)
def check_tensor_parallel_block(answer, draw):
    """Output and gradients are those of the whole block, with two all-reduces in forward
    and two in backward.
    """
    # in one a rank's place is rank % 2, in the other it is rank // 2
    pairs = [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
    for n, groups in [(draw.choice([2, 3]), []), (4, pairs)]:
        cases = []
        for group in [whole_world(n), *groups]:
            case = {"groups": group, "width": HEADS * draw.choice([2, 3]), "tokens": draw.randrange(4, 8)}
            cases.append(case | {"seed": draw.randrange(10**6)})
        of_ranks = answer.on_ranks(observe_blocks, cases, nproc=n, timeout=10)
        for number, case in enumerate(cases):
            on_every_rank(partial(claims, case), [seen[number] for seen in of_ranks])
