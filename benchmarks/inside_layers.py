"""What lessons 17 to 20 say about time: which ranks belong inside a machine, how long a
step waits for a pipeline's bubble, and for its busiest rank.

Links are those of the pretend network, and computing sleeps: a busy machine changes
little.

python benchmarks/inside_layers.py
"""

import time
from functools import partial

import torch
import torch.distributed as dist
from claims import claim, report, seconds
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_course.estimates import pipeline as plans
from ddp_course.models import context_parallel, expert_parallel, tensor_parallel
from ddp_course.models.context_parallel import Sharing
from ddp_course.models.gpt import GPT
from ddp_course.models.pipeline import Pipeline, owners_of
from ddp_course.models.sleepy import SleepyLinear
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import launch
from ddp_course.ranks.links import Link, Network
from ddp_course.ranks.pretend_network import ends_of, network_of_environment

TWO_MACHINES = Network(Link(1e-5, 1e10), Link(5e-5, 1e9), 2)  # of two ranks each
MICRO_BATCHES, SLOT = 8, 0.02  # seconds of a forward in a stage


def busy(names, kind):
    """Seconds of a step for which this rank's links are in use, on a mesh of 2 x 2."""
    with process_group():
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        network = GPT(256, context=128, layers=2, heads=2, width=64)
        if kind == "tensor":
            network = tensor_parallel.cut(network, mesh["tensor"].get_group())
            group = mesh["data"].get_group()
            network = DistributedDataParallel(network, process_group=group)
            part, parts = mesh.get_local_rank("data"), 2  # tensor ranks read the same
        else:
            network = expert_parallel.with_experts(network, 8)
            network = expert_parallel.share(network, mesh)
            part, parts = dist.get_rank(), 4
        texts = torch.randint(
            256, (16, 128), generator=torch.Generator().manual_seed(0)
        )
        mine = texts.chunk(parts)[part]
        network(mine, mine).backward()
        if kind == "expert":
            expert_parallel.average_gradients(network, mesh)
        dist.barrier()
        ends = ends_of(network_of_environment()).values()
        return sum(over - begin for end in ends for _, begin, over in end.carried)


def across_over_inside(kind):
    """How much longer links are in use if these ranks are on two machines."""
    job = partial(launch, busy, nproc=4, network=TWO_MACHINES, timeout=300)
    inside = job(("data", kind), kind=kind)[0]
    return job((kind, "data"), kind=kind)[0] / inside


def pipelined(name):
    """Seconds of a step of a schedule whose stages sleep; two per rank for half as long
    each if it interleaves.
    """
    with process_group() as (rank, ranks):
        plan = plans.PLANS[name](ranks, MICRO_BATCHES)
        owners = owners_of(plan)
        length = SLOT * ranks / len(owners)
        parts = {s: SleepyLinear(4, 4, length) for s, r in owners.items() if r == rank}
        pipe = Pipeline(parts, owners, loss=F.mse_loss)
        batch = torch.randn(2, MICRO_BATCHES, 4).unbind()
        step = lambda: pipe.run(
            plan[rank], *[part.chunk(MICRO_BATCHES) for part in batch]
        )
        return min(together(step) for _ in range(3))


def together(step):
    """Seconds until all ranks have done a step that they begin together."""
    dist.barrier()
    return seconds(lambda: (step(), dist.barrier()))


def ring(layout):
    """Seconds of a ring's forward that sleeps for 0.2 ms per pair of tokens."""
    with process_group():
        sharing, right = Sharing(layout), context_parallel.attend

        def sleepy(query, key, value, allowed):
            time.sleep(2e-4 * allowed.sum().item())
            return right(query, key, value, allowed)

        context_parallel.attend = sleepy
        three = [sharing.own(torch.randn(1, 1, 96, 4), 2) for _ in range(3)]
        step = lambda: context_parallel.ring(*three, sharing)
        return min(together(step) for _ in range(3))


def main():
    ratio = {kind: across_over_inside(kind) for kind in ("tensor", "expert")}
    of = {name: launch(pipelined, name, nproc=4)[0] for name in ("1f1b", "interleaved")}
    rings = {name: launch(ring, name, nproc=4)[0] for name in ("contiguous", "zigzag")}
    slots = 3 * MICRO_BATCHES + 9  # three of each micro-batch, and the bubble's
    where = "ranks on two machines instead of one, times as long on the links"
    report(
        [
            claim(f"tensor {where}", ratio["tensor"], at_least=2),
            claim(f"expert {where}", ratio["expert"], at_least=1.2),
            claim(
                "1F1B on 4 ranks, seconds over its slots",
                of["1f1b"] / (slots * SLOT),
                at_most=1.15,
            ),
            claim(
                "1F1B over two stages per rank, times as long (by slots 1.16)",
                of["1f1b"] / of["interleaved"],
                at_least=1.05,
            ),
            claim(
                "a ring with neighbouring tokens over zigzag, times as long",
                rings["contiguous"] / rings["zigzag"],
                at_least=1.4,
            ),
        ],
        seconds=of | rings,
    )


if __name__ == "__main__":
    main()
