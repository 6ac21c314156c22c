"""Question 4: the conversion of a network."""

from itertools import zip_longest

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.checks.claims import Claim, hold, on_every_rank
from ddp_course.checks.training import fill, state, take_steps
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.lesson05 import SyncBatchNorm
from ddp_course.ranks.environment import process_group

BATCH_NORMS = ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d"]
OPTIONS = ["num_features", "eps", "momentum", "affine", "track_running_stats"]


class BatchNormBlock(nn.Module):
    """Every kind of BatchNorm, with all options, at several depths, and modules that
    only look like one, such as this block by its name. Takes (batch, channels, 2, 2,
    2), returns (batch, width).
    """

    def __init__(self, channels, width, eps, momentum):
        super().__init__()
        self.first = nn.BatchNorm3d(channels, eps, momentum)
        self.first.weight.requires_grad_(False)
        others = nn.Sequential(nn.InstanceNorm2d(channels, affine=True), nn.GroupNorm(1, channels))
        self.images = nn.ModuleDict({"norm": nn.BatchNorm2d(channels, eps, affine=False), "others": others})
        rest = [nn.Linear(8 * channels, width), SyncBatchNorm(width, eps)]
        rest += [nn.Sequential(nn.Tanh(), nn.BatchNorm1d(width, eps, momentum=None)), nn.LayerNorm(width)]
        rest += [nn.BatchNorm1d(width, momentum=momentum).eval()]
        self.rest = nn.ModuleList([nn.BatchNorm1d(channels, track_running_stats=False), nn.Sequential(*rest)])

    def forward(self, x):
        x = self.images["norm"](self.first(x).flatten(3))
        x = self.rest[0](self.images["others"](x).flatten(2))
        return self.rest[1](x.flatten(1))


def networks(seed, channels, eps, momentum):
    """The networks to convert, {name: network}: single layers, and at the end a network
    to train.
    """
    width = 4
    made = {
        "a BatchNorm1d": nn.BatchNorm1d(channels, eps, momentum),
        "a BatchNorm2d with affine=False": nn.BatchNorm2d(channels, eps, momentum, affine=False),
        "a BatchNorm3d with track_running_stats=False":
            nn.BatchNorm3d(channels, eps, momentum=None, track_running_stats=False),
        "a BatchNorm2d with frozen parameters": nn.BatchNorm2d(channels, eps).requires_grad_(False),
        "a BatchNorm1d in eval mode": nn.BatchNorm1d(channels, eps).eval(),
        "a BatchNorm2d with track_running_stats=False in eval mode":
            nn.BatchNorm2d(channels, eps, track_running_stats=False).eval(),
        "an InstanceNorm2d": nn.InstanceNorm2d(channels, eps, affine=True, track_running_stats=True),
        "a network": nn.Sequential(BatchNormBlock(channels, width, eps, momentum), nn.Linear(width, 2)),
        "a network that uses a layer twice": used_twice(channels, eps),
        "a network in eval mode with a layer in training mode": mostly_in_eval_mode(channels, eps),
    }  # fmt: skip
    return {name: fill(network, seed) for name, network in made.items()}


def mostly_in_eval_mode(channels, eps):
    network = nn.Sequential(nn.Linear(channels, channels), nn.BatchNorm1d(channels, eps))
    network.eval()
    network[1].train()
    return network


def used_twice(channels, eps):
    layer = nn.BatchNorm1d(channels, eps)
    return nn.Sequential(layer, nn.Linear(channels, channels), layer)


def conversions(convert, *of_networks):
    """Convert each of the `networks`; describe every layer, parameter and buffer
    afterwards.
    """
    seen = []
    for name, network in networks(*of_networks).items():
        layers = dict(network.named_modules(remove_duplicate=False))
        tensors = tensors_of(network)
        before, values = ({path: about(layer) for path, layer in layers.items()}, state(network))
        kinds = {key: "Parameter" if isinstance(value, nn.Parameter) else "buffer" for key, value in tensors.items()}
        trained = {key: value.requires_grad for key, value in tensors.items()}
        with trying(f"convert of {name}"):
            converted = convert(network)
        if not isinstance(converted, nn.Module):
            return [{"name": name, "returned": "None" if converted is None else f"a {type(converted).__name__}"}]
        new = {path: at(converted, path) for path in layers}
        new_tensors = tensors_of(converted)
        seen.append({
            "name": name,
            "layers": {
                path: {"before": before[path], "after": about(new[path]), "same": new[path] is layer}
                for path, layer in layers.items()
            },
            "keys": [list(values), list(converted.state_dict())],
            "tensors": {
                key: {
                    "kind": kinds[key], "same": new_tensors.get(key) is value,
                    "values": [values[key], new_tensors.get(key)],
                    "trained": [trained[key], key in new_tensors and new_tensors[key].requires_grad],
                }
                for key, value in tensors.items()
            },
        })  # fmt: skip
    return seen


def tensors_of(network):
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


def at(network, path):
    """The layer at a path such as 'features.0'; None where there is none."""
    try:
        return network.get_submodule(path)
    except AttributeError:
        return None


def about(layer):
    """A description of a layer, or of the object in its place: kind, mode and options."""
    kind = type(layer).__name__
    if isinstance(layer, SyncBatchNorm):
        kind = "SyncBatchNorm"
    elif kind == "SyncBatchNorm":
        kind = f"{type(layer).__module__.removesuffix('.modules.batchnorm')}.SyncBatchNorm"
    return {"kind": kind, **{name: getattr(layer, name, None) for name in ["training", *OPTIONS]}}


def convert_and_train(convert, batches, *of_networks):
    with process_group(timeout=4) as (rank, world_size):
        model = DistributedDataParallel(convert(networks(*of_networks)["a network"]))
        return take_steps(model, [batch.chunk(world_size)[rank] for batch in batches])


# ---- what is claimed ----


def claims_about(seen):
    """That every BatchNorm in training mode has become a SyncBatchNorm with its tensors and
    options, and that all else is unchanged. seen: what `conversions` returns.
    """
    for case in seen:
        yield Claim(
            f"what convert returns for {case['name']}", case.get("returned", "a module"), "a module",
            "return the converted module, even if it is the same object",
        )  # fmt: skip
    for claims in (kinds_of, options_of, tensors_kept):
        for case in seen:
            yield from claims(case, seen)


def kinds_of(case, seen):
    for path, layer in case["layers"].items():
        before, old, new = layer["before"], layer["before"]["kind"], layer["after"]["kind"]
        if old in BATCH_NORMS and before["training"]:
            yield Claim(the_place(case, path), new, "SyncBatchNorm", cause_of_a_layer_left(case, path, seen))
        else:
            yield Claim(
                the_place(case, path), [new, layer["same"]], [old, True], cause_of_a_layer_changed(before, new),
                told=f"the same {old}", shown=f"another object, {new}" if new == old else f"a {new}",
            )  # fmt: skip


def cause_of_a_layer_changed(before, new):
    """Why a module is another one now, or of another kind."""
    old = before["kind"]
    if old == "SyncBatchNorm":
        return "it is already a SyncBatchNorm: leave it unchanged"
    if old in BATCH_NORMS and new != old:
        why = "leave it as it is, with or without running statistics"
        if before["track_running_stats"]:
            why = "it normalises with its running statistics, which need no other rank, so leave it as it is"
        return f"it is in eval mode: {why}"
    if new == "SyncBatchNorm":
        return (
            "replace only BatchNorm1d, 2d and 3d: this layer shares a base class with them, but normalises each sample "
            "separately"
        )  # fmt: skip
    return "all other modules must stay the same objects: change the given module, not a copy"


def cause_of_a_layer_left(case, path, seen):
    """Why a BatchNorm has not become a SyncBatchNorm. seen: of all networks."""
    before, after = case["layers"][path]["before"], case["layers"][path]["after"]
    layers = [layer for one in seen for layer in one["layers"].values()]
    done = [one["before"] for one in layers if one["after"]["kind"] == "SyncBatchNorm"]
    done = [one for one in done if one["kind"] in BATCH_NORMS]
    if after["kind"] == "torch.nn.SyncBatchNorm":
        return "that is torch's SyncBatchNorm, which trains on GPUs only: use the one from ddp_course.lesson05"
    if after["kind"].endswith(".SyncBatchNorm"):
        return "that is another class with this name: use the one from ddp_course.lesson05"
    if done and before["kind"] not in [one["kind"] for one in done]:
        return "BatchNorm comes in three kinds, 1d, 2d and 3d"
    if done and "frozen" in case["name"]:
        return "frozen parameters do not matter: in training mode, it uses the statistics of its batch"
    if done and not path and "track_running_stats" in case["name"]:
        return "without running statistics, it uses those of its batch, in every mode: convert it, too"
    if case["name"].endswith("a layer in training mode"):
        return "this layer is in training mode, though the module around it is not: look at the mode of each layer"
    if case["name"].endswith("twice"):
        return (
            "the same layer is in two places, and named_children(), named_modules() and modules() show it in "
            "the first one only: replace it in both"
        )  # fmt: skip
    if not path:
        return "the module may be a BatchNorm itself, which has no parent: return the new layer"
    return "it is deeper in the network: visit every child recursively, and replace the layer in its parent"


def options_of(case, _):
    for path, layer in case["layers"].items():
        before, after, place = layer["before"], layer["after"], the_place(case, path)
        for option in OPTIONS:
            yield Claim(
                f"{option} of {place}", after[option], before[option], "a new layer has default options: pass it all four "
                "options of the old layer",
            )  # fmt: skip
        modes = ("training mode" if each["training"] else "eval mode" for each in (after, before))
        yield Claim(place, *modes, "a layer must keep its mode")


COPIES = {
    "buffer": "it is a copy: assign the old layer's buffer itself",
    "Parameter": "it is a copy with the same numbers: an optimizer that was made before trains the old parameter",
}


def tensors_kept(case, _):
    """Claims that names, parameters and buffers are unchanged and the same objects."""
    names, new_names = case["keys"]
    different = (pair for pair in zip_longest(names, new_names, fillvalue="none") if pair[0] != pair[1])
    old, new = next(different, ("", ""))
    yield Claim(
        f"names in the state_dict of {case['name']}, converted", new_names, names, "names and their order come from a "
        "layer's place among its siblings: setattr keeps this place, but a layer that is deleted and added again comes last",
        told=f"{old} in this place", shown=new,
    )  # fmt: skip
    for name, tensor in case["tensors"].items():
        what, (old, new) = f"{name} of {case['name']}, converted", tensor["values"]
        lost = "the old layer's values are lost: assign its parameters and buffers to the new layer"
        yield Claim(what, new, old, lost, digits=6)
        yield Claim(
            what, tensor["same"], True, COPIES[tensor["kind"]], told=f"the same {tensor['kind']} as before",
            shown="another object",
        )  # fmt: skip
        before, after = tensor["trained"]
        yield Claim(f"requires_grad of {what}", after, before, "a frozen parameter must stay frozen")


def trained_alike(step, expected):
    """Claims that a rank's parameters and buffers are those of one process after a step."""

    def claims(rank, of_ranks):
        for name, value in expected.items():
            yield Claim(
                f"{name} after step {step + 1} of training with DDP", of_ranks[rank][step].get(name), value, "each layer "
                "looks like a SyncBatchNorm, but the ranks do not train like one process: does it compute like a "
                "SyncBatchNorm?", digits=6,
            )  # fmt: skip

    return claims


def the_place(case, path):
    """A layer in words: 'a BatchNorm1d, converted', or 'layer 0.first of a network,
    converted'.
    """
    return f"layer {path} of {case['name']}, converted" if path else f"{case['name']}, converted"


@question(
    "What must convert return for a single BatchNorm? Any other module keeps its identity, but some of its children are "
    "replaced. In how many places may the same layer be?",
    "Make a new layer for each BatchNorm in training mode: SyncBatchNorm(num_features, eps, momentum, affine, "
    "track_running_stats). What else does the old layer have? Then put it into each place of the old one: "
    "module._modules shows all of them; named_children() shows a layer only once.",
    "isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and module.training: make the layer; assign "
    "weight, bias, running_mean, running_var and num_batches_tracked of the old layer, even if they are None; return "
    "it. Any other module: for name, child in module._modules.items(): setattr(module, name, convert(child)); return "
    "the module.",
)
def check_convert(answer, draw):
    """Every BatchNorm in training mode must become a SyncBatchNorm with its tensors and
    options; nothing else may change; then the ranks must train like one process.
    """
    seed, channels = draw.randrange(10**6), draw.randint(3, 6)
    of_networks = (seed, channels, round(draw.uniform(0.1, 0.4), 2), round(draw.uniform(0.2, 0.6), 2))
    hold(claims_about(answer.on_ranks(conversions, *of_networks)[0]))

    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randn(8, channels, 2, 2, 2, generator=generator, dtype=torch.float64) for _ in range(3)]
    of_ranks = answer.on_ranks(convert_and_train, batches, *of_networks, nproc=2)
    history = take_steps(networks(*of_networks)["a network"], batches)
    for step, expected in enumerate(history):
        on_every_rank(trained_alike(step, expected), of_ranks)
