"""A GPT with experts on several ranks: expert parallel, and data parallel for the rest.

The ranks are a mesh of two dimensions, "data" and "expert". Each rank has its own texts.
The ranks along "expert" share one set of experts, and each has some of them; the ranks
along "data" have the same experts. What is not an expert is on all ranks: dense.
"""

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.models.experts import MixtureOfExperts, balance_loss


def with_experts(network, experts, top=2, capacity=None, shared=False, every=1):
    """Give a GPT experts in place of the MLP of each block, or of every second one, in
    place, and return it. shared: keep the MLP, as an expert of all tokens.
    """
    width = network.norm.weight.numel()
    for block in network.blocks[every - 1 :: every]:
        kept = block.mlp if shared else None
        layer = MixtureOfExperts(experts, width, 4 * width, top, capacity, kept)
        layer = layer.to(network.norm.weight)  # its device and dtype
        std = 0.02 / (2 * len(network.blocks)) ** 0.5  # as in GPT.initialise
        nn.init.normal_(layer.router.weight, std=0.02)
        nn.init.normal_(layer.experts.up, std=0.02)
        nn.init.normal_(layer.experts.down, std=std)
        block.mlp = layer
    return network


def layers_of(network):
    """The network's layers with experts."""
    return [part for part in network.modules() if isinstance(part, MixtureOfExperts)]


def share(network, mesh):
    """Leave each rank its own experts, in place, and return the network.

    All ranks have the same network before. Raises ValueError where the ranks along
    "expert" do not divide the experts.
    """
    ranks, rank = mesh["expert"].size(), mesh.get_local_rank("expert")
    for layer in layers_of(network):
        if len(layer.bias) % ranks:
            problem = f"{len(layer.bias)} experts cannot be shared by {ranks} ranks"
            raise ValueError(problem)
        if ranks == 1:
            continue  # nothing travels
        layer.group = mesh["expert"].get_group()
        for name in ("up", "down"):
            whole = getattr(layer.experts, name)
            own = whole.detach().chunk(ranks)[rank].clone()
            own = nn.Parameter(own, requires_grad=whole.requires_grad)
            setattr(layer.experts, name, own)
    return network


def of_experts(network):
    """The parameters of the experts, and those of all other layers: two lists."""
    ours = {id(p) for layer in layers_of(network) for p in layer.experts.parameters()}
    experts = [value for value in network.parameters() if id(value) in ours]
    dense = [value for value in network.parameters() if id(value) not in ours]
    return experts, dense


# ---- after backward ----


def average_gradients(network, mesh):
    """Make gradients of each rank's mean loss those of the mean over all ranks.

    An expert's gradient already is a sum over the ranks that share the experts: their
    tokens came with the all-to-all. So it is added up over the ranks with the same
    experts only, and divided by the number of *all* ranks, like any other. The mesh
    has all ranks.
    """
    experts, dense = of_experts(network)
    ranks = dist.get_world_size()
    for parameters, group in ((experts, mesh["data"].get_group()), (dense, None)):
        gradients = [value.grad for value in parameters if value.grad is not None]
        if not gradients:
            continue
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=group)
        parts = flat.div_(ranks).split([gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, parts):
            gradient.copy_(mean.view_as(gradient))


def clip_gradients(network, max_norm, mesh):
    """Like nn.utils.clip_grad_norm_, over the ranks; return the norm before, ().

    Call it after average_gradients. Each expert counts once, as does each other layer.
    """
    experts, dense = of_experts(network)
    squares = network.norm.weight.new_zeros(2)
    for place, parameters in enumerate((experts, dense)):
        for value in parameters:
            if value.grad is not None:
                squares[place] += value.grad.square().sum()
    dist.all_reduce(squares[:1], group=mesh["expert"].get_group())
    norm = squares.sum().sqrt()
    nn.utils.clip_grads_with_norm_(network.parameters(), max_norm, norm)
    return norm


# ---- balance ----


def auxiliary_loss(network, group=None):
    """The mean of the layers' balance_loss for the last forward, ()."""
    return torch.stack([
        balance_loss(layer.choice, group) for layer in layers_of(network)
    ]).mean()  # fmt: skip


def collect_loads(network):
    """How many choices each expert got, and how many of these it dropped, on all ranks
    since the last call: two int64 (layers, experts). One all-reduce.
    """
    layers = layers_of(network)
    counts = torch.stack([torch.stack([x.load, x.dropped]) for x in layers], dim=1)
    dist.all_reduce(counts)
    for layer in layers:
        layer.load.zero_()
        layer.dropped.zero_()
    return counts.unbind()


def move_biases(network, loads, rate):
    """Make experts with more tokens than the mean a little less likely, and the others
    a little more: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024.
    """
    for layer, load in zip(layers_of(network), loads):
        load = load.to(layer.bias.dtype)
        layer.bias -= rate * (load - load.mean()).sign()


# ---- whole tensors, which any number of ranks can load ----


def gathered(value, group):
    """The experts of all ranks of a group, on each of them: float (experts, ...)."""
    ranks = dist.get_world_size(group)
    whole = value.new_empty(ranks * len(value), *value.shape[1:])
    dist.all_gather_into_tensor(whole, value.detach().contiguous(), group=group)
    return whole


def whole_state(network, mesh):
    """The state_dict of the network before `share`, on all ranks, which call it
    together.
    """
    experts, _ = of_experts(network)
    ours, group = {id(value) for value in experts}, mesh["expert"].get_group()
    found = {}
    for name, value in network.state_dict(keep_vars=True).items():
        whole = gathered(value, group) if id(value) in ours else value.detach().clone()
        found[name] = whole
    return found


def whole_averages(network, optimizer, mesh):
    """The state of AdamW by the names of parameters, {name: {key: tensor}}, whole."""
    experts, _ = of_experts(network)
    ours, group = {id(value) for value in experts}, mesh["expert"].get_group()
    found = {}
    for name, value in network.named_parameters():
        state = optimizer.state[value]
        cut = id(value) in ours
        found[name] = {
            key: gathered(kept, group) if cut and kept.dim() else kept.clone()
            for key, kept in state.items()
        }
    return found


def load_averages(network, optimizer, averages, mesh):
    """Give AdamW what whole_averages has saved, on any number of expert ranks."""
    ranks, rank = mesh["expert"].size(), mesh.get_local_rank("expert")
    experts, _ = of_experts(network)
    ours = {id(value) for value in experts}
    for name, value in network.named_parameters():
        cut = id(value) in ours
        optimizer.state[value] = {
            key: (kept.chunk(ranks)[rank] if cut and kept.dim() else kept).clone()
            for key, kept in averages[name].items()
        }
