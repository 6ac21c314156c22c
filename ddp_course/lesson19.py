"""One GPT for long texts: ranks share the tokens of each text; only attention sends.

torchrun --nproc_per_node 2 ddp_course/lesson19.py --train-samples 256
torchrun --nproc_per_node 2 ddp_course/lesson19.py --context 1024 --train-samples 32
torchrun --nproc_per_node 2 ddp_course/lesson19.py --attention ulysses
torchrun --nproc_per_node 4 ddp_course/lesson19.py --context-ranks 2 --sharding fsdp
python ddp_course/lesson19.py --train-samples 64
"""

import math
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_course import UsageError, runs
from ddp_course.checkpoints.export import export
from ddp_course.data.text import load_windows
from ddp_course.lesson12 import MOST_ON_A_CPU
from ddp_course.models.context_parallel import (
    ATTENTION,
    LAYOUTS,
    Sharing,
    check_shared,
    share,
)
from ddp_course.models.dtensors import full
from ddp_course.models.gpt import GPT, SHAPES
from ddp_course.models.modern import ModernGPT
from ddp_course.models.recipe import learning_rate, parameter_groups
from ddp_course.ranks.environment import backend_for, choose_device, process_group
from ddp_course.ranks.watch import held

# ---- a model whose parameters all ranks have, and whose tokens some ranks share ----


def over_all_ranks(network, sharding):
    """Average the gradients over all ranks: other texts, and other tokens of a text.

    Each rank's loss is a mean over the same number of tokens, so the mean of these
    losses is the mean over all tokens.
    """
    if sharding == "ddp":
        return DistributedDataParallel(network)
    for part in (*network.blocks, network):
        fully_shard(part)
    return network


def update(model, tokens, targets, optimizer, rate, max_norm):
    """Do one update; return the mean loss of this rank's tokens, float ()."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss = model(tokens, targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def held_out_loss(run):
    """The mean over some windows, which the data ranks share, in nats per token.

    All ranks compute as many, since attention and FSDP take all of them; what comes
    beyond the last window does not count.
    """
    run.model.eval()
    texts, total = run.mesh["data"].size(), torch.zeros((), device=run.device)
    for begin in range(0, len(run.held_out), texts):
        number = begin + run.mesh.get_local_rank("data")
        window = run.held_out[min(number, len(run.held_out) - 1)]
        tokens, targets = own_tokens(run, [part[None] for part in window])
        loss = run.model(tokens, targets)
        total += loss if number < len(run.held_out) else 0
    dist.all_reduce(total)
    run.model.train()
    return total.item() / len(run.held_out) / run.sharing.ranks


def own_tokens(run, texts):
    """This rank's tokens and targets. A target is the next token of the *text*."""
    return [run.sharing.own(part).to(run.device) for part in texts]


# ---- the program ----


def arguments(argv=()):
    about = {"trains": "text", "most": MOST_ON_A_CPU}
    parser = runs.parser(__file__, __doc__, **about)
    parser.set_defaults(epochs=1, batch_size=8)
    flag, count, number = parser.add_argument, {"type": runs.count}, runs.number
    flag("--context", **count, help="tokens of a text (as --shape has)")
    flag("--context-ranks", **count, help="ranks that share a text (all)")
    flag("--attention", choices=list(ATTENTION), default="ring", help="how (ring)")
    layouts = "which tokens a rank has (ring: zigzag; ulysses: contiguous)"
    flag("--layout", choices=list(LAYOUTS), help=layouts)
    flag("--sharding", choices=["ddp", "fsdp"], default="ddp", help="(ddp)")
    flag("--modern", action="store_true", help="rotate by positions, as Llama does")
    flag("--tokenizer", help="bytes, bpe, or a tokenizer.json (bytes)")
    flag("--vocabulary", **count, default=2048, help="tokens that bpe learns (2048)")
    flag("--shape", choices=list(SHAPES), default="small", help="of the model (small)")
    flag("--learning-rate", type=number, default=2e-3, help="the highest (2e-3)")
    flag("--warmup", **count, default=20, help="updates of rising learning rate (20)")
    flag("--weight-decay", type=number, default=0.1, help="of matrices (0.1)")
    flag("--max-norm", type=number, default=1.0, help="clip longer gradients (1)")
    flag("--eval-windows", **count, default=32, help="of held-out text (32)")
    args = parser.parse_args(argv)
    args.context = args.context or SHAPES[args.shape]["context"]
    args.layout = args.layout or {"ring": "zigzag"}.get(args.attention, "contiguous")
    return args


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device, deterministic=args.deterministic)
    with process_group(backend_for(device), args.timeout) as (_, world_size):
        run = prepare(args, world_size, device)
        train(run)
        return report(run)


def mesh_for(args, world_size, device):
    """The ranks as a mesh, data x context: neighbours share a text. And how they do.

    Raises UsageError for a number of ranks that does not suit the flags.
    """
    ranks = args.context_ranks or world_size
    if world_size % ranks:
        raise UsageError(f"--context-ranks {ranks} does not divide {world_size} ranks")
    sizes, names = (world_size // ranks, ranks), ("data", "context")
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    sharing = Sharing(args.layout, mesh["context"].get_group())
    heads = SHAPES[args.shape]["heads"] // (2 if args.modern else 1)
    try:
        check_shared(sharing, args.attention, heads, args.context)
    except ValueError as problem:
        raise UsageError(str(problem)) from None
    return mesh, sharing


def prepare(args, world_size, device):
    """What `train` needs: data, how its tokens are shared, and the model."""
    mesh, sharing = mesh_for(args, world_size, device)
    log, shape = runs.open_folder(args.out), shape_of(args)
    most = None if device.type == "cuda" else MOST_ON_A_CPU
    train_set, held_out, tokenizer, _ = load_windows(
        args.data, args.tokenizer, args.vocabulary,
        shape["context"], args.train_samples, most,
    )  # fmt: skip
    data_ranks, data_rank = mesh["data"].size(), mesh.get_local_rank("data")
    runs.check_batch_size(args.batch_size, len(train_set), data_ranks)
    # the ranks that share a text get the same one, and each takes its tokens
    sampler = DistributedSampler(
        train_set, data_ranks, data_rank, seed=args.seed, drop_last=True
    )
    loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    torch.manual_seed(args.seed)
    network = kind_of(args)(tokenizer.vocabulary, **shape).to(device)
    share(network, sharing, args.attention)
    model = over_all_ranks(network, args.sharding)
    groups = parameter_groups(network, args.weight_decay)
    return SimpleNamespace(
        args=args, log=log, device=device, mesh=mesh, sharing=sharing,
        train_set=train_set, loader=loader, tokenizer=tokenizer,
        network=network, model=model,
        held_out=held_out.some(min(args.eval_windows, len(held_out))),
        optimizer=torch.optim.AdamW(groups, betas=(0.9, 0.95)),
        losses=[], validation_loss=math.nan, seconds=0.0,
    )  # fmt: skip


def shape_of(args):
    return SHAPES[args.shape] | {"context": args.context}


def kind_of(args):
    return ModernGPT if args.modern else GPT


def train(run):
    args, updates = run.args, run.args.epochs * len(run.loader)
    for epoch in range(args.epochs):
        run.loader.sampler.set_epoch(epoch)
        begin, losses = time.perf_counter(), []
        for texts in run.loader:
            step = epoch * len(run.loader) + len(losses)
            how = run.optimizer, learning_rate(step, updates, args), args.max_norm
            losses.append(update(run.model, *own_tokens(run, texts), *how))
        losses = torch.stack(losses)
        runs.check_finite(losses)
        dist.all_reduce(losses, dist.ReduceOp.AVG)  # of other texts, and other tokens
        run.losses += losses.tolist()
        run.seconds += time.perf_counter() - begin
        run.validation_loss = held_out_loss(run)
        found = f"loss {run.losses[-1]:.3f}, held out {run.validation_loss:.3f}"
        run.log.info(f"epoch {epoch + 1}: {found}")


def report(run):
    """The result, and the model as one folder: a GPT that reads a text on one rank."""
    args, kept = run.args, held(run.network, run.optimizer)
    whole = {name: full(value) for name, value in run.network.state_dict().items()}
    network = kind_of(args)(run.tokenizer.vocabulary, **shape_of(args))
    network.load_state_dict(whole)
    samples = args.epochs * len(run.loader) * args.batch_size * run.mesh["data"].size()
    sizes = zip(run.mesh.mesh_dim_names, run.mesh.shape)
    more = {
        "sharding": " x ".join(f"{size} {name}" for name, size in sizes),
        "tokens_per_rank": args.context // run.sharing.ranks,
        "parameters": sum(value.numel() for value in network.parameters()),
        "weight_bytes": kept["weights"],
        "optimizer_bytes": kept["optimizer"],
        "train_loss": round(run.losses[-1], 4),
        "validation_loss": round(run.validation_loss, 4),
        "samples_per_second": round(samples / run.seconds),
    }
    if dist.get_rank() == 0:
        export(network, run.tokenizer, args.out / "model")
    trained = network, run.train_set, run.losses, run.seconds
    return runs.finish(args, run.device, *trained, more=more) | {"losses": run.losses}


if __name__ == "__main__":
    runs.start(main)
