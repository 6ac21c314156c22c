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
from torch._subclasses.fake_tensor import FakeTensorMode
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

from ddp_course.models.dtensors import ALL, TOKENS, Shard, loss_of, loss_parallel
from ddp_course.models.modern import ModernGPT
from ddp_course.ranks.watch import Watch


class Counted(NamedTuple):
    """Of rank 0. Bytes in rings, in one step, with all numbers in bf16."""

    parameters: int
    gradients: int  # numbers
    optimizer: int  # numbers
    sent_by_tensor: float
    sent_by_data: float
    collectives: dict  # {(dimension, kind): number}


@contextmanager
def fake_job(mesh):
    """A process group in which this process is rank 0, and its mesh of three dimensions."""
    ranks = mesh.pipeline * mesh.data * mesh.tensor
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        sizes = mesh.pipeline, mesh.data, mesh.tensor
        names = "pipeline", "data", "tensor"
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


class WatchGroups(Watch):
    """A Watch whose log also has the name of each collective's group."""

    def _note(self, name, at, size, shared):
        super()._note(name, at, size, shared)
        groups = [each for each in shared if isinstance(each, torch.ScriptObject)]
        if groups:
            group = dist.ProcessGroup.unbox(groups[0]).group_name
        else:
            group = [each for each in shared if isinstance(each, str)][-1]
        self.log[-1]["group"] = group


def cut(network, mesh):
    """Cut a ModernGPT for tensor ranks, as lesson 17 cuts a GPT with torch."""
    gathered = PrepareModuleInput(input_layouts=(TOKENS,), desired_input_layouts=(ALL,))
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=TOKENS)
    plan = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    plan |= {"attention": gathered, "attention.output": rows}
    plan |= {"mlp": gathered, "mlp.contract": rows}
    plan |= {f"attention.{name}": columns for name in ("query", "key", "value")}
    plan |= {f"mlp.{name}": columns for name in ("gate", "expand")}
    for block in network.blocks:
        parallelize_module(block, mesh, plan)
    head = ColwiseParallel(
        input_layouts=TOKENS, output_layouts=Shard(-1), use_local_output=False
    )
    embedding = RowwiseParallel(input_layouts=ALL, output_layouts=TOKENS)
    outer = {"token_embedding": embedding, "norm": SequenceParallel(), "head": head}
    parallelize_module(network, mesh, outer)
    network.head.weight = network.token_embedding.weight


class Job(NamedTuple):
    """What a step needs, made of fake tensors."""

    network: nn.Module
    optimizer: torch.optim.Optimizer
    texts: torch.Tensor  # int64 (2, sequences, tokens): tokens and targets
    names: dict  # of the mesh's dimensions, by those of their groups

    def step(self, micro_batches=1):
        for _ in range(micro_batches):
            with loss_parallel():
                loss_of(self.network, *self.texts).backward()
        self.optimizer.step()


@contextmanager
def fake_model(model, run):
    """Rank 0's part of a model in bf16, a Job; only fake tensors are made in the block.

    Raises ValueError for what is not rehearsed: pipeline, context and expert ranks, and
    weights that are not sharded. The model is tied, with two heads of queries per head
    of keys.
    """
    mesh = run.mesh
    if mesh.pipeline * mesh.context * mesh.expert > 1 or run.stage != 3:
        raise ValueError("only data and tensor ranks with ZeRO-3 are rehearsed here")
    with fake_job(mesh) as ranks:
        data, tensor = ranks["data"], ranks["tensor"]
        with torch.device("meta"):
            shape = {"layers": model.layers, "heads": model.heads, "width": model.width}
            network = ModernGPT(model.vocabulary, run.context, **shape)
        network.to(torch.bfloat16)
        if mesh.tensor > 1:
            cut(network, tensor)
        for part in (*network.blocks, network):
            fully_shard(part, mesh=data)
        names = {
            each.get_group().group_name: each.mesh_dim_names[0]
            for each in (data, tensor)
        }
        with FakeTensorMode(allow_non_fake_inputs=True):
            network.to_empty(device="cpu")
            optimizer = torch.optim.AdamW(network.parameters())
            texts = torch.zeros(2, run.micro_batch, run.context, dtype=torch.int64)
            yield Job(network, optimizer, texts, names)


def rehearse(model, run):
    """Do a step of this run as rank 0; return what was Counted."""
    with fake_model(model, run) as job, WatchGroups() as watch:
        job.step(round(run.micro_batches()))
        return counted(job, watch.log, run.mesh)


def peak_by_torch(model, run):
    """The highest moment of a step, as torch's memory tracker sees it: {kind: bytes}."""
    with fake_model(model, run) as job:
        tracker = FSDPMemTracker(job.network, job.optimizer)
        tracker.track_inputs(tuple(job.texts))
        with tracker:
            job.step(round(run.micro_batches()))
        [kinds] = tracker.get_tracker_snapshot("peak").values()
        return {getattr(kind, "value", kind): size for kind, size in kinds.items()}


def counted(job, log, mesh):
    parameters = list(job.network.parameters())
    state = [v for of in job.optimizer.state.values() for v in of.values() if v.dim()]
    sent, collectives = {"data": 0.0, "tensor": 0.0}, {}
    for entry in log:
        dimension = job.names[entry["group"]]
        key = dimension, entry["name"]
        collectives[key] = collectives.get(key, 0) + 1
        n = getattr(mesh, dimension)
        times = 2 if entry["name"] == "allreduce" else 1
        sent[dimension] += times * entry["whole"] * (n - 1) / n
    local = lambda values: sum(value.to_local().numel() for value in values)
    return Counted(
        local(parameters), local(value.grad for value in parameters), local(state),
        sent["tensor"], sent["data"], collectives,
    )  # fmt: skip
