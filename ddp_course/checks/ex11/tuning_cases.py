"""What question 6 tries an answer on, and what fine-tuning it gives: in one process, or on
ranks that make mistakes.
"""

from itertools import product
from operator import mul
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

EPOCHS, STEPS, CLEAR = 4, 3, 1.06
CURVE = 3  # epochs whose held-out losses are drawn


class Adapted(nn.Module):
    """A frozen weight in bf16, and an adapter in fp32."""

    def __init__(self, weight, adapter, scale):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.A, self.B = map(nn.Parameter, adapter)
        self.scale, self.merged = scale, False

    def forward(self, x):
        y = x @ self.weight.to(x.dtype).T
        return y if self.merged else y + self.scale * (x @ self.A.T @ self.B.T)


class Network(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        first, last = self.layers
        return last(torch.tanh(first(x)))


class Faults(NamedTuple):
    """What ranks do in training that one process does not; "" is right."""

    start: str = ""  # own
    gradient: str = ""  # sum, own, small, kept
    base: str = ""  # rounded, by merging and subtracting


def combinations():
    """Those with one fault first."""
    every = product(("", "own"), ("", "sum", "own", "small", "kept"), ("", "rounded"))
    return sorted((Faults(*each) for each in every if any(each)), key=lambda faults: sum(map(bool, faults)))


def base_of(case):
    """The frozen weights, in bf16."""
    draw = torch.Generator().manual_seed(case["seed"])
    return [(torch.randn(rows, columns, generator=draw) / columns**0.5).bfloat16() for rows, columns in shapes_of(case)]


def shapes_of(case):
    inputs, width, outputs = case["sizes"]
    return [(width, inputs), (outputs, width)]


def adapters_of(case, rank):
    """[A, B, A, B] with which a rank begins, in fp32. Each rank has its own A."""
    draw, r = torch.Generator().manual_seed(case["seed"] + 1 + rank), case["r"]
    pairs = [(torch.randn(r, i, generator=draw) / i**0.5, torch.zeros(o, r)) for o, i in shapes_of(case)]
    return [value for pair in pairs for value in pair]


def network_of(case, adapters, base=None):
    pairs = zip(adapters[::2], adapters[1::2])
    return Network([Adapted(*each, case["scale"]) for each in zip(base or base_of(case), pairs)])


def samples(case, number, seed):
    draw = torch.Generator().manual_seed(case["seed"] + 100 + seed)
    return torch.randn(number, case["sizes"][0], generator=draw)


def batches_of(case, rank):
    """[(inputs, targets), ...] of a rank, in fp32. Targets are those of another adapter."""
    wanted = adapters_of(case, 50)
    draw = torch.Generator().manual_seed(case["seed"] + 51)
    wanted[1::2] = [torch.randn(B.shape, generator=draw) / 2 for B in wanted[1::2]]
    network, batches = network_of(case, wanted), []
    for step in range(STEPS):
        x = samples(case, case["batch"], 10 * rank + step)
        batches.append((x, network(x).detach() + rank / 2))
    return batches


def held_out_of(case, rank, epochs):
    """(inputs, targets) of a rank, on which the losses of the first epochs differ as the rank's
    curve says. epochs: the adapters after each.
    """
    x = samples(case, case["held out"][rank], 90 + rank)
    first, *others = [outputs(case, adapters, x).flatten() for adapters in epochs[:CURVE]]
    noise = torch.Generator().manual_seed(case["seed"] + 90 + rank)
    y = first + 0.1 * torch.randn(first.shape, generator=noise)
    # |o - y|^2 - |first - y|^2 = 2 (first - o) y + |o|^2 - |first|^2: equations for y
    lines = torch.stack([first - other for other in others])
    curve = torch.tensor(case["curves"][rank], dtype=torch.float64) * len(first)
    wanted = [(more - curve[0] - o @ o + first @ first) / 2 for more, o in zip(curve[1:], others)]
    y = y + torch.linalg.pinv(lines) @ (torch.stack(wanted) - lines @ y)
    return x, y.reshape(len(x), -1).float()


def outputs(case, adapters, x):
    with torch.no_grad():
        return network_of(case, [value.double() for value in adapters])(x.double())


def trained(case, rank=0, faults=Faults()):
    """A rank's adapters after each epoch, in 64 bits."""
    n = case["n"]
    of_ranks = [[value.double() for value in adapters_of(case, r if faults.start else 0)] for r in range(n)]
    batches, after, before = [batches_of(case, r) for r in range(n)], [], [0.0] * 4
    rate, base = case["learning_rate"], n * [base_of(case)]
    for _ in range(EPOCHS):
        for step in range(STEPS):
            own = [gradient(case, of_ranks[r], base[r], batches[r][step]) for r in range(n)]
            total = [sum(parts) for parts in zip(*own)]
            by = {"sum": 1, "small": n**2}.get(faults.gradient, n)
            mean = [value / by for value in total]
            if faults.gradient == "kept":  # the last step's gradient, too
                mean = before = [old + new for old, new in zip(before, mean)]
            updates = own if faults.gradient == "own" else [mean] * n
            of_ranks = [moved(*pair, rate) for pair in zip(of_ranks, updates)]
        if faults.base:
            base = [rounded(case, *pair) for pair in zip(base, of_ranks)]
        after.append(of_ranks[rank])
    return after


def moved(adapters, updates, rate):
    return [value - rate * update for value, update in zip(adapters, updates)]


def rounded(case, base, adapters):
    """The weights in bf16 after what the adapters add has been added and subtracted."""
    added = [(case["scale"] * B @ A).float() for A, B in zip(adapters[::2], adapters[1::2])]
    return [((W + more).bfloat16() - more).bfloat16() for W, more in zip(base, added)]


def gradient(case, adapters, base, batch):
    inputs, targets = (tensor.double() for tensor in batch)
    network = network_of(case, adapters, base)
    leaves = [value for layer in network.layers for value in (layer.A, layer.B)]
    return torch.autograd.grad(F.mse_loss(network(inputs), targets), leaves)


class Right(NamedTuple):
    """What one process has: the adapters after each epoch, each rank's held-out samples,
    and losses_of() these.
    """

    epochs: list
    held_out: list
    losses: dict


def one_process(case):
    epochs = trained(case)
    parts = [held_out_of(case, rank, epochs) for rank in range(case["n"])]
    return Right(epochs, parts, losses_of(case, epochs, parts))


def losses_of(case, epochs, parts):
    """The held-out losses after each epoch: `whole`, over all samples; `own`, of each rank;
    `means`, the mean of these; `base`, without adapters, and `twice`, merged and added.
    """
    nothing, double = [[0 * value for value in epochs[0]]] * EPOCHS, [doubled(adapters) for adapters in epochs]
    own = [[loss(case, adapters, [part]) for adapters in epochs] for part in parts]
    return {
        "whole": [loss(case, adapters, parts) for adapters in epochs],
        "own": own,
        "means": [sum(of_epoch) / case["n"] for of_epoch in zip(*own)],
        "sum": [sum(of_epoch) for of_epoch in zip(*own)],
        "base": [loss(case, adapters, parts) for adapters in nothing],
        "twice": [loss(case, adapters, parts) for adapters in double],
    }


def doubled(adapters):
    return [value * (1 + place % 2) for place, value in enumerate(adapters)]


def loss(case, adapters, parts):
    """The mean of squared errors over all samples of these parts."""
    errors = [(outputs(case, adapters, x) - y.double()).flatten() for x, y in parts]
    return torch.cat(errors).pow(2).mean().item()


def draw_case(draw, n):
    """A case, and what is Right: the best epoch is clear, and is not that of each rank
    alone. None of these is the last one.
    """
    while True:
        case = {"n": n, "seed": draw.randrange(10**6), "r": draw.randint(2, 4), "scale": draw.choice([1.5, 2.0, 3.0])}
        case |= {"sizes": draw.sample(range(20, 33), 3), "batch": draw.randint(4, 9), "learning_rate": 0.3}
        case["held out"], case["curves"] = draw_held_out(draw, n)
        if not learns(case):
            continue
        losses = (right := one_process(case)).losses
        first, second = sorted(losses["whole"])[:2]
        best = best_epoch(losses["whole"])
        others = [*losses["own"], *(losses[name] for name in ("means", "base", "twice"))]
        apart = all(far(losses["whole"], other) for other in others)
        alone = any(best_epoch(own) != best for own in losses["own"])
        last = any(best_epoch(epochs) == EPOCHS - 1 for epochs in [losses["whole"], *losses["own"]])
        falls = n == 2 and losses["whole"][-1] < CLEAR * losses["whole"][-2]
        if second > CLEAR * first and not last and not falls and apart and alone:
            return case, right


def draw_held_out(draw, n):
    """How many held-out samples each rank has, and its curve: how its held-out losses differ.

    On two ranks the loss of all samples is the lowest first, rises, and falls to another low:
    that epoch is better than the one before it, and not the best one. Rank 1 has its own lowest
    in between.
    """
    while True:
        sizes = draw.sample(range(4, 16), n)
        curves = [[draw.uniform(0, 1) for _ in range(CURVE)] for _ in sizes]
        whole = [sum(map(mul, sizes, of_epoch)) / sum(sizes) for of_epoch in zip(*curves)]
        bests, (lowest, second, _) = [best_epoch(losses) for losses in (whole, *curves)], sorted(whole)
        shaped = bests[0] == 0 and bests[-1] == 1 and whole[2] < whole[1] - 0.1 if n == 2 else True
        if shaped and second > lowest + 0.15 and len(set(bests)) > 1:
            return sizes, curves


def learns(case):
    """Whether the training loss falls in each epoch."""
    parts = [batch for rank in range(case["n"]) for batch in batches_of(case, rank)]
    begin = [value.double() for value in adapters_of(case, 0)]
    losses = [loss(case, adapters, parts) for adapters in [begin, *trained(case)]]
    return all(new < old for old, new in zip(losses, losses[1:]))


def far(some, others):
    return any(max(pair) > CLEAR * min(pair) for pair in zip(some, others))


def best_epoch(losses):
    return losses.index(min(losses))
