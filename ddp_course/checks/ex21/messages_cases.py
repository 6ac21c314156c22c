"""Runs on which question 2 tries an answer."""

from ddp_course.checks.ex21.messages_claims import neighbours
from ddp_course.estimates.memory import Mesh
from ddp_course.estimates.step_time import FITTED, GPUS, Constants
from ddp_course.estimates.transformer import MODELS, run_of


class Case(tuple):
    """(run, gpu, constants), short where it is printed."""

    def __str__(self):
        run, gpu, constants = self
        mesh = ", ".join(f"{name}={size}" for name, size in vars(run.mesh).items() if size > 1)
        links = f"inside {gpu.inside:.3g}, across {gpu.across:.4g}, hop {gpu.hop:.4g} s"
        where = f"{gpu.per_machine} GPUs per machine, {links}, network {constants.network:.4g}"
        how = f"batch {run.batch}, micro_batch {run.micro_batch}, chunks {run.chunks}, width {run.width}"
        return f"(Run(Mesh({mesh}), {how}, context {run.context}, stage {run.stage}, recompute {run.recompute!r}), {where})"


MESHES = [  # data, tensor, pipeline, context, expert; chunks
    (1, 1, 1, 1, 1, 1), (4, 2, 1, 2, 1, 1), (8, 2, 1, 1, 1, 2), (1, 1, 2, 1, 1, 1), (4, 2, 2, 1, 1, 4), (1, 1, 3, 1, 1, 1),
    (2, 2, 4, 1, 1, 2), (1, 1, 8, 1, 1, 4), (1, 2, 4, 1, 1, 1), (2, 8, 8, 2, 1, 1), (1, 4, 4, 4, 1, 4), (2, 2, 2, 2, 2, 2),
    (4, 1, 4, 1, 8, 1), (1, 1, 2, 4, 1, 1), (16, 4, 16, 1, 1, 1),
]  # fmt: skip


def cases_of(draw):
    """Each mesh with sizes that are drawn; and the same job on machines of another size."""
    found = []
    for *sizes, chunks in MESHES:
        mesh = Mesh(*sizes)
        name = "mixtral-8x7b" if mesh.expert > 1 else draw.choice(["llama3-8b", "llama3-70b", "llama3-1b"])
        micro_batch, count = draw.choice([1, 2, 3]), draw.choice([1, 2, 5, 8])
        batch = mesh.data * mesh.expert * micro_batch * count
        how = {"stage": draw.choice([0, 1]), "recompute": draw.choice(["none", "full"]), "chunks": chunks}
        run = run_of(MODELS[name], mesh, draw.choice([2048, 8192]), batch, micro_batch, **how)
        machine = draw.choice([2, 4, 8, 16])
        gpu = GPUS["h100"]._replace(per_machine=machine, hop=draw.uniform(1e-4, 1e-3), across=draw.uniform(2e10, 6e10))
        constants = Constants(0.6, 0.5, 500.0, draw.uniform(1.2, 2.5))
        found.append(Case((run, gpu, constants)))
        whole = neighbours(run) * draw.choice([1, 2])  # the pipeline fits into a machine
        found.append(Case((run, gpu._replace(per_machine=whole), constants)))
    one = run_of(MODELS["llama3-8b"], Mesh(data=2, pipeline=8), 8192, 2, 1, stage=1)  # one micro-batch
    found.append(Case((one, GPUS["a100"], FITTED["a100"])))
    many = run_of(MODELS["llama3-8b"], Mesh(data=2, pipeline=8), 8192, 96, 2, stage=1, recompute="full")
    found.append(Case((many, GPUS["h100"]._replace(hop=0.0), FITTED["h100"])))
    # H100 inside a machine, not faster than its data sheet, and across; and sharded weights, which send nothing more here
    for mesh in (Mesh(data=2, pipeline=4), Mesh(data=2, tensor=4, pipeline=4)):
        run = run_of(MODELS["llama3-8b"], mesh, 8192, 16, 1, stage=3)
        found.append(Case((run, GPUS["h100"], FITTED["h100"])))
    # two machines of 4: each dimension counts, but data ranks do not
    for dimension, name in {
        "data": "llama3-8b",
        "tensor": "llama3-8b",
        "context": "llama3-8b",
        "expert": "mixtral-8x7b",
    }.items():
        run = run_of(MODELS[name], Mesh(**{"data": 1, "pipeline": 2, dimension: 4}), 8192, 16, 1)
        found.append(Case((run, GPUS["h100"]._replace(per_machine=4), FITTED["a100"])))
    # machines of 4 GPUs, so that 8 ranks of one kind do not fit into one
    for mesh in (Mesh(data=2, tensor=8, pipeline=2), Mesh(data=2, tensor=2, pipeline=8)):
        run = run_of(MODELS["llama3-8b"], mesh, 8192, 16, 1, stage=1)
        found.append(Case((run, GPUS["h100"]._replace(per_machine=4, hop=draw.uniform(1e-4, 1e-3)), FITTED["a100"])))
    return found
