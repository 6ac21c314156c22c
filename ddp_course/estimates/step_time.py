"""How long one training step of a transformer takes on a cluster: four constants that
were fitted to published runs, and what data sheets say.

A step computes matrix products and attention; a pipeline waits; tensor, context and
expert ranks talk while nobody computes; and data ranks talk once per step, or, if they
share the weights, for each micro-batch while the next layers are computed.
"""

import math
from typing import NamedTuple

from ddp_course.estimates.memory import Mesh


class GPU(NamedTuple):
    """What its data sheet says. Links: bytes per second that it sends, to a GPU of its
    machine and to another machine.
    """

    flops: float  # per second, of dense products in bf16
    memory: float  # bytes
    inside: float
    across: float
    per_machine: int = 8
    hop: float = 5e-6  # seconds of a short message to another machine: an assumption


# NVIDIA's data sheets, and a network card per GPU: of 200 and of 400 Gbit/s
GPUS = {
    "a100": GPU(312e12, 80e9, 300e9, 25e9),
    "a100-40": GPU(312e12, 40e9, 300e9, 25e9),
    "h100": GPU(989e12, 80e9, 450e9, 50e9),
}


class Constants(NamedTuple):
    """What no data sheet says."""

    rate: float  # share of the flops that large matrix products reach
    attention: float  # attention's share of that, counted without a mask
    half: float  # width of a matrix at which its products reach half of the rate
    network: float  # times that messages take as long as a link's data sheet says


# published.fit of all published runs with this GPU; those with 40 GB were never fitted
FITTED = {
    "a100": Constants(0.811, 0.688, 683.0, 1.407),
    "h100": Constants(0.628, 0.497, 927.0, 0.563),
}
FITTED["a100-40"] = FITTED["a100"]


class Run(NamedTuple):
    """A training run. The job has gpus; the mesh says what they share."""

    parameters: float  # all that are kept
    multiplied: float  # those that a token is multiplied by
    layers: int
    width: int
    context: int  # tokens per sequence
    batch: int  # sequences per step
    micro_batch: int  # sequences per data rank
    mesh: Mesh
    stage: int = 0  # of ZeRO, see memory.STAGES
    recompute: str = "none"  # or "full": the forward of each block once more
    chunks: int = 1  # stages per pipeline rank
    shards: int = 0  # ranks that share the weights of one model; 0 is all data ranks
    keys: int = 0  # width of all keys together; 0 is the width
    experts: float = 0.0  # parameters of experts
    chosen: int = 1  # experts per token

    def gpus(self):
        m = self.mesh
        return m.data * m.tensor * m.pipeline * m.context * m.expert

    def micro_batches(self):
        """Per step, of one data rank; experts' ranks have texts of their own, too."""
        return self.batch / (self.mesh.data * self.mesh.expert * self.micro_batch)


def layers_per_rank(run):
    """Of the pipeline rank that has most: where stages do not divide the layers, some
    stages have one more than others.
    """
    return run.chunks * math.ceil(run.layers / (run.mesh.pipeline * run.chunks))


def flops(run):
    """Of one step, without recomputing: (products, attention).

    A parameter takes 6 per token, of forward and backward; attention 12 per pair of
    tokens, layer and number of the width, if no mask is taken into account. V.
    Korthikanti et al., 2022, appendix A, which has the same without the mask.
    """
    tokens = float(run.batch) * run.context
    products = 6.0 * run.multiplied * tokens
    return products, 12.0 * run.layers * run.width * run.context * tokens


def utilization(run, gpu, seconds):
    """Model FLOPs utilization of a step, 0 to 1: recomputing does not count."""
    return sum(flops(run)) / (seconds * run.gpus() * gpu.flops)


def link(gpu, ranks):
    """The bytes per second that a GPU sends in a group of so many neighbouring ranks."""
    return gpu.inside if ranks <= gpu.per_machine else gpu.across


def seconds_of(sent, gpu, constants, ranks):
    """How long a rank sends these bytes in a group of so many neighbouring ranks.

    Inside of a machine that is never less than the data sheet says. Across, it may be:
    a group can use the cards of several GPUs.
    """
    network = constants.network
    slower = max(1.0, network) if ranks <= gpu.per_machine else network
    return slower * sent / link(gpu, ranks)


# ---- traffic: bytes that a rank sends per step, in rings ----


def own_tokens(run):
    """How many a rank sees per step, alone or with its tensor and pipeline ranks."""
    mesh = run.mesh
    return float(run.batch) * run.context / (mesh.data * mesh.context * mesh.expert)


def sent_by_tensor(run):
    """Four all-reduces per block (lesson 17), and two more if it is recomputed; and one
    each for the embedding and the head.
    """
    n = run.mesh.tensor
    times = 6.0 if run.recompute == "full" else 4.0
    times = times * layers_per_rank(run) + 2.0 / run.mesh.pipeline
    return times * 2.0 * (n - 1) / n * 2.0 * run.width * own_tokens(run)


def sent_by_context(run):
    """Keys and values around a ring, and their gradients (lesson 19)."""
    n = run.mesh.context
    forwards = 2.0 if run.recompute == "full" else 1.0
    rounds = (forwards + 1.0) * (n - 1) + n if n > 1 else 0.0
    keys = float(run.keys or run.width) / run.mesh.tensor
    return rounds * 2.0 * keys * 2.0 * own_tokens(run) * layers_per_rank(run)


def sent_by_expert(run):
    """Four all-to-alls per block (lesson 20), and two more if it is recomputed."""
    n = run.mesh.expert
    times = 6.0 if run.recompute == "full" else 4.0
    copies = run.chosen * own_tokens(run) / run.mesh.tensor
    return times * copies * (n - 1) / n * 2.0 * run.width * layers_per_rank(run)


# Bytes per parameter and step with stages 0 and 1: gradients in fp32, weights in bf16;
# per micro-batch with 2 and 3: gradients in bf16, and weights gathered once or twice.
SENT = (8.0, 6.0, 4.0, 6.0)


def sent_by_data(run, parameters, ranks):
    """Gradients, and weights that are sharded (lesson 12): (bytes among the ranks that
    share the weights of one model, bytes between several such groups).

    parameters: of one rank, before they are sharded; ranks: those that have the same
    ones. Usually all share them, and nothing is sent between groups; with hybrid
    sharding gradients travel once more.
    """
    shards = min(run.shards, ranks) if run.shards else ranks
    times = run.micro_batches() if run.stage >= 2 else 1.0
    inside = times * SENT[run.stage] * parameters * (shards - 1) / shards
    groups = ranks / shards
    return inside, times * 4.0 * parameters / shards * (groups - 1) / groups


def data_seconds(run, gpu, constants):
    """Of the data ranks' messages. Experts are the same on fewer ranks (lesson 20).

    Data ranks are the outermost dimension, so their group spans the whole job, unless
    only neighbours share the weights.
    """
    mesh = run.mesh
    cut = float(mesh.tensor * mesh.pipeline)
    ranks = mesh.data * mesh.context
    spanned = mesh.tensor * run.shards if run.shards else run.gpus()
    seconds = 0.0
    for parameters, same in (
        ((run.parameters - run.experts) / cut, ranks * mesh.expert),
        (run.experts / cut / mesh.expert, ranks),
    ):
        inside, between = sent_by_data(run, parameters, same)
        seconds = seconds + seconds_of(inside, gpu, constants, spanned)
        seconds = seconds + constants.network * between / gpu.across
    if spanned <= gpu.per_machine:
        return seconds
    # each block's weights and gradients go through a ring of all that share them
    hops = 3.0 * run.micro_batches() if run.stage >= 2 else 1.0
    ring = (run.shards or ranks * mesh.expert) - 1
    return seconds + constants.network * hops * layers_per_rank(run) * ring * gpu.hop


# ---- the step ----


class Parts(NamedTuple):
    """Seconds of one step."""

    products: float
    attention: float
    bubble: float  # while others compute, or have one layer more
    tensor: float
    context: float
    expert: float
    data: float  # what of it is not hidden behind the rest

    def total(self):
        computing = self.products + self.attention + self.bubble
        return computing + self.tensor + self.context + self.expert + self.data


def parts(run, gpu, constants):
    """Where the seconds of a step go."""
    mesh, (products, attention) = run.mesh, flops(run)
    again = 4.0 / 3.0 if run.recompute == "full" else 1.0
    speed = run.gpus() * gpu.flops * constants.rate
    thin = 1.0 + constants.half * mesh.tensor / run.width
    products = products * again / speed * thin
    attention = attention * again / (speed * constants.attention)
    waits = (mesh.pipeline - 1) / (run.chunks * run.micro_batches())
    fullest = layers_per_rank(run) * mesh.pipeline / run.layers
    bubble = (products + attention) * (fullest * (1.0 + waits) - 1.0)
    spanned = mesh.tensor
    tensor = seconds_of(sent_by_tensor(run), gpu, constants, spanned)
    spanned = spanned * mesh.context
    context = seconds_of(sent_by_context(run), gpu, constants, spanned)
    spanned = spanned * mesh.expert
    expert = seconds_of(sent_by_expert(run), gpu, constants, spanned)
    data = data_seconds(run, gpu, constants)
    if run.stage >= 2:  # while other layers are computed
        data = max(0.0, data - (products + attention + bubble))
    return Parts(products, attention, bubble, tensor, context, expert, data)


def seconds(run, gpu, constants):
    """Of one step."""
    return parts(run, gpu, constants).total()
