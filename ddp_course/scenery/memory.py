"""What a training step keeps in memory, and what it sends: DDP, and the three stages of
ZeRO.

S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", 2020, sections 3, 5 and 7. Stage 0 is DDP, whose ranks all keep everything.
Stage 1 shards the optimizer's state, 2 the gradients as well, and 3, which is FSDP, the
parameters as well. Activations, and what a backend needs for itself, are not in here.
"""

from typing import NamedTuple

STAGES = {
    0: "DDP",
    1: "ZeRO-1: the optimizer is sharded",
    2: "ZeRO-2: gradients, too",
    3: "ZeRO-3, FSDP: parameters, too",
}


class Precision(NamedTuple):
    """Bytes for each parameter, with Adam."""

    weight: int
    gradient: int
    optimizer: int


PRECISIONS = {
    "fp32": Precision(weight=4, gradient=4, optimizer=8),  # Adam's two averages
    "mixed": Precision(
        weight=2, gradient=2, optimizer=12
    ),  # these, and a copy of the weights, in fp32
}


class State(NamedTuple):
    """Bytes on one rank."""

    weights: float
    gradients: float
    optimizer: float


def states(parameters, ranks, stage, precision="mixed"):
    """What one rank keeps between two steps, a State in bytes; a gradient bucket of DDP
    that is no view comes on top.

    parameters: how many. stage: 0 to 3. precision: 'fp32' or 'mixed'.
    """
    of_each = PRECISIONS[precision]
    shares = [ranks if stage >= sharded_from else 1 for sharded_from in (3, 2, 1)]
    return State(*(parameters * size / share for size, share in zip(of_each, shares)))


def sent(parameters, ranks, stage, precision="mixed"):
    """The bytes that one rank sends in a step, with ring collectives.

    DDP's all-reduce is a reduce-scatter and an all-gather, each of (ranks - 1) / ranks
    of all; stages 1 and 2 do the same two, of gradients and then of weights. Stage 3
    gathers the weights twice, forward and backward, and scatters.
    """
    of_each = PRECISIONS[precision]
    gathered = (
        of_each.gradient if stage == 0 else of_each.weight * (2 if stage == 3 else 1)
    )
    return parameters * (of_each.gradient + gathered) * (ranks - 1) / ranks
