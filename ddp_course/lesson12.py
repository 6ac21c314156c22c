"""One GPT with less and less memory per rank: DDP, ZeRO-1 and 2, FSDP.

torchrun --nproc_per_node 2 ddp_course/lesson12.py --train-samples 256
torchrun --nproc_per_node 2 ddp_course/lesson12.py --sharding fsdp-by-hand
torchrun --nproc_per_node 3 ddp_course/lesson12.py --sharding zero1-by-hand
python ddp_course/lesson12.py --sharding ddp --train-samples 64
"""

import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_course import UsageError, runs
from ddp_course.lesson03 import broadcast_from_rank_zero
from ddp_course.lesson10 import SHAPES, loss_of
from ddp_course.ranks.environment import backend_for, choose_device, process_group
from ddp_course.scenery import memory
from ddp_course.scenery.models import GPT
from ddp_course.scenery.text import Windows, load_text

MOST_ON_A_CPU = 512  # windows to train on, where nobody says how many
ADAM = {"lr": 1e-3, "fused": True}

# ---- ZeRO-1 and ZeRO-2: each parameter has an owner ----


def deal(sizes, world_size):
    """The owner, a rank, of each of these sizes: the largest first, each to whoever has
    least so far.
    """
    load, owners = [0] * world_size, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owners[place] = load.index(min(load))
        load[owners[place]] += sizes[place]
    return owners


class ShardedOptimizer:
    """ZeRO-1: an optimizer that has state for its own share of the parameters only, and
    sends what it has updated.

    To be used by all ranks together, after the gradients have become equal.
    optimizer_class: any of torch's, options: what it takes.
    """

    def __init__(self, parameters, optimizer_class, **options):
        self.parameters = list(parameters)
        self.owners = deal(
            [parameter.numel() for parameter in self.parameters], dist.get_world_size()
        )
        own = [
            p
            for p, owner in zip(self.parameters, self.owners)
            if owner == dist.get_rank()
        ]
        self.optimizer = optimizer_class(
            own or [torch.empty(0)], **options
        )  # an empty list it would refuse

    def step(self):
        self.optimizer.step()
        in_flight = [
            dist.broadcast(parameter.detach(), src=owner, async_op=True)
            for parameter, owner in zip(self.parameters, self.owners)
        ]
        for work in in_flight:
            work.wait()

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None


def reduce_to_owners(parameters, owners):
    """ZeRO-2: as soon as backward has made a gradient, its mean goes to the parameter's
    owner; the others drop theirs.

    For one backward in each step: what the owner has is a mean already, and must not be
    added to before it is used.
    """

    def gradient_is_ready(parameter, owner):
        parameter.grad /= dist.get_world_size()
        dist.reduce(parameter.grad, dst=owner)
        if owner != dist.get_rank():
            parameter.grad = None

    for parameter, owner in zip(parameters, owners):
        parameter.register_post_accumulate_grad_hook(
            partial(gradient_is_ready, owner=owner)
        )


# ---- FSDP: each parameter is cut into shards ----


class Gathered(torch.autograd.Function):
    """Forward: a flat parameter out of all ranks' shards. Backward: this rank's shard
    of its mean gradient.
    """

    @staticmethod
    def forward(ctx, shard, sharded):
        ctx.sharded = sharded
        return gather(shard)

    @staticmethod
    def backward(ctx, gradient):
        ctx.sharded.again = (
            None  # backward has been through this module: free its weights
        )
        own = gradient.chunk(dist.get_world_size())[dist.get_rank()].clone()
        dist.reduce_scatter(
            own, list(gradient.chunk(dist.get_world_size())), dist.ReduceOp.AVG
        )
        return own, None


def gather(shard):
    """What all ranks have of a flat tensor, equal shards of it, as one: float
    (world_size * len(shard)).
    """
    whole = shard.new_empty(dist.get_world_size() * len(shard))
    dist.all_gather(list(whole.chunk(dist.get_world_size())), shard.detach())
    return whole


class Sharded(nn.Module):
    """FSDP: a module of which each rank keeps one shard; the whole is there while it
    computes, forward and backward.

    The parameters become one flat tensor, with zeros at the end where it does not
    divide; frozen ones stay as they are. What is wrapped within keeps its own shards:
    wrap each block, then the model.
    """

    def __init__(self, module):
        super().__init__()
        self.module = module
        inside = [
            f"{name}."
            for name, part in module.named_modules()
            if isinstance(part, Sharded)
        ]
        own = {  # tied parameters come once
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and not name.startswith(tuple(inside))
        }
        self.shapes = {name: parameter.shape for name, parameter in own.items()}
        flat = torch.cat([parameter.detach().flatten() for parameter in own.values()])
        flat = nn.functional.pad(flat, (0, -len(flat) % dist.get_world_size()))
        dist.broadcast(flat, src=0)
        self.shard = nn.Parameter(
            flat.chunk(dist.get_world_size())[dist.get_rank()].clone()
        )
        for parameter in own.values():
            parameter.data = parameter.new_empty(0)  # frees what it held
            parameter.requires_grad = False
        self.again = None  # the weights, once more, for backward

    def views(self, flat):
        """The parameters by name, as parts of the flat tensor."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = flat[: sum(sizes)].split(sizes)
        return {
            name: part.view(self.shapes[name]) for name, part in zip(self.shapes, parts)
        }

    def forward(self, *inputs):
        whole = Gathered.apply(self.shard, self)
        storage = whole.untyped_storage().data_ptr()

        def pack(tensor):
            """Autograd wants to save this for backward: of a weight, only where it
            lies.
            """
            if tensor.untyped_storage().data_ptr() != storage:
                return tensor
            return tensor.size(), tensor.stride(), tensor.storage_offset()

        def unpack(saved):
            if isinstance(saved, torch.Tensor):
                return saved
            if self.again is None:
                self.again = gather(self.shard)
            return self.again.as_strided(*saved)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return functional_call(self.module, self.views(whole), inputs)


def whole_parameters(model):
    """All parameters of a model made of Sharded modules, by name, on all ranks."""
    found = {}
    for path, part in model.named_modules():
        if isinstance(part, Sharded):
            for name, value in part.views(gather(part.shard)).items():
                found[f"{path}.{name}".replace("module.", "").lstrip(".")] = value
    return found


# ---- six ways to train the same network: (the model to call, the optimizer, its parameters at the end) ----


def ddp(network, device):
    model = wrap(network, device)
    return model, torch.optim.AdamW(network.parameters(), **ADAM), network.state_dict


def zero1(network, device):
    model = wrap(network, device)
    return (
        model,
        ZeroRedundancyOptimizer(network.parameters(), torch.optim.AdamW, **ADAM),
        network.state_dict,
    )


def zero1_by_hand(network, device):
    model = wrap(network, device)
    return (
        model,
        ShardedOptimizer(network.parameters(), torch.optim.AdamW, **ADAM),
        network.state_dict,
    )


def zero2_by_hand(network, device):
    broadcast_from_rank_zero(network)
    optimizer = ShardedOptimizer(network.parameters(), torch.optim.AdamW, **ADAM)
    reduce_to_owners(optimizer.parameters, optimizer.owners)
    return network, optimizer, network.state_dict


def fsdp(network, device):
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in network.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)  # what is left: embeddings and the last norm
    optimizer = torch.optim.AdamW(
        network.parameters(), **ADAM
    )  # not before: there are other parameters now
    return (
        network,
        optimizer,
        partial(
            get_model_state_dict,
            network,
            options=StateDictOptions(full_state_dict=True),
        ),
    )


def fsdp_by_hand(network, device):
    for number, block in enumerate(network.blocks):
        network.blocks[number] = Sharded(block)
    model = Sharded(network)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], **ADAM
    )
    return model, optimizer, partial(whole_parameters, model)


WAYS = {
    way.__name__.replace("_", "-"): way
    for way in (ddp, zero1_by_hand, zero1, zero2_by_hand, fsdp_by_hand, fsdp)
}


def wrap(network, device):
    gpu = [device] if device.type == "cuda" else None
    return DistributedDataParallel(
        network, device_ids=gpu, gradient_as_bucket_view=True
    )


# ---- what it takes ----


def held(model, optimizer):
    """The bytes of the live storages that this rank keeps between two steps: a
    memory.State.

    A gradient that is a view counts with all that it is a view of, once.
    """
    for inner in (
        "optim",
        "optimizer",
    ):  # the one within a sharded one, torch's or ours
        optimizer = getattr(optimizer, inner, optimizer)
    parameters = list(model.parameters())
    gradients = [
        parameter.grad for parameter in parameters if parameter.grad is not None
    ]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return memory.State(
        *(bytes_of(tensors) for tensors in (parameters, gradients, states))
    )


def bytes_of(tensors):
    """What the storages of these tensors take on this rank: the shards of a DTensor,
    and each storage once.
    """
    local = [
        tensor.to_local() if hasattr(tensor, "to_local") else tensor
        for tensor in tensors
    ]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in local
    }
    return sum(storages.values())


# ---- the program ----


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__, trains="text")
    parser.set_defaults(epochs=1, batch_size=8)
    parser.add_argument(
        "--sharding",
        choices=list(WAYS),
        default="fsdp",
        help="what the ranks share (fsdp)",
    )
    parser.add_argument(
        "--shape", choices=list(SHAPES), default="small", help="of the model (small)"
    )
    return parser.parse_args(argv)


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device)
    with process_group(backend_for(device)) as (rank, world_size):
        return train(args, rank, world_size, device)


def train(args, rank, world_size, device):
    log = runs.open_folder(args.out)
    tokens, _, tokenizer, _ = load_text(args.data)
    train_set = Windows(tokens, SHAPES[args.shape]["context"])
    if len(train_set) < world_size:
        raise UsageError(
            f"--data {args.data} is too short: it has {len(train_set)} windows for {world_size} ranks"
        )
    most = (
        len(train_set) if device.type == "cuda" else min(MOST_ON_A_CPU, len(train_set))
    )
    train_set = train_set.some(args.train_samples or most)
    runs.check_batch_size(args.batch_size, len(train_set), world_size)
    sampler = DistributedSampler(
        train_set, world_size, rank, seed=args.seed, drop_last=True
    )
    loader = DataLoader(train_set, args.batch_size, sampler=sampler)

    torch.manual_seed(args.seed)
    network = GPT(tokenizer.vocabulary, **SHAPES[args.shape]).to(device)
    model, optimizer, parameters_of_all = WAYS[args.sharding](network, device)

    losses, seconds = [], 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        begin = time.perf_counter()
        losses += train_one_epoch(model, loader, optimizer, device)
        seconds += time.perf_counter() - begin
        log.info(f"epoch {epoch + 1}: loss {losses[-1]:.3f}")

    state = held(model, optimizer)
    network = GPT(tokenizer.vocabulary, **SHAPES[args.shape])
    network.load_state_dict(
        parameters_of_all(), strict=False
    )  # by hand, tied parameters come once
    result = {
        "lesson": args.lesson, "world_size": world_size, "backend": dist.get_backend(), "device": device.type,
        "data": str(args.data), "sharding": args.sharding, "train_samples": len(train_set), "epochs": args.epochs,
        "batch_size": args.batch_size, "parameters": sum(value.numel() for value in network.parameters()),
        "weight_bytes": state.weights, "gradient_bytes": state.gradients, "optimizer_bytes": state.optimizer,
        "train_loss": round(losses[-1], 4), "seconds": round(seconds, 2),
        "samples_per_second": round(args.epochs * len(sampler) * world_size / seconds),
        "params_sha256": runs.params_sha256(network),
    }  # fmt: skip
    if rank == 0:
        runs.write_result(
            args.out,
            result,
            [{"step": step, "loss": loss} for step, loss in enumerate(losses)],
        )
    return result | {"losses": losses}


def train_one_epoch(model, loader, optimizer, device):
    """The loop of all six ways. Return the mean loss of each step."""
    losses = []
    for tokens, targets in loader:
        optimizer.zero_grad()
        loss = loss_of(model, tokens, targets, torch.float32, device)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return losses.tolist()


if __name__ == "__main__":
    runs.start(main)
