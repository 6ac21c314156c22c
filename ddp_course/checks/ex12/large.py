"""Question 5: train a network that fits on no rank, and leave one file of it."""

import os
from functools import partial
from pathlib import Path

import torch

from ddp_course.checks.claims import hold, on_every_rank
from ddp_course.checks.ex12.large_claims import bytes_in_use, file_claims, weight_claims
from ddp_course.checks.ex12.large_network import (
    batches_of,
    by_one_process,
    held_out_loss,
    initial_state,
    initial_value,
    median_norm,
    on_meta,
    shapes_of,
)
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.watch import memory_timeline

# ---- what a rank does ----


def observe(train, case, folder):
    """The most bytes in use, in all and until the last forward of a block."""
    with process_group(timeout=8) as (rank, _):
        network, batches, trained = on_meta(case), batches_of(case, rank), [None]
        initial = partial(initial_value, shapes_of(network), case["seed"])
        path = Path(folder, str(rank), "model.pt")  # as if each rank were on a machine of its own
        path.parent.mkdir()
        with memory_timeline() as timeline:

            def note(*_):
                trained[0] = len(timeline)

            for block in network.blocks:
                block.register_forward_hook(note)
            train(network, initial, batches, case["max_norm"], path)
        return {"most": max(timeline, default=0), "training": max(timeline[: trained[0]], default=0)}


def read(folder, n):
    """The files of each rank, and what is in rank 0's, as one process finds them."""
    files = [sorted(os.listdir(Path(folder, str(rank)))) for rank in range(n)]
    found = {"files": files, "error": None}
    if "model.pt" not in files[0]:
        return found
    try:
        content = torch.load(Path(folder, "0", "model.pt"), weights_only=True)
    except Exception as error:
        return found | {"error": f"{type(error).__name__}: {error}"}
    if not isinstance(content, dict):
        return found | {"error": f"it loads a {type(content).__name__}"}
    found["kinds"] = {str(name): type(value).__name__ for name, value in content.items()}
    if "DTensor" not in found["kinds"].values():
        found["content"] = dict(content)
    return found


# ---- the question ----


@question(
    "Five parts, and each is a section of the lesson: shard, give the shards memory, fill them, train, save. Three of them "
    'are in the folded section "A model that fits on no rank". Create the optimizer after sharding, and print '
    "model.state_dict() before you save: are all values filled, the buffer's, too?",
    "mesh = init_device_mesh('cpu', (dist.get_world_size(),)); fully_shard(block, mesh=mesh) for each block, then "
    "fully_shard(model, mesh=mesh); model.to_empty(device='cpu'). The values of model.state_dict() are the shards, and the "
    "buffer: fill each with value.copy_(...). distribute_tensor(initial(name), value.device_mesh, value.placements) is the "
    "DTensor for a DTensor. The training loop is an ordinary one; clip_grad_norm_ knows shards.",
    "After the loop, on all ranks: options = StateDictOptions(full_state_dict=True, cpu_offload=True); state = "
    "get_model_state_dict(model, options=options). With cpu_offload=True, only rank 0 gets the whole values. Then, if "
    "dist.get_rank() == 0: torch.save(state, path).",
)
def check_train_large(answer, draw):
    """The one file has, under the plain names, what one process would have trained, and no rank
    had more than its limit in use.
    """
    case = {"n": 3, "width": draw.randrange(28, 37), "hidden": draw.randrange(44, 57), "seed": draw.randrange(10**6)}
    case["sizes"] = [draw.randrange(2, 4) for _ in range(draw.randrange(4, 7))]
    case["max_norm"] = median_norm(case)
    with answer.folder() as folder:
        of_ranks = answer.on_ranks(observe, case, str(folder), nproc=case["n"], timeout=30)
        found = answer.apart(read, str(folder), case["n"])
    expected, start = by_one_process(case), initial_state(case)
    hold(file_claims(found, expected))
    hold(weight_claims(case, found["content"], expected, start))
    on_every_rank(partial(bytes_in_use, sum(value.nbytes for value in expected.values())), of_ranks)
    states = {"at the beginning": start, "your file": found["content"], "one process": expected}
    values = {name: held_out_loss(case, state) for name, state in states.items()}
    return "bars", {"values": values, "xlabel": "loss on held-out data", "title": "What has been trained"}
