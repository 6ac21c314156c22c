"""One GPT with less and less memory per rank: DDP, ZeRO-1 and 2, FSDP, HSDP.

torchrun --nproc_per_node 2 ddp_course/lesson12.py --train-samples 256
torchrun --nproc_per_node 3 ddp_course/lesson12.py --train-samples 256 --resume --epochs 2
torchrun --nproc_per_node 2 ddp_course/lesson12.py --sharding fsdp-by-hand
torchrun --nproc_per_node 2 ddp_course/lesson12.py --recipe --recompute selective
python ddp_course/lesson12.py --sharding ddp --train-samples 64
"""

import itertools
import time
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader

from ddp_course import UsageError, runs
from ddp_course.checkpoints import sharded as sharded_checkpoints
from ddp_course.checkpoints.export import export
from ddp_course.data.order import ResumableSampler
from ddp_course.data.text import load_windows
from ddp_course.lesson06 import PRECISIONS, grouped
from ddp_course.models.gpt import GPT, SHAPES
from ddp_course.models.modern import ModernGPT
from ddp_course.models.muon import Together
from ddp_course.models.recipe import (
    evaluate,
    learning_rate,
    loss_of,
    optimizers,
    parameter_groups,
)
from ddp_course.models.recompute import recompute
from ddp_course.models.six_ways import WAYS, fsdp, mesh_of
from ddp_course.ranks.environment import backend_for, choose_device, process_group
from ddp_course.ranks.watch import held

MOST_ON_A_CPU = 512  # windows of text to train on, unless --train-samples says more
FULLY_SHARDED = ("fsdp", "hsdp")
OF_THE_WHOLE_RECIPE = (
    "recipe precision accumulate recompute compile chunked_loss".split()
)

# ---- one update, and one epoch, of any way ----

# rates: an iterator of learning rates, or None, then the optimizer keeps its own
PLAIN = SimpleNamespace(accumulate=1, autocast=torch.float32, max_norm=None, rates=None)


def averaging(model, last):
    """A context for backward: only the last of an update averages gradients."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        return nullcontext()
    return nullcontext() if last else model.no_sync()


def update(model, micro_batches, optimizer, recipe, device):
    """Do one update; return this rank's mean loss, a float tensor ()."""
    mean = 0.0
    optimizer.zero_grad()
    for number, (tokens, targets) in enumerate(micro_batches, 1):
        with averaging(model, number == len(micro_batches)):
            loss = loss_of(model, tokens, targets, recipe.autocast, device)
            (loss / len(micro_batches)).backward()
        mean = mean + loss.detach() / len(micro_batches)
    if recipe.max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm)
    if recipe.rates is not None:
        rate = next(recipe.rates)
        for group in optimizer.param_groups:
            group["lr"] = rate
    optimizer.step()
    return mean


def train_one_epoch(model, batches, optimizer, device, recipe=PLAIN):
    """The loop of all ways, for an epoch or the part of it that `batches` has.

    Return the mean loss over the ranks of each update.
    """
    losses = [
        update(model, micro_batches, optimizer, recipe, device)
        for micro_batches in grouped(batches, recipe.accumulate)
    ]
    losses = torch.stack(losses)
    runs.check_finite(losses)
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return losses.tolist()


# ---- the program ----


def arguments(argv=()):
    about = {"trains": "text", "most": MOST_ON_A_CPU, "per": "micro-batch"}
    parser = runs.parser(__file__, __doc__, **about)
    parser.set_defaults(epochs=1, batch_size=8)
    flag, count, number = parser.add_argument, {"type": runs.count}, runs.number
    ways, kept = [*WAYS, "hsdp"], ["none", "selective", "full"]
    flag("--sharding", choices=ways, default="fsdp", help="what is sharded (fsdp)")
    flag("--replicas", **count, default=2, help="hsdp: copies of the model (2)")
    flag("--offload", action="store_true", help="fsdp, hsdp: shards stay on the CPU")
    flag("--tokenizer", help="bytes, bpe, or a tokenizer.json (bytes)")
    flag("--vocabulary", **count, default=2048, help="tokens that bpe learns (2048)")
    flag("--shape", choices=list(SHAPES), default="small", help="of the model (small)")
    flag("--modern", action="store_true", help="a model like Llama, not like GPT-2")
    dropout_help = "probability; a run that resumes does not draw the same (0)"
    flag("--dropout", type=runs.share, default=0.0, help=dropout_help)
    flag("--precision", choices=["fp32", "bf16"], default="fp32", help="(fp32)")
    flag("--recompute", choices=kept, default="none", help="of each block (none)")
    flag("--compile", action="store_true", help="compile each block")
    flag("--chunked-loss", action="store_true", help="never all logits at once")
    flag("--accumulate", **count, default=1, help="micro-batches per update (1)")
    flag("--recipe", action="store_true", help="lesson 10's, with the next six flags")
    optimizer_help = "adamw, or muon for the matrices of the blocks (adamw)"
    flag("--optimizer", choices=["adamw", "muon"], default="adamw", help=optimizer_help)
    schedule_help = "what the rate does after its warm-up (cosine)"
    flag("--schedule", choices=["cosine", "wsd"], default="cosine", help=schedule_help)
    flag("--learning-rate", type=number, default=2e-3, help="the highest (2e-3)")
    flag("--warmup", **count, default=20, help="updates of rising learning rate (20)")
    flag("--weight-decay", type=number, default=0.1, help="of matrices (0.1)")
    flag("--max-norm", type=number, default=1.0, help="clip longer gradients (1)")
    flag("--eval-windows", **count, default=32, help="of held-out text (32)")
    flag("--save-every", **count, default=100, help="updates per checkpoint (100)")
    flag("--resume", action="store_true", help="ddp, fsdp, hsdp: from a checkpoint")
    args = parser.parse_args(argv)
    if args.sharding.endswith("by-hand"):
        for name in OF_THE_WHOLE_RECIPE:
            if vars(args)[name] != parser.get_default(name):
                name = name.replace("_", "-")
                parser.error(f"--sharding {args.sharding} does not take --{name}")
    if args.offload and args.sharding not in FULLY_SHARDED:
        parser.error("--offload needs --sharding fsdp or hsdp")
    if args.optimizer == "muon" and not args.recipe:
        parser.error("--optimizer muon needs --recipe")
    if args.chunked_loss and not hasattr(nn, "LinearCrossEntropyOptions"):
        parser.error("--chunked-loss needs torch 2.15 or later")
    return args


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device, deterministic=args.deterministic)
    backend = backend_for(device)
    if args.offload and device.type != "cpu":  # gradients are on the CPU, too
        backend = f"cpu:gloo,{device.type}:{backend}"
    with process_group(backend, args.timeout) as (rank, world_size):
        run = prepare(args, rank, world_size, device)
        train(run)
        return report(run)


def arrange(network, args, device):
    """What a way of training makes of a network, with what the flags ask for.

    The order counts: recompute, compile, shard, and only then the optimizer.
    """
    for block in network.blocks:
        recompute(block, args.recompute)
        if args.compile:
            block.compile()  # in place, so names of parameters do not change
    options, policies = {}, {}
    if args.recipe:
        options["groups"] = partial(parameter_groups, weight_decay=args.weight_decay)
        options["betas"] = (0.9, 0.95)
    if args.sharding not in FULLY_SHARDED:
        return WAYS[args.sharding](network, device, **options)
    if args.precision == "bf16":
        policies["mp_policy"] = MixedPrecisionPolicy(
            torch.bfloat16, reduce_dtype=torch.float32
        )
    if args.offload:
        pin = device.type == "cuda"  # which needs a GPU's driver
        policies["offload_policy"] = CPUOffloadPolicy(pin_memory=pin)
    mesh = mesh_of(device, args.replicas if args.sharding == "hsdp" else 1)
    return fsdp(network, device, mesh=mesh, policies=policies, **options)


def recipe_for(args, first, updates):
    """What `update` needs to know, from update number `first` to the last."""
    casts = args.sharding not in FULLY_SHARDED  # these have a policy for it
    rates = (learning_rate(step, updates, args) for step in range(first, updates))
    return SimpleNamespace(
        accumulate=args.accumulate,
        autocast=PRECISIONS[args.precision if casts else "fp32"],
        max_norm=args.max_norm if args.recipe else None,
        rates=rates if args.recipe else None,
    )


def new_network(args, tokenizer):
    kind = ModernGPT if args.modern else GPT
    network = kind(tokenizer.vocabulary, dropout=args.dropout, **SHAPES[args.shape])
    network.head.chunked = args.chunked_loss
    return network


def prepare(args, rank, world_size, device):
    """What `train` needs: data, model, and where an earlier run has ended."""
    log = runs.open_folder(args.out)
    most = None if device.type == "cuda" else MOST_ON_A_CPU
    context = SHAPES[args.shape]["context"]
    train_set, held_out, tokenizer, _ = load_windows(
        args.data, args.tokenizer, args.vocabulary, context, args.train_samples, most
    )
    runs.check_batch_size(args.batch_size * args.accumulate, len(train_set), world_size)
    sampler = ResumableSampler(
        train_set, world_size, rank, seed=args.seed, drop_last=True
    )
    loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    per_epoch = -(-len(loader) // args.accumulate)  # updates
    per_update = args.batch_size * args.accumulate * world_size  # windows
    # each rank evaluates as many windows: with shards, a forward pass takes all ranks
    windows = min(args.eval_windows, len(held_out)) // world_size * world_size

    torch.manual_seed(args.seed)
    network = new_network(args, tokenizer).to(device)
    model, optimizer, parameters_of_all = arrange(network, args, device)
    if args.optimizer == "muon":  # products of DTensors send what they need
        groups = parameter_groups(network, args.weight_decay)
        make = {"make": ZeroRedundancyOptimizer} if args.sharding == "zero1" else {}
        optimizer = Together(*optimizers(groups, "muon", network, **make).values())
    torch.manual_seed(args.seed + rank)  # each rank draws its own dropout
    epoch, seen = sharded_checkpoints.begin(args, model, optimizer)
    # other ranks, or batches, may have stopped in the middle of an update of these
    first = epoch * per_epoch + min(seen // per_update, per_epoch)
    if first >= args.epochs * per_epoch:
        problem = f"the checkpoint in {args.out} is of epoch {epoch + (seen > 0)}"
        raise UsageError(f"{problem}: --epochs {args.epochs} leaves nothing to do")
    return SimpleNamespace(
        args=args, log=log, device=device, train_set=train_set, loader=loader,
        held_out=held_out.some(windows or world_size), tokenizer=tokenizer, model=model,
        optimizer=optimizer, parameters_of_all=parameters_of_all,
        first=first, per_epoch=per_epoch, per_update=per_update,
        recipe=recipe_for(args, first, args.epochs * per_epoch),
        losses=[], validation_loss=0.0, seconds=0.0,
    )  # fmt: skip


def train(run):
    """Train to the end; write checkpoints on the way, and evaluate after each epoch."""
    args, model, optimizer = run.args, run.model, run.optimizer
    number = run.first  # of updates done
    for epoch in range(number // run.per_epoch, args.epochs):
        begins, ends = epoch * run.per_epoch, (epoch + 1) * run.per_epoch
        run.loader.sampler.set_epoch(epoch)
        run.loader.sampler.start = (number - begins) * args.accumulate * args.batch_size
        batches = iter(run.loader)
        while number < ends:
            some = min(ends - number, args.save_every - number % args.save_every)
            part = itertools.islice(batches, some * args.accumulate)
            begin = time.perf_counter()
            run.losses += train_one_epoch(
                model, part, optimizer, run.device, run.recipe
            )
            run.seconds += time.perf_counter() - begin
            number += some
            if number < ends:
                seen = (number - begins) * run.per_update
                sharded_checkpoints.save(args, model, optimizer, epoch, seen)
        run.validation_loss, error = evaluate(
            model, run.held_out, run.recipe.autocast, run.device
        )
        held_out = f"held out {run.validation_loss:.3f} ± {error:.3f}"
        run.log.info(f"epoch {epoch + 1}: loss {run.losses[-1]:.3f}, {held_out}")
        sharded_checkpoints.save(args, model, optimizer, epoch + 1)


def report(run):
    """The result, with the bytes that each rank keeps, and the model as one folder."""
    args, losses = run.args, run.losses
    network, kept = new_network(args, run.tokenizer), held(run.model, run.optimizer)
    whole = run.parameters_of_all()  # tied ones come once
    network.load_state_dict(whole, strict=False)
    epoch, before = divmod(run.first, run.per_epoch)
    per_epoch = len(run.loader.sampler) * dist.get_world_size()
    trained = (args.epochs - epoch) * per_epoch - before * run.per_update
    more = {
        "sharding": args.sharding,
        "parameters": sum(value.numel() for value in network.parameters()),
        "weight_bytes": kept["weights"],
        "gradient_bytes": kept["gradients"],
        "optimizer_bytes": kept["optimizer"],
        "train_loss": round(losses[-1], 4),
        "validation_loss": round(run.validation_loss, 4),
        "samples_per_second": round(trained / run.seconds),
    }
    if dist.get_rank() == 0:
        export(network, run.tokenizer, args.out / "model")
    found = network, run.train_set, losses, run.seconds
    return runs.finish(args, run.device, *found, more=more) | {"losses": losses}


if __name__ == "__main__":
    runs.start(main)
