"""A LoRA layer with the scale of rank-stabilised LoRA, and its merge."""

import math
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.checks.claims import Claim, hold, on_every_rank
from ddp_course.checks.ex11.drawn import some, trained_of
from ddp_course.checks.training import LEARNING_RATE, descend, fill
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.environment import process_group


def a_layer(case):
    """The given layer, in fp32, as nn.Linear makes it."""
    layer = nn.Linear(case["inputs"], case["outputs"], bias=case["bias"])
    return fill(layer, case["seed"]).float()


def inputs_of(case):
    """What the layer gets: rows, or rows of tokens."""
    return some(*case["rows"], case["inputs"], seed=case["seed"] + 1).float()


def observe_layers(kind, cases):
    """For each case: which parameters train, the outputs at first, with other weights,
    and when merged, and what the constructor changed in torch.
    """
    seen = []
    for case in cases:
        with trying(f"{case['inputs']} inputs, {case['outputs']} outputs, r={case['r']}, alpha={case['alpha']}"):
            layer, x = a_layer(case), inputs_of(case)
            torch.manual_seed(case["seed"])
            lora = kind(layer, case["r"], case["alpha"])
            of_case = {
                "trained": [[name, list(value.shape)] for name, value in trained_of(lora).items()],
                "seeded": torch.initial_seed() != case["seed"],
            }
            of_case["begin"] = lora(x)
            if len(of_case["trained"]) == 2:
                of_case |= observe_numbers(lora, layer, x, case)
            of_case["gradients on"] = torch.is_grad_enabled()
            torch.set_grad_enabled(True)
            seen.append(of_case)
    return seen


def observe_numbers(lora, layer, x, case):
    output = lora(x)
    if output.requires_grad:
        output.pow(2).sum().backward()
    flows = any(value.grad is not None and value.grad.abs().sum() > 0 for value in trained_of(lora).values())
    all_zeros = not any(value.detach().any() for value in trained_of(lora).values())
    some_zeros = not all(value.detach().any() for value in trained_of(lora).values())
    values = []
    with torch.no_grad():
        for place, value in enumerate(trained_of(lora).values()):
            value.copy_(some(*value.shape, seed=case["seed"] + 2 + place))
            values.append(value.clone())
    earlier = x.clone().requires_grad_()  # what the layers before would get
    output = lora(earlier)
    if output.requires_grad:
        output.sum().backward()
    seen = {"flows": flows, "all zeros": all_zeros, "values": values}
    seen["some zeros"] = some_zeros
    seen |= {"output": output, "of x": earlier.grad}
    last = list(trained_of(lora).values())[-1]
    merged = lora.merged()
    seen |= {"merged": merged(x), "afterwards": lora(x)}
    with torch.no_grad():
        last.mul_(2)  # training goes on
    again = lora.merged()(x)
    if type(merged) is nn.Linear:
        with torch.no_grad():
            for value in merged.parameters():
                value.add_(1)  # training goes on there, too
    return seen | {
        "kind": "Linear" if type(merged) is nn.Linear else type(merged).__name__,
        "new": merged is not layer and merged is not lora,
        "again": again,
        "apart": lora(x),
        "still": list(trained_of(lora)),
    }


def observe_training(kind, case, steps):
    """Train on ranks with DDP; return the initial matrices, and the merged layer's
    output at the end.
    """
    with process_group(timeout=4) as (rank, n):
        lora = kind(a_layer(case), case["r"], case["alpha"])
        model = DistributedDataParallel(lora)
        begin = [value.detach().clone() for value in trained_of(lora).values()]
        for step in range(steps):
            batch = some(2 * n, case["inputs"], seed=case["seed"] + step).float()
            model(batch.chunk(n)[rank]).pow(2).mean().backward()
            descend(lora)
        x = some(3, case["inputs"], seed=case["seed"]).float()
        return {"begin": begin, "end": lora.merged()(x)}


@question(
    "Keep the layer as a submodule and freeze its parameters. Add two nn.Parameters: A of shape (r, inputs), and B "
    "of shape (outputs, r). layer.in_features and layer.out_features are the sizes.",
    "One of A and B starts as zeros, so that the layer starts unchanged; the other must not, otherwise neither would "
    "ever get a gradient. forward: self.layer(x) + alpha / math.sqrt(r) * (x @ A.T @ B.T).",
    "merged: make an nn.Linear of the same sizes, with a bias if the layer has one; its weight is layer.weight + alpha "
    "/ math.sqrt(r) * B @ A, its bias a copy. Do this under torch.no_grad(), and leave self unchanged: copy.deepcopy("
    "self.layer) is a start.",
)
def check_lora_layer(answer, draw):
    """It starts like the layer, trains only A and B, and computes W x + b + alpha / sqrt(r)
    B A x, also when merged.
    """
    cases = []
    for bias in (True, False):
        r, inputs, outputs = draw.sample(range(2, 9), 3)
        # no multiple of r, and smaller than r in the second case
        alpha = r * draw.randrange(2, 6) + 1 if bias else draw.randrange(1, r)
        case = {"inputs": inputs, "outputs": outputs, "r": r, "alpha": alpha, "bias": bias}
        cases.append(case | {"rows": [5] if bias else [2, 3], "seed": draw.randrange(10**6)})
    cases.append(cases[0] | {"rows": []})  # one vector
    [seen] = answer.on_ranks(observe_layers, cases)
    for case, of_case in zip(cases, seen):
        hold(claims(case, of_case))
    steps, n = 2, draw.choice([2, 3])
    of_ranks = answer.on_ranks(observe_training, cases[0], steps, nproc=n)
    on_every_rank(partial(trained, cases[0], steps), of_ranks)


def thin(values, case):
    """(B A, in that shape) of two matrices that are found by their shapes, whichever
    way round they are stored.
    """
    r, shapes = (case["r"], {(case["r"], case["inputs"]): "A", (case["outputs"], case["r"]): "B"})
    found = {}
    for value in values:
        for matrix in (value, value.T):
            found.setdefault(shapes.get(tuple(matrix.shape)), matrix)
    assert found["A"].shape[0] == r
    return found["B"] @ found["A"]


def scale_of(case):
    """Of rank-stabilised LoRA."""
    return case["alpha"] / math.sqrt(case["r"])


def trained_by_hand(case, begin, steps, n):
    layer = a_layer(case).double()
    values = [value.double().requires_grad_() for value in begin]
    for step in range(steps):
        batch = some(2 * n, case["inputs"], seed=case["seed"] + step).float().double()
        output = layer(batch) + scale_of(case) * batch @ thin(values, case).T
        gradients = torch.autograd.grad(output.pow(2).mean(), values)
        with torch.no_grad():
            for value, gradient in zip(values, gradients):
                value -= LEARNING_RATE * gradient
    x = some(3, case["inputs"], seed=case["seed"]).float().double()
    return layer(x).detach() + scale_of(case) * x @ thin(values, case).T.detach()


# ---- what is claimed ----


def claims(case, seen):
    r, inputs, outputs, alpha = (case[name] for name in ("r", "inputs", "outputs", "alpha"))
    call = f"LoRALinear of {inputs} inputs, {outputs} outputs, bias {case['bias']}, r={r}, alpha={alpha}"
    yield only_two_train(call, case, seen["trained"])
    layer, x, scale = a_layer(case).double(), inputs_of(case).double(), scale_of(case)
    change = thin([value.double() for value in seen["values"]], case)
    given, added = layer(x), x @ change.T
    yield numbers(call, seen["begin"], given, [(0 * given, GIVEN_IS_MISSING)],
        "B A is zero at first, and yet the output is not the layer's: forward must add nothing else to it"
        if seen["some zeros"] else
        "it must start with the output of the given layer: initialise B with zeros, so that B A is zero")  # fmt: skip
    yield Claim(call, seen["all zeros"], False,
        "if A and B both start as zeros, the gradient of each is a product with the other, so it stays zero forever",
        told="a gradient in the first step", shown="zeros")  # fmt: skip
    mistakes = [(given + other * added, cause) for cause, scales in wrong_scales(r, alpha) for other in scales]
    yield numbers(call, seen["output"], given + scale * added, [(scale * added, GIVEN_IS_MISSING), *mistakes],
                  "the layer must compute W x + b + alpha / sqrt(r) B A x")  # fmt: skip
    yield Claim(call, seen["seeded"], False,
        "the constructor sets torch's seed, so all layers start with the same A, and everything random that follows "
        "changes: leave the seed to the program", told="torch's seed as before", shown="another")  # fmt: skip
    yield Claim(call, seen["flows"], True,
        "no gradient reaches A and B: forward detaches their output, or computes it under no_grad",
        told="a gradient in the first step", shown="none, or zeros")  # fmt: skip
    yield gradient_of_inputs(f"{call}: the gradient of x", seen["of x"], layer.weight, scale * change, x)
    yield from merges(call, case, seen, layer, given, added)


def numbers(call, got, expected, mistakes, otherwise):
    """A claim about numbers in 32 bits."""
    return Claim(call, got, expected, otherwise, mistakes, digits=5, scale=1)


def only_two_train(call, case, trained):
    r, inputs, outputs = (case[name] for name in ("r", "inputs", "outputs"))
    cause = "only the two new matrices may train"
    if any(shape in ([outputs, inputs], [outputs]) for _, shape in trained):
        cause = "the layer's own weight and bias are frozen: layer.requires_grad_(False)"
    elif not trained:
        cause = "A and B must be nn.Parameters that require a gradient, stored as attributes of the module"
    return Claim(call, sorted(sorted(shape) for _, shape in trained), sorted([sorted([r, inputs]), sorted([outputs, r])]),
                 cause, told=f"parameters that train: A {(r, inputs)} and B {(outputs, r)}",
                 shown=", ".join(f"{name} {tuple(shape)}" for name, shape in trained) or "none")  # fmt: skip


GIVEN_IS_MISSING = "W x + b is missing: add the output of A and B to the output of the layer"


def wrong_scales(r, alpha):
    return [
        ("B A x is missing: the new matrices have no effect", [0]),
        ("the added term has the wrong sign", [-alpha / math.sqrt(r)]),
        ("the sum is scaled by alpha / sqrt(r)", [alpha, 1, 1 / r, r / alpha, r**-0.5, (alpha / r) ** 0.5]),
        ("a whole-number division or root drops the fraction: the scale is alpha / sqrt(r)",
         [alpha // r, alpha // r**0.5, alpha // math.isqrt(r), alpha / math.isqrt(r)]),
        ("this is plain LoRA's alpha / r: here the sum is scaled by alpha / sqrt(r)", [alpha / r]),
    ]  # fmt: skip


def gradient_of_inputs(call, got, weight, change, x):
    """The claim that the layers before get the whole gradient."""

    def through(weight):
        return weight.sum(0).expand(x.shape)

    otherwise = "the gradient that reaches x must be that of W x + alpha / sqrt(r) B A x"
    if got is None:
        otherwise = "no gradient reaches x, so the layers before learn nothing"
    return numbers(call, got, through(weight + change), [
        (through(change), "no gradient passes through the frozen layer to x, so the layers before learn something else: "
         "freeze with requires_grad_(False), not with no_grad() or detach()"),
        (through(weight), "no gradient passes through A and B to x, so the layers before learn something else: do not "
         "detach x"),
    ], otherwise)  # fmt: skip


def merges(call, case, seen, layer, given, added):
    """Claims about the merged layer, and about its own layer afterwards."""
    yield Claim(call, seen["kind"] == "Linear" and seen["new"], True,
        "merged() must return a new nn.Linear that does not need this class; the LoRALinear must not change",
        told="a new Linear",
        shown=seen["kind"] if seen["kind"] != "Linear" else "the layer that it was given, changed")  # fmt: skip
    whole, later = (given + times * scale_of(case) * added for times in (1, 2))
    lost = [(whole - layer.bias, "the merged layer has lost the bias")] if case["bias"] else []
    changes_itself = "merged() changes its own layer, so B A counts twice afterwards: work on a copy of the layer"
    yield numbers(f"{call}: what the merged layer computes", seen["merged"], whole, [
        *lost,
        (given + added, "the merged layer has no alpha / sqrt(r): include it in the weight, too"),
        (given, "the merged layer is the old one: B A is missing"),
    ], "its weight must be W + alpha / sqrt(r) B A")  # fmt: skip
    yield numbers(f"{call}: its own output after merged()", seen["afterwards"], whole, [], changes_itself)
    yield numbers(f"{call}: the result of calling merged() a second time, with B A twice as large", seen["again"], later, [
        (seen["merged"], "merged() returns its first result again: A and B have changed since, so merge them anew in each "
         "call"),
    ], changes_itself)  # fmt: skip
    yield numbers(f"{call}: its own output after a change to the merged layer", seen["apart"], later, [],
                  "the merged layer and the LoRALinear share a weight or the bias: give the merged one copies")  # fmt: skip
    yield Claim(f"{call}: after merged()", seen["gradients on"], True,
        "gradients are off for the whole program: use torch.no_grad() in a with block or as a decorator",
        told="gradients on", shown="off")  # fmt: skip
    still = len(seen["still"])
    yield Claim(f"{call}: after merged()", still, 2, "merged() has frozen A and B: the LoRALinear must stay as it is",
                told="A and B still train", shown=f"{still} of the two")  # fmt: skip


def trained(case, steps, rank, of_ranks):
    expected = trained_by_hand(case, of_ranks[0]["begin"], steps, len(of_ranks))
    yield numbers(f"{steps} steps with DDP", of_ranks[rank]["end"], expected, [],
                  "after training with DDP, the merged layer is not that of one process on all batches")  # fmt: skip
