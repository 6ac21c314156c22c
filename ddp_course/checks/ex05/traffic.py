"""Question 1: what the SyncBatchNorms of a network send in a training step."""

import torch
from torch import nn

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import Claim, hold
from ddp_course.checks.traffic import as_measured, as_prediction
from ddp_course.checks.training import fill
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.lesson05 import SyncBatchNorm
from ddp_course.ranks.environment import process_group

INPUTS = 3


def frozen(module):
    return module.requires_grad_(False)


def with_frozen_weight(module):
    module.weight.requires_grad_(False)
    return module


def networks(widths):
    """The networks to predict, {name: network}. widths: four different numbers."""
    a, b, c, d = widths
    twice = SyncBatchNorm(a)
    made = {
        "a network": [
            nn.Linear(INPUTS, a), SyncBatchNorm(a), nn.ReLU(),
            nn.Linear(a, b), SyncBatchNorm(b, affine=False), nn.Linear(b, 2),
        ],
        "a network with other norms, some of them nested": [
            nn.Linear(INPUTS, c), nn.GroupNorm(1, c),
            nn.Sequential(SyncBatchNorm(c), nn.Sequential(nn.Linear(c, d), SyncBatchNorm(d)), nn.BatchNorm1d(d)),
            nn.Linear(d, 2),
        ],
        "a network whose first layer is a SyncBatchNorm": [
            SyncBatchNorm(INPUTS), nn.Linear(INPUTS, b), nn.Tanh(), SyncBatchNorm(b), nn.Linear(b, 2),
        ],
        "a network with a SyncBatchNorm in eval mode": [
            nn.Linear(INPUTS, d), SyncBatchNorm(d).eval(), nn.Linear(d, a), SyncBatchNorm(a),
            nn.Linear(a, 2),
        ],
        "a network whose first half is frozen": [
            nn.Sequential(frozen(nn.Linear(INPUTS, b)), frozen(SyncBatchNorm(b)), nn.ReLU()),
            frozen(nn.Linear(b, c)), SyncBatchNorm(c), nn.Linear(c, d), frozen(SyncBatchNorm(d)),
            nn.Linear(d, 2),
        ],
        "a network with one SyncBatchNorm in two places": [
            nn.Linear(INPUTS, a), twice, nn.ReLU(), nn.Linear(a, a), twice, nn.Linear(a, 2),
        ],
        "a network that trains only biases at first": [
            with_frozen_weight(nn.Linear(INPUTS, c)), SyncBatchNorm(c), nn.Linear(c, d), SyncBatchNorm(d),
            nn.Linear(d, 2),
        ],
        "a network that trains only a SyncBatchNorm in eval mode at first": [
            frozen(nn.Linear(INPUTS, a)), SyncBatchNorm(a).eval(), frozen(nn.Linear(a, d)), SyncBatchNorm(d),
            nn.Linear(d, b), SyncBatchNorm(b), nn.Linear(b, 2),
        ],
    }  # fmt: skip
    return {name: fill(nn.Sequential(*layers), place) for place, (name, layers) in enumerate(made.items())}


def predictions(traffic, widths):
    """What the answer predicts for each network, without a process group."""
    found = {}
    for name, network in networks(widths).items():
        before = portrait(network)
        with trying(name):
            returned = traffic(network)
        after = portrait(network)
        found[name] = as_prediction(returned) | {"changed": [what for what in before if before[what] != after[what]]}
    return found


def portrait(network):
    """What an answer must leave as it is, {in words: value}."""
    layers, parameters = list(network.modules()), list(network.parameters())
    gradients = [value.grad for value in parameters]
    return {
        "layers": [(name, id(layer), type(layer)) for name, layer in network.named_modules()],
        "modes": [layer.training for layer in layers],
        "requires_grad": [value.requires_grad for value in parameters],
        "dtypes": [value.dtype for value in network.state_dict().values()],
        "parameters": [(id(value), value.tolist()) for value in parameters],
        "buffers": [value.tolist() for value in network.buffers()],
        "gradients": [None if value is None else value.tolist() for value in gradients],
        "hooks": [hooks_of(part) for part in [*layers, *parameters]],
    }  # fmt: skip


def hooks_of(part):
    """How many hooks a layer or parameter has."""
    kinds = "forward_pre forward backward_pre backward post_accumulate_grad".split()
    return sum(len(getattr(part, f"_{kind}_hooks", None) or ()) for kind in kinds)


def measured(widths, samples):
    """The all-reduces of a forward and a backward on this rank, and their bytes."""
    with process_group(timeout=4) as (rank, _):
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(samples, INPUTS, generator=generator, dtype=torch.float64)
        found = {}
        for name, network in networks(widths).items():
            with CheckedWatch() as watch:
                network(x).square().mean().backward()
            found[name] = [len(watch.log), sum(entry["bytes"] for entry in watch.log)]
        return found


def in_words(network):
    parts = [in_words(layer) if isinstance(layer, nn.Sequential) else a_name(layer) for layer in network]
    return f"Sequential({', '.join(parts)})"


def a_name(layer):
    width = getattr(layer, "num_features", getattr(layer, "out_features", ""))
    return f"{type(layer).__name__}{f'({width})' if width else ''}"


def calls_of(network, needed=False):
    """The SyncBatchNorms in the order of their calls: [(layer, whether its input needs a
    gradient)]; and whether the output needs one.
    """
    calls = []
    for layer in network:
        if isinstance(layer, nn.Sequential):
            inner, needed = calls_of(layer, needed)
            calls += inner
        elif isinstance(layer, SyncBatchNorm):
            calls.append((layer, needed))
        needed = needed or any(value.requires_grad for value in layer.parameters())
    return calls, needed


def total(calls, back=None, count=1, size=8):
    """All-reduces and bytes of these calls. back: whether all are called in the
    backward pass, or none; left out: those whose input needs a gradient.
    """
    found = [0, 0]
    for layer, needed in calls:
        numbers = [2 * layer.num_features + count]
        if needed if back is None else back:
            numbers.append(2 * layer.num_features)
        found = [found[0] + len(numbers), found[1] + size * sum(numbers)]
    return found


OTHERWISE = (
    "each SyncBatchNorm in training mode calls one all-reduce in the forward pass, and one in the backward pass if its "
    "input needs a gradient; look at the order of the layers and at those inside of others",
    "the number of all-reduces is right: how many numbers are in each, and how many bytes has each number?",
)  # fmt: skip


def claims_about(call, network, seen, measured):
    yield from as_measured(call, seen, measured, mistakes(measured, network), OTHERWISE)
    yield Claim(
        f"the network after {call}", seen["changed"], [], "the network belongs to the caller: do not change its modes, "
        "buffers, gradients or hooks. If you run it, run a copy: copy.deepcopy(network)",
        told="as before the call", shown=f"other {', '.join(seen['changed'])}",
    )  # fmt: skip


def mistakes(expected, network):
    """Of a prediction: what it gives, and the cause."""
    calls, _ = calls_of(network)
    active = [call for call in calls if call[0].training]
    once = list({layer: (layer, needed) for layer, needed in reversed(active)}.values())
    others = [module for module in network.modules() if isinstance(module, nn.BatchNorm1d)]
    return [
        (total(active, back=True), "nothing before the first of these layers has a trainable parameter, so its input "
                                   "needs no gradient, and autograd does not call its backward"),
        (total(active, back=False), "only the forward pass is counted: the backward pass communicates, too"),
        (total(active, count=0), "the number of values per channel is missing: the forward pass sums it as well"),
        (total(active, count=0, back=True), "the number of values per channel is missing: the forward pass sums it as "
                                            "well"),
        (total(active, size=4), "the sums are float64, whatever the type of x is: 8 bytes each"),
        (total(active, size=4, back=True), "the sums are float64, whatever the type of x is: 8 bytes each"),
        (total(calls), "a layer in eval mode uses its running statistics and sends nothing"),
        (total(calls, back=True), "a layer in eval mode uses its running statistics and sends nothing"),
        (total(once), "a layer in two places is called twice, but modules() shows it once"),
        (total(once, back=True), "a layer in two places is called twice, but modules() shows it once"),
        (total(active + [(layer, True) for layer in others]), "an ordinary BatchNorm sends nothing: only SyncBatchNorm "
                                                              "does"),
        ([0, 0] if any(isinstance(layer, SyncBatchNorm) for layer in network) else None,
         "nothing is counted: without a process group nothing is sent, so this needs counting on paper"),
        ([2 * expected[0], 2 * expected[1]], "it is what both ranks send: count the all-reduces of one rank"),
    ]  # fmt: skip


@question(
    "Which numbers does a SyncBatchNorm with C channels sum over the ranks in the forward pass, and which in the "
    "backward pass? Read NormalizeOverRanks again, and count the bytes of each number.",
    "Forward: two sums per channel and one count. Backward: two sums per channel. All of them are float64. A layer in "
    "eval mode sends nothing. When does autograd call backward of a function at all?",
    "Go through the layers in the order in which the input passes them, and remember whether any parameter so far has "
    "requires_grad=True. A SyncBatchNorm in training mode adds 1 all-reduce of 8 * (2C + 1) bytes; and, if its input "
    "needs a gradient, 1 of 8 * 2C bytes. nn.Sequential yields its layers in this order, also those that come twice; "
    "call your function again for an nn.Sequential inside.",
)
def check_traffic(answer, draw):
    """The predicted number of all-reduces and their bytes must be those that real ranks
    then call.
    """
    widths, samples = draw.sample(range(4, 60), 4), draw.randint(3, 8)
    [predicted] = answer.on_ranks(predictions, widths)
    truth = answer.without(measured, widths, samples, nproc=2)[0]
    for name, network in networks(widths).items():
        call = f"traffic of {name}, {in_words(network)}"
        hold(claims_about(call, network, predicted[name], truth[name]))
