"""One GPT with less and less memory per rank: DDP, ZeRO-1 and 2, FSDP.

torchrun --nproc_per_node 2 ddp_course/lesson12.py --train-samples 256
torchrun --nproc_per_node 3 ddp_course/lesson12.py --epochs 2 --resume
torchrun --nproc_per_node 2 ddp_course/lesson12.py --sharding fsdp-by-hand
python ddp_course/lesson12.py --sharding ddp --train-samples 64
"""

import time
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_course import runs
from ddp_course.checkpoints import sharded as sharded_checkpoints
from ddp_course.data.text import Windows, load_text
from ddp_course.lesson03 import broadcast_from_rank_zero
from ddp_course.models.gpt import GPT, SHAPES
from ddp_course.models.recipe import loss_of
from ddp_course.models.sharded import Sharded, whole_parameters
from ddp_course.ranks.environment import backend_for, choose_device, process_group
from ddp_course.ranks.watch import held

ADAM = {"lr": 1e-3, "fused": True}
MOST_ON_A_CPU = 512  # windows of text to train on, unless --train-samples says more

# ---- ZeRO-1 and ZeRO-2: each parameter has an owner ----


def deal(sizes, world_size):
    """An owner for each size: the largest goes first, to the rank that has least."""
    load, owners = [0] * world_size, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owners[place] = load.index(min(load))
        load[owners[place]] += sizes[place]
    return owners


class ShardedOptimizer:
    """ZeRO-1: each rank keeps the optimizer's state of its own parameters only.

    All ranks use it together, with gradients that have been averaged. optimizer_class:
    one of torch's whose step() needs no closure; options: what it takes.
    """

    def __init__(self, parameters, optimizer_class, **options):
        self.parameters = list(parameters)
        sizes = [parameter.numel() for parameter in self.parameters]
        self.owners = deal(sizes, dist.get_world_size())
        pairs = zip(self.parameters, self.owners)
        own = [parameter for parameter, owner in pairs if owner == dist.get_rank()]
        self.optimizer = optimizer_class(own or [torch.empty(0)], **options)

    def step(self):
        self.optimizer.step()
        for parameter, owner in zip(self.parameters, self.owners):
            dist.broadcast(parameter.detach(), src=owner)

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None


def reduce_to_owners(parameters, owners):
    """ZeRO-2: during backward, reduce each gradient to its owner, as a mean.

    It is made for one backward per step: a second one would add to a gradient that is
    a mean already.
    """

    def reduce_gradient(owner, parameter):
        parameter.grad /= dist.get_world_size()
        dist.reduce(parameter.grad, dst=owner)
        if owner != dist.get_rank():
            parameter.grad = None

    for parameter, owner in zip(parameters, owners):
        hook = partial(reduce_gradient, owner)
        parameter.register_post_accumulate_grad_hook(hook)


# ---- six ways to train: model, optimizer, and a function that gets all parameters ----


def ddp(network, device):
    gpu = [device] if device.type == "cuda" else None
    model = DistributedDataParallel(
        network, device_ids=gpu, gradient_as_bucket_view=True
    )
    return model, torch.optim.AdamW(network.parameters(), **ADAM), network.state_dict


def zero1(network, device, sharded=ZeroRedundancyOptimizer):
    model, *_ = ddp(network, device)
    optimizer = sharded(network.parameters(), torch.optim.AdamW, **ADAM)
    return model, optimizer, network.state_dict


def zero1_by_hand(network, device):
    return zero1(network, device, ShardedOptimizer)


def zero2_by_hand(network, device):
    broadcast_from_rank_zero(network)
    optimizer = ShardedOptimizer(network.parameters(), torch.optim.AdamW, **ADAM)
    reduce_to_owners(optimizer.parameters, optimizer.owners)
    return network, optimizer, network.state_dict


def fsdp_by_hand(network, device):
    for number, block in enumerate(network.blocks):
        network.blocks[number] = Sharded(block)
    model = Sharded(network)  # what is left: embeddings and the last norm
    shards = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(shards, **ADAM), partial(whole_parameters, model)


def fsdp(network, device):
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in (*network.blocks, network):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(network.parameters(), **ADAM)  # the shards: only now
    return network, optimizer, partial(sharded_checkpoints.full_parameters, network)


ALL_WAYS = (ddp, zero1_by_hand, zero1, zero2_by_hand, fsdp_by_hand, fsdp)
WAYS = {way.__name__.replace("_", "-"): way for way in ALL_WAYS}

# ---- the program ----


def train_one_epoch(model, loader, optimizer, device):
    """The loop of all six ways. Return the mean loss over the ranks of each step."""
    losses = []
    for tokens, targets in loader:
        optimizer.zero_grad()
        loss = loss_of(model, tokens, targets, torch.float32, device)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    runs.check_finite(losses)
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return losses.tolist()


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__, trains="text", most=MOST_ON_A_CPU)
    parser.set_defaults(epochs=1, batch_size=8)
    flag, ways, shapes = parser.add_argument, list(WAYS), list(SHAPES)
    flag("--sharding", choices=ways, default="fsdp", help="what is sharded (fsdp)")
    flag("--shape", choices=shapes, default="small", help="of the model (small)")
    flag("--resume", action="store_true", help="ddp and fsdp: from a checkpoint")
    return parser.parse_args(argv)


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device, deterministic=args.deterministic)
    with process_group(backend_for(device), args.timeout) as (rank, world_size):
        run = prepare(args, rank, world_size, device)
        train(run)
        return report(run)


def prepare(args, rank, world_size, device):
    """What `train` needs: data, model, and where an earlier run has ended."""
    log = runs.open_folder(args.out)
    text = Windows(load_text(args.data)[0], SHAPES[args.shape]["context"])  # of bytes
    most = len(text) if device.type == "cuda" else min(MOST_ON_A_CPU, len(text))
    samples = args.train_samples or most
    runs.check_batch_size(args.batch_size, samples, world_size)
    train_set = text.some(samples)
    sampler = DistributedSampler(
        train_set, world_size, rank, seed=args.seed, drop_last=True
    )
    loader = DataLoader(train_set, args.batch_size, sampler=sampler)

    torch.manual_seed(args.seed)
    network = GPT(**SHAPES[args.shape]).to(device)
    model, optimizer, parameters_of_all = WAYS[args.sharding](network, device)
    return SimpleNamespace(
        args=args, log=log, device=device, train_set=train_set, loader=loader,
        model=model, optimizer=optimizer, parameters_of_all=parameters_of_all,
        first=sharded_checkpoints.begin(args, model, optimizer), losses=[], seconds=0.0,
    )  # fmt: skip


def train(run):
    for epoch in range(run.first, run.args.epochs):
        run.loader.sampler.set_epoch(epoch)
        begin = time.perf_counter()
        run.losses += train_one_epoch(run.model, run.loader, run.optimizer, run.device)
        run.seconds += time.perf_counter() - begin
        run.log.info(f"epoch {epoch + 1}: loss {run.losses[-1]:.3f}")
        sharded_checkpoints.save(run.args, run.model, run.optimizer, epoch + 1)


def report(run):
    """The result, with the bytes that each rank keeps."""
    args, losses = run.args, run.losses
    network, kept = GPT(**SHAPES[args.shape]), held(run.model, run.optimizer)
    network.load_state_dict(
        run.parameters_of_all(), strict=False
    )  # tied ones come once
    per_epoch = len(run.loader.sampler) * dist.get_world_size()
    trained = (args.epochs - run.first) * per_epoch
    more = {
        "sharding": args.sharding,
        "parameters": sum(value.numel() for value in network.parameters()),
        "weight_bytes": kept["weights"],
        "gradient_bytes": kept["gradients"],
        "optimizer_bytes": kept["optimizer"],
        "train_loss": round(losses[-1], 4),
        "samples_per_second": round(trained / run.seconds),
    }
    found = network, run.train_set, losses, run.seconds
    return runs.finish(args, run.device, *found, more=more) | {"losses": losses}


if __name__ == "__main__":
    runs.start(main)
