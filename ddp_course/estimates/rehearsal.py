"""One step of a plan without its cluster: this process is rank 0 of the whole job, and
counts what it keeps and sends.

torch's fake process group returns from each collective at once, and fake tensors have
shapes but no numbers: so a step takes seconds and no memory, whatever the size.
"""

from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddp_course.estimates.pipeline import interleaved, one_f_one_b
from ddp_course.models.context_parallel import Sharing, share
from ddp_course.models.dtensors import ALL, TOKENS, Shard, loss_of, loss_parallel
from ddp_course.models.modern import GroupedAttention, ModernBlock, ModernGPT
from ddp_course.models.pipeline import Pipeline, Shared, owners_of, place
from ddp_course.ranks.watch import Watch


class Counted(NamedTuple):
    """Of rank 0, in one step, with all numbers in bf16."""

    parameters: int
    gradients: int  # numbers
    optimizer: int  # numbers
    sent: dict  # {dimension: bytes, in rings}
    messages: dict  # {(dimension, kind): number}
    in_flight: int  # micro-batches whose activations are kept at a time


# ---- ranks ----


@contextmanager
def fake_job(mesh):
    """A process group in which this process is rank 0; {dimension: its DeviceMesh}.

    Context ranks have the same parameters, so they are among the data ranks, too.
    """
    texts = mesh.data * mesh.context
    ranks = mesh.pipeline * texts * mesh.tensor
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        sizes, names = (
            (mesh.pipeline, texts, mesh.tensor),
            ("pipeline", "data", "tensor"),
        )
        whole = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        dimensions = {name: whole[name] for name in names}
        if mesh.context > 1:
            sizes = ranks // mesh.context // mesh.tensor, mesh.context, mesh.tensor
            names = "others", "context", "neighbours"
            shared = init_device_mesh("cpu", sizes, mesh_dim_names=names)
            dimensions["context"] = shared["context"]
        yield dimensions
    finally:
        dist.destroy_process_group()


class WatchGroups(Watch):
    """A Watch whose log also has the name of each message's group."""

    def _note(self, name, at, size, shared):
        super()._note(name, at, size, shared)
        groups = [each for each in shared if isinstance(each, torch.ScriptObject)]
        if groups:
            group = dist.ProcessGroup.unbox(groups[0]).group_name
        else:
            group = [each for each in shared if isinstance(each, str)][-1]
        self.log[-1]["group"] = group


class RealPlaces(Sharing):
    """A Sharing in which places in the text have numbers: shapes follow from them."""

    def places(self, tokens):
        with unset_fake_temporarily():
            return super().places(tokens)

    def block(self, *where):
        with unset_fake_temporarily():
            return super().block(*where)


# ---- a model that they share ----


def network_of(model, context):
    """A ModernGPT of a Model's sizes, in bf16, on meta: without numbers."""
    with torch.device("meta"):
        sizes = {"layers": model.layers, "heads": 2, "width": model.width}
        network = ModernGPT(model.vocabulary, context, **sizes)
        heads = model.width, model.heads, model.groups()
        for block in network.blocks:
            block.attention = GroupedAttention(*heads, dropout=0.0)
            for layer in ("gate", "expand"):
                setattr(block.mlp, layer, linear(model.width, model.inner))
            block.mlp.contract = linear(model.inner, model.width)
        if not model.tied:
            network.head.weight = nn.Parameter(torch.empty_like(network.head.weight))
    return network.to(torch.bfloat16)


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def cut_block(block, mesh):
    """Cut a ModernBlock for tensor ranks, as lesson 17 cuts a GPT's with torch."""
    gathered = PrepareModuleInput(input_layouts=(TOKENS,), desired_input_layouts=(ALL,))
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=TOKENS)
    plan = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    plan |= {"attention": gathered, "attention.output": rows}
    plan |= {"mlp": gathered, "mlp.contract": rows}
    plan |= {f"attention.{name}": columns for name in ("query", "key", "value")}
    plan |= {f"mlp.{name}": columns for name in ("gate", "expand")}
    parallelize_module(block, mesh, plan)


def cut(network, mesh):
    """Cut a ModernGPT for tensor ranks."""
    for block in network.blocks:
        cut_block(block, mesh)
    tied = network.head.weight is network.token_embedding.weight
    head = ColwiseParallel(
        input_layouts=TOKENS, output_layouts=Shard(-1), use_local_output=False
    )
    embedding = RowwiseParallel(input_layouts=ALL, output_layouts=TOKENS)
    outer = {"token_embedding": embedding, "norm": SequenceParallel(), "head": head}
    parallelize_module(network, mesh, outer)
    if tied:
        network.head.weight = network.token_embedding.weight


class Job:
    """Rank 0's part of a model, network, and what a step needs.

    groups: {name of a group with collectives: its dimension}.
    """

    def __init__(self, network, run, dimensions):
        self.network, self.run = network, run
        self.micro_batches = round(run.micro_batches())
        self.groups = {
            dimensions[name].get_group().group_name: name for name in ("data", "tensor")
        }

    def make(self):
        """Make its tensors, fake ones in a FakeTensorMode, and return it."""
        run, parts = self.run, self.network.to_empty(device="cpu").parameters()
        tokens = run.context // run.mesh.context
        self.texts = torch.zeros(2, run.micro_batch, tokens, dtype=torch.int64)
        self.optimizer = torch.optim.AdamW(parts)
        return self


class ShardedJob(Job):
    """Data ranks share the parameters; tensor or context ranks the work of a text."""

    def __init__(self, network, run, dimensions):
        super().__init__(network, run, dimensions)
        if run.mesh.tensor > 1:
            cut(network, dimensions["tensor"])
        if run.mesh.context > 1:
            share(network, RealPlaces("zigzag", dimensions["context"].get_group()))
        for part in (*network.blocks, network):
            fully_shard(part, mesh=dimensions["data"])

    def step(self):
        """Returns how many micro-batches were in flight."""
        for _ in range(self.micro_batches):
            with loss_parallel():
                loss_of(self.network, *self.texts).backward()
        self.optimizer.step()
        return 1


class PipelineJob(Job):
    """The stages of a pipeline; data ranks have the same ones."""

    def __init__(self, network, run, dimensions):
        ranks = run.mesh.pipeline
        how = (interleaved, run.chunks) if run.chunks > 1 else (one_f_one_b,)
        plan = how[0](ranks, round(run.micro_batches()), *how[1:])
        self.owners = owners_of(plan, dimensions["pipeline"].mesh.tolist())
        self.actions, self.parts = plan[0], place(network, self.owners)
        super().__init__(nn.ModuleList(self.parts.values()), run, dimensions)
        self.replicas = dimensions["data"].get_group() if run.mesh.data > 1 else None

    def make(self):
        super().make()
        self.pipe = Pipeline(self.parts, self.owners, self.run.width)
        with unset_fake_temporarily():  # a group is made
            self.shared = Shared(self.parts, self.owners, self.replicas)
        self.groups[self.shared.ends.group_name] = "tied"
        return self

    def step(self):
        texts = [[part] * self.micro_batches for part in self.texts]
        self.pipe.run(self.actions, *texts)
        self.shared.gradients()
        self.optimizer.step()
        return self.pipe.most


@contextmanager
def fake_model(model, run):
    """Rank 0's part of a model in bf16, a Job; only fake tensors are made in the block.

    Raises ValueError for what is not rehearsed: experts, whose messages depend on
    numbers; several ways of cutting a model at once; and a pipeline that is not tied.
    """
    mesh = run.mesh
    ways = [mesh.tensor > 1, mesh.context > 1, mesh.pipeline > 1]
    stage = run.stage if model.tied or not ways[2] else None
    if mesh.expert > 1 or sum(ways) > 1 or stage != (0 if ways[2] else 3):
        problem = "tensor or context ranks with ZeRO-3, or tied pipelines without ZeRO"
        raise ValueError(f"only {problem}, and data ranks, are rehearsed here")
    with fake_job(mesh) as dimensions:
        network = network_of(model, run.context)
        kind = PipelineJob if mesh.pipeline > 1 else ShardedJob
        job = kind(network, run, dimensions)
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield job.make()


# ---- what is counted ----


def built(model, run):
    """How many parameters rank 0 has once its part of the model is built. No step is
    done, so any mesh without expert ranks will do, but for a pipeline with ZeRO-3.
    """
    mesh = run.mesh
    with fake_job(mesh) as dimensions:
        network, tensor = network_of(model, run.context), dimensions["tensor"]
        own = network
        if mesh.pipeline > 1:
            stages = range(mesh.pipeline * run.chunks)
            owners = {stage: stage % mesh.pipeline for stage in stages}
            own = nn.ModuleList(place(network, owners).values())
            for part in own.modules() if mesh.tensor > 1 else ():
                if isinstance(part, ModernBlock):
                    cut_block(part, tensor)
            if mesh.tensor > 1:
                parallelize_module(network.token_embedding, tensor, RowwiseParallel())
        elif mesh.tensor > 1:
            cut(network, tensor)
        if run.stage == 3:
            fully_shard(own, mesh=dimensions["data"])
        return local(own.parameters())


def rehearse(model, run):
    """Do a step of this run as rank 0; return what was Counted."""
    with fake_model(model, run) as job, WatchGroups() as watch:
        in_flight = job.step()
        return counted(job, watch.log, run.mesh, in_flight)


def peak_by_torch(model, run):
    """The highest moment of a step, as torch's tracker sees it: {kind: bytes}."""
    with fake_model(model, run) as job:
        tracker = FSDPMemTracker(job.network, job.optimizer)
        tracker.track_inputs(tuple(job.texts))
        with tracker:
            job.step()
        [kinds] = tracker.get_tracker_snapshot("peak").values()
        return {getattr(kind, "value", kind): size for kind, size in kinds.items()}


def counted(job, log, mesh, in_flight):
    parameters = list(job.network.parameters())
    state = [v for of in job.optimizer.state.values() for v in of.values() if v.dim()]
    ranks = vars(mesh) | {"data": mesh.data * mesh.context, "tied": 2}
    to_one = "pipeline" if mesh.pipeline > 1 else "context"
    sent, messages = {}, {}
    for entry in log:
        kind, size = entry["name"], entry["whole"]
        if kind in ("send", "recv"):
            dimension, size = to_one, size if kind == "send" else 0
        else:
            dimension = job.groups[entry["group"]]
            n, times = ranks[dimension], 2 if kind == "allreduce" else 1
            size = times * size * (n - 1) / n
        messages[dimension, kind] = messages.get((dimension, kind), 0) + 1
        sent[dimension] = sent.get(dimension, 0) + size
    return Counted(
        local(parameters), local(value.grad for value in parameters), local(state),
        sent, messages, in_flight,
    )  # fmt: skip


def local(values):
    """How many numbers this rank has of them."""
    parts = (
        getattr(value, "to_local", lambda value=value: value)() for value in values
    )
    return sum(part.numel() for part in parts)
