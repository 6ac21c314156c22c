"""One GPT on several ranks that share its layers, for the same texts: tensor parallel.

torchrun --nproc_per_node 2 ddp_course/lesson17.py --train-samples 256
torchrun --nproc_per_node 4 ddp_course/lesson17.py --shape medium --train-samples 64
torchrun --nproc_per_node 4 ddp_course/lesson17.py --tensor 2 --sequence
torchrun --nproc_per_node 4 ddp_course/lesson17.py --tensor 2 --layers torch
python ddp_course/lesson17.py --train-samples 64
"""

import math
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_course import UsageError, runs
from ddp_course.checkpoints.export import export
from ddp_course.data.text import load_windows
from ddp_course.lesson12 import MOST_ON_A_CPU
from ddp_course.models import dtensors, tensor_parallel
from ddp_course.models.gpt import GPT, SHAPES
from ddp_course.models.recipe import learning_rate, parameter_groups
from ddp_course.ranks.environment import backend_for, choose_device, process_group
from ddp_course.ranks.watch import held

# ---- a model on a mesh: data ranks have other texts, tensor ranks other parts ----


class ByHand:
    """A GPT that is cut for this rank, and the steps of an update that know of it."""

    def __init__(self, network, mesh, sequence):
        self.group, self.sequence = mesh["tensor"].get_group(), sequence
        self.network = tensor_parallel.cut(network, self.group, sequence)
        self.model = self.network
        if mesh["data"].size() > 1:
            group = mesh["data"].get_group()
            self.model = DistributedDataParallel(self.network, process_group=group)

    def loss(self, tokens, targets):
        """The mean cross entropy of this data rank's tokens, in nats, ()."""
        return self.model(tokens, targets)

    def backward(self, loss):
        loss.backward()
        if self.sequence:
            tensor_parallel.sum_gradients(self.network, self.group)

    def clip(self, max_norm):
        return tensor_parallel.clip_gradients(self.network, max_norm, self.group)

    def whole_parameters(self):
        return tensor_parallel.whole_parameters(self.network, self.group)


class WithTorch:
    """The same with torch's DTensors, and FSDP over the data ranks."""

    def __init__(self, network, mesh, sequence):
        self.network = dtensors.parallelize(network, mesh["tensor"], sequence)
        if mesh["data"].size() > 1:
            dtensors.shard_over_data(self.network, mesh)
        self.model = self.network

    def loss(self, tokens, targets):
        with dtensors.loss_parallel():
            return dtensors.loss_of(self.network, tokens, targets)

    def backward(self, loss):
        with dtensors.loss_parallel():
            loss.backward()
        dtensors.sum_gradients(self.network)

    def clip(self, max_norm):
        norm = nn.utils.clip_grad_norm_(self.network.parameters(), max_norm)
        return dtensors.full(norm)

    def whole_parameters(self):
        return dtensors.whole_parameters(self.network)


LAYERS = {"hand": ByHand, "torch": WithTorch}


def update(parallel, tokens, targets, optimizer, rate, max_norm):
    """Do one update; return the mean loss of this data rank's tokens, float ()."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss = parallel.loss(tokens, targets)
    parallel.backward(loss)
    parallel.clip(max_norm)
    optimizer.step()
    return dtensors.full(loss.detach())


@torch.no_grad()
def held_out_loss(run):
    """The mean over some windows, which the data ranks share, in nats per token.

    Each data rank computes as many, since with FSDP a forward pass takes all ranks; what
    comes beyond the last window does not count.
    """
    run.parallel.model.eval()
    data, total = run.mesh["data"], torch.zeros((), device=run.device)
    for begin in range(0, len(run.held_out), data.size()):
        number = begin + run.data_rank
        window = run.held_out[min(number, len(run.held_out) - 1)]
        tokens, targets = (part[None].to(run.device) for part in window)
        loss = dtensors.full(run.parallel.loss(tokens, targets))
        total += loss if number < len(run.held_out) else 0
    dist.all_reduce(total, group=data.get_group())
    run.parallel.model.train()
    return total.item() / len(run.held_out)


# ---- the program ----


def arguments(argv=()):
    about = {"trains": "text", "most": MOST_ON_A_CPU}
    parser = runs.parser(__file__, __doc__, **about)
    parser.set_defaults(epochs=1, batch_size=8)
    flag, count, number = parser.add_argument, {"type": runs.count}, runs.number
    flag("--tensor", **count, help="ranks that share a model (as its heads allow)")
    flag("--sequence", action="store_true", help="between its layers, share the tokens")
    flag("--layers", choices=list(LAYERS), default="hand", help="whose (hand)")
    flag("--tokenizer", help="bytes, bpe, or a tokenizer.json (bytes)")
    flag("--vocabulary", **count, default=2048, help="tokens that bpe learns (2048)")
    flag("--shape", choices=list(SHAPES), default="small", help="of the model (small)")
    flag("--learning-rate", type=number, default=2e-3, help="the highest (2e-3)")
    flag("--warmup", **count, default=20, help="updates of rising learning rate (20)")
    flag("--weight-decay", type=number, default=0.1, help="of matrices (0.1)")
    flag("--max-norm", type=number, default=1.0, help="clip longer gradients (1)")
    flag("--eval-windows", **count, default=32, help="of held-out text (32)")
    args = parser.parse_args(argv)
    args.sequence |= args.layers == "torch"  # so that all parameters are DTensors
    return args


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device, deterministic=args.deterministic)
    with process_group(backend_for(device), args.timeout) as (_, world_size):
        run = prepare(args, world_size, device)
        train(run)
        return report(run)


def mesh_for(args, world_size, device):
    """The ranks as a mesh, data x tensor: neighbours share a model.

    Raises UsageError for a number of ranks that does not suit --tensor or the model.
    """
    shape = SHAPES[args.shape]
    tensor = args.tensor or math.gcd(world_size, shape["heads"])
    if world_size % tensor:
        raise UsageError(f"--tensor {tensor} does not divide {world_size} ranks")
    for what, size in (("heads", shape["heads"]), ("tokens", shape["context"])):
        if size % tensor and (what == "heads" or args.sequence):
            problem = f"does not divide the {size} {what} of --shape {args.shape}"
            raise UsageError(f"--tensor {tensor} {problem}")
    sizes, names = (world_size // tensor, tensor), ("data", "tensor")
    return init_device_mesh(device.type, sizes, mesh_dim_names=names)


def prepare(args, world_size, device):
    """What `train` needs: data, and this rank's part of the model."""
    mesh = mesh_for(args, world_size, device)
    log = runs.open_folder(args.out)
    most = None if device.type == "cuda" else MOST_ON_A_CPU
    context = SHAPES[args.shape]["context"]
    train_set, held_out, tokenizer, _ = load_windows(
        args.data, args.tokenizer, args.vocabulary, context, args.train_samples, most
    )
    data_ranks, data_rank = mesh["data"].size(), mesh.get_local_rank("data")
    runs.check_batch_size(args.batch_size, len(train_set), data_ranks)
    # the ranks that share a model get the same texts
    sampler = DistributedSampler(
        train_set, data_ranks, data_rank, seed=args.seed, drop_last=True
    )
    loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    torch.manual_seed(args.seed)
    network = GPT(tokenizer.vocabulary, **SHAPES[args.shape]).to(device)
    parallel = LAYERS[args.layers](network, mesh, args.sequence)
    groups = parameter_groups(parallel.network, args.weight_decay)
    return SimpleNamespace(
        args=args, log=log, device=device, mesh=mesh, data_rank=data_rank,
        train_set=train_set, loader=loader, tokenizer=tokenizer, parallel=parallel,
        held_out=held_out.some(min(args.eval_windows, len(held_out))),
        optimizer=torch.optim.AdamW(groups, betas=(0.9, 0.95)),
        losses=[], validation_loss=math.nan, seconds=0.0,
    )  # fmt: skip


def train(run):
    args, updates = run.args, run.args.epochs * len(run.loader)
    for epoch in range(args.epochs):
        run.loader.sampler.set_epoch(epoch)
        begin, losses = time.perf_counter(), []
        for tokens, targets in run.loader:
            step = epoch * len(run.loader) + len(losses)
            texts = tokens.to(run.device), targets.to(run.device)
            how = run.optimizer, learning_rate(step, updates, args), args.max_norm
            losses.append(update(run.parallel, *texts, *how))
        losses = torch.stack(losses)
        runs.check_finite(losses)
        dist.all_reduce(losses, dist.ReduceOp.AVG)  # tensor ranks have the same
        run.losses += losses.tolist()
        run.seconds += time.perf_counter() - begin
        run.validation_loss = held_out_loss(run)
        found = f"loss {run.losses[-1]:.3f}, held out {run.validation_loss:.3f}"
        run.log.info(f"epoch {epoch + 1}: {found}")


def report(run):
    """The result, with the bytes that each rank keeps, and the model as one folder."""
    args, kept = run.args, held(run.parallel.network, run.optimizer)
    network = GPT(run.tokenizer.vocabulary, **SHAPES[args.shape])
    found = network.load_state_dict(run.parallel.whole_parameters(), strict=False)
    assert found.missing_keys == ["head.weight"] and not found.unexpected_keys  # tied
    samples = args.epochs * len(run.loader) * args.batch_size * run.mesh["data"].size()
    more = {
        "sharding": " x ".join(f"{size} {name}" for name, size in sizes_of(run.mesh)),
        "parameters": sum(value.numel() for value in network.parameters()),
        "weight_bytes": kept["weights"],
        "gradient_bytes": kept["gradients"],
        "optimizer_bytes": kept["optimizer"],
        "train_loss": round(run.losses[-1], 4),
        "validation_loss": round(run.validation_loss, 4),
        "samples_per_second": round(samples / run.seconds),
    }
    if dist.get_rank() == 0:
        export(network, run.tokenizer, args.out / "model")
    trained = network, run.train_set, run.losses, run.seconds
    return runs.finish(args, run.device, *trained, more=more) | {"losses": run.losses}


def sizes_of(mesh):
    return zip(mesh.mesh_dim_names, mesh.shape)


if __name__ == "__main__":
    runs.start(main)
