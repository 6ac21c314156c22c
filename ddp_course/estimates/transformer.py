"""Models by their sizes, and what one rank of a mesh keeps of them."""

from typing import NamedTuple

from ddp_course.estimates.memory import State, states
from ddp_course.estimates.step_time import Run, layers_per_rank


class Model(NamedTuple):
    """A transformer with grouped queries and SwiGLU, as Llama. keys: the width of all
    keys together. experts: MLPs per block, of which a token takes `chosen`.
    """

    layers: int
    width: int
    inner: int
    heads: int
    keys: int
    vocabulary: int
    tied: bool = False
    experts: int = 1
    chosen: int = 1

    def groups(self):
        """How many heads have keys of their own."""
        return self.keys * self.heads // self.width

    def mlp(self):
        return 3 * self.width * self.inner

    def dense(self):
        """The parameters of a block besides its MLPs: (matrices, norms and router)."""
        attention = 2 * self.width * (self.width + self.keys)
        router = self.width * self.experts if self.experts > 1 else 0
        return attention, 2 * self.width + router

    def embedding(self):
        return self.vocabulary * self.width

    def parameters(self, mlps=None):
        """All of them; or with so many MLPs per block."""
        block = sum(self.dense()) + (mlps or self.experts) * self.mlp()
        embeddings = self.embedding() * (1 if self.tied else 2)
        return self.layers * block + embeddings + self.width

    def multiplied(self):
        """By how many of them a token is multiplied: an embedding is looked up."""
        looked_up = 0 if self.tied else self.embedding()
        return self.parameters(self.chosen) - looked_up


# from each model's config.json
MODELS = {
    "smollm2-135m": Model(30, 576, 1536, 9, 192, 49152, tied=True),
    "llama3-1b": Model(16, 2048, 8192, 32, 512, 128256, tied=True),
    "llama3-8b": Model(32, 4096, 14336, 32, 1024, 128256),
    "llama3-70b": Model(80, 8192, 28672, 64, 1024, 128256),
    "llama3-405b": Model(126, 16384, 53248, 128, 1024, 128256),
    "mixtral-8x7b": Model(32, 4096, 14336, 32, 1024, 32000, experts=8, chosen=2),
}


def run_of(model, mesh, context, batch, micro_batch=1, **more):
    """A Run of this model. more: its stage, recompute and chunks."""
    experts = float(model.layers * model.experts * model.mlp())
    return Run(
        float(model.parameters()), float(model.multiplied()), model.layers, model.width,
        context, batch, micro_batch, mesh, keys=model.keys, chosen=model.chosen,
        experts=experts if model.experts > 1 else 0.0, **more,
    )  # fmt: skip


# ---- what a rank keeps ----

SHORTEST = 4096  # tokens of a context rank: its messages are long then
FREE = 0.9  # of a GPU's memory: the rest is the libraries', and between tensors


class Kept(NamedTuple):
    """Bytes on one rank at the highest moment of a step."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    moment: float  # gathered weights; and logits, or a block that is recomputed

    def total(self):
        states = self.weights + self.gradients + self.optimizer
        return states + self.activations + self.moment


def kept_per_token(model, recompute):
    """Numbers that forward keeps in one block: as memory.kept_by_block, with more than
    one MLP per token where there are experts.
    """
    if recompute == "full":
        return 1.0 * model.width
    kept, inner = (4.0, 2.0) if recompute == "selective" else (6.0, 4.0)
    outside = kept * model.width + 2.0 * model.keys
    return outside + model.chosen * (model.width + inner * model.inner)


def stage_parameters(model, mesh, stage, layers):
    """What a tensor rank has of this pipeline stage: (without experts, experts).

    layers: how many it has. The first stage has the embedding, the last one the head;
    both have the matrix where the two are tied. Norms and routers are not cut.
    """
    matrices, whole = model.dense()
    mlps = model.experts * model.mlp() / mesh.expert if model.experts > 1 else 0
    if model.experts == 1:
        matrices = matrices + model.mlp()
    dense = layers * (matrices / mesh.tensor + whole)
    last = stage == mesh.pipeline - 1
    times = (stage == 0) + (last and not (model.tied and mesh.pipeline == 1))
    dense = dense + times * model.embedding() / mesh.tensor + last * model.width
    return dense, layers * mlps / mesh.tensor


def states_of(parameters, ranks, stage):
    """State of these parameters, in bytes.

    With stage 3 as MixedPrecisionPolicy keeps them, see memory.PRECISIONS. Else weights
    in bf16, a sum of gradients in fp32, and the optimizer's 12 bytes, which stage 1
    shards.
    """
    if stage == 3:
        return states(parameters, ranks, 3, "policy")
    optimizer = 12.0 * parameters / (ranks if stage else 1)
    return State(2.0 * parameters, 4.0 * parameters, optimizer)


def kept_by_stage(model, run, stage):
    """What a rank of this pipeline stage has at its highest moment, Kept in bytes.

    With 1F1B; an interleaved pipeline of several chunks keeps more (V. Korthikanti et
    al., 2022, section 4.2.3). Tensor ranks share the tokens between their layers.
    """
    mesh = run.mesh
    layers = layers_per_rank(run)
    dense, experts = stage_parameters(model, mesh, stage, layers)
    ranks = mesh.data * mesh.context
    kept = [
        of_dense + of_experts
        for of_dense, of_experts in zip(
            states_of(dense, ranks * mesh.expert, run.stage),
            states_of(experts, ranks, run.stage),
        )
    ]
    tokens = run.micro_batch * run.context / mesh.context / mesh.tensor
    flying = min(mesh.pipeline - stage, run.micro_batches())
    if run.chunks > 1:
        flying = flying + (mesh.pipeline - 1) / run.chunks
    block = 2.0 * tokens * kept_per_token(model, run.recompute)
    moment = 0.0
    if stage == mesh.pipeline - 1:  # logits in bf16, and twice in fp32, with gradients
        moment = 12.0 * tokens * model.vocabulary
    if run.recompute != "none":
        moment = max(moment, 2.0 * tokens * kept_per_token(model, "none"))
    if run.stage >= 3:  # two gathered blocks in bf16: a share of all parameters
        moment = moment + 2.0 * (dense + experts) / layers * min(2.0, layers)
    return Kept(*kept, flying * layers * block, moment)


def kept_by_run(model, run):
    """Kept of the pipeline stage that has most."""
    stages = {0, run.mesh.pipeline - 1}
    return max((kept_by_stage(model, run, stage) for stage in stages), key=Kept.total)
