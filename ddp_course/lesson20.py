"""Lesson 10's GPT with experts: each token uses a few of many, which the ranks share.

torchrun --nproc_per_node 2 ddp_course/lesson20.py --train-samples 256
torchrun --nproc_per_node 4 ddp_course/lesson20.py --expert-ranks 2 --balance loss
torchrun --nproc_per_node 4 ddp_course/lesson20.py --experts 16 --top 1 --capacity 1.25
torchrun --nproc_per_node 2 ddp_course/lesson20.py --shared --every 2
python ddp_course/lesson20.py --train-samples 64
"""

import math
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler

from ddp_course import UsageError, runs
from ddp_course.data.text import load_windows
from ddp_course.lesson12 import MOST_ON_A_CPU
from ddp_course.models import expert_parallel
from ddp_course.models.gpt import GPT, SHAPES
from ddp_course.models.recipe import learning_rate, parameter_groups
from ddp_course.ranks.environment import backend_for, choose_device, process_group
from ddp_course.ranks.watch import held

BALANCES = ["bias", "loss", "none"]


def update(run, tokens, targets, rate):
    """Do one update; return float (4,): the mean loss of this rank's tokens, and over
    all ranks what the busiest expert has of its layer's choices, what the busiest
    expert rank has of them, and the share that was dropped.
    """
    args, network = run.args, run.network
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    run.optimizer.zero_grad()
    loss = network(tokens, targets)
    total = loss
    if args.balance == "loss":
        everyone = dist.group.WORLD
        auxiliary = expert_parallel.auxiliary_loss(network, everyone)
        total = loss + args.loss_weight * auxiliary
    total.backward()
    expert_parallel.average_gradients(network, run.mesh)
    expert_parallel.clip_gradients(network, args.max_norm, run.mesh)
    run.optimizer.step()

    loads, dropped = expert_parallel.collect_loads(network)
    if args.balance == "bias":
        expert_parallel.move_biases(network, loads, args.bias_rate)
    shares = loads / loads.sum(1, keepdim=True)
    of_ranks = shares.unflatten(1, (run.mesh["expert"].size(), -1)).sum(2)
    lost = dropped.sum() / loads.sum()
    return torch.stack([loss.detach(), shares.max(), of_ranks.max(), lost])


@torch.no_grad()
def held_out_loss(run):
    """The mean over some windows, which the ranks share, in nats per token.

    Each rank computes as many, since a forward pass takes all ranks; what comes beyond
    the last window does not count. No choice is dropped.
    """
    run.network.eval()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total = torch.zeros((), device=run.device)
    for begin in range(0, len(run.held_out), ranks):
        number = begin + rank
        window = run.held_out[min(number, len(run.held_out) - 1)]
        tokens, targets = (part[None].to(run.device) for part in window)
        loss = run.network(tokens, targets)
        total += loss if number < len(run.held_out) else 0
    dist.all_reduce(total)
    run.network.train()
    return total.item() / len(run.held_out)


# ---- the program ----


def arguments(argv=()):
    about = {"trains": "text", "most": MOST_ON_A_CPU}
    parser = runs.parser(__file__, __doc__, **about)
    parser.set_defaults(epochs=1, batch_size=8)
    flag, count, number = parser.add_argument, {"type": runs.count}, runs.number
    flag("--experts", **count, default=8, help="per layer (8)")
    flag("--expert-ranks", **count, help="ranks that share them (as experts allow)")
    flag("--top", **count, default=2, help="experts per token (2)")
    flag("--every", **count, default=1, help="experts in every n-th block (1)")
    flag("--shared", action="store_true", help="keep the MLP, for all tokens")
    flag("--capacity", type=number, help="choices per expert, of its fair share (all)")
    flag("--balance", choices=BALANCES, default="bias", help="of the experts (bias)")
    flag("--bias-rate", type=number, default=1e-2, help="per update, of a bias (0.01)")
    flag("--loss-weight", type=number, default=1e-2, help="of the balance loss (0.01)")
    flag("--tokenizer", help="bytes, bpe, or a tokenizer.json (bytes)")
    flag("--vocabulary", **count, default=2048, help="tokens that bpe learns (2048)")
    flag("--shape", choices=list(SHAPES), default="small", help="of the model (small)")
    flag("--learning-rate", type=number, default=2e-3, help="the highest (2e-3)")
    flag("--warmup", **count, default=20, help="updates of rising learning rate (20)")
    flag("--weight-decay", type=number, default=0.1, help="of matrices (0.1)")
    flag("--max-norm", type=number, default=1.0, help="clip longer gradients (1)")
    flag("--eval-windows", **count, default=32, help="of held-out text (32)")
    args = parser.parse_args(argv)
    if args.top > args.experts:
        parser.error(f"--top {args.top} is more than --experts {args.experts}")
    blocks = f"the {SHAPES[args.shape]['layers']} blocks of --shape {args.shape}"
    if args.every > SHAPES[args.shape]["layers"]:
        parser.error(f"--every {args.every} is more than {blocks}")
    if args.capacity is not None and args.capacity <= 0:
        parser.error("--capacity must be above 0")
    return args


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device, deterministic=args.deterministic)
    with process_group(backend_for(device), args.timeout) as (_, world_size):
        run = prepare(args, world_size, device)
        train(run)
        return report(run)


def mesh_for(args, world_size, device):
    """The ranks as a mesh, data x expert: neighbours share the experts.

    Raises UsageError for a number of ranks that does not suit the flags.
    """
    ranks = args.expert_ranks or math.gcd(world_size, args.experts)
    if world_size % ranks:
        raise UsageError(f"--expert-ranks {ranks} does not divide {world_size} ranks")
    if args.experts % ranks:
        problem = f"does not divide --experts {args.experts}"
        raise UsageError(f"--expert-ranks {ranks} {problem}")
    sizes, names = (world_size // ranks, ranks), ("data", "expert")
    return init_device_mesh(device.type, sizes, mesh_dim_names=names)


def a_gpt(args, vocabulary):
    """The whole model, with all experts."""
    network = GPT(vocabulary, **SHAPES[args.shape])
    how = args.top, args.capacity, args.shared, args.every
    return expert_parallel.with_experts(network, args.experts, *how)


def prepare(args, world_size, device):
    """What `train` needs: data, and the model with this rank's experts."""
    mesh = mesh_for(args, world_size, device)
    log = runs.open_folder(args.out)
    most = None if device.type == "cuda" else MOST_ON_A_CPU
    context = SHAPES[args.shape]["context"]
    train_set, held_out, tokenizer, _ = load_windows(
        args.data, args.tokenizer, args.vocabulary, context, args.train_samples, most
    )
    runs.check_batch_size(args.batch_size, len(train_set), world_size)
    # each rank has its own texts, those that share experts, too
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    torch.manual_seed(args.seed)
    network = a_gpt(args, tokenizer.vocabulary).to(device)
    network = expert_parallel.share(network, mesh)
    groups = parameter_groups(network, args.weight_decay)
    return SimpleNamespace(
        args=args, log=log, device=device, mesh=mesh, train_set=train_set,
        loader=loader, tokenizer=tokenizer, network=network,
        held_out=held_out.some(min(args.eval_windows, len(held_out))),
        optimizer=torch.optim.AdamW(groups, betas=(0.9, 0.95)),
        history=[], validation_loss=math.nan, seconds=0.0,
    )  # fmt: skip


def train(run):
    args, updates = run.args, run.args.epochs * len(run.loader)
    for epoch in range(args.epochs):
        run.loader.sampler.set_epoch(epoch)
        begin, found = time.perf_counter(), []
        for tokens, targets in run.loader:
            rate = learning_rate(epoch * len(run.loader) + len(found), updates, args)
            texts = tokens.to(run.device), targets.to(run.device)
            found.append(update(run, *texts, rate))
        found = torch.stack(found)
        runs.check_finite(found[:, 0])
        dist.all_reduce(found, dist.ReduceOp.AVG)
        run.history += found.tolist()
        run.seconds += time.perf_counter() - begin
        run.validation_loss = held_out_loss(run)
        loss, busiest, *_ = run.history[-1]
        losses = f"loss {loss:.3f}, held out {run.validation_loss:.3f}"
        run.log.info(f"epoch {epoch + 1}: {losses}, busiest expert {busiest:.0%}")


NAMES = ["loss", "busiest_expert", "busiest_rank", "dropped"]


def report(run):
    """The result, with the bytes that each rank keeps, and the model as one file."""
    args, mesh, kept = run.args, run.mesh, held(run.network, run.optimizer)
    whole = a_gpt(args, run.tokenizer.vocabulary)
    whole.load_state_dict(expert_parallel.whole_state(run.network, mesh))
    history = [
        {"step": step} | dict(zip(NAMES, row)) for step, row in enumerate(run.history)
    ]
    losses = [row["loss"] for row in history]
    samples = len(losses) * args.batch_size * dist.get_world_size()
    names = zip(mesh.shape, mesh.mesh_dim_names)
    more = {
        "method": f"top {args.top} of {args.experts} experts, balance {args.balance}",
        "sharding": " x ".join(f"{size} {name}" for size, name in names),
        "parameters": sum(value.numel() for value in whole.parameters()),
        "weight_bytes": kept["weights"],
        "gradient_bytes": kept["gradients"],
        "optimizer_bytes": kept["optimizer"],
        "train_loss": round(losses[-1], 4),
        "validation_loss": round(run.validation_loss, 4),
        "samples_per_second": round(samples / run.seconds),
    }
    if dist.get_rank() == 0:
        state = whole.state_dict()
        del state["head.weight"]  # tied: the token embedding
        runs.write_atomically(args.out / "model.safetensors", save(state))
    trained = whole, run.train_set, losses, run.seconds
    result = runs.finish(args, run.device, *trained, more=more, metrics=history)
    return result | {"losses": losses, "history": history}


if __name__ == "__main__":
    runs.start(main)
