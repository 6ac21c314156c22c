"""Lesson 10's GPT, cut between its layers: each rank has a stage of a pipeline.

torchrun --nproc_per_node 2 ddp_course/lesson18.py --train-samples 256
torchrun --nproc_per_node 2 ddp_course/lesson18.py --schedule interleaved
torchrun --nproc_per_node 4 ddp_course/lesson18.py --schedule zb-h1 --replicas 2
python ddp_course/lesson18.py --train-samples 64
"""

import time
from itertools import islice
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler

from ddp_course import UsageError, runs
from ddp_course.checkpoints.export import export
from ddp_course.data.text import load_windows
from ddp_course.estimates.pipeline import PLANS, idle, play
from ddp_course.lesson06 import grouped
from ddp_course.models.gpt import GPT, SHAPES
from ddp_course.models.pipeline import (
    Pipeline,
    Shared,
    channels_of,
    gather,
    owners_of,
    parameters,
    place,
)
from ddp_course.ranks.environment import backend_for, choose_device, process_group

MOST_ON_A_CPU = 512  # windows of text to train on, unless --train-samples says more


def update(pipe, shared, actions, micro_batches, optimizer, device):
    """Do one update; return its mean loss, on the rank of the last stage, else 0."""
    optimizer.zero_grad()
    losses = pipe.run(actions, *as_lists(micro_batches, device))
    shared.gradients()
    optimizer.step()
    return sum(losses, torch.zeros((), device=device)) / len(micro_batches)


def as_lists(micro_batches, device):
    """The tokens of the micro-batches, and their targets."""
    on_device = [[part.to(device) for part in pair] for pair in micro_batches]
    return map(list, zip(*on_device))


@torch.no_grad()
def evaluate(pipe, windows, device):
    """The mean loss over some windows, in nats per token, on all ranks. A window is a
    micro-batch, and the schedule has forwards only. Each replica evaluates all windows.
    """
    windows = list(DataLoader(windows))
    actions = [("F", stage, i) for i in range(len(windows)) for stage in pipe.parts]
    losses = pipe.run(actions, *as_lists(windows, device))
    found = [sum(losses, torch.zeros((), device=device)), len(losses)]
    found = torch.tensor(found, device=device)
    dist.all_reduce(found)  # zeros, but for those of the last stages
    return (found[0] / found[1]).item()


# ---- the program ----


def arguments(argv=()):
    about = {"trains": "text", "most": MOST_ON_A_CPU, "per": "micro-batch"}
    parser = runs.parser(__file__, __doc__, **about)
    parser.set_defaults(epochs=1, batch_size=8)
    flag, count = parser.add_argument, {"type": runs.count}
    flag(
        "--schedule",
        choices=list(PLANS),
        default="1f1b",
        help="the order of the work (1f1b)",
    )
    flag("--replicas", **count, default=1, help="of the pipeline, with other texts (1)")
    flag("--accumulate", **count, default=4, help="micro-batches per update (4)")
    flag("--shape", choices=list(SHAPES), default="small", help="of the model (small)")
    flag("--learning-rate", type=runs.number, default=1e-3, help="of AdamW (1e-3)")
    flag("--eval-windows", **count, default=32, help="of held-out text (32)")
    return parser.parse_args(argv)


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device, deterministic=args.deterministic)
    with process_group(backend_for(device), args.timeout) as (rank, world_size):
        run = prepare(args, rank, world_size, device)
        train(run)
        return report(run)


def plan_for(args, world_size):
    """Who computes what: a list of actions for each rank of a pipeline."""
    if world_size % args.replicas:
        problem = f"--replicas {args.replicas} does not divide {world_size} ranks"
        raise UsageError(problem)
    try:
        return PLANS[args.schedule](world_size // args.replicas, args.accumulate)
    except ValueError as error:
        raise UsageError(f"{error}: see --accumulate") from None


def prepare(args, rank, world_size, device):
    """What `train` needs: the data, and this rank's stages."""
    log, shape = runs.open_folder(args.out), SHAPES[args.shape]
    plan = plan_for(args, world_size)
    most = None if device.type == "cuda" else MOST_ON_A_CPU
    train_set, held_out, tokenizer, _ = load_windows(
        args.data, None, 2048, shape["context"], args.train_samples, most
    )
    # all replicas get equally many windows; what is left over is dropped
    equal = len(train_set) - len(train_set) % args.replicas or len(train_set)
    runs.check_batch_size(args.batch_size * args.accumulate, equal, args.replicas)

    # a row of ranks for each pipeline; a column has the same stages
    rows, names = (args.replicas, len(plan)), ("replica", "stage")
    mesh = init_device_mesh(device.type, rows, mesh_dim_names=names)
    row, column = mesh.get_coordinate()
    # all ranks of a pipeline read the same micro-batches
    sampler = DistributedSampler(
        train_set, args.replicas, row, seed=args.seed, drop_last=True
    )
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)

    torch.manual_seed(args.seed)
    network = GPT(tokenizer.vocabulary, **shape)  # the same on all ranks
    owners = owners_of(plan, mesh.mesh[row].tolist())
    parts = {s: part.to(device) for s, part in place(network, owners).items()}
    channels = channels_of(owners) if device.type == "cuda" else ()
    replicas = mesh.get_group("replica") if args.replicas > 1 else None
    return SimpleNamespace(
        args=args, log=log, device=device, plan=plan, actions=plan[column],
        train_set=train_set, loader=loader, tokenizer=tokenizer,
        held_out=held_out.some(min(args.eval_windows, len(held_out))),
        per_epoch=len(loader) // args.accumulate,
        group=mesh.get_group("stage"), owners=owners,
        pipe=Pipeline(parts, owners, shape["width"], channels=channels),
        shared=Shared(parts, owners, replicas),
        optimizer=torch.optim.AdamW(parameters(parts), args.learning_rate, fused=True),
        losses=[], validation_loss=0.0, seconds=0.0,
    )  # fmt: skip


def train(run):
    log, args, optimizer = run.log, run.args, run.optimizer
    bubble = f"{idle(play(run.plan)):.0%} of each step is the bubble"
    log.info(f"{args.schedule}: {bubble}, if stages are equal")
    for epoch in range(args.epochs):
        run.loader.sampler.set_epoch(epoch)
        begin = time.perf_counter()
        updates = islice(grouped(run.loader, args.accumulate), run.per_epoch)
        losses = torch.stack([
            update(run.pipe, run.shared, run.actions, group, optimizer, run.device)
            for group in updates
        ])  # fmt: skip
        runs.check_finite(losses)
        dist.all_reduce(losses)  # zeros, but for those of the last stages
        run.losses += (losses / args.replicas).tolist()
        run.seconds += time.perf_counter() - begin
        run.validation_loss = evaluate(run.pipe, run.held_out, run.device)
        held_out = f"held out {run.validation_loss:.3f}"
        log.info(f"epoch {epoch + 1}: loss {run.losses[-1]:.3f}, {held_out}")


def report(run):
    """The result, and the model as one folder."""
    args, losses = run.args, run.losses
    network = GPT(run.tokenizer.vocabulary, **SHAPES[args.shape]).to(run.device)
    gather(network, run.pipe.parts, run.owners, run.group)
    per_update = args.batch_size * args.accumulate * args.replicas
    more = {
        "method": args.schedule,
        "updates": len(losses),
        "samples_per_update": per_update,
        "parameters": sum(value.numel() for value in network.parameters()),
        "train_loss": round(losses[-1], 4),
        "validation_loss": round(run.validation_loss, 4),
        "samples_per_second": round(len(losses) * per_update / run.seconds),
    }
    if dist.get_rank() == 0:
        export(network, run.tokenizer, args.out / "model")
    found = network, run.train_set, losses, run.seconds
    return runs.finish(args, run.device, *found, more=more) | {"losses": losses}


if __name__ == "__main__":
    runs.start(main)
