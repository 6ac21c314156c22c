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
    "autocast": Precision(4, 4, 8, 4, 4, "fp32, with products in 16 bits"),
    "policy": Precision(
        4, 4, 8, 2, 4, "MixedPrecisionPolicy: fp32 shards, gathered in bf16", (3,)
    ),
    "master": Precision(2, 2, 12, 2, 2, "weights in 16 bits, master weights in fp32"),
}


# bytes per number of an activation: `size` and `stream` of activations_on
OF_ACTIVATIONS = {
    "fp32": {"size": 4, "stream": 4},
    "autocast": {"size": 2, "stream": 4},
    "policy": {"size": 2, "stream": 2},
    "master": {"size": 2, "stream": 2},
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


def copies(parameters, precision="fp32"):
    """The bytes of the copies in 16 bits that autocast makes of the weights in a forward
    pass and keeps until its backward has used them: on each rank, and in each stage,
    since they are of gathered weights. A pipeline's micro-batches in flight have one each.
    With the other precisions there are none.
    """
    return 2 * parameters if precision == "autocast" else 0


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


def fsdp_peak(block, rest, blocks, ranks, precision="fp32"):
    """The peak of fully_shard, in bytes per rank, without activations.

    It is at the end of block 1's backward: block 0 is gathered already, and block 2's
    gradients are still being reduced. Or it is where the rest's gradients are reduced.
    block: parameters per block; rest: those outside of blocks, which stay gathered.
    precision: "fp32" or "policy". A large embedding that is tied takes more, since it
    has two gradients for a moment.
    """
    dtypes, parameters = PRECISIONS[precision], blocks * block + rest
    shards = states(parameters, ranks, 3, precision)
    block = block if blocks else 0

    def moment(in_use, reducing, not_reduced):
        """Bytes. in_use: gathered weights, and gradients in their dtype; reducing: the
        copies of gradients that are sent; not_reduced: gradients that have no shard.
        """
        gradients = shards.gradients * (1 - not_reduced / parameters)
        gathered = dtypes.gathered * in_use + dtypes.reduced * reducing
        return shards.weights + shards.optimizer + gradients + gathered

    return max(
        moment(2 * block + rest + block + rest, block, 2 * block + rest),
        moment(rest, block + rest, block + rest),
    )


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


# ---- a plan on paper: a Llama with fully_shard ----


class Llama(NamedTuple):
    """A model's sizes. keys: the width of all keys together, smaller than `width` where
    several heads of queries share them. tied: whether the head is the token embedding.
    """

    layers: int
    width: int
    inner: int
    keys: int
    vocabulary: int
    tied: bool = False

    def block(self):
        """The parameters of one block: attention, SwiGLU, two norms."""
        attention = 2 * self.width * (self.width + self.keys)
        return attention + 3 * self.width * self.inner + 2 * self.width

    def rest(self):
        """The parameters outside of blocks: embedding, head, the last norm."""
        matrices = 1 if self.tied else 2
        return matrices * self.vocabulary * self.width + self.width

    def parameters(self):
        return self.layers * self.block() + self.rest()


# A. Grattafiori et al., "The Llama 3 Herd of Models", 2024, table 3
LLAMA_3_8B = Llama(layers=32, width=4096, inner=14336, keys=1024, vocabulary=128256)


def kept_by_block(model, tokens, recompute="none", size=2):
    """What forward keeps for backward in one block of a Llama, in bytes.

    Per token: the inputs of two norms, of attention's and the MLP's first layers, and
    of attention's output layer; queries, keys, values and their mixture; and four rows of
    the MLP's inner width. "selective" keeps the block's input and the results of matrix
    products and attention; "full" keeps its input. Where a norm is not one fused
    operation, as on a CPU, it keeps more.
    """
    rows = {
        "none": 7 * model.width + 2 * model.keys + 4 * model.inner,
        "selective": 5 * model.width + 2 * model.keys + 2 * model.inner,
        "full": model.width,
    }
    return size * tokens * rows[recompute]


class Plan(NamedTuple):
    """Bytes on one rank at the highest moment of a step."""

    state: float  # shards of weights, gradients and Adam's averages
    gathered: float  # two blocks and what is outside of blocks, in 16 bits
    activations: float
    moment: float  # logits with their gradients; or a recomputed block, and gradients


def plan(model, ranks, tokens, recompute="none", chunked=False):
    """A Plan for a Llama with fully_shard, a policy of bf16, and `tokens` per rank and
    micro-batch, not the first of its update: the shards of gradients are there already.
    chunked: a loss that never has all logits at once.
    """
    whole = 2 * model.block() + model.rest()
    logits = tokens * model.vocabulary * (0.52 if chunked else 12)
    again = kept_by_block(model, tokens) if recompute != "none" else 0
    # of two blocks and the head, in 16 bits; one block's in fp32 as well, to be reduced
    gradients = 2 * (2 * model.block() + model.rest()) + 4 * model.block()
    return Plan(
        state=sum(states(model.parameters(), ranks, 3, "policy")),
        gathered=2 * whole,
        activations=model.layers * kept_by_block(model, tokens, recompute),
        moment=max(logits, again + gradients),
    )


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


def activations_on(
    mesh,
    batch,
    tokens,
    width,
    layers,
    heads=0,
    size=4,
    in_flight=1,
    sequence=False,
    again=False,
    stream=None,
):
    """What `activations` counts, on one rank of a mesh, in bytes.

    Of the 16 units per token, tensor ranks cut 12: those of attention, of its output
    layer, of the MLP's second layer and of GELU. The inputs of norms, query-key-value
    and the MLP's first layer stay whole, as in Korthikanti et al., equation 2.

    sequence: sequence parallelism, which cuts the norms' inputs along the tokens, too.
    The other two are gathered for the layers that need them whole, and kept so. again:
    they are gathered again in backward instead, and all 16 are cut, as in equation 4.

    Context ranks cut the tokens, if keys and values of other ranks come and go. in_flight:
    how many micro-batches of this size a pipeline's stage keeps at a time. stream: bytes
    per number of the norms' inputs, where it is not `size`: 4 with autocast.
    """
    without_experts(mesh)
    if heads and mesh.context > 1:
        raise ValueError("with context ranks, no formula holds but for fused attention")
    in_equal_parts(heads, "heads", mesh.tensor)
    tokens = in_equal_parts(tokens, "tokens", mesh.context)
    if sequence:
        in_equal_parts(tokens, "tokens", mesh.tensor)
    layers = in_equal_parts(layers, "layers", mesh.pipeline)
    norms = 2 * width * (stream or size) / (mesh.tensor if sequence else 1)
    gathered = 2 * width * size / (mesh.tensor if sequence and again else 1)
    cut = (12 * width + heads * tokens) * size / mesh.tensor
    return in_flight * batch * tokens * layers * (norms + gathered + cut)


def in_flight_with_1f1b(stages, stage, micro_batches):
    """How many micro-batches a stage of a pipeline keeps at a time, with 1F1B: it begins
    as many as there are stages from it to the last one, then each backward lets one go.
    """
    return min(stages - stage, micro_batches)
