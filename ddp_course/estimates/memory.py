"""What training takes: bytes that a rank keeps, bytes that it sends, and activations.

S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", 2020, sections 3, 5 and 7. Stage 0 is DDP, whose ranks all keep everything.
Stage 1 shards the optimizer's state, 2 the gradients as well, and 3, which is FSDP, the
parameters as well. What a backend needs for itself is not counted.
"""

from dataclasses import astuple, dataclass
from typing import NamedTuple

STAGES = {
    0: "DDP",
    1: "ZeRO-1: optimizer sharded",
    2: "ZeRO-2: gradients, too",
    3: "ZeRO-3, FSDP: weights, too",
}


class Precision(NamedTuple):
    """Bytes per parameter, with Adam: kept between two steps, and communicated."""

    weight: int
    gradient: int
    optimizer: int
    gathered: int  # a weight, when it is sent
    reduced: int  # a gradient, when it is sent
    words: str
    stages: tuple = (0, 1, 2, 3)  # where there is such a thing


PRECISIONS = {
    "fp32": Precision(4, 4, 8, 4, 4, "everything in fp32"),
    "autocast": Precision(
        *(4, 4, 8, 4, 4),
        "fp32, products in 16 bits; DDP: 2 bytes per parameter more in a step",
    ),
    "policy": Precision(
        4, 4, 8, 2, 4, "MixedPrecisionPolicy: fp32 shards, gathered in bf16", (3,)
    ),
    "master": Precision(2, 2, 12, 2, 2, "weights in 16 bits, master weights in fp32"),
}


class State(NamedTuple):
    """Bytes on one rank."""

    weights: float
    gradients: float
    optimizer: float


def states(parameters, ranks, stage, precision="fp32"):
    """What one rank keeps between two steps, a State in bytes.

    parameters: how many. stage: 0 to 3. precision: one of PRECISIONS. Unless gradients
    are views of DDP's buckets, the buckets come on top.
    """
    weight, gradient, optimizer, *_ = PRECISIONS[precision]
    return State(
        weights=parameters * weight / (ranks if stage >= 3 else 1),
        gradients=parameters * gradient / (ranks if stage >= 2 else 1),
        optimizer=parameters * optimizer / (ranks if stage >= 1 else 1),
    )


def sent(parameters, ranks, stage, precision="fp32"):
    """The bytes that one rank sends per step, with collectives on a ring.

    DDP's all-reduce is a reduce-scatter and an all-gather, and each of these sends
    (ranks - 1) / ranks of the whole. Stages 1 and 2 reduce-scatter gradients and gather
    weights. Stage 3 gathers weights twice, for forward and for backward.
    """
    *_, gathered, reduced, _, _ = PRECISIONS[precision]
    if stage == 0:
        shared = 2 * reduced
    else:
        shared = reduced + gathered * (2 if stage == 3 else 1)
    return parameters * shared * (ranks - 1) / ranks


def fsdp_peak(block, rest, blocks, ranks):
    """The peak of fully_shard in fp32, in bytes per rank, without activations.

    It is at the end of block 1's backward: block 0 is gathered already, and block 2's
    gradients are still being reduced. block: parameters per block; rest: parameters
    outside of blocks, which stay gathered.
    """
    parameters = blocks * block + rest
    whole = (2 * block if blocks else 0) + rest  # two blocks, and the rest
    shards = 12 * parameters / ranks + 4 * (parameters - whole) / ranks
    gathered = 4 * whole
    gradients = 4 * whole  # of blocks 1 and 2, and of the rest: not yet reduced
    return shards + gathered + gradients


def activations(batch, tokens, width, layers, heads=0, size=4):
    """What forward keeps for backward in the blocks of a GPT without dropout, in bytes.

    Per token, in units of `width`: the inputs of two norms (2), of query-key-value (1),
    of attention (3), of its output layer (1), of the MLP's layers (1 + 4), of GELU (4).
    V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
    Models", 2022, count 34 bytes in 16 bits: these 32, and two dropout masks.

    size: bytes per number. heads: for attention that is not fused, which keeps `tokens`
    numbers per token and head.
    """
    return size * batch * tokens * layers * (16 * width + heads * tokens)


# ---- a model that is cut in other ways, too ----


@dataclass(frozen=True)
class Mesh:
    """How many ranks there are in each dimension; a job has as many as their product."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    def __post_init__(self):
        if min(astuple(self)) < 1:
            raise ValueError(f"each dimension has 1 rank or more, but this is {self}")


def without_experts(mesh):
    """Raise ValueError for a mesh whose bytes the course has not measured yet."""
    if mesh.expert != 1:
        raise ValueError(f"no formula here holds for {mesh.expert} expert ranks")


def in_equal_parts(number, what, ranks):
    """A number divided by ranks. Raises ValueError where that leaves a rest."""
    if number % ranks:
        raise ValueError(f"{number} {what} cannot be cut into {ranks} equal parts")
    return number // ranks


def parameters_on(mesh, vocabulary, context, layers, heads, width):
    """How many parameters of a GPT a rank has, for each stage of its pipeline: a list.

    Tensor ranks cut heads and the MLP's inner numbers, with the biases of these, and
    the vocabulary; where that leaves a rest, this is the rank that has most. Each keeps
    the whole of the norms, the positions, and the biases of what is added up over the
    ranks. M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language
    Models Using Model Parallelism", 2019. The first and the last stage both have the
    tied matrix. Data and context ranks cut nothing.
    """
    without_experts(mesh)
    in_equal_parts(heads, "heads", mesh.tensor)
    cut, whole = 12 * width**2 + 7 * width, 6 * width  # of a block
    block = cut // mesh.tensor + whole
    tied = -(-vocabulary // mesh.tensor) * width
    per_stage = in_equal_parts(layers, "layers", mesh.pipeline)
    stages = [per_stage * block] * mesh.pipeline
    stages[0] += tied + context * width
    stages[-1] += 2 * width + (tied if mesh.pipeline > 1 else 0)
    return stages


def states_on(mesh, shape, stage, precision="fp32"):
    """What a rank of the fullest pipeline stage keeps between two steps, a State.

    shape: of a GPT, a dict. ZeRO's stage shards over the data ranks.
    """
    return states(max(parameters_on(mesh, **shape)), mesh.data, stage, precision)


def activations_on(mesh, batch, tokens, width, layers, heads=0, size=4, in_flight=1):
    """What `activations` counts, on one rank of a mesh, in bytes.

    Of the 16 units per token, tensor ranks cut 12: those of attention, of its output
    layer, of the MLP's second layer and of GELU. The inputs of norms, query-key-value
    and the MLP's first layer stay whole, as in Korthikanti et al., equation 2. Context
    ranks cut the tokens, if keys and values of other ranks come and go. in_flight: how
    many micro-batches of this size a pipeline's stage keeps at a time.
    """
    without_experts(mesh)
    if heads and mesh.context > 1:
        raise ValueError("with context ranks, no formula holds but for fused attention")
    in_equal_parts(heads, "heads", mesh.tensor)
    tokens = in_equal_parts(tokens, "tokens", mesh.context)
    layers = in_equal_parts(layers, "layers", mesh.pipeline)
    whole = activations(batch, tokens, 4 / 16 * width, layers, 0, size)
    cut = activations(batch, tokens, 12 / 16 * width, layers, heads, size)
    return in_flight * (whole + cut / mesh.tensor)
